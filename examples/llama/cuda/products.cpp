#include "products.hpp"

#include <stdexcept>
#include <string>

namespace llama {
namespace {

void ok(cublasStatus_t status, const char* call) {
    if (status != CUBLAS_STATUS_SUCCESS) {
        throw std::runtime_error(std::string(call) + ": " + cublasLtGetStatusName(status) + ", " +
                                 cublasLtGetStatusString(status));
    }
}

}  // namespace

// cuBLAS counts by columns, so a row-major array is its transpose there: y^T [rows, count] = w [rows, cols]
// x^T [cols, count].
struct Products::Plan {
    cublasLtMatmulDesc_t product = nullptr;
    cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
    cublasLtMatmulAlgo_t how{};

    Plan() = default;
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;
    ~Plan() {
        for (const cublasLtMatrixLayout_t layout : {w, x, y}) {
            static_cast<void>(cublasLtMatrixLayoutDestroy(layout));
        }
        static_cast<void>(cublasLtMatmulDescDestroy(product));
    }

    void make(cublasLtHandle_t handle, int count, int rows, int cols, DType type, std::size_t workspace) {
        const cudaDataType_t input = type == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F;
        ok(cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
        const cublasOperation_t transposed = CUBLAS_OP_T;
        ok(cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                          sizeof transposed),
           "cublasLtMatmulDescSetAttribute");
        const auto layout = [](cublasLtMatrixLayout_t& made, cudaDataType_t of, int height, int width) {
            ok(cublasLtMatrixLayoutCreate(&made, of, static_cast<std::uint64_t>(height),
                                          static_cast<std::uint64_t>(width), height),
               "cublasLtMatrixLayoutCreate");
        };
        layout(w, input, cols, rows);
        layout(x, input, cols, count);
        layout(y, CUDA_R_32F, rows, count);
        cublasLtMatmulPreference_t wish = nullptr;
        ok(cublasLtMatmulPreferenceCreate(&wish), "cublasLtMatmulPreferenceCreate");
        cublasLtMatmulHeuristicResult_t found{};
        int count_found = 0;
        cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(
            wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
        if (status == CUBLAS_STATUS_SUCCESS) {
            status =
                cublasLtMatmulAlgoGetHeuristic(handle, product, w, x, y, y, wish, 1, &found, &count_found);
        }
        static_cast<void>(cublasLtMatmulPreferenceDestroy(wish));
        ok(status, "cublasLtMatmulAlgoGetHeuristic");
        if (count_found == 0) {
            throw std::runtime_error("cublasLt has no product of " + std::to_string(count) + " x " +
                                     std::to_string(cols) + " and " + std::to_string(cols) + " x " +
                                     std::to_string(rows));
        }
        how = found.algo;
    }
};

Products::Products() : workspace_(workspace_bytes) { ok(cublasLtCreate(&handle_), "cublasLtCreate"); }

Products::~Products() {
    plans_.clear();
    static_cast<void>(cublasLtDestroy(handle_));
}

const Products::Plan& Products::plan(const Key& key) {
    const auto found = plans_.find(key);
    if (found != plans_.end()) {
        return found->second;
    }
    Plan& made = plans_[key];
    try {
        const auto& [count, rows, cols, type, add] = key;
        made.make(handle_, count, rows, cols, type, workspace_bytes);
    } catch (...) {
        plans_.erase(key);
        throw;
    }
    return made;
}

void Products::multiply(cudaStream_t stream, const void* x, int count, const DeviceMatrix& w, float* y,
                        bool add) {
    const Plan& p = plan({count, w.rows, w.cols, w.type, add});
    const float one = 1.0f, kept = add ? 1.0f : 0.0f;
    ok(cublasLtMatmul(handle_, p.product, &one, w.values.data(), p.w, x, p.x, &kept, y, p.y, y, p.y, &p.how,
                      workspace_.data(), workspace_bytes, stream),
       "cublasLtMatmul");
}

}  // namespace llama
