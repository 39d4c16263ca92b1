// The host's masks are the oracle of the device's: one call of each, and the first difference named.
#pragma once

#include <kvpolicy/cuda.cuh>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/compose.hpp>

#include "../../support/cases.hpp"
#include "device.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace test {

using namespace kvpolicy;

/// What a case has besides its policy. Empty vectors: not given.
struct MaskCase {
    Plane<float> scores;
    std::vector<std::int32_t> lengths;
    std::vector<std::int32_t> cu_seqlens;
    MaskOptions options;

    [[nodiscard]] Sequences sequences(const std::int32_t* on_lengths, const std::int32_t* on_edges) const {
        Sequences s;
        s.batch = scores.batch;
        s.length = scores.length;
        s.lengths = lengths.empty() ? nullptr : on_lengths;
        s.cu_seqlens = cu_seqlens.empty() ? nullptr : on_edges;
        s.segments = cu_seqlens.empty() ? 0 : static_cast<std::int32_t>(cu_seqlens.size()) - 1;
        return s;
    }
};

inline constexpr std::int32_t untouched = -77;

struct MaskResult {
    std::vector<expiry_t> expiry;
    std::vector<std::uint32_t> status;
};

inline const host& oracle_context() {
    static const host ctx(0);
    return ctx;
}

template <class P>
MaskResult host_mask(const P& policy, MaskCase& input) {
    MaskOptions options = input.options;
    options.nan_ranks_last = true;
    Plane<expiry_t> out(input.scores.batch, input.scores.heads, input.scores.length, untouched);
    std::vector<std::uint32_t> status(static_cast<std::size_t>(input.scores.batch), 0);
    const Sequences sequences = input.sequences(input.lengths.data(), input.cu_seqlens.data());
    Workspace workspace(
        build_mask_workspace_bytes(oracle_context(), policy, sequences, input.scores.heads, options));
    const Plane<float>& scores = input.scores;
    options.status = status.data();
    build_mask(oracle_context(), policy, scores.view(), sequences, out.view(), workspace, options);
    return {out.data, status};
}

template <class P>
MaskResult device_mask(const P& policy, const MaskCase& input, const cuda_backend::mask_tuning& tuning) {
    const std::int32_t batch = input.scores.batch, heads = input.scores.heads, length = input.scores.length;
    const Device<float> scores(input.scores.data);
    const Device<std::int32_t> lengths(input.lengths);
    const Device<std::int32_t> edges(input.cu_seqlens);
    const Device<expiry_t> out(std::vector<expiry_t>(input.scores.data.size(), untouched));
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(static_cast<std::size_t>(batch), 0));
    const Sequences sequences = input.sequences(lengths.data(), edges.data());
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> workspace(
        cuda_backend::mask_workspace_bytes(ctx, policy, sequences, heads, input.options, tuning));
    cuda_backend::build_mask_tuned(ctx, policy, view_bhs<const float>(scores.data(), batch, heads, length),
                                   sequences, view_bhs(out.data(), batch, heads, length), workspace,
                                   input.options, status.data(), tuning);
    return {out.read(), status.read()};
}

/// Both ways of ranking: by blocks where they can, and over the device.
inline std::vector<cuda_backend::mask_tuning> all_tunings() {
    cuda_backend::mask_tuning tuning = cuda_backend::mask_tuning_of(kvpolicy::cuda{});
    std::vector<cuda_backend::mask_tuning> all{tuning};
    tuning.longest_block_sort = 0;
    all.push_back(tuning);
    return all;
}

inline void same(const std::vector<std::int32_t>& got, const std::vector<std::int32_t>& wanted,
                 std::int32_t length, const std::string& what) {
    std::int64_t wrong = 0;
    std::size_t first = 0;
    for (std::size_t i = got.size(); i-- > 0;) {
        if (got[i] != wanted[i]) {
            ++wrong;
            first = i;
        }
    }
    const std::size_t row = length == 0 ? 1 : static_cast<std::size_t>(length);
    CHECK_MESSAGE(wrong == 0, what, ": ", wrong, " of ", got.size(), " differ; the first in plane ",
                  first / row, " at token ", first % row, ": ", wrong == 0 ? 0 : got[first], " instead of ",
                  wrong == 0 ? 0 : wanted[first]);
}

/// Device against host, every way. Returns the host's result.
template <class P>
MaskResult check_mask(const P& policy, MaskCase& input, const std::string& what) {
    const MaskResult wanted = host_mask(policy, input);
    int way = 0;
    for (const cuda_backend::mask_tuning& tuning : all_tunings()) {
        const MaskResult got = device_mask(policy, input, tuning);
        const std::string name = what + (way++ == 0 ? " (by block)" : " (over the device)");
        same(got.expiry, wanted.expiry, input.scores.length, name);
        CHECK_MESSAGE(got.status == wanted.status, name, ": status");
    }
    return wanted;
}

/// Orders of scores that break careless rankings on a device, besides those of cases.hpp.
/// `log_gamma` is the decay.
enum class HardScores { nan, minus_infinity, masked, level, nearly_level, jump, bf16 };
inline constexpr HardScores all_hard_scores[] = {
    HardScores::nan,          HardScores::minus_infinity, HardScores::masked, HardScores::level,
    HardScores::nearly_level, HardScores::jump,           HardScores::bf16};
inline std::string name(HardScores kind) {
    static const char* const names[] = {"NaN",  "-inf", "masked by -1e9", "level", "nearly level",
                                        "jump", "bf16"};
    return names[static_cast<int>(kind)];
}

inline void fill_scores(Plane<float>& plane, HardScores kind, float log_gamma, std::mt19937& generator) {
    std::normal_distribution<float> normal;
    std::int32_t t = 0;
    for (float& x : plane.data) {
        switch (kind) {
            case HardScores::nan:
                x = generator() % 4 == 0 ? std::numeric_limits<float>::quiet_NaN() : normal(generator);
                break;
            case HardScores::minus_infinity:
                x = -std::numeric_limits<float>::infinity();
                break;
            case HardScores::masked:
                x = generator() % 2 == 0 ? -1e9f : normal(generator);
                break;
            // Priorities r - t log_gamma that are all nearly the same: only the bits beyond fp32
            // tell them apart.
            case HardScores::level:
                x = 1000.0f + static_cast<float>(t) * log_gamma;
                break;
            case HardScores::nearly_level:
                x = 1000.0f + static_cast<float>(t) * log_gamma + 1e-4f * static_cast<float>(generator() % 5);
                break;
            // Bad keys first, then better and better ones that arrive after a long time: the cutoff leaps.
            case HardScores::jump:
                x = t < plane.length / 2 ? -static_cast<float>(generator() % 1000) : static_cast<float>(t);
                break;
            case HardScores::bf16:
                x = static_cast<float>(bf16(normal(generator)));
                break;
        }
        t = t + 1 == plane.length ? 0 : t + 1;
    }
}

}  // namespace test
