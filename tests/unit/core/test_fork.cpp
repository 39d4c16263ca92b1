// Children of fork(): they inherit a host context without its threads, run ranges on their own thread, and
// destroy the context. Children that hang are killed, and count as failed.
#include <kvpolicy/core/context.hpp>

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <optional>
#include <thread>

using kvpolicy::host;

namespace {

/// The exit status of a child that runs body(), or -1 where it does not end within ten seconds or is ended by
/// a signal.
template <class Body>
int child(const Body& body) {
    const pid_t id = fork();
    if (id == 0) {
        _exit(body());
    }
    for (int waited = 0; waited < 1000; ++waited) {
        int status = 0;
        if (waitpid(id, &status, WNOHANG) == id) {
            return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    kill(id, SIGKILL);
    waitpid(id, nullptr, 0);
    return -1;
}

std::int64_t sum_of(const host& ctx, std::int64_t count) {
    std::atomic<std::int64_t> sum{0};
    ctx.parallel_for(count, [&](std::int64_t i) { sum += i; });
    return sum;
}

}  // namespace

TEST_CASE("children run ranges and destroy what they inherit, whatever the workers did when they forked") {
    int ended = 0;
    for (int round = 0; round < 60; ++round) {
        std::optional<host> ctx(std::in_place, 4);
        static_cast<void>(sum_of(*ctx, 50));
        if (round % 3 == 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the workers sleep
        }
        ended += child([&] {
                     const bool right = ctx->threads() == 4 && sum_of(*ctx, 1000) == 999 * 500;
                     ctx.reset();
                     return right ? 17 : 1;
                 }) == 17
                     ? 1
                     : 0;
        CHECK(sum_of(*ctx, 1000) == 999 * 500);  // the parent's threads are its own
    }
    CHECK(ended == 60);
}

TEST_CASE("children of a process whose context another thread keeps busy") {
    std::optional<host> ctx(std::in_place, 3);
    std::atomic<bool> stop{false};
    std::thread other([&] {
        while (!stop) {
            static_cast<void>(sum_of(*ctx, 20));
        }
    });
    int ended = 0;
    for (int round = 0; round < 60; ++round) {
        ended += child([&] {
                     const bool right = sum_of(*ctx, 100) == 99 * 50;
                     ctx.reset();
                     return right ? 17 : 1;
                 }) == 17
                     ? 1
                     : 0;
    }
    stop = true;
    other.join();
    CHECK(ended == 60);
}

TEST_CASE("a child has contexts of its own, and so have its children") {
    host ctx(3);
    CHECK(child([&] {
              host own(3);
              const bool right = sum_of(own, 100) == 99 * 50 && sum_of(ctx, 100) == 99 * 50;
              return right && child([&] {
                                  const host third(2);
                                  const host taken = std::move(own);
                                  return sum_of(taken, 100) == 99 * 50 && sum_of(third, 100) == 99 * 50 ? 17
                                                                                                        : 1;
                              }) == 17
                         ? 17
                         : 1;
          }) == 17);
}
