// CUDA kernels of caches and attention that know no type of rows.
#include "shared_kernels.hpp"

#include <kvpolicy/attention/cuda/kernel_plan.cuh>
#include <kvpolicy/caches/cuda/prefill/kernel_top_k_update.cuh>

namespace kvpolicy {
KVPOLICY_PYTHON_PLAN_KERNELS(template)
KVPOLICY_PYTHON_TOP_K_KERNELS(template)
}  // namespace kvpolicy
