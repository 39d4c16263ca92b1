// Twenty thousand steps of a cache on a device and of one on the host that are given the same scores: the
// same keys in the same rows. Keys and values come from a few tokens that return, scores are all different,
// so that a step costs neither side a copy.
#pragma once

#include "cache_case.hpp"
#include "support/step_io.hpp"

#include <cstdint>
#include <vector>

namespace test {

inline constexpr std::int32_t long_steps = 20000;

/// `both`: BothCaches or BothDuals, of one layer. For a DualCache `reserve(tokens)` is called now and then.
template <class Dims, class T, class Both, class Reserve>
void check_long(Both& both, Scores kind, const Reserve& reserve) {
    CAPTURE(name(kind));
    constexpr std::int32_t returning = 64, ahead = 500;
    const kvpolicy::CacheShape& shape = both.shape;
    const std::int32_t max_sequences = shape.max_sequences, heads = shape.kv_heads,
                       query_heads = shape.query_heads;
    std::mt19937 generator(static_cast<unsigned>(shape.query_heads));
    std::vector<CallTensors<T>> tokens;
    std::vector<T> all_k, all_v, all_q;
    for (std::int32_t i = 0; i < returning; ++i) {
        tokens.emplace_back(shape, max_sequences, 1, kind, generator);
        all_q.insert(all_q.end(), tokens.back().q.data.begin(), tokens.back().q.data.end());
        all_k.insert(all_k.end(), tokens.back().k.data.begin(), tokens.back().k.data.end());
        all_v.insert(all_v.end(), tokens.back().v.data.begin(), tokens.back().v.data.end());
    }
    const Device<T> q(all_q), k(all_k), v(all_v);
    const Device<T> out(std::size_t(max_sequences) * std::size_t(query_heads) *
                        std::size_t(shape.head_dim_vo));
    Tensor<T> host_out(max_sequences, query_heads, 1, shape.head_dim_vo);
    const auto each = std::int64_t{max_sequences} * heads;
    std::vector<float> given(static_cast<std::size_t>(each * long_steps));
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < given.size(); ++i) {
        const float x = normal(generator);
        given[i] = kind == Scores::few_values ? std::round(x)
                   : kind == Scores::improving
                       ? x + 1e-3f * static_cast<float>(i / static_cast<std::size_t>(each))
                       : x;
    }
    const Device<float> scores(given);
    const auto ref = both.cache.layer(0);
    const auto host_ref = both.oracle.cache.layer(0);
    const Device<unsigned char> workspace(
        kvpolicy::step_workspace_bytes<Dims>(both.device, ref, max_sequences));
    Workspace host_workspace(
        kvpolicy::workspace_bytes(both.ctx, host_ref, {.batch = max_sequences, .tokens = 1}));
    const Device<std::uint32_t> status(
        std::vector<std::uint32_t>(static_cast<std::size_t>(max_sequences), 0));
    const kvpolicy::Batch batch{.count = max_sequences};
    for (std::int32_t t = 0; t < long_steps; ++t) {
        if (t % ahead == 0) {
            reserve(ahead);
        }
        const CallTensors<T>& token = tokens[static_cast<std::size_t>(t % returning)];
        test::Extras extras, device_extras;
        extras.scores = kvpolicy::view_bhs<const float>(given.data() + t * each, max_sequences, heads, 1);
        device_extras.scores =
            kvpolicy::view_bhs<const float>(scores.data() + t * each, max_sequences, heads, 1);
        const std::int64_t at = t % returning * each;
        kvpolicy::step<Dims>(
            both.device, ref,
            test::step_io(
                batch,
                kvpolicy::view_bhsd<const T>(q.data() + at * (query_heads / heads) * shape.head_dim_qk,
                                             max_sequences, query_heads, 1, shape.head_dim_qk),
                kvpolicy::view_bhsd<const T>(k.data() + at * shape.head_dim_qk, max_sequences, heads, 1,
                                             shape.head_dim_qk),
                kvpolicy::view_bhsd<const T>(v.data() + at * shape.head_dim_vo, max_sequences, heads, 1,
                                             shape.head_dim_vo),
                kvpolicy::view_bhsd(out.data(), max_sequences, query_heads, 1, shape.head_dim_vo),
                device_extras),
            workspace, {.status = status.data()});
        both.cache.advance(both.device, batch, {.status = status.data()});
        kvpolicy::step(
            both.ctx, host_ref,
            test::step_io(batch, token.q.view(), token.k.view(), token.v.view(), host_out.view(), extras),
            host_workspace);
        both.oracle.cache.advance(both.ctx, batch);
        if (t % 5000 == 4999) {
            both.same_rows("after " + std::to_string(t + 1) + " steps");
        }
    }
    CHECK(status.read() == std::vector<std::uint32_t>(static_cast<std::size_t>(max_sequences), 0));
}

}  // namespace test
