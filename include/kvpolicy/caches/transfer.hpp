// One layer of a sequence as bytes in other memory, and back: for offloading layer by layer beside other
// work, and for moving a prompt's cache to another GPU. Unlike a snapshot (CacheOwner::snapshot) the bytes
// carry no checksum and no hash of the policy, and on CUDA nothing is allocated or waited for.
#pragma once

#include <kvpolicy/caches/calls.hpp>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

namespace detail {

inline constexpr std::uint32_t layer_blob_version = 1;

/// The first bytes of a saved layer. Numbers are as this machine has them.
struct alignas(16) layer_header {
    static constexpr std::uint64_t name = 0x726579616c70766bu;  // "kvplayer"
    std::uint64_t magic = name;
    std::uint32_t version = layer_blob_version;
    std::int32_t number_bytes = 0;  // of a key's number: 2, 4, 8; negative: fp16
    std::int32_t layer = 0, kv_heads = 0, head_dim_qk = 0, head_dim_vo = 0;
    std::int64_t state_size = 0;
    std::int64_t query_numbers = 0;  // of a head, for an eviction part
    position_t length = 0;
    std::int64_t entries = 0;  // of all heads
};

/// What a saved layer says of a head; its numbers of the policy must be the reader's.
struct alignas(16) layer_head {
    std::int32_t sinks, window, num_long_range, num_protected;
};

/// Where the parts of a saved layer begin, in bytes: entries head after head, each head's in the order of its
/// rows.
struct layer_layout {
    std::int64_t heads, state, queries, position, score, k, v, bytes;

    template <class Ref>
    KVPOLICY_HOST_DEVICE constexpr layer_layout(const Ref& cache, std::int64_t entries)
        : heads(sizeof(layer_header)),
          state(heads + cache.kv_heads * std::int64_t{sizeof(layer_head)}),
          queries(aligned(state + cache.kv_heads * cache.state_size * std::int64_t{sizeof(float)})),
          position(aligned(queries + cache.kv_heads * query_numbers(cache) * number_bytes<Ref>())),
          score(aligned(position + entries * std::int64_t{sizeof(position_t)})),
          k(aligned(score + entries * std::int64_t{sizeof(float)})),
          v(aligned(k + entries * cache.head_dim_qk * number_bytes<Ref>())),
          bytes(aligned(v + entries * cache.head_dim_vo * number_bytes<Ref>())) {}

    /// Of one head's ring of queries.
    template <class Ref>
    KVPOLICY_HOST_DEVICE static constexpr std::int64_t query_numbers(const Ref& cache) {
        if constexpr (Ref::policy_type::has_eviction) {
            return std::int64_t{cache.eviction.observing} * cache.group * cache.head_dim_qk;
        } else {
            return 0;
        }
    }

  private:
    template <class Ref>
    KVPOLICY_HOST_DEVICE static constexpr std::int64_t number_bytes() {
        return sizeof(typename Ref::value_type);
    }
    KVPOLICY_HOST_DEVICE static constexpr std::int64_t aligned(std::int64_t at) {
        return (at + 15) / 16 * 16;
    }
};

/// The header of a layer of a sequence with so many tokens and entries.
template <class Ref>
KVPOLICY_HOST_DEVICE constexpr layer_header header_of(const Ref& cache, position_t length,
                                                      std::int64_t entries) {
    layer_header header;
    using T = typename Ref::value_type;
    header.number_bytes = std::is_same_v<T, fp16> ? -2 : static_cast<std::int32_t>(sizeof(T));
    header.layer = cache.layer;
    header.kv_heads = cache.kv_heads;
    header.head_dim_qk = cache.head_dim_qk;
    header.head_dim_vo = cache.head_dim_vo;
    header.state_size = cache.state_size;
    header.query_numbers = layer_layout::query_numbers(cache);
    header.length = length;
    header.entries = entries;
    return header;
}

/// Whether a header is of a layer like `cache`, in `bytes` bytes: the numbers before its heads'.
template <class Ref>
KVPOLICY_HOST_DEVICE constexpr bool header_fits(const Ref& cache, const layer_header& header,
                                                std::int64_t bytes) {
    if constexpr (Ref::pooled) {
        if (cache.limited && header.length > cache.max_seq_len) {
            return false;
        }
    }
    const layer_header wanted = header_of(cache, header.length, header.entries);
    return header.magic == wanted.magic && header.version == wanted.version &&
           header.number_bytes == wanted.number_bytes && header.layer == wanted.layer &&
           header.kv_heads == wanted.kv_heads && header.head_dim_qk == wanted.head_dim_qk &&
           header.head_dim_vo == wanted.head_dim_vo && header.state_size == wanted.state_size &&
           header.query_numbers == wanted.query_numbers && header.length >= 0 && header.entries >= 0 &&
           header.entries <= bytes && layer_layout(cache, header.entries).bytes <= bytes;
}

/// Entries of a head as a saved layer has it, or -1 where the cache's head cannot hold them.
template <class Ref>
KVPOLICY_HOST_DEVICE constexpr std::int64_t entries_of(const Ref& cache, std::int32_t head, position_t length,
                                                       const layer_head& saved) {
    const HeadRows layout = cache.layout(head);
    const std::int64_t beyond = length - layout.sinks - layout.window;
    if (saved.sinks != layout.sinks || saved.window != layout.window || saved.num_long_range < 0 ||
        saved.num_long_range > (beyond > 0 ? beyond : 0) || saved.num_protected < 0 ||
        (!Ref::policy_type::has_keep && saved.num_protected != 0) ||
        !may_compete(cache, head, std::int64_t{saved.num_long_range} - saved.num_protected)) {
        return -1;
    }
    const std::int64_t used = layout.used(length, saved.num_long_range);
    return used <= cache.capacity(head) ? used : -1;
}

}  // namespace detail

/// Bytes of a saved layer whose heads hold `entries` entries together (usage() of every head, or the layer's
/// rows at most). Refuses counts below 0.
template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>> std::size_t layer_bytes(const Ref<P, T>& cache, std::int64_t entries);

/// Writes one layer of sequence `seq` to `buffer`: entries, positions, scores, counters, scorer states. At
/// most `bytes` bytes, at an address that is a multiple of 16. The cache is not changed. Refuses a sequence
/// in the middle of a token, as snapshot does, and too few bytes.
template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void save_layer(const host& ctx, const Ref<P, T>& cache, std::int32_t seq, void* buffer, std::size_t bytes,
                const StepOptions& options = {});

/// Reads one layer of a sequence from what save_layer wrote, on either context, of a cache of the same
/// policy, shape and storage type; kind, page size, and number of sequences may differ. Overwrites the
/// entries and counters of the layer, and the sequence's length; draft tokens are forgotten. The sequence
/// is whole once all layers are loaded. Refuses bytes that no such layer wrote. Exhaustion as for step:
/// refused, or status_pool_exhausted in *options.status; that layer is then as it was.
template <class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void load_layer(const host& ctx, const Ref<P, T>& cache, std::int32_t seq, const void* buffer,
                std::size_t bytes, const StepOptions& options = {});

}  // namespace kvpolicy

#include <kvpolicy/caches/host/host_transfer.hpp>

#if defined(__CUDACC__)
#include <kvpolicy/caches/cuda_transfer.cuh>
#endif
