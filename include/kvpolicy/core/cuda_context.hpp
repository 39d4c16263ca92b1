// The CUDA backend as a context: which stream a call goes to. Plain C++, so that headers which only pass it
// on need no CUDA; the operations themselves need nvcc.
#pragma once

#include <cstdint>
#include <type_traits>

struct CUstream_st;  // what cudaStream_t points to

namespace kvpolicy {

/// The CUDA backend: kvpolicy::cuda ctx{stream}. A call enqueues its work on the stream and returns; it
/// allocates nothing and waits for nothing, so it can be captured in a graph. Pointers of the call are device
/// memory. `device` is the ordinal of the stream's device; the default -1 stands for the current device,
/// which must then be the stream's.
struct cuda {
    CUstream_st* stream = nullptr;
    std::int32_t device = -1;
};

static_assert(std::is_trivially_copyable_v<cuda>);

}  // namespace kvpolicy
