// A small fixed pool of threads for the host backend: parallel_for over an index range, the
// caller taking part.
#pragma once

#include <kvpolicy/core/config.hpp>
#include <kvpolicy/core/error.hpp>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvpolicy::detail {

/// Runs index ranges on `threads` threads (the caller is one of them). One range at a time: concurrent
/// callers of one pool are serialized. A worker spins a moment before it sleeps, since a decode step asks for
/// a range every few microseconds. What an index throws is thrown again to the caller, the lowest index
/// first, after all have ended.
///
/// A range that an index asks for runs on the thread of that index, one after the other, under that thread's
/// number: the pool is busy with the outer range. (A cycle through the workers of a second pool is not
/// noticed, and hangs.)
class thread_pool {
  public:
    /// Refuses where the system gives fewer threads than that; without exceptions std::thread itself ends
    /// the process then.
    explicit thread_pool(int threads)
        : thread_pool(threads,
                      [](entry run, void* pool, int thread) { return std::thread(run, pool, thread); }) {}

    // What a thread runs: no type of ours, since std::thread makes a class of it that a shared library
    // exports even where all that is ours is hidden, and two versions in one process would share it.
    using entry = void (*)(void* pool, int thread);

    /// The same with start(run, pool, thread) in the place of std::thread(run, pool, thread), for tests.
    template <class Start>
    thread_pool(int threads, const Start& start) {
        workers_.reserve(static_cast<std::size_t>(threads > 1 ? threads - 1 : 0));
#if KVPOLICY_EXCEPTIONS
        try {
            start_workers(threads, start);
        } catch (const std::system_error&) {
            stop();
            refuse("host threads", threads,
                   text("no more than the system allows, and the system gave ", this->threads()));
        } catch (...) {
            stop();
            throw;
        }
#else
        start_workers(threads, start);
#endif
    }
    thread_pool(const thread_pool&) = delete;
    thread_pool& operator=(const thread_pool&) = delete;

    ~thread_pool() { stop(); }

    [[nodiscard]] int threads() const { return static_cast<int>(workers_.size()) + 1; }

    /// Calls body(i), or body(i, thread) with 0 <= thread < threads(), for every i in [0, count), in any
    /// order, on all threads. `thread` tells which memory of its own an index may use. From inside a body:
    /// all on the calling thread.
    template <class Body>
    void parallel_for(std::int64_t count, Body&& body) {
        if (count <= 0) {
            return;
        }
        for (const inside* range = innermost; range != nullptr; range = range->outer) {
            if (range->pool == this) {
                for (std::int64_t i = 0; i < count; ++i) {
                    call(body, i, range->thread);
                }
                return;
            }
        }
        if (workers_.empty() || count == 1) {
            for (std::int64_t i = 0; i < count; ++i) {
                call(body, i, 0);
            }
            return;
        }
        const std::lock_guard one_caller(callers_);
        using body_type = std::remove_reference_t<Body>;
        job_ = [](void* context, std::int64_t i, int thread) {
            call(*static_cast<body_type*>(context), i, thread);
        };
        context_ = const_cast<void*>(static_cast<const void*>(std::addressof(body)));
        count_ = count;
        next_.store(0, std::memory_order_relaxed);
        {
            const std::lock_guard lock(mutex_);
            open_ = true;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        drain(0);
        {
            // A worker that has not come by now need not come at all: on a busy machine it may
            // take milliseconds.
            const std::lock_guard lock(mutex_);
            open_ = false;
        }
        for (int spins = 0; inside_.load(std::memory_order_acquire) != 0; ++spins) {
            if (spins < spin_limit) {
                pause();
            } else {
                std::this_thread::yield();
            }
        }
#if KVPOLICY_EXCEPTIONS
        if (failure_) {
            std::exception_ptr failure;
            std::swap(failure, failure_);
            std::rethrow_exception(failure);
        }
#endif
    }

  private:
    static constexpr int spin_limit = 2000;

    /// A range that the present thread runs indices of, and the one that it was asked for from.
    struct inside {
        const thread_pool* pool;
        int thread;
        const inside* outer;
    };
    static inline constinit thread_local const inside* innermost = nullptr;

    template <class Start>
    void start_workers(int threads, const Start& start) {
        const entry run = [](void* pool, int thread) { static_cast<thread_pool*>(pool)->work(thread); };
        for (int i = 1; i < threads; ++i) {
            workers_.push_back(start(run, this, i));
        }
    }

    void stop() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) {
            worker.join();
        }
    }

    template <class Body>
    static void call(Body& body, std::int64_t i, int thread) {
        if constexpr (std::is_invocable_v<Body&, std::int64_t, int>) {
            body(i, thread);
        } else {
            body(i);
        }
    }

    static void pause() {
#if KVPOLICY_X86
        __builtin_ia32_pause();
#endif
    }

    void drain(int thread) {
        const inside range{this, thread, innermost};
        innermost = &range;
        for (std::int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) {
#if KVPOLICY_EXCEPTIONS
            try {
                job_(context_, i, thread);
            } catch (...) {
                const std::lock_guard lock(mutex_);
                if (!failure_ || i < failed_index_) {
                    failure_ = std::current_exception();
                    failed_index_ = i;
                }
            }
#else
            job_(context_, i, thread);
#endif
        }
        innermost = range.outer;
    }

    void work(int thread) {
        std::uint64_t seen = 0;
        for (;;) {
            for (int spins = 0; spins < spin_limit && generation_.load(std::memory_order_acquire) == seen;
                 ++spins) {
                pause();
            }
            {
                std::unique_lock lock(mutex_);
                wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
                seen = generation_.load(std::memory_order_relaxed);
                if (stopping_) {
                    return;
                }
                if (!open_) {
                    continue;
                }
                inside_.fetch_add(1, std::memory_order_relaxed);
            }
            drain(thread);
            inside_.fetch_sub(1, std::memory_order_release);
        }
    }

    std::vector<std::thread> workers_;
    std::mutex callers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<std::uint64_t> generation_{0};
    bool stopping_ = false;
    bool open_ = false;           // may a worker still join the present range?
    std::atomic<int> inside_{0};  // workers that have joined it
    void (*job_)(void*, std::int64_t, int) = nullptr;
    void* context_ = nullptr;
    std::int64_t count_ = 0;
    std::atomic<std::int64_t> next_{0};
#if KVPOLICY_EXCEPTIONS
    std::exception_ptr failure_;
    std::int64_t failed_index_ = 0;
#endif
};

}  // namespace kvpolicy::detail
