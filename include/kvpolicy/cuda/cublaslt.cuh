// Matrix products of the caller's cuBLASLt handle. Whoever includes this links cuBLASLt (CMake:
// CUDA::cublasLt, else -lcublasLt); the rest of the library does without.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/cuda_error.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/types.hpp>

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Workspace that cuBLASLt may choose its algorithm for: what NVIDIA recommends for compute capability 9.0.
inline constexpr std::size_t cublaslt_bytes = std::size_t{32} << 20;

inline void check(cublasStatus_t status, const char* call,
                  std::source_location where = std::source_location::current()) {
    if (status != CUBLAS_STATUS_SUCCESS) [[unlikely]] {
        detail::fail_cuda(std::string(cublasLtGetStatusName(status)) + ", " + cublasLtGetStatusString(status),
                          static_cast<int>(status), call, where.file_name(), where.line());
    }
}

template <class T>
inline constexpr cudaDataType_t cublas_type = std::is_same_v<T, bf16>   ? CUDA_R_16BF
                                              : std::is_same_v<T, fp16> ? CUDA_R_16F
                                                                        : CUDA_R_32F;

/// A row-major matrix in device memory: `rows` rows of `columns` numbers, `stride` numbers apart. stride >=
/// columns.
struct product_matrix {
    const void* data = nullptr;
    cudaDataType_t type = CUDA_R_32F;
    std::int64_t rows = 0, columns = 0, stride = 0;
};
template <class T>
product_matrix matrix_of(const T* data, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
    return {data, cublas_type<T>, rows, columns, stride};
}

/// A layout of cuBLASLt, which counts by columns, so that a row-major matrix is its own transpose to it.
class product_layout {
  public:
    explicit product_layout(const product_matrix& matrix) {
        check(cublasLtMatrixLayoutCreate(&layout_, matrix.type, static_cast<std::uint64_t>(matrix.columns),
                                         static_cast<std::uint64_t>(matrix.rows), matrix.stride),
              "cublasLtMatrixLayoutCreate");
    }
    product_layout(const product_layout&) = delete;
    product_layout& operator=(const product_layout&) = delete;
    ~product_layout() { static_cast<void>(cublasLtMatrixLayoutDestroy(layout_)); }
    [[nodiscard]] cublasLtMatrixLayout_t get() const { return layout_; }

  private:
    cublasLtMatrixLayout_t layout_ = nullptr;
};

/// A description of a product and a wish about algorithms, destroyed together.
class product_plan {
  public:
    product_plan() {
        check(cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
        const cublasStatus_t status = cublasLtMatmulPreferenceCreate(&wish);
        if (status != CUBLAS_STATUS_SUCCESS) {
            static_cast<void>(cublasLtMatmulDescDestroy(product));
        }
        check(status, "cublasLtMatmulPreferenceCreate");
    }
    product_plan(const product_plan&) = delete;
    product_plan& operator=(const product_plan&) = delete;
    ~product_plan() {
        static_cast<void>(cublasLtMatmulPreferenceDestroy(wish));
        static_cast<void>(cublasLtMatmulDescDestroy(product));
    }
    void transpose(cublasLtMatmulDescAttributes_t which, bool transposed) const {
        const cublasOperation_t how = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
        check(cublasLtMatmulDescSetAttribute(product, which, &how, sizeof how),
              "cublasLtMatmulDescSetAttribute");
    }
    template <class V>
    void want(cublasLtMatmulPreferenceAttributes_t which, V value) const {
        check(cublasLtMatmulPreferenceSetAttribute(wish, which, &value, sizeof value),
              "cublasLtMatmulPreferenceSetAttribute");
    }
    void want_alignment(cublasLtMatmulPreferenceAttributes_t which, const void* data) const {
        const auto address = reinterpret_cast<std::uintptr_t>(data) | 256u;
        want(which, static_cast<std::uint32_t>(address & (~address + 1)));  // its lowest bit
    }

    cublasLtMatmulDesc_t product = nullptr;
    cublasLtMatmulPreference_t wish = nullptr;
};

/// to = a b, or to += a b; either may be taken transposed. fp32 sums. Enqueued on the context's stream;
/// `workspace` has cublaslt_bytes. `factors`, where given: {f, 1, 0} in device memory, for f a b in place of
/// a b.
inline void multiply(const cuda& ctx, cublasLtHandle_t handle, const product_matrix& a, bool transpose_a,
                     const product_matrix& b, bool transpose_b, const product_matrix& to, bool add,
                     void* workspace, const float* factors = nullptr) {
    // To cuBLASLt everything is transposed: to^T = b^T a^T, and the operands trade places.
    const product_plan plan;
    plan.transpose(CUBLASLT_MATMUL_DESC_TRANSA, transpose_b);
    plan.transpose(CUBLASLT_MATMUL_DESC_TRANSB, transpose_a);
    plan.want(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, cublaslt_bytes);
    plan.want_alignment(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b.data);
    plan.want_alignment(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a.data);
    plan.want_alignment(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, to.data);
    plan.want_alignment(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, to.data);
    if (factors != nullptr) {
        const cublasLtPointerMode_t on_device = CUBLASLT_POINTER_MODE_DEVICE;
        check(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_POINTER_MODE, &on_device,
                                             sizeof on_device),
              "cublasLtMatmulDescSetAttribute");
    }
    const product_layout of_a(a), of_b(b), of_to(to);
    cublasLtMatmulHeuristicResult_t found{};
    int count = 0;
    check(cublasLtMatmulAlgoGetHeuristic(handle, plan.product, of_b.get(), of_a.get(), of_to.get(),
                                         of_to.get(), plan.wish, 1, &found, &count),
          "cublasLtMatmulAlgoGetHeuristic");
    check(count > 0 ? found.state : CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmulAlgoGetHeuristic");
    const float one = 1.0f, kept = add ? 1.0f : 0.0f;
    const float* const of_product = factors != nullptr ? factors : &one;
    const float* const of_sum = factors != nullptr ? factors + (add ? 1 : 2) : &kept;
    void* const result = const_cast<void*>(to.data);
    check(cublasLtMatmul(handle, plan.product, of_product, b.data, of_b.get(), a.data, of_a.get(), of_sum,
                         result, of_to.get(), result, of_to.get(), &found.algo, workspace, cublaslt_bytes,
                         ctx.stream),
          "cublasLtMatmul");
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
