// What the compiler says where a call that takes one layer, cache.layer(layer), is given the whole cache: one
// sentence, instead of a list of templates that do not match. None of these is ever called; caches/calls.hpp
// has the calls.
#pragma once

#include <kvpolicy/caches/calls.hpp>

#include <cstdint>

namespace kvpolicy {
namespace detail {

template <class Cache>
constexpr void require_layer() {
    static_assert(sizeof(Cache) == 0,
                  "kvpolicy: this call takes one layer of a cache: cache.layer(layer) in place of cache");
}
template <CacheObject Cache>
using value_of = typename Cache::ref_type::value_type;

}  // namespace detail

template <class Dims = void, class Context, CacheObject Cache>
void step(const Context&, const Cache&, const Batch&, input_rows<detail::value_of<Cache>>,
          input_rows<detail::value_of<Cache>>, input_rows<detail::value_of<Cache>>,
          output_rows<detail::value_of<Cache>>, workspace_view, std::uint32_t* = nullptr,
          const CacheExtras& = {}) {
    detail::require_layer<Cache>();
}
template <class Dims = void, class Context, CacheObject Cache>
void prefill(const Context&, const Cache&, const Batch&, input_rows<detail::value_of<Cache>>,
             input_rows<detail::value_of<Cache>>, input_rows<detail::value_of<Cache>>,
             output_rows<detail::value_of<Cache>>, workspace_view, std::uint32_t* = nullptr,
             const CacheExtras& = {}) {
    detail::require_layer<Cache>();
}
template <class Dims = void, class Context, CacheObject Cache>
void append_draft(const Context&, const Cache&, const Batch&, input_rows<detail::value_of<Cache>>,
                  input_rows<detail::value_of<Cache>>, input_rows<detail::value_of<Cache>>,
                  output_rows<detail::value_of<Cache>>, workspace_view, const CacheExtras& = {}) {
    detail::require_layer<Cache>();
}
template <class Dims = void, class Context, CacheObject Cache>
void append_draft(const Context&, const Cache&, const Batch&, input_rows<detail::value_of<Cache>>,
                  input_rows<detail::value_of<Cache>>, input_rows<detail::value_of<Cache>>,
                  output_rows<detail::value_of<Cache>>, workspace_view, std::uint32_t*,
                  const CacheExtras& = {}) {
    detail::require_layer<Cache>();
}
template <class Dims = void, class Context, CacheObject Cache>
void accept(const Context&, const Cache&, const Batch&, workspace_view, std::uint32_t* = nullptr) {
    detail::require_layer<Cache>();
}
template <class Dims = void, class Context, CacheObject Cache>
void attend(const Context&, const Cache&, const Batch&, input_rows<detail::value_of<Cache>>,
            output_rows<detail::value_of<Cache>>, plane_view<float>, workspace_view,
            std::uint32_t* = nullptr) {
    detail::require_layer<Cache>();
}
template <class Context, CacheObject Cache>
void export_heads(const Context&, const Cache&, const Batch&, const HeadPages&) {
    detail::require_layer<Cache>();
}

}  // namespace kvpolicy
