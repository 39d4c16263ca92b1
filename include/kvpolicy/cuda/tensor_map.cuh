// Tensor maps: how TMA finds the tiles of a view. The driver encodes them on the host, and they go to kernels
// as __grid_constant__ parameters.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/launch.cuh>

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// cuTensorMapEncodeTiled of the driver that runs, so that nobody has to link against it; null where it has
/// none.
inline auto tensor_map_encoder() {
    using encoder = decltype(&cuTensorMapEncodeTiled);
    static const encoder found = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
        const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                                   cudaEnableDefault, &result);
#else
        const cudaError_t error =
            cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
        check(error, "cudaGetDriverEntryPoint");
        return result == cudaDriverEntryPointSuccess ? reinterpret_cast<encoder>(function) : nullptr;
    }();
    return found;
}

/// A map of rows of bf16 or fp16 whose boxes are 64 elements of `box_rows` rows of one head, swizzled as
/// wgmma reads them (cuda/primitives/wgmma.cuh). Elements beyond head_dim and rows beyond the view come as 0.
/// False where TMA cannot read the view: data or strides that are no multiples of 16 bytes, or negative.
template <class T>
bool make_tensor_map(const rows_view<const T>& rows, std::uint32_t box_rows, CUtensorMap& map) {
    static_assert(std::is_same_v<T, bf16> || std::is_same_v<T, fp16>);
    const auto encode = tensor_map_encoder();
    const auto fits = [](std::int64_t stride) {
        return stride % 8 == 0 && stride >= 0 && stride < (std::int64_t{1} << 39);
    };
    if (encode == nullptr || reinterpret_cast<std::uintptr_t>(rows.data) % 16 != 0 ||
        !fits(rows.row_stride) || !fits(rows.head_stride) || !fits(rows.batch_stride)) {
        return false;
    }
    const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(rows.dim), static_cast<cuuint64_t>(rows.length),
                                 static_cast<cuuint64_t>(rows.heads), static_cast<cuuint64_t>(rows.batch)};
    const cuuint64_t strides[3] = {2 * static_cast<cuuint64_t>(rows.row_stride),
                                   2 * static_cast<cuuint64_t>(rows.head_stride),
                                   2 * static_cast<cuuint64_t>(rows.batch_stride)};
    const cuuint32_t box[4] = {64, box_rows, 1, 1};
    const cuuint32_t every[4] = {1, 1, 1, 1};
    return encode(
               &map,
               std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
               4, const_cast<void*>(static_cast<const void*>(rows.data)), sizes, strides, box, every,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/// One box into shared memory, by one thread; the barrier counts its bytes.
template <class = void>
__device__ inline void copy_box(std::uint32_t to, const CUtensorMap& map, std::int32_t element,
                                std::int32_t row, std::int32_t head, std::int32_t batch,
                                std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
        "%5}], [%6];" ::"r"(to),
        "l"(&map), "r"(element), "r"(row), "r"(head), "r"(batch), "r"(barrier)
        : "memory");
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
