# What Doxygen 1.9 reads in place of a header.
# The comment at the top is the file's.
1 s|^// |/// @file\
/// |
1,/^#/ s|^//( .*)?$|///\1|
# It does not know a requires clause behind a member function,
s/(\)|\) const) requires [A-Za-z_:]+;/\1;/
# and ends a summary at "eq. 7", "a . b" and "a .. b".
/^ *\/\/\/ [^ ]/ {
    s/([Ee])q\. /\1quation /g
    s/ \.\. / to /g
    s/ \. / \&middot; /g
}
