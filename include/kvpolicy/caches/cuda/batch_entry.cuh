// The entries of a batch as kernels see them, whatever cache they are for: sequences, tokens, and why there
// are none.
#pragma once

#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/packed_rows.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Tokens of a head that its layer has taken and advance() has not counted: LayerRef::pending.
template <class View>
__device__ std::int32_t num_appended_of(const View& cache, std::int64_t index) {
    return detail::appended_tokens(__ldcg(cache.appended + index));
}
/// Rows that a head has in use now, with those of such tokens: LayerRef::used.
template <class View, class Head>
__device__ std::int32_t rows_now(const View& cache, const Head& head, std::int32_t seq) {
    return head.layout.used(cache.length[seq] + num_appended_of(cache, head.index),
                            cache.num_long_range[head.index]);
}

/// The tokens of one entry of a batch, at most `most`, and its sequence. What the CPU backend would reject
/// counts as no token, and an entry of Batch::no_seq has none. With `grow` the tokens must fit into the
/// sequence.
struct active_entry {
    std::int32_t seq;  // 0 where there is none
    std::int32_t tokens;
    bool there = true;                // there is a sequence, and the tokens are a number that may be
    std::uint32_t wrong = status_ok;  // why there are no tokens

    template <class View>
    __device__ active_entry(const View& cache, const Batch& batch, std::int32_t i, std::int32_t most,
                            bool grow = true)
        : seq(batch.seq(i)), tokens(batch.tokens(i)) {
        if (seq == Batch::no_seq) {
            seq = tokens = 0;
            there = false;
        } else if (seq < 0 || seq >= cache.max_sequences) {
            seq = 0;
            there = false;
            refuse(status_bad_length);
        } else if (tokens < 0 || tokens > most || (grow && tokens != 0 && !cache.takes(seq, tokens))) {
            there = false;
            refuse(status_bad_length);
        }
    }
    /// No tokens if the layer has appended some since the last advance(). Call it before the first write.
    template <class View>
    __device__ active_entry once(const View& cache) const {
        active_entry entry = *this;
        if (tokens != 0 && cache.appended[std::int64_t{seq} * cache.kv_heads] > 0) {
            entry.refuse(status_layer_repeated);
        }
        return entry;
    }
    __device__ void refuse(std::uint32_t why) {
        wrong = why;
        tokens = 0;
    }
    /// By one thread.
    __device__ void report(std::uint32_t* status, std::int32_t i) const {
        if (wrong != 0 && status != nullptr) {
            atomicOr(status + i, wrong);
        }
    }
};

/// Where the tokens of a chunk are: in a call's tensors, or in the spare rows of a cache, where draft tokens
/// wait.
template <class T>
struct prefill_tokens {
    rows_view<const T> k{};  // [count, Hkv, most, Dk]
    rows_view<const T> v{};  // [count, Hkv, most, Dv]
    packed_rows packed{};    // of k and v, and of the call's other tensors
    std::int32_t most = 1;
    bool spare = false;

    template <class Head>
    __device__ const T* key(const Head& head, std::int32_t i, std::int32_t h, std::int32_t j) const {
        return spare ? head.spare_key(j) : k.row(i, h, packed.begin(i) + j);
    }
    template <class Head>
    __device__ const T* value(const Head& head, std::int32_t i, std::int32_t h, std::int32_t j) const {
        return spare ? head.spare_value(j) : v.row(i, h, packed.begin(i) + j);
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
