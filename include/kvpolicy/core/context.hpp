// Where a call runs. The first argument of every operation is a context: `host` here, `cuda` under nvcc. A
// combination that a backend lacks does not compile; there is no silent fallback.
#pragma once

#include <kvpolicy/core/config.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/thread_pool.hpp>

#include <cstdint>
#include <memory>
#include <thread>

namespace kvpolicy {

/// The instruction sets that the host backend has bodies for. `portable` is plain C++ that the compiler
/// vectorizes for its baseline; `avx2` needs AVX2, FMA and F16C.
enum class isa : std::uint8_t { portable, avx2 };

/// The best instruction set of this machine.
inline isa detected_isa() noexcept {
#if KVPOLICY_X86
    static const isa found = [] {
        __builtin_cpu_init();
        // F16C is older than AVX2 and on every processor that has it; clang 14 cannot ask for it by name.
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? isa::avx2 : isa::portable;
    }();
    return found;
#else
    return isa::portable;
#endif
}

/// The host backend: a pool of threads and an instruction set. Calls are synchronous. One object serves one
/// caller at a time (concurrent callers wait for each other); make one per thread that decodes on its own.
/// Results do not depend on the number of threads. A call made from inside a parallel_for of the same object
/// runs on the calling thread alone.
///
/// fork(): a child has no threads but the one that forked. A context that it inherits stays valid; its calls
/// run on the calling thread alone, with the same results, and it can be destroyed. A context that the child
/// makes has threads. A child that was forked from inside a parallel_for body must not return from it.
class host {
  public:
    /// `threads` >= 1 counts the caller; 0 takes all hardware threads. `set` may only lower the instruction
    /// set. Refuses more threads than the system gives; without exceptions the standard library ends the
    /// process in that case.
    explicit host(int threads = 0, isa set = detected_isa()) : set_(set) {
        detail::require(threads >= 0 && threads <= 4096, "host threads", threads, "0 (all) to 4096");
        detail::require(set <= isa::avx2, "host isa", static_cast<int>(set), "isa::portable or isa::avx2");
        detail::require(set <= detected_isa(), "host isa", "avx2", "one that this processor has (portable)");
        if (threads == 0) {
            const unsigned all = std::thread::hardware_concurrency();
            threads = all == 0 ? 1 : static_cast<int>(all);
        }
        pool_ = std::make_unique<detail::thread_pool>(threads);
    }

    [[nodiscard]] int threads() const { return pool_->threads(); }
    [[nodiscard]] isa instructions() const { return set_; }

    /// Calls body(i), or body(i, thread) with 0 <= thread < threads(), for every i in [0, count) on
    /// the pool's threads; from inside another body of this pool on the calling thread, with that
    /// thread's number.
    template <class Body>
    void parallel_for(std::int64_t count, Body&& body) const {
        pool_->parallel_for(count, static_cast<Body&&>(body));
    }

  private:
    std::unique_ptr<detail::thread_pool> pool_;
    isa set_;
};

}  // namespace kvpolicy
