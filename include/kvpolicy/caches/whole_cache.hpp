// What the compiler says where a call that takes one layer, cache.layer(layer), is given the whole cache: one
// sentence, instead of a list of templates that do not match. None of these is ever called; caches/calls.hpp
// has the calls.
#pragma once

#include <kvpolicy/caches/calls.hpp>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {
namespace detail {

template <class Cache>
constexpr void require_layer() {
    static_assert(sizeof(Cache) == 0,
                  "kvpolicy: this call takes one layer of a cache: cache.layer(layer) in place of cache");
}
template <CacheObject Cache>
using io_of = step_io<typename Cache::ref_type::value_type>;

}  // namespace detail

template <class Dims = void, class Context, CacheObject Cache>
std::size_t workspace_bytes(const Context&, const Cache&, const CallSize&) {
    detail::require_layer<Cache>();
    return 0;
}
template <class Dims = void, class Context, CacheObject Cache>
std::size_t step_workspace_bytes(const Context&, const Cache&, std::int32_t) {
    detail::require_layer<Cache>();
    return 0;
}
template <class Dims = void, class Context, CacheObject Cache>
void step(const Context&, const Cache&, const detail::io_of<Cache>&, workspace_view,
          const StepOptions& = {}) {
    detail::require_layer<Cache>();
}
template <class Dims = void, class Context, CacheObject Cache>
void prefill(const Context&, const Cache&, const detail::io_of<Cache>&, workspace_view,
             const StepOptions& = {}) {
    detail::require_layer<Cache>();
}
template <class Dims = void, class Context, CacheObject Cache>
std::size_t append_workspace_bytes(const Context&, const Cache&, const CallSize&) {
    detail::require_layer<Cache>();
    return 0;
}
template <class Dims = void, class Context, CacheObject Cache>
void append(const Context&, const Cache&, const detail::io_of<Cache>&, workspace_view,
            const StepOptions& = {}) {
    detail::require_layer<Cache>();
}
template <class Dims = void, class Context, CacheObject Cache>
void chunk_expiry(const Context&, const Cache&, const detail::io_of<Cache>&, const ChunkExpiry&,
                  workspace_view, const StepOptions& = {}) {
    detail::require_layer<Cache>();
}
template <class Dims = void, class Context, CacheObject Cache>
void append_chunk(const Context&, const Cache&, const detail::io_of<Cache>&, workspace_view,
                  const StepOptions& = {}) {
    detail::require_layer<Cache>();
}
template <class Dims = void, class Context, CacheObject Cache>
void observe(const Context&, const Cache&, const Batch&, input_plane<float>, workspace_view = {},
             const StepOptions& = {}) {
    detail::require_layer<Cache>();
}
template <class Dims = void, class Context, CacheObject Cache>
void append_draft(const Context&, const Cache&, const detail::io_of<Cache>&, workspace_view,
                  const StepOptions& = {}) {
    detail::require_layer<Cache>();
}
template <class Dims = void, class Context, CacheObject Cache>
void accept(const Context&, const Cache&, const Batch&, workspace_view, const StepOptions& = {}) {
    detail::require_layer<Cache>();
}
template <class Dims = void, class Context, CacheObject Cache>
void attend(const Context&, const Cache&, const detail::io_of<Cache>&, workspace_view,
            const StepOptions& = {}) {
    detail::require_layer<Cache>();
}
template <class Dims = void, class Context, CacheObject Cache>
void export_heads(const Context&, const Cache&, const Batch&, const HeadPages&, workspace_view = {},
                  const StepOptions& = {}) {
    detail::require_layer<Cache>();
}

}  // namespace kvpolicy
