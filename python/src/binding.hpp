// What the functions of the extension module share. They take tensors (reader.hpp), or None for one that is
// left out.
#pragma once

#include "operators.hpp"
#include "reader.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>

namespace kvpolicy::python {

namespace nb = nanobind;

using Stream = std::uintptr_t;  // of _host: the number of threads
using Device = std::int32_t;
using Object = nb::handle;

#if defined(KVPOLICY_PYTHON_CUDA)
/// `stream` is the address of a cudaStream_t.
inline Context context_of(std::uintptr_t stream, std::int32_t device) {
    return {reinterpret_cast<CUstream_st*>(stream), device};
}
#else
/// The pool of `threads` threads. A forked process has none of its parent's threads, so it makes its own.
inline const Context& context_of(std::uintptr_t threads, std::int32_t /*device*/) {
    using Pools = std::map<std::uintptr_t, std::unique_ptr<Context>>;
    static std::mutex mutex;
    static Pools* pools = new Pools;
    static pid_t owner = getpid();
    const std::lock_guard lock(mutex);
    if (owner != getpid()) {
        pools = new Pools;  // the parent's threads cannot be joined here
        owner = getpid();
    }
    std::unique_ptr<Context>& pool = (*pools)[threads];
    if (pool == nullptr) {
        pool = std::make_unique<Context>(static_cast<int>(threads));
    }
    return *pool;
}
#endif

/// (instance, sinks, windows, budgets, thresholds, log_gammas)
inline PolicyNumbers policy_from(const nb::tuple& policy) {
    using Ints = std::vector<std::int32_t>;
    using Floats = std::vector<float>;
    return {nb::cast<std::string>(policy[0]), nb::cast<Ints>(policy[1]),   nb::cast<Ints>(policy[2]),
            nb::cast<Ints>(policy[3]),        nb::cast<Floats>(policy[4]), nb::cast<Floats>(policy[5])};
}

/// (kind, epsilon, alpha, tau, clip, temperature, noise, seed)
inline GateNumbers gate_from(const nb::tuple& gate) {
    return {nb::cast<std::string>(gate[0]), nb::cast<float>(gate[1]),        nb::cast<float>(gate[2]),
            nb::cast<float>(gate[3]),       nb::cast<float>(gate[4]),        nb::cast<float>(gate[5]),
            nb::cast<bool>(gate[6]),        nb::cast<std::uint64_t>(gate[7])};
}

/// Runs call(context, workspace) with the bytes of workspace that call(context, nullptr) asks for, which are
/// torch's. The run itself is without the interpreter's lock.
template <class Call>
void run(std::uintptr_t stream, std::int32_t device, Call&& call) {
    const auto& ctx = context_of(stream, device);
    const std::size_t bytes = call(ctx, nullptr);
    Torch::Memory memory;
    if (bytes > 0) {
        memory = Torch::get().allocate(bytes, device);
    }
    const workspace_view view{static_cast<std::uint8_t*>(memory.data), bytes};
    const nb::gil_scoped_release release;
    call(ctx, &view);
}

/// Adds a function. Without none() an argument of any type would not take None.
template <class... Args>
void add(nb::module_& m, const char* name, void (*function)(Args...)) {
    m.def(name, function, (static_cast<void>(sizeof(Args)), nb::arg().none())...);
}

/// Adds the functions of bind_training.cpp: losses of gates and of distillation, metrics, observed policies.
void bind_training(nb::module_& m);

/// Adds the class of caches (bind_caches.cpp).
void bind_caches(nb::module_& m);

}  // namespace kvpolicy::python
