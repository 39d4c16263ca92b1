// From a dispatch to a kernel: error checks, the device of a context, launches, and the caller's workspace in
// parts.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/cuda_error.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/view.hpp>

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Reports a failed call with its name and the place of this check. A binary without code for the GPU is
/// named as such, since CUDA's own text for it is easily misread.
inline void check(cudaError_t error, const char* call,
                  std::source_location where = std::source_location::current()) {
    if (error == cudaSuccess) [[likely]] {
        return;
    }
    static_cast<void>(
        cudaGetLastError());  // the error is reported here, so the next call must not see it again
    std::string text = std::string(cudaGetErrorName(error)) + ", " + cudaGetErrorString(error);
    // Relocatable device code without code for the GPU is a symbol that was not found: we launch kernels,
    // and name no others.
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
        error == cudaErrorUnsupportedPtxVersion || error == cudaErrorSymbolNotFound) {
        int device = 0;
        int major = 0;
        int minor = 0;
        if (cudaGetDevice(&device) == cudaSuccess &&
            cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
            cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess) {
            const std::string here = std::to_string(major) + std::to_string(minor);
            text += "; this binary has no code that runs on the present GPU of compute capability " +
                    std::to_string(major) + "." + std::to_string(minor) + ": it was compiled for " +
                    KVPOLICY_CUDA_ARCHS_TEXT + ", add -gencode arch=compute_" + here + ",code=sm_" + here;
        }
    }
    detail::fail_cuda(text, static_cast<int>(error), call, where.file_name(), where.line());
}

#if defined(KVPOLICY_TEST_GPU)
/// Where not 0, calls run as on a GPU of compute capability 8 whose blocks have at most so many bytes of
/// shared memory: for tests, which define KVPOLICY_TEST_GPU in a program's only translation unit.
inline int test_shared_limit = 0;
#endif

/// What the driver says of a device.
inline int attribute_of(int device, cudaDeviceAttr which) {
#if defined(KVPOLICY_TEST_GPU)
    if (test_shared_limit != 0 && which == cudaDevAttrMaxSharedMemoryPerBlockOptin) {
        return test_shared_limit;
    }
    if (test_shared_limit != 0 && which == cudaDevAttrComputeCapabilityMajor) {
        return 8;
    }
#endif
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
}

/// The device that a context's work runs on. (A stream may not be asked for its device while it is capturing,
/// and work can be enqueued only where the stream's device is current, so the current one is the answer.)
inline int device_of(const cuda& ctx) {
    if (ctx.device >= 0) {
        return ctx.device;
    }
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    return device;
}

/// Makes a context's device current for the length of a call, and gives the caller's back.
class device_scope {
  public:
    /// `bound`: the device whose memory the call is for, which must be the same; below 0: any.
    explicit device_scope(const cuda& ctx, int bound = -1) : device_(device_of(ctx)) {
        detail::require(bound < 0 || bound == device_, "device", device_,
                        [&] { return detail::text(bound, ", the one whose memory the cache is bound to"); });
        check(cudaGetDevice(&before_), "cudaGetDevice");
        if (device_ != before_) {
            check(cudaSetDevice(device_), "cudaSetDevice");
        }
    }
    device_scope(const device_scope&) = delete;
    device_scope& operator=(const device_scope&) = delete;
    ~device_scope() {
        if (device_ != before_) {
            static_cast<void>(cudaSetDevice(before_));
        }
    }

    [[nodiscard]] int number() const { return device_; }
    [[nodiscard]] int attribute(cudaDeviceAttr which) const { return attribute_of(device_, which); }
    /// Bytes of shared memory that a block can have.
    [[nodiscard]] std::size_t shared_limit() const {
        return static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
    }
    /// Compute capability as 10 * major + minor.
    [[nodiscard]] int capability() const {
        return 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
               attribute(cudaDevAttrComputeCapabilityMinor);
    }

  private:
    int device_ = 0;
    int before_ = 0;
};

