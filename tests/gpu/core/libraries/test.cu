// Shared libraries of one process that were built for different architectures run their own code: without an
// inline namespace and hidden visibility the first one loaded would serve all, the foreign one too.
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/mask_check.hpp"
#include "library.hpp"

#include <doctest/doctest.h>

#include <random>
#include <string>
#include <vector>

using namespace kvpolicy;
using namespace test;

TEST_CASE("libraries for different architectures in one process") {
    MaskCase input{Plane<float>(1, 3, 2000), {}, {}, {}};
    std::mt19937 generator(2);
    fill_scores(input.scores, Scores::random, generator);
    const Policy<Sink<4>, Window<16>, TopKBudget<64>> policy;
    const std::vector<expiry_t> wanted = host_mask(policy, input).expiry;
    const Device<float> scores(input.scores.data);
    const Device<unsigned char> workspace(build_mask_workspace_bytes(kvpolicy::cuda{}, policy, {1, 2000}, 3));
    std::vector<char> text(4096);
    const auto run = [&](library_call* call, std::vector<expiry_t>& out) {
        const Device<expiry_t> expiry(std::vector<expiry_t>(wanted.size(), untouched));
        const int result = call(scores.data(), 3, 2000, expiry.data(), workspace.data(), workspace.bytes(),
                                text.data(), text.size());
        out = expiry.read();
        return result;
    };
    for (int turn = 0; turn < 2; ++turn) {
        std::vector<expiry_t> got;
        CHECK(run(kvpolicy_test_portable, got) == 0);
        CHECK(std::string(text.data()) == "800");
        same(got, wanted, 2000, "portable");
        CHECK(run(kvpolicy_test_native, got) == 0);
        same(got, wanted, 2000, "native");
        // The foreign one fails, with one clear sentence, and leaves the others alone.
        CHECK(run(kvpolicy_test_foreign, got) == 1);
        const std::string error = text.data();
        CAPTURE(error);
        CHECK(error.find("this binary has no code that runs on the present GPU of compute capability") !=
              std::string::npos);
        CHECK(error.find("it was compiled for 1200") != std::string::npos);
        CHECK(got == std::vector<expiry_t>(wanted.size(), untouched));
    }
    check_mask(policy, input, "this executable's own");
}
