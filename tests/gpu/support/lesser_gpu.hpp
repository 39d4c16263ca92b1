// Calls of a program can run as on a GPU that gives a block less shared memory than the one they run on:
// where its only translation unit that has kernels defines KVPOLICY_TEST_GPU before it includes anything.
#pragma once

#include <kvpolicy/cuda/launch.cuh>

namespace test {

/// Bytes of shared memory that a block can have on GPUs of compute capability 8.6, 8.9 and 12.x, on those of
/// 8.0, and on those of 9.0.
inline constexpr int small_gpu = 101376, middle_gpu = 166912, large_gpu = 232448;

/// While it lives, calls run as on a GPU of compute capability 8 whose blocks have so many bytes: by
/// portable kernels.
class LesserGpu {
  public:
    explicit LesserGpu(int bytes) { kvpolicy::cuda_backend::test_shared_limit = bytes; }
    LesserGpu(const LesserGpu&) = delete;
    LesserGpu& operator=(const LesserGpu&) = delete;
    ~LesserGpu() { kvpolicy::cuda_backend::test_shared_limit = 0; }
};

}  // namespace test
