// What kernels know of a layer whose heads share a budget: the keys of all heads of a sequence as one plane.
//
// A plane's keys are numbered by the query at which they leave their window, and by head: unit q * heads + h
// is key (h, q - w_h). So the keys that have left by any moment are the units before one, as the tokens of a
// head are, and the kernels that rank the keys of a head rank those of a layer. A key that does not leave
// within its segment of n tokens has one of the numbers that are left: t = q - w_h counts modulo n.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/masks/cuda/mask_params.cuh>
#include <kvpolicy/masks/cuda/priority_keys.cuh>
#include <kvpolicy/masks/cuda/sorted_keys.cuh>
#include <kvpolicy/policies/ranking.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A key of a layer; t counts from its segment's first token.
struct layer_key {
    std::int32_t head;
    std::int32_t t;
};

/// The params of a call, and in the same names what differs for planes of layers: lengths, edges, segments
/// and chunks count units. Of the call's own, `length` is by_head().length.
template <class Gate, class Keep>
struct shared_mask_params : mask_params<Gate, Keep> {
    using call = mask_params<Gate, Keep>;

    std::int32_t length = 0;    // units of a plane: heads * S
    std::int32_t chunks = 0;    // of units, a plane
    HeadParams layer_params{};  // budget: the layer's slots. A unit leaves at its own number: no window
    bool is_exact = false;      // priorities are the scores
    bool is_static = true;      // Policy::has_static_shared_order

    __device__ const call& by_head() const { return *this; }
    KVPOLICY_HOST_DEVICE std::int64_t planes() const { return this->batch; }
    __device__ std::int32_t sequence_of(std::int64_t plane) const { return static_cast<std::int32_t>(plane); }
    __device__ std::int32_t head_of(std::int64_t) const { return 0; }
    __device__ HeadParams head_params_of(std::int64_t) const { return layer_params; }
    __device__ bool has_exact_keys(const HeadParams&) const { return is_exact; }
    __device__ bool by_decayed_top_k(const HeadParams&) const { return false; }

    __device__ std::int32_t edge(std::int32_t index) const { return call::edge(index) * this->heads; }
    __device__ segment_range segment(std::int32_t b, std::int32_t index) const {
        const segment_range tokens = call::segment(b, index);
        return {tokens.begin * this->heads, tokens.end * this->heads, index};
    }
    __device__ std::int32_t first_chunk(std::int32_t index) const {
        return this->edges == nullptr ? 0 : edge(index) / mask_chunk + index;
    }
    __device__ std::int32_t segment_of_chunk(std::int32_t chunk_index) const {
        return last_begun(this->segments, [&](std::int32_t i) { return first_chunk(i) <= chunk_index; });
    }

    /// The key of a unit, counted from the segment's first; the segment has n tokens.
    __device__ layer_key key_of(std::int32_t unit, std::int32_t n) const {
        const auto q = static_cast<std::int32_t>(static_cast<std::uint32_t>(unit) /
                                                 static_cast<std::uint32_t>(this->heads));
        const std::int32_t head = unit - q * this->heads;
        const std::int32_t window = this->all_params.of(head).window;
        const std::int32_t t = window < n ? q - window : q;
        return {head, t < 0 ? t + n : t};
    }
    /// The inverse.
    __device__ std::int32_t unit_of(const layer_key& key, std::int32_t window, std::int32_t n) const {
        std::int32_t q = key.t;
        if (window < n && key.t < n) {
            q += window;
            q -= q < n ? 0 : n;
        }
        return q * this->heads + key.head;
    }
    /// What ranks a key. Static priorities only.
    __device__ double priority_of(const HeadParams& head_params, float score, std::int32_t t) const {
        return shared_rank_value(head_params, true, score, t, 0);
    }

    /// The expiry of a unit; `value` is the unit whose key evicts it, or never.
    __device__ void expire(const plane_view<expiry_t>& out, std::int32_t b, std::int32_t,
                           const segment_range& range, std::int32_t unit, expiry_t value) const {
        const segment_range tokens{range.begin / this->heads, range.end / this->heads, range.index};
        const layer_key key = key_of(unit, tokens.length());
        call::expire(out, b, key.head, tokens, key.t, value == never ? never : value / this->heads);
    }
    __device__ void expire_alone(const plane_view<expiry_t>& out, std::int32_t b, std::int32_t,
                                 const segment_range& range, const HeadParams&, std::int32_t unit) const {
        const segment_range tokens{range.begin / this->heads, range.end / this->heads, range.index};
        const layer_key key = key_of(unit, tokens.length());
        call::expire_alone(out, b, key.head, tokens, this->all_params.of(key.head), key.t);
    }
};

/// The 64-bit code of an absolute unit; what does not compete is last.
template <class Gate, class Keep>
__device__ inline std::uint64_t code_of_token(const shared_mask_params<Gate, Keep>& params,
                                              const sorted_segment& segment, std::int32_t unit) {
    const std::int32_t n = segment.n / params.heads;
    const std::int32_t in_segment = unit - segment.begin;
    if (in_segment >= segment.n) {
        return idle_code;
    }
    const layer_key key = params.key_of(in_segment, n);
    const HeadParams head_params = params.all_params.of(key.head);
    if (!params.leaves(head_params, key.t, n)) {
        return idle_code;
    }
    const auto b = static_cast<std::int32_t>(segment.plane);
    const float score = params.scores.head(b, key.head)[segment.begin / params.heads + key.t];
    return params.gate.open(score, head_params)
               ? descending_code(params.priority_of(head_params, score, key.t))
               : idle_code;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
