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

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace kvpolicy::detail {

/// How often this process and its ancestors have forked, as far as they counted: whether the threads of an
/// object are still there. Counting starts with the first call.
class forks {
  public:
    static std::uint64_t count() {
#if defined(__unix__) || defined(__APPLE__)
        // One handler per copy of this code. It runs in the child, before fork() returns there.
        [[maybe_unused]] static const int counting =
            pthread_atfork(nullptr, nullptr, [] { so_far.fetch_add(1, std::memory_order_relaxed); });
#endif
        return so_far.load(std::memory_order_relaxed);
    }
    static bool since(std::uint64_t before) { return so_far.load(std::memory_order_relaxed) != before; }

  private:
    static inline constinit std::atomic<std::uint64_t> so_far{0};
};

/// Runs index ranges on `threads` threads (the caller is one of them). One range at a time: concurrent
/// callers of one pool are serialized. A worker spins a moment before it sleeps, since a decode step asks for
/// a range every few microseconds. What an index throws is thrown again to the caller, the lowest index
/// first, after all have ended.
///
/// A range that an index asks for runs on the thread of that index, one after the other, under that thread's
/// number: the pool is busy with the outer range. (A cycle through the workers of a second pool is not
/// noticed, and hangs.)
///
/// A child of fork() has the calling thread only. There ranges run on the thread that asks for them, and the
/// destructor leaves what the workers shared as it is: a lock may have been taken when the process forked.
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
        crew_->workers.reserve(static_cast<std::size_t>(threads > 1 ? threads - 1 : 0));
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

    ~thread_pool() {
        if (inherited()) {
            abandon();
        } else {
            stop();
        }
    }

    /// As many as there were before a fork().
    [[nodiscard]] int threads() const { return static_cast<int>(crew_->workers.size()) + 1; }

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
        if (crew_->workers.empty() || count == 1 || inherited()) {
            for (std::int64_t i = 0; i < count; ++i) {
                call(body, i, 0);
            }
            return;
        }
        const std::lock_guard one_caller(crew_->callers);
        using body_type = std::remove_reference_t<Body>;
        crew_->job = [](void* context, std::int64_t i, int thread) {
            call(*static_cast<body_type*>(context), i, thread);
        };
        crew_->context = const_cast<void*>(static_cast<const void*>(std::addressof(body)));
        crew_->count = count;
        crew_->next.store(0, std::memory_order_relaxed);
        {
            const std::lock_guard lock(crew_->mutex);
            crew_->open = true;
            crew_->generation.fetch_add(1, std::memory_order_release);
        }
        crew_->wake.notify_all();
        drain(0);
        {
            // A worker that has not come by now need not come at all: on a busy machine it may
            // take milliseconds.
            const std::lock_guard lock(crew_->mutex);
            crew_->open = false;
        }
        for (int spins = 0; crew_->inside.load(std::memory_order_acquire) != 0; ++spins) {
            if (spins < spin_limit) {
                pause();
            } else {
                std::this_thread::yield();
            }
        }
#if KVPOLICY_EXCEPTIONS
        if (crew_->failure) {
            std::exception_ptr failure;
            std::swap(failure, crew_->failure);
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
            crew_->workers.push_back(start(run, this, i));
        }
    }

    void stop() {
        {
            const std::lock_guard lock(crew_->mutex);
            crew_->stopping = true;
            crew_->generation.fetch_add(1, std::memory_order_release);
        }
        crew_->wake.notify_all();
        for (std::thread& worker : crew_->workers) {
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
        for (std::int64_t i; (i = crew_->next.fetch_add(1, std::memory_order_relaxed)) < crew_->count;) {
#if KVPOLICY_EXCEPTIONS
            try {
                crew_->job(crew_->context, i, thread);
            } catch (...) {
                const std::lock_guard lock(crew_->mutex);
                if (!crew_->failure || i < crew_->failed_index) {
                    crew_->failure = std::current_exception();
                    crew_->failed_index = i;
                }
            }
#else
            crew_->job(crew_->context, i, thread);
#endif
        }
        innermost = range.outer;
    }

    void work(int thread) {
        std::uint64_t seen = 0;
        for (;;) {
            for (int spins = 0;
                 spins < spin_limit && crew_->generation.load(std::memory_order_acquire) == seen; ++spins) {
                pause();
            }
            {
                std::unique_lock lock(crew_->mutex);
                crew_->wake.wait(lock,
                                 [&] { return crew_->generation.load(std::memory_order_relaxed) != seen; });
                seen = crew_->generation.load(std::memory_order_relaxed);
                if (crew_->stopping) {
                    return;
                }
                if (!crew_->open) {
                    continue;
                }
                crew_->inside.fetch_add(1, std::memory_order_relaxed);
            }
            drain(thread);
            crew_->inside.fetch_sub(1, std::memory_order_release);
        }
    }

    /// What the workers share with a caller.
    struct crew {
        std::vector<std::thread> workers;
        std::mutex callers;
        std::mutex mutex;
        std::condition_variable wake;
        std::atomic<std::uint64_t> generation{0};
        bool stopping = false;
        bool open = false;           // may a worker still join the present range?
        std::atomic<int> inside{0};  // workers that have joined it
        void (*job)(void*, std::int64_t, int) = nullptr;
        void* context = nullptr;
        std::int64_t count = 0;
        std::atomic<std::int64_t> next{0};
#if KVPOLICY_EXCEPTIONS
        std::exception_ptr failure;
        std::int64_t failed_index = 0;
#endif
        crew* other = nullptr;  // of those that are abandoned
    };

    [[nodiscard]] bool inherited() const { return forks::since(forks_before_); }

    /// The threads are not there to be joined, and a lock or condition that one of them held cannot be
    /// destroyed.
    void abandon() {
        crew* const left = crew_.release();
        left->other = abandoned.load(std::memory_order_relaxed);
        while (!abandoned.compare_exchange_weak(left->other, left, std::memory_order_relaxed)) {
        }
    }
    static inline constinit std::atomic<crew*> abandoned{nullptr};  // known to tools that look for leaks

    std::uint64_t forks_before_ = forks::count();
    std::unique_ptr<crew> crew_ = std::make_unique<crew>();
};

}  // namespace kvpolicy::detail
