// SnapKV (Li et al., 2024): prunes a prompt once, to the keys that its last queries attend to most; generated
// tokens stay.
//
//     using SnapKV = kvpolicy::SnapKV<2016, 32>;                      // B = 2048: 32 observing tokens, 2016
//         others
//     // the same, spelled out:
//     using Same = kvpolicy::Policy<kvpolicy::Window<32>, kvpolicy::TopKBudget<2016>, kvpolicy::WindowMass>;
//     const auto policy = kvpolicy::snapkv_for_total(2048, 32, {.pooling = kvpolicy::MassPooling::max(7)});
//     kvpolicy::DualCache<kvpolicy::SnapKV<>, kvpolicy::bf16> cache{shape, {.slab_pages = 4096, .max_slabs =
//         64, .max_seq_len = 131072}, policy};
//     kvpolicy::build_observed_mask(ctx, policy, attention, q, k, sequences, expiry, workspace);    // the
//         same as lifetimes
//
// At the end of a prompt the last w tokens are the observation window. score(t) is the sum over its queries
// of their softmax weights (normalized over the window too), for the keys before it; smoothed over 5
// neighboring keys (mean, with zeros beyond the ends; or max); the B - w best stay, with the window. B
// counts the window, as the paper's capacity does. A prompt of up to B tokens keeps everything. Each KV
// head decides for itself; with G query heads per KV head the mean of their weights is pooled (the paper
// has G = 1; its code lets every query head keep keys of its own). Defaults are those of the authors' code:
// w = 32, mean over 5.
//
// Decoded tokens stay, so use a DualCache: steps do not evict. A further prefill() is a new prompt, one of a
// single token too: it prunes all keys to B again, the window's last tokens apart. So decode with step().
// ObservedPrefill::in_chunks(c) prunes after every c tokens, with the chunk's last w queries (all of a
// shorter chunk): then B + c rows are enough for any text that comes by prefill.
#pragma once

#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/attention/observed_mask.hpp>
#include <kvpolicy/attention/received_mass.hpp>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/observed.hpp>

namespace kvpolicy {

/// SnapKV's composition: Keys = B - w, and the observation window w. With `dynamic` numbers (the default):
/// snapkv_for_total.
template <std::int32_t Keys = dynamic, std::int32_t Observing = dynamic>
using SnapKV = Policy<Window<Observing>, TopKBudget<Keys>, WindowMass>;

/// SnapKV with B keys after a prompt, `window` of them observing. Refuses window < 1 and total < window.
inline SnapKV<> snapkv_for_total(std::int32_t total, std::int32_t window = 32, WindowMass scorer = {}) {
    return SnapKV<>{Window<>{window}, TopKBudget<>{budget_for_total(total, 0, window)}, scorer};
}

static_assert(SnapKV<2016, 32>::observed && SnapKV<2016, 32>::grows);

}  // namespace kvpolicy
