// main() of the tests that need a CUDA device. Without one they are skipped, not failed, and ctest says so.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <cstdio>

int main(int argc, char** argv) {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
        std::printf("skipped: no CUDA device (%s)\n", cudaGetErrorString(error));
        return KVPOLICY_TEST_SKIP_CODE;
    }
    return doctest::Context(argc, argv).run();
}
