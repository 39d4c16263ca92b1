// cuBLASLt for as long as a benchmark runs.
#pragma once

#include <cublasLt.h>

#include <cstdio>
#include <cstdlib>

namespace bench {

class lt_handle {
  public:
    lt_handle() {
        if (cublasLtCreate(&handle) != CUBLAS_STATUS_SUCCESS) {
            std::fprintf(stderr, "cublasLtCreate failed\n");
            std::exit(1);
        }
    }
    lt_handle(const lt_handle&) = delete;
    lt_handle& operator=(const lt_handle&) = delete;
    ~lt_handle() { static_cast<void>(cublasLtDestroy(handle)); }
    cublasLtHandle_t handle = nullptr;
};

}  // namespace bench
