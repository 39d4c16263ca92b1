// A task of the host's threads per head of a plane.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/view.hpp>

#include <cstdint>

namespace kvpolicy::host_backend {

/// visit(b, h, b * heads + h) for all heads of a plane [B, heads, S], in parallel.
template <class T, class Visit>
void for_each_head(const host& ctx, const plane_view<T>& plane, const Visit& visit) {
    ctx.parallel_for(std::int64_t{plane.batch} * plane.heads, [&](std::int64_t task) {
        visit(task / plane.heads, static_cast<std::int32_t>(task % plane.heads), task);
    });
}

}  // namespace kvpolicy::host_backend
