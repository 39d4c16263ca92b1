// Copies into shared memory that run beside the arithmetic, and the barriers that tell when they are done.
//
// Shared memory is named by its 32-bit address (shared_address), as the instructions want it. Two traps:
// cp.async writes through the generic proxy while wgmma and TMA read through the async proxy, so a
// fence_async_proxy belongs between them; and a wait must not contain a trap instruction, which makes ptxas
// 13.0 give up the registers of setmaxnreg.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

__device__ inline std::uint32_t shared_address(const void* pointer) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Asks the L2 cache for the line of 128 bytes at an address.
__device__ inline void ask_for_line(const void* line) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

/// 16 bytes from global to shared memory; the last 16 - bytes of them become 0, and nothing is read where
/// bytes = 0.
__device__ inline void copy_16(std::uint32_t to, const void* from, std::uint32_t bytes = 16) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
/// The same of a row that is read once, from beginning to end: nothing beyond the 16 bytes is asked for.
__device__ inline void copy_16_once(std::uint32_t to, const void* from, std::uint32_t bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
/// 8 bytes, which lie to 8.
__device__ inline void copy_8(std::uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
/// 4 bytes, or zeros where bytes = 0.
__device__ inline void copy_4(std::uint32_t to, const void* from, std::uint32_t bytes = 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
/// Closes a group of this thread's copies.
__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most `Pending` groups of this thread are still under way.
template <int Pending>
__device__ inline void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// mbarriers (compute capability 8.0; try_wait 9.0). A barrier of `count` arrivals counts phases; a wait names
// the parity of the phase it waits for. A fresh barrier is in phase 0, so a wait for parity 1 returns at
// once.

__device__ inline void barrier_init(std::uint32_t barrier, std::uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ inline void barrier_arrive(std::uint32_t barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier)
                 : "memory");
}

// One lane arrives for its warp, after a __syncwarp that orders what the other lanes did before.
// compute-sanitizer's racecheck does not follow that: it reports every access of the 31 lanes that do not
// arrive, and none where all arrive. So in its own build, with KVPOLICY_RACECHECK, every lane arrives, and a
// barrier counts 32 arrivals of a warp instead of one. That is for tools/gpu alone: it is slower, and has no
// other use.
#if defined(KVPOLICY_RACECHECK)
inline constexpr std::uint32_t arrivals_of_warp = 32;
#else
inline constexpr std::uint32_t arrivals_of_warp = 1;
#endif
/// Whether this lane is one of those that arrive for the warp; after a __syncwarp of the warp.
__device__ inline bool arrives_for_warp(int lane) { return arrivals_of_warp == 32 || lane == 0; }
/// The whole warp arrives, as arrivals_of_warp arrivals: after what all its lanes have done so far.
__device__ inline void warp_arrive(std::uint32_t barrier, int lane) {
    __syncwarp();
    if (arrives_for_warp(lane)) {
        barrier_arrive(barrier);
    }
}
/// Arrives once all copies that this thread has issued are done; counts as one of the barrier's arrivals.
__device__ inline void barrier_arrive_after_copies(std::uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// From here on: compute capability 9.0. Templates, so that no code is made of them where nobody calls them.

template <class = void>
__device__ inline void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// Arrives, and lets the phase end only after `bytes` more have come by bulk copies or TMA.
template <class = void>
__device__ inline void barrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
    asm volatile(
        "{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier),
        "r"(bytes)
        : "memory");
}
/// Lets the present phase end only after `bytes` more have come, without arriving.
template <class = void>
__device__ inline void barrier_expect_more(std::uint32_t barrier, std::uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
template <class = void>
__device__ inline bool barrier_try_wait(std::uint32_t barrier, std::uint32_t parity) {
    std::uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}
/// Waits for the end of the phase of this parity. After some seconds, which only a fault of ours can take,
/// the kernel fails by a store to address 0 instead of hanging the GPU.
template <class = void>
__device__ inline void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
    if (barrier_try_wait(barrier, parity)) {
        return;
    }
    for (std::uint32_t turns = 0; !barrier_try_wait(barrier, parity); ++turns) {
        if (turns > (1u << 26)) {
            asm volatile("st.volatile.global.u32 [%0], 1;" ::"l"(0ull) : "memory");
        }
    }
}
/// What this thread wrote to shared memory before becomes visible to wgmma, TMA and bulk copies after.
template <class = void>
__device__ inline void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// Registers a thread of this warpgroup may have from here on; a multiple of 8, and all warpgroups must call
/// one of the two.
template <int Registers>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ inline void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
/// `bytes` (a multiple of 16) from global to shared memory by one thread; the barrier counts them.
template <class = void>
__device__ inline void copy_bulk(std::uint32_t to, const void* from, std::uint32_t bytes,
                                 std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
/// Asks the L2 cache for `bytes` (a multiple of 16) that somebody will load soon; nothing before compute
/// capability 9.0.
template <class = void>
__device__ inline void prefetch_to_l2([[maybe_unused]] const void* from,
                                      [[maybe_unused]] std::uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}
/// Adds `bytes` of fp32 (a multiple of 16) in shared memory to global memory; close with bulk_commit.
template <class = void>
__device__ inline void reduce_add_bulk(float* to, std::uint32_t from, std::uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
}
/// `bytes` (a multiple of 16) from shared to global memory, both aligned to 16 bytes; close with bulk_commit.
template <class = void>
__device__ inline void store_bulk(void* to, std::uint32_t from, std::uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
/// Closes a group of this thread's reductions and stores.
template <class = void>
__device__ inline void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until all but `Pending` of these groups have read their shared memory.
template <int Pending>
__device__ inline void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
/// Barrier `id` (1 to 15; 0 is __syncthreads) for `threads` threads of the block.
__device__ inline void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// The same where threads wait at it by different instructions: bar.sync is for warps that all wait by one.
__device__ inline void named_barrier_of_any(int id, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Counts at it without waiting for the others.
__device__ inline void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
