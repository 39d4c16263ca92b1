// What the warpgroups of a Hopper forward block share: sizes, the layout of shared memory, the ring and its
// barriers.
#pragma once

#include <kvpolicy/attention/cuda/forward/forward_params.cuh>
#include <kvpolicy/attention/cuda/forward/row_stream.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/pipeline_state.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/cuda/tuning.cuh>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Sizes for head_dims up to Dim. `General` kernels know soft cap, biases and slopes below 0.
template <class Storage, int Dim_, bool General_>
struct forward_hopper_sizes {
    using T = Storage;
    static constexpr int Dim = Dim_;
    static constexpr bool General = General_;
    static constexpr forward_hopper_tuning tuning = select_forward_hopper_tuning(Dim, General);
    static constexpr int consumers = tuning.consumers;  // warpgroups
    static constexpr int keys = tuning.keys;
    static constexpr int stages = tuning.stages;
    static constexpr int rows = 64 * consumers;
    static constexpr int threads = 128 * (consumers + 1);
    static constexpr int row_bytes = Dim * 2;
    static constexpr int tile_bytes = keys * row_bytes;
    static_assert(consumers * tuning.consumer_registers + tuning.producer_registers <= 512);
};

/// What stands in shared memory behind the queries and the ring.
template <class S>
struct forward_hopper_memory {
    key_notes<S::keys, S::General> notes[S::stages];  // of the stages that hold keys
    std::uint64_t full[S::stages];
    std::uint64_t empty[S::stages];
    std::uint64_t queries_full, queries_empty;
    key_addresses<S::keys> addresses[2];
    // Of the tile that the producer is at: sequence and head in the maps, and which row is row 0 there.
    std::int32_t box_b, box_h, box_row;
    union {
        stream_memory<S::keys, S::General, listed_rows> listed;
        stream_memory<S::keys, S::General, scanned_rows> scanned;
    };
    std::uint32_t ticket;  // among the producer's threads
    std::int32_t tile;     // the consumers' tile; -1: no more
};

template <class S>
constexpr std::size_t forward_hopper_shared_bytes() {
    constexpr std::size_t bytes =
        1024 + static_cast<std::size_t>(S::rows * S::row_bytes + S::stages * S::tile_bytes) +
        sizeof(forward_hopper_memory<S>);
    static_assert(bytes <= 232448);
    return bytes;
}

/// A launch, and where its parts stand in this block's shared memory.
template <class S>
class forward_pipeline {
  public:
    using T = typename S::T;

    __device__ forward_pipeline(const forward_params<T>& call, unsigned char* shared) : call_(call) {
        unsigned char* const aligned = shared + ((1024 - (shared_address(shared) & 1023)) & 1023);
        queries_ = shared_address(aligned);
        ring_ = queries_ + S::rows * S::row_bytes;
        memory_ = reinterpret_cast<forward_hopper_memory<S>*>(aligned + S::rows * S::row_bytes +
                                                              S::stages * S::tile_bytes);
        full_ = shared_address(memory_->full);
        empty_ = shared_address(memory_->empty);
        queries_full_ = shared_address(&memory_->queries_full);
        queries_empty_ = shared_address(&memory_->queries_empty);
    }

    /// One thread, before all others go on.
    __device__ void init_barriers() const {
        for (int i = 0; i < S::stages; ++i) {
            barrier_init(full_ + 8 * i, 4 * arrivals_of_warp);
            barrier_init(empty_ + 8 * i, 4 * S::consumers * arrivals_of_warp);
        }
        barrier_init(queries_full_, 4 * arrivals_of_warp);
        barrier_init(queries_empty_, 4 * S::consumers * arrivals_of_warp);
        barrier_init_fence();
    }

  protected:
    const forward_params<T>& call_;
    forward_hopper_memory<S>* memory_;
    std::uint32_t queries_, ring_, full_, empty_, queries_full_, queries_empty_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
