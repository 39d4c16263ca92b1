// A compiler that was not asked for C++20, as nvcc is by default. The mistake is the flag; KVPOLICY_CONTROL
// does without it.
// flags: -std=c++17
// expect: kvpolicy: needs C++20: -std=c++20
#include <kvpolicy/kvpop.hpp>
