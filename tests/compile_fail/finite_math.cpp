// A compiler that may assume that no number is NaN or infinite. The mistake is the flag; KVPOLICY_CONTROL
// does without it.
// flags: -ffast-math
// expect: kvpolicy: -ffast-math and -ffinite-math-only lose NaN and infinity: add -fno-finite-math-only
#include <kvpolicy/kvpop.hpp>
