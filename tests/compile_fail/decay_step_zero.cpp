// Scores that age every zero tokens.
// expect: kvpolicy: Decay<n> needs a step n >= 1
#include <kvpolicy/policies/decay.hpp>

#ifndef KVPOLICY_CONTROL
kvpolicy::Decay<0> decay;
#else
kvpolicy::Decay<1> decay;
#endif
