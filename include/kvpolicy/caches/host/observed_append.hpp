// Steps without attention of caches whose policy ranks keys by the attention they receive: the key that loses
// its place goes, the token is written, and the masses of its query come from the caller.
#pragma once

#include <kvpolicy/caches/host/observed_step.hpp>
#include <kvpolicy/core/error.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace kvpolicy::host_backend {

/// Whether the masses of a step's query count.
template <class P>
constexpr bool observes() {
    if constexpr (P::observed) {
        return P::scorer_type::evicts_at_steps;
    } else {
        return false;
    }
}
template <class P>
inline constexpr bool observes_steps = observes<P>();

/// The body of append.
template <class Cache, class T = typename Cache::value_type>
void append_observed(const host& ctx, const Cache& cache, const Batch& all, rows_view<const T> k,
                     rows_view<const T> v, std::byte* memory, std::uint32_t* status) {
    const observed_pass<Cache> pass(ctx, cache, all.count, 1, memory + admission_bytes(cache, all.count));
    const observed_call<T> call{{}, k, v, {}, {}};
    pass.check(all, call, false);
    const Batch batch = admit(cache, all, status, memory, [&](std::int32_t i, std::int32_t h) {
        return pass.rows_after(all, false, i, h);
    });
    pass.append(batch, call);
    mark_appended(cache, batch);
}

/// Refuses masses that are no numbers of 0 or more, and planes below the rows in use.
template <class Cache>
void check_masses(const Cache& cache, const Batch& batch, plane_view<const float> masses) {
    std::int32_t used = 0;
    for (std::int32_t i = 0; i < batch.count; ++i) {
        for (std::int32_t h = 0; batch.tokens(i) != 0 && h < cache.kv_heads; ++h) {
            used = std::max(used, cache.used(batch.seq(i), h));
        }
    }
    checks::check_plane("masses", masses, batch.count, cache.kv_heads, used);
    for (std::int32_t i = 0; i < batch.count; ++i) {
        for (std::int32_t h = 0; batch.tokens(i) != 0 && h < cache.kv_heads; ++h) {
            const float* const of_head = masses.head(i, h);
            for (std::int32_t r = 0; r < cache.used(batch.seq(i), h); ++r) {
                if (!(of_head[r] >= 0.0f) || std::isinf(of_head[r])) [[unlikely]] {
                    detail::refuse(detail::text("masses[", i, "][", h, "][", r, "]").c_str(), of_head[r],
                                   "a number of 0 or more");
                }
            }
        }
    }
}

/// observed_list::take_masses, from the caller's: the rows of a head in their order.
template <class Cache>
void take_masses(const host& ctx, const Cache& cache, const Batch& batch, plane_view<const float> masses) {
    const Observation seen = cache.scorer.observation();
    for_each_head(ctx, cache.kv_heads, batch, [&](std::int32_t i, std::int32_t h) {
        const std::int32_t seq = batch.seq(i), used = cache.used(seq, h);
        const auto rows = cache.head_rows(seq, h);
        for (std::int32_t r = 0; r < used; ++r) {
            double mass = masses.head(i, h)[r];
            if (seen.whole_layer) {  // all heads hold the same keys in the same rows
                mass = 0.0;
                for (std::int32_t other = 0; other < cache.kv_heads; ++other) {
                    mass += static_cast<double>(masses.head(i, other)[r]);
                }
                mass /= cache.kv_heads;
            }
            const double before = seen.accumulate ? static_cast<double>(rows.score(r)) : 0.0;
            rows.score(r) = static_cast<float>(before + mass);
        }
    });
}

}  // namespace kvpolicy::host_backend
