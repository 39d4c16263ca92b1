// One shared library of the test in test.cu: it instantiates the same policy as its siblings, for
// architectures of its own.
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "library.hpp"

#include <cstdio>
#include <exception>

namespace kvp = kvpolicy;

extern "C" __attribute__((visibility("default"))) int KVPOLICY_TEST_LIBRARY(const float* scores, int heads,
                                                                            int length, int* expiry,
                                                                            void* workspace,
                                                                            std::size_t bytes, char* text,
                                                                            std::size_t text_bytes) {
    try {
        const kvp::Policy<kvp::Sink<4>, kvp::Window<16>, kvp::TopKBudget<64>> policy;
        const kvp::cuda ctx{};
        kvp::build_mask(ctx, policy, kvp::view_bhs<const float>(scores, 1, heads, length), {1, length},
                        kvp::view_bhs(expiry, 1, heads, length), {workspace, bytes});
        std::snprintf(text, text_bytes, "%s", KVPOLICY_CUDA_ARCHS_TEXT);
        return 0;
    } catch (const std::exception& error) {
        std::snprintf(text, text_bytes, "%s", error.what());
        return 1;
    }
}
