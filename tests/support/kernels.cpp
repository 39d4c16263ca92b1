// Instances of the inner loops of host attention for tests that are not optimized.
#define KVPOLICY_TEST_KERNELS
#include "support/kernels.hpp"
