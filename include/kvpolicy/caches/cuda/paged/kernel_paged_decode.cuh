// Entry points of a DualCache's step.
#pragma once

#include <kvpolicy/caches/cuda/paged/agent_paged_decode.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// One block.
template <class Rows, class Gate, class Scorer, class View>
__global__ void __launch_bounds__(admit_threads)
    paged_plan_kernel(const __grid_constant__ paged_decode_params<Rows, Gate, Scorer, View> call) {
    __shared__ admit_memory memory;
    let_next_kernel_start();  // its blocks wait for the shares
    admit_paged_decode(call, memory);
    share_paged_decode(call, memory);
}

/// work.blocks blocks.
template <class Rows, class Gate, class Scorer, class View>
__global__ void __launch_bounds__(Rows::threads, 2)
    paged_decode_kernel(const __grid_constant__ paged_decode_params<Rows, Gate, Scorer, View> call) {
    __shared__ typename paged::agent_paged_head<paged_decode_params<Rows, Gate, Scorer, View>>::Memory memory;
    wait_for_kernel_before();
    run_paged_decode(call, memory, dynamic_shared());
}

// Where pages are chosen, a step writes before it reads.

/// One block.
template <class Rows, class Gate, class Scorer, class View>
__global__ void __launch_bounds__(admit_threads)
    paged_admit_kernel(const __grid_constant__ paged_decode_params<Rows, Gate, Scorer, View> call) {
    __shared__ admit_memory memory;
    admit_paged_decode(call, memory);
}
/// A block a head.
template <class Rows, class Gate, class Scorer, class View>
__global__ void __launch_bounds__(Rows::threads)
    paged_write_kernel(const __grid_constant__ paged_decode_params<Rows, Gate, Scorer, View> call) {
    using Step = paged::agent_paged_head<paged_decode_params<Rows, Gate, Scorer, View>>;
    __shared__ typename Step::Memory memory;
    const auto pair = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t entry = pair / call.cache.kv_heads;
    if (call.work.appended[entry] > 0) {
        Step(call, memory, nullptr, pair, 0, call.batch.seq(entry)).write();
    }
}
/// One block, once pages have been chosen.
template <class Rows, class Gate, class Scorer, class View>
__global__ void __launch_bounds__(admit_threads)
    paged_share_rows_kernel(const __grid_constant__ paged_decode_params<Rows, Gate, Scorer, View> call) {
    __shared__ admit_memory memory;
    let_next_kernel_start();
    share_paged_decode(call, memory);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
