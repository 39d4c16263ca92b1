// A comparison that a threshold gate does not know.
// expect: kvpolicy: ThresholdGate<c> needs c = at_least or above
#include <kvpolicy/policies/threshold_gate.hpp>

#ifndef KVPOLICY_CONTROL
kvpolicy::ThresholdGate<int> gate;
#else
kvpolicy::ThresholdGate<kvpolicy::above> gate;
#endif
