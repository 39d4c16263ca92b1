// The paper's pair of ranks and cutoffs on the device, by every algorithm, against the host's; and the
// expiries from them.
#pragma once

#include <kvpolicy/policies/cutoff.hpp>

#include "mask_check.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace test {

template <class P>
void check_cutoffs(const P& policy, MaskCase& input, const std::string& what) {
    const std::int32_t batch = input.scores.batch, heads = input.scores.heads, length = input.scores.length;
    const Plane<float>& scores = input.scores;
    const Sequences host_ctx = input.sequences(input.lengths.data(), nullptr);
    Plane<std::int32_t> rank(batch, heads, length, untouched), cutoff(batch, heads, length, untouched);
    Workspace memory(build_cutoffs_workspace_bytes(oracle_context(), policy, host_ctx, heads));
    build_cutoffs(oracle_context(), policy, scores.view(), host_ctx, rank.view(), cutoff.view(), memory);
    const std::vector<expiry_t> expiries = host_mask(policy, input).expiry;

    const Device<float> device_scores(scores.data);
    const Device<std::int32_t> lengths(input.lengths);
    const Sequences on_device = input.sequences(lengths.data(), nullptr);
    const kvpolicy::cuda ctx{};
    const auto check = [&]<class C>(C, const std::string& algorithm) {
        const std::string end = ", " + algorithm + ", " + what;
        const std::vector<std::int32_t> sentinel(rank.data.size(), untouched);
        const Device<std::int32_t> got_rank(sentinel);
        const Device<std::int32_t> got_cutoff(sentinel);
        const Device<unsigned char> workspace(
            build_cutoffs_workspace_bytes<C>(ctx, policy, on_device, heads));
        build_cutoffs<C>(ctx, policy, view_bhs<const float>(device_scores.data(), batch, heads, length),
                         on_device, view_bhs(got_rank.data(), batch, heads, length),
                         view_bhs(got_cutoff.data(), batch, heads, length), workspace);
        same(got_rank.read(), rank.data, length, "rank" + end);
        same(got_cutoff.read(), cutoff.data, length, "cutoff" + end);
        const Device<expiry_t> expiry(sentinel);
        const Device<unsigned char> more(expiry_from_cutoffs_workspace_bytes(ctx, policy, on_device, heads));
        expiry_from_cutoffs(ctx, policy, view_bhs<const std::int32_t>(got_rank.data(), batch, heads, length),
                            view_bhs<const std::int32_t>(got_cutoff.data(), batch, heads, length), on_device,
                            view_bhs(expiry.data(), batch, heads, length), more);
        same(expiry.read(), expiries, length, "expiry" + end);
    };
    check(ParallelCutoff{}, "parallel");
    check(FenwickCutoff{}, "Fenwick");
    check(LinkedCutoff{}, "linked");
}

}  // namespace test
