// Clusters of blocks, which read and write each other's shared memory: compute capability 9.0.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool compiled_for_clusters = true;
#else
inline constexpr bool compiled_for_clusters = false;
#endif

// Templates, so that no code is made of them where nobody calls them.

/// Where in a cluster's shared memory the address of this block's is in block `block`.
template <class = void>
__device__ inline std::uint32_t cluster_address(std::uint32_t mine, int block) {
    std::uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(mine), "r"(block));
    return address;
}
/// Sends numbers to cluster_address() `to`; the barrier there counts their bytes, as those of a bulk copy.
/// Nobody waits here, where barriers of a cluster wait until memory has all that was written before. Two
/// numbers lie aligned to 8 bytes, four to 16.
template <class = void>
__device__ inline void send_in_cluster(std::uint32_t to, float x, std::uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to),
                 "f"(x), "r"(barrier)
                 : "memory");
}
template <class = void>
__device__ inline void send_in_cluster(std::uint32_t to, float2 x, std::uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
        "f"(x.x), "f"(x.y), "r"(barrier)
        : "memory");
}
template <class = void>
__device__ inline void send_in_cluster(std::uint32_t to, float4 x, std::uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::
            "r"(to),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
        : "memory");
}
/// Arrives for those who will cluster_wait(), without a word of what was written before: barrier_init_fence()
/// has it for barriers.
template <class = void>
__device__ inline void cluster_arrive_relaxed() {
    __syncwarp();  // see cluster_arrive()
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
/// All threads of all blocks of the cluster; what they wrote before is visible after.
template <class = void>
__device__ inline void cluster_arrive() {
    __syncwarp();  // the instruction wants all lanes at once
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
template <class = void>
__device__ inline void cluster_wait() {
    __syncwarp();  // this one, too
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
template <class = void>
__device__ inline void cluster_barrier() {
    cluster_arrive();
    cluster_wait();
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