/// Refuses memory that a cache cannot stay in: pageable memory of the host, where the device does not read
/// that, and what another device has.
inline void check_device_memory(const device_scope& device, const char* name, const void* memory) {
    cudaPointerAttributes of{};
    check(cudaPointerGetAttributes(&of, memory), "cudaPointerGetAttributes");
    const bool elsewhere = of.type == cudaMemoryTypeDevice && of.device != device.number();
    detail::require(
        !elsewhere, name, [&] { return detail::text("memory of device ", of.device); },
        [&] { return detail::text("of device ", device.number(), ", the context's"); });
    detail::require(
        of.type != cudaMemoryTypeUnregistered || device.attribute(cudaDevAttrPageableMemoryAccess) != 0, name,
        "host memory", "device memory");
}

/// Bytes of dynamic shared memory that a block of a kernel can have on this device.
inline std::size_t shared_capacity(const device_scope& device, const char* name, const void* kernel) {
    cudaFuncAttributes code{};
    check(cudaFuncGetAttributes(&code, kernel), name);
    return device.shared_limit() - code.sharedSizeBytes;
}
/// Whether it can have so many.
inline bool shared_fits(const device_scope& device, const char* name, const void* kernel,
                        std::size_t shared_bytes) {
    return shared_bytes <= shared_capacity(device, name, kernel);
}

/// Refuses an argument that makes a kernel want more than `capacity` bytes of shared memory a block, before
/// anything is enqueued.
inline void require_shared(const char* argument, std::int32_t value, std::size_t wanted,
                           std::size_t capacity) {
    detail::require(wanted <= capacity, argument, value, [&] {
        return detail::text("less on this device for rows of this type: a block needs ", wanted,
                            " bytes of shared memory for it, and has at most ", capacity);
    });
}

/// Lets a kernel have more dynamic shared memory than every kernel may: all that the present device has,
/// whatever this launch wants, so that no other thread's launch of the same kernel finds less than it asked
/// for.
inline void allow_shared(const char* name, const void* kernel, std::size_t shared_bytes) {
    constexpr std::size_t without_asking = 48 * 1024;
    if (shared_bytes <= without_asking) {
        return;
    }
    int device = 0;
    cudaFuncAttributes code{};
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaFuncGetAttributes(&code, kernel), name);
    const int allowed = attribute_of(device, cudaDevAttrMaxSharedMemoryPerBlockOptin) -
                        static_cast<int>(code.sharedSizeBytes);
    detail::require(static_cast<std::int64_t>(shared_bytes) <= allowed, name, shared_bytes, [&] {
        return detail::text("at most the ", allowed,
                            " bytes of shared memory that a block has on this device");
    });
    if (code.maxDynamicSharedSizeBytes != allowed) {
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, allowed), name);
    }
}

/// Up to two launch attributes.
struct launch_attributes {
    cudaLaunchAttribute all[2] = {};
    unsigned count = 0;

    cudaLaunchAttribute& add(cudaLaunchAttributeID id) {
        all[count].id = id;
        return all[count++];
    }
    /// Blocks of a cluster; 1: none.
    void add_cluster(unsigned blocks) {
        if (blocks > 1) {
            auto& cluster = add(cudaLaunchAttributeClusterDimension).val.clusterDim;
            cluster.x = blocks;
            cluster.y = cluster.z = 1;
        }
    }
};

/// A launch on a 1-D grid. `attributes` must outlive it.
inline cudaLaunchConfig_t launch_config(unsigned blocks, int threads, std::size_t shared_bytes,
                                        launch_attributes& attributes, cudaStream_t stream = nullptr) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes.all;
    config.numAttrs = attributes.count;
    return config;
}

/// Enqueues a kernel on a 1-D grid, with launch attributes; `name` is a literal and names the kernel in
/// errors.
template <class... Parameters, class... Arguments>
void launch_with(launch_attributes attributes, const char* name, void (*kernel)(Parameters...),
                 std::int64_t blocks, int threads, std::size_t shared_bytes, const cuda& ctx,
                 Arguments... arguments) {
    detail::require(blocks > 0 && blocks <= 0x7fffffff, "blocks of a launch", blocks,
                    "at most 2^31 - 1: split the batch");
    allow_shared(name, reinterpret_cast<const void*>(kernel), shared_bytes);
    const cudaLaunchConfig_t config =
        launch_config(static_cast<unsigned>(blocks), threads, shared_bytes, attributes, ctx.stream);
    check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), name);
}

