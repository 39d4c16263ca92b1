"""A reader of C++ and CUDA sources for the checks: comments, strings, functions. It is no compiler, and
does for this tree's style."""

import bisect
import collections
import functools
import re

Function = collections.namedtuple("Function", "name first last head")
TOKEN = re.compile(
    r'//(?:[^\\\n]|\\.|\\\n)*|/\*.*?\*/|R"([^()\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])+'",
    re.S,
)
BRACKETS = {"{}": re.compile(r"[{}]"), "()": re.compile(r"[()]")}
MARK = re.compile(r"[()\[\]{};:]")
# What has parentheses and names no function.
NOT_A_NAME = re.compile(
    r"\b(__launch_bounds__|__cluster_dims__|__attribute__|alignas|decltype|noexcept|explicit|requires"
    r"|sizeof|if)"
    r"\s*$"
)


def blank(text, keep_strings=False):
    """The text with comments and the insides of strings as spaces; each character keeps its line and
    column."""

    def spaces(match):
        found = match.group()
        if found.startswith("/"):
            return re.sub(r"[^\n]", " ", found)
        if keep_strings:
            return found
        return found[0] + re.sub(r"[^\n]", "_", found[1:-1]) + found[-1]

    return TOKEN.sub(spaces, text)


def without_directives(text):
    """Preprocessor lines, with what they continue on, as spaces."""
    return re.sub(
        r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.M | re.S
    )


def closing(text, start, pair="{}"):
    depth = 0
    for match in BRACKETS[pair].finditer(text, start):
        depth += 1 if match.group() == pair[0] else -1
        if depth == 0 and match.group() == pair[1]:
            return match.start()
    return len(text) - 1


def without_templates(head):
    """The head of a declaration without its leading template <...> and attributes."""
    while True:
        head = head.lstrip()
        if re.match(r"template\s*<", head):
            angle = paren = 0
            for i in range(head.index("<"), len(head)):
                c = head[i]
                paren += (c in "([{") - (c in ")]}")
                if paren == 0 and c == "<":
                    angle += 1
                elif paren == 0 and c == ">" and head[i - 1] != "-":
                    angle -= 1
                    if angle == 0:
                        break
            head = head[i + 1 :]
        elif head.startswith("[["):
            head = head[head.index("]]") + 2 :]
        else:
            return head


def name_of(head):
    """The name of the function that a head declares, or None."""
    rest = re.sub(r"\{[^{}]*\}", " ", without_templates(head))
    position = 0
    while True:
        opening = rest.find("(", position)
        if opening < 0:
            return None
        before = rest[:opening]
        if re.search(r"\boperator\s*$", before) and rest[opening : opening + 2] == "()":
            before, opening = before.rstrip() + "()", opening + 2
        if NOT_A_NAME.search(before):
            position = closing(rest, opening, "()") + 1
            continue
        # (Without template arguments, of which a name has none here but in a specialisation.)
        match = re.search(
            r"((?:[A-Za-z_]\w*(?:<[^<>]*(?:<[^<>]*>[^<>]*)*>)?\s*::\s*)*(?:~\s*)?"
            r"(?:operator\s*(?:\(\)|\[\]|\"\"\s*\w+|[^\s\w(]+|[\w:<>*& ]+)|[A-Za-z_]\w*))(?:<[^()]*>)?\s*$",
            before,
        )
        if not match:
            return None
        return re.sub(r"\s+", " ", match.group(1)).strip()


@functools.lru_cache(maxsize=None)
def functions(text):
    """The functions of a file that have a body, but for those inside functions."""
    text = without_directives(blank(text))
    found = []
    ends = [match.start() for match in re.finditer("\n", text)]

    def line(position):
        return bisect.bisect_left(ends, position) + 1

    i = start = 0
    parens = 0
    while mark := MARK.search(text, i):
        i = mark.start()
        c = mark.group()
        if c in "([":
            parens += 1
        elif c in ")]":
            parens -= 1
        elif parens == 0 and c in ";}":
            start = i + 1
        elif parens == 0 and c == ":" and re.fullmatch(r"\s*(public|private|protected)\s*", text[start:i]):
            start = i + 1
        elif c == "{":
            if parens > 0:  # an argument's default
                i = closing(text, i) + 1
                continue
            head = text[start:i]
            plain = without_templates(head)
            first = start + len(head) - len(head.lstrip())
            if re.match(r"\s*((inline\s+)?namespace\b|extern\s+_*\"|extern\s+\"_*\"\s*$)", plain):
                start = i + 1
            elif re.search(r"\brequires\s*(\([^{}]*\))?\s*$", head) or re.search(r"\bconcept\b", plain):
                i = closing(text, i) + 1  # an expression; the head goes on
                continue
            elif re.match(
                r"\s*(typedef\s+)?(struct|class|union)\b(?![^{]*\)\s*(const|noexcept)?\s*$)", plain
            ):
                start = i + 1
            elif re.match(r"\s*enum\b", plain):
                i = start = closing(text, i) + 1
                continue
            elif "(" in plain and not re.search(r"=\s*$", plain) and name_of(head):
                end = closing(text, i)
                after = text[end + 1 : end + 200].lstrip()
                # A member's initialiser in a constructor's head: its braces stand behind a name.
                if (
                    re.search(r"\)\s*(noexcept\s*)?:[^:]", plain)
                    and re.search(r"[\w>]\s*$", plain)
                    and after[:1] in (",", "{")
                ):
                    i = end + 1
                    continue
                found.append(Function(name_of(head), line(first), line(end), head.strip()))
                i = start = end + 1
                continue
            else:  # a value
                i = closing(text, i) + 1
                continue
        i += 1
    return found
