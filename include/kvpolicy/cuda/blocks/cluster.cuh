// Clusters of blocks, which read and write each other's shared memory: compute capability 9.0.
#pragma once

#include <kvpolicy/cuda/blocks/async.cuh>
#include <kvpolicy/cuda/config.cuh>

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

template <class = void>
__device__ inline void store_in_cluster(float* to, int block, float x) {
    std::uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address)
                 : "r"(shared_address(to)), "r"(block));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
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

/// The place in another block's shared memory that stands where `mine` does in this one's.
template <class Value>
__device__ inline const Value* in_cluster(const Value* mine, int block) {
    const Value* there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(mine), "r"(block));
    return there;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
