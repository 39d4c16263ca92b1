// Launches of the kernels of this folder: which tile a call takes, and grids.
#pragma once

#include <kvpolicy/attention/cuda/received_mass/kernel_counted_lse.cuh>
#include <kvpolicy/attention/cuda/received_mass/kernel_received_mass.cuh>
#include <kvpolicy/attention/cuda/received_mass/mass_tile.cuh>
#include <kvpolicy/attention/cuda/received_mass/received_mass_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/head_tiles.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Calls body(tile<...>{}) with the tile of a call: of matrix instructions where `halves` is set, which says
/// that 16-byte copies can read all rows of T; else plain loops.
template <class Tile_>
struct mass_tile_of {
    using Tile = Tile_;
};
template <class T, class Dims, class Body>
void with_mass_tile(bool halves, std::int32_t dim, const Body& body) {
    if constexpr (is_half<T>) {
        const int tile = fitting_tile(Dims{}, dim);
        if (halves && tile != 0) {
            with_tile(Dims{}, tile, [&](auto of) { body(mass_tile_of<half_mass_tile<T, of()>>{}); });
            return;
        }
    }
    body(mass_tile_of<plain_mass_tile<T>>{});
}

inline std::int64_t mass_tiles(std::int64_t rows) { return (rows + mass_tile_rows - 1) / mass_tile_rows; }

/// lse of the queries that count, of a head at most `most`.
template <class Dims, class T>
void launch_counted_lse(const cuda& ctx, const received_mass_params<T>& params, bool halves,
                        std::int32_t most) {
    const std::int64_t tiles = mass_tiles(std::min(most, params.queries));
    const std::int64_t heads = std::int64_t{params.batch} * params.kv_heads * params.group;
    with_mass_tile<T, Dims>(halves, params.q.dim, [&](auto of) {
        using Tile = typename decltype(of)::Tile;
        launch("counted_lse_kernel", counted_lse_kernel<Tile>, heads * tiles, mass_tile_threads,
               Tile::shared_bytes, ctx, params, static_cast<std::int32_t>(tiles));
    });
}

/// Masses of the keys of all heads.
template <class Dims, class T>
void launch_received_mass(const cuda& ctx, const received_mass_params<T>& params, bool halves,
                          group_aggregate aggregate) {
    const std::int64_t tiles = mass_tiles(params.max_keys);
    const std::int64_t heads = std::int64_t{params.batch} * params.kv_heads;
    with_mass_tile<T, Dims>(halves, params.q.dim, [&](auto of) {
        using Tile = typename decltype(of)::Tile;
        const bool largest = aggregate == group_aggregate::max && params.group > 1;
        const auto kernel = largest ? received_mass_kernel<Tile, true> : received_mass_kernel<Tile, false>;
        launch("received_mass_kernel", kernel, heads * tiles, mass_tile_threads, Tile::shared_bytes, ctx,
               params, static_cast<std::int32_t>(tiles));
    });
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