/// Enqueues a kernel on a 1-D grid; nothing where the grid is empty.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), std::int64_t blocks, int threads,
            std::size_t shared_bytes, const cuda& ctx, Arguments... arguments) {
    if (blocks != 0) {
        launch_with({}, name, kernel, blocks, threads, shared_bytes, ctx, arguments...);
    }
}

/// What `ask` finds about a kernel on a device, a number from 0 on: asked once a device, since a step would
/// ask each time. `Which` tells questions apart.
template <auto Kernel, int Which, class Ask>
int asked_once(const device_scope& device, const Ask& ask) {
#if defined(KVPOLICY_TEST_GPU)
    if (test_shared_limit != 0) {
        return ask();  // another GPU than the one that answered before
    }
#endif
    constexpr int max_devices = 64;
    static std::array<std::atomic<int>, max_devices> answers{};  // one more than the answer
    const int number = device.number();
    if (number >= max_devices) {
        return ask();
    }
    std::atomic<int>& answer = answers[static_cast<std::size_t>(number)];
    int known = answer.load(std::memory_order_relaxed);
    if (known == 0) {
        known = ask() + 1;  // the same in every thread that comes here at once
        answer.store(known, std::memory_order_relaxed);
    }
    return known - 1;
}

/// Whether a device runs code of a kernel that was made for compute capability 9.0 or later.
template <auto Kernel>
bool runs_as_hopper(const device_scope& device) {
    return asked_once<Kernel, 0>(device, [&] {
               cudaFuncAttributes code{};
               check(cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(Kernel)),
                     "cudaFuncGetAttributes");
               const bool does =
                   code.ptxVersion >= 90 && device.attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
               return does ? 1 : 0;
           }) != 0;
}

/// The most blocks of a cluster that every GPU of compute capability 9.0 or later takes; more must be
/// allowed by kernel and context.
inline constexpr unsigned portable_cluster = 8;
template <auto Kernel>
void allow_cluster(const char* name, unsigned blocks) {
    if (blocks > portable_cluster) {
        check(cudaFuncSetAttribute(reinterpret_cast<const void*>(Kernel),
                                   cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
              name);
    }
}

/// How many clusters of so many blocks the current device runs at once; -1 where the driver has no answer.
template <auto Kernel>
int active_clusters(int blocks, int threads, std::size_t shared_bytes) {
    launch_attributes attributes;
    attributes.add_cluster(static_cast<unsigned>(blocks));
    const cudaLaunchConfig_t config =
        launch_config(static_cast<unsigned>(blocks), threads, shared_bytes, attributes);
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, Kernel, &config) != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        return -1;
    }
    return clusters;
}

/// The most blocks of a kernel, up to `most` and always of these sizes, that a device runs as a cluster; 1:
/// it has no clusters, or no space for one (a part of a GPU, as with MIG and MPS).
template <auto Kernel>
int largest_cluster(const device_scope& device, int most, int threads, std::size_t shared_bytes) {
    if (!runs_as_hopper<Kernel>(device)) {
        return 1;
    }
    return asked_once<Kernel, 1>(device, [&] {
        if (!shared_fits(device, "cudaFuncGetAttributes", reinterpret_cast<const void*>(Kernel),
                         shared_bytes)) {
            return 1;
        }
        allow_shared("cudaFuncSetAttribute", reinterpret_cast<const void*>(Kernel), shared_bytes);
        allow_cluster<Kernel>("cudaFuncSetAttribute", static_cast<unsigned>(most));
        launch_attributes none;
        const cudaLaunchConfig_t any = launch_config(16, threads, shared_bytes, none);
        int blocks = 0;
        if (cudaOccupancyMaxPotentialClusterSize(&blocks, Kernel, &any) != cudaSuccess) {
            static_cast<void>(cudaGetLastError());  // there is a way without clusters
            return 1;
        }
        for (blocks = blocks < most ? blocks : most; blocks > 1; --blocks) {
            if (active_clusters<Kernel>(blocks, threads, shared_bytes) != 0) {
                return blocks;  // without an answer the first one stands
            }
        }
        return 1;
    });
}

