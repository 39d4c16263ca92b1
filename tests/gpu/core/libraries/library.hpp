#pragma once

#include <cstddef>

// Builds a mask with the library's own instantiation on the default stream. 0: done, and `text` is its
// architectures; 1: `text` is the error.
using library_call = int(const float* scores, int heads, int length, int* expiry, void* workspace,
                         std::size_t bytes, char* text, std::size_t text_bytes);

extern "C" {
library_call kvpolicy_test_portable;  // PTX for compute capability 8.0
library_call kvpolicy_test_native;    // the tree's architectures
library_call kvpolicy_test_foreign;   // code for a GPU that nobody has
}