/// How many clusters of so many blocks a device runs at once, of a kernel always launched by such sizes; 0:
/// it has no clusters, or no space.
template <auto Kernel>
int clusters_at_once(const device_scope& device, int blocks, int threads, std::size_t shared_bytes) {
    if (!runs_as_hopper<Kernel>(device)) {
        return 0;
    }
    return asked_once<Kernel, 3>(device, [&] {
        allow_shared("cudaFuncSetAttribute", reinterpret_cast<const void*>(Kernel), shared_bytes);
        const int clusters = active_clusters<Kernel>(blocks, threads, shared_bytes);
        return clusters > 0 ? clusters : 0;  // without an answer there is a way without clusters
    });
}

/// An SM runs blocks of two kernels at once only where both want the same cut between its L1 cache
/// and shared memory: those that shall run beside each other ask for as much shared memory as there is.
template <auto Kernel>
void share_sms(const device_scope& device) {
    asked_once<Kernel, 2>(device, [] {
        check(cudaFuncSetAttribute(reinterpret_cast<const void*>(Kernel),
                                   cudaFuncAttributePreferredSharedMemoryCarveout,
                                   cudaSharedmemCarveoutMaxShared),
              "cudaFuncSetAttribute");
        return 0;
    });
}

/// As launch(), but the kernel may begin once all blocks of the one before in the stream have called
/// let_next_kernel_start(), and must call wait_for_kernel_before() where it needs what that one wrote. Where
/// the GPU or the kernel's code is older than compute capability 9.0, it begins when the other has ended.
template <auto Kernel, class... Arguments>
void launch_early(const char* name, std::int64_t blocks, int threads, std::size_t shared_bytes,
                  const device_scope& device, const cuda& ctx, unsigned cluster, Arguments... arguments) {
    if (blocks == 0) {
        return;
    }
    launch_attributes early;
    early.add_cluster(cluster);
    allow_cluster<Kernel>(name, cluster);  // each time: a process may have several contexts of a device
    if (runs_as_hopper<Kernel>(device)) {
        early.add(cudaLaunchAttributeProgrammaticStreamSerialization)
            .val.programmaticStreamSerializationAllowed = 1;
    }
    launch_with(early, name, Kernel, blocks, threads, shared_bytes, ctx, arguments...);
}

/// See launch_early().
__device__ inline void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Enqueues a kernel whose blocks wait for each other: up to `most` of them on every SM, all at
/// once.
template <class... Parameters, class... Arguments>
void launch_cooperative(const char* name, void (*kernel)(Parameters...), int most, const device_scope& device,
                        int threads, std::size_t shared_bytes, const cuda& ctx, Arguments... arguments) {
    allow_shared(name, reinterpret_cast<const void*>(kernel), shared_bytes);
    int fit = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernel, threads, shared_bytes), name);
    detail::require(fit > 0, name, "no SM has space for a block", [&] {
        return detail::text("a device with ", shared_bytes, " bytes of shared memory for it");
    });
    const int each = fit < most ? fit : most;
    launch_attributes together;
    together.add(cudaLaunchAttributeCooperative).val.cooperative = 1;
    launch_with(together, name, kernel, std::int64_t{each} * device.attribute(cudaDevAttrMultiProcessorCount),
                threads, shared_bytes, ctx, arguments...);
}

/// The block's dynamic shared memory, aligned to 128 bytes: behind a static array of another size, rows of a
/// swizzled tile would lie across lines, which costs copies into them a sixth of their rate. All kernels take
/// theirs from here.
__device__ inline unsigned char* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char kvpolicy_dynamic_shared[];
    return kvpolicy_dynamic_shared;
}

/// Parts of the caller's workspace, in the order in which they are asked for. With no memory it only
/// measures.
class workspace_parts {
  public:
    static constexpr std::size_t alignment = 256;

    explicit workspace_parts(void* memory) : memory_(static_cast<unsigned char*>(memory)) {
        if (memory_ != nullptr) {
            const auto address = reinterpret_cast<std::uintptr_t>(memory_);
            memory_ += (alignment - address % alignment) % alignment;
        }
    }

    template <class T>
    T* take(std::int64_t count) {
        T* part = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
        used_ += (static_cast<std::size_t>(count) * sizeof(T) + alignment - 1) / alignment * alignment;
        return part;
    }

    /// What a workspace must have, wherever it begins; 0 where nothing was asked for.
    [[nodiscard]] std::size_t bytes() const { return used_ == 0 ? 0 : used_ + alignment; }

  private:
    unsigned char* memory_;
    std::size_t used_ = 0;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
