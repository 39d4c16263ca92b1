// The host context and its pool: every index once, exceptions, concurrent callers, refusals.
#include <kvpolicy/core/context.hpp>

#include "support/refusal.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

using kvpolicy::host;

TEST_CASE("every index is visited once, for any count and number of threads") {
    for (const int threads : {1, 2, 3, 4, 9}) {
        const host ctx(threads);
        CHECK(ctx.threads() == threads);
        for (const std::int64_t count : {0, 1, 2, 3, 7, 64, 1000}) {
            std::vector<int> visits(static_cast<std::size_t>(count), 0);  // not atomic: one index, one thread
            ctx.parallel_for(count, [&](std::int64_t i) { ++visits[static_cast<std::size_t>(i)]; });
            CHECK(std::all_of(visits.begin(), visits.end(), [](int n) { return n == 1; }));
        }
        bool called = false;
        ctx.parallel_for(-3, [&](std::int64_t) { called = true; });
        CHECK_FALSE(called);
    }
}

TEST_CASE("the thread's number names memory that no other thread uses meanwhile") {
    for (const int threads : {1, 2, 4}) {
        const host ctx(threads);
        std::vector<std::int64_t> sums(static_cast<std::size_t>(threads), 0);  // not atomic
        std::atomic<bool> in_range{true};
        ctx.parallel_for(5000, [&](std::int64_t i, int thread) {
            if (thread < 0 || thread >= threads) {
                in_range = false;
            }
            sums[static_cast<std::size_t>(thread)] += i;
        });
        CHECK(in_range);
        CHECK(std::accumulate(sums.begin(), sums.end(), std::int64_t{0}) == 5000 * 4999 / 2);
    }
}

TEST_CASE("what was written before a range is seen in it, and the other way round") {
    const host ctx(3);
    std::vector<std::int64_t> data(50, 0);  // not atomic
    for (int round = 0; round < 600; ++round) {
        const std::int64_t count = round % 50 + 1;
        std::fill_n(data.begin(), count, round);
        ctx.parallel_for(count, [&](std::int64_t i) { data[static_cast<std::size_t>(i)] += i; });
        bool right = true;
        for (std::int64_t i = 0; i < count; ++i) {
            right = right && data[static_cast<std::size_t>(i)] == round + i;
        }
        if (!right) {
            CHECK(right);
        }
    }
    CHECK(data[0] >= 0);
}

TEST_CASE("many short ranges, with pauses in which the workers fall asleep") {
    const host ctx(4);
    std::atomic<std::int64_t> sum{0};
    for (int round = 0; round < 2000; ++round) {
        ctx.parallel_for(2, [&](std::int64_t i) { sum += i + 1; });
        if (round % 200 == 0) {
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
    }
    CHECK(sum == 6000);
}

TEST_CASE("concurrent callers of one context wait for each other") {
    const host ctx(3);
    std::vector<std::int64_t> sums(4, 0);
    std::vector<std::thread> callers;
    for (std::size_t caller = 0; caller < sums.size(); ++caller) {
        callers.emplace_back([&, caller] {
            for (int round = 0; round < 300; ++round) {
                std::vector<std::int64_t> mine(20, 0);
                ctx.parallel_for(20, [&](std::int64_t i) { mine[static_cast<std::size_t>(i)] += i; });
                sums[caller] += std::accumulate(mine.begin(), mine.end(), std::int64_t{0});
            }
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
    for (const std::int64_t sum : sums) {
        CHECK(sum == 300 * 190);
    }
}

TEST_CASE("contexts come and go, and can be moved") {
    for (int round = 0; round < 100; ++round) {
        host ctx(3);
        std::atomic<int> sum{0};
        if (round % 2 == 0) {
            ctx.parallel_for(5, [&](std::int64_t) { ++sum; });
        }
        const host moved = std::move(ctx);
        moved.parallel_for(5, [&](std::int64_t) { ++sum; });
        if (sum != (round % 2 == 0 ? 10 : 5)) {
            CHECK(sum == -1);
        }
    }
    const host all(0);
    CHECK(all.threads() >= 1);
    CHECK(host(1).instructions() == kvpolicy::detected_isa());
    CHECK(host(1, kvpolicy::isa::portable).instructions() == kvpolicy::isa::portable);
}

TEST_CASE("a number of threads that makes no sense is refused") {
    CHECK_REFUSED(host(-1), "host threads: -1 is not allowed; it must be 0 (all) to 4096");
    CHECK_REFUSED(host(4097), "host threads: 4097");
    CHECK_REFUSED(host(1, static_cast<kvpolicy::isa>(7)),
                  "host isa: 7 is not allowed; it must be isa::portable or isa::avx2");
    if (kvpolicy::detected_isa() == kvpolicy::isa::portable) {
        CHECK_REFUSED(host(1, kvpolicy::isa::avx2), "host isa: avx2");
    }
}

TEST_CASE("a range inside a range runs on the thread that asks for it") {
    const host ctx(3), other(2);
    std::vector<std::int64_t> sums(3, 0);  // not atomic: the inner index has the outer one's number
    std::atomic<bool> same_thread{true};
    std::atomic<int> in_other{0};
    ctx.parallel_for(40, [&](std::int64_t i, int thread) {
        const std::thread::id mine = std::this_thread::get_id();
        ctx.parallel_for(10, [&](std::int64_t j, int inner) {
            if (inner != thread || std::this_thread::get_id() != mine) {
                same_thread = false;
            }
            ctx.parallel_for(1, [&](std::int64_t, int innermost) {
                sums[static_cast<std::size_t>(innermost)] += i * 10 + j;
            });
        });
        // Through another pool and back, on the thread that waits for it.
        other.parallel_for(1, [&](std::int64_t) { ctx.parallel_for(2, [&](std::int64_t) { ++in_other; }); });
        other.parallel_for(4, [&](std::int64_t) { ++in_other; });
    });
    CHECK(same_thread);
    CHECK(std::accumulate(sums.begin(), sums.end(), std::int64_t{0}) == 400 * 399 / 2);
    CHECK(in_other == 40 * 6);
    // Afterwards all threads take part again.
    std::atomic<int> visits{0};
    ctx.parallel_for(100, [&](std::int64_t) { ++visits; });
    CHECK(visits == 100);
}

#if KVPOLICY_EXCEPTIONS
TEST_CASE("a system that gives fewer threads: refused, and those that it gave have ended") {
    for (const int given : {1, 2, 35}) {
        std::atomic<int> running{0};
        int started = 1;  // the caller
        const auto start = [&](auto... work) {
            if (started == given) {
                throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
            }
            ++started;
            ++running;
            return std::thread(
                [&running](auto run, auto... arguments) {
                    run(arguments...);
                    --running;
                },
                work...);
        };
        CHECK_REFUSED(kvpolicy::detail::thread_pool(4096, start),
                      "host threads: 4096 is not allowed; it must be no more than the system allows, and the "
                      "system gave " +
                          std::to_string(given));
        CHECK(started == given);
        CHECK(running == 0);
    }
    const auto broken = [](auto...) -> std::thread { throw std::runtime_error("no"); };
    CHECK_THROWS_AS(kvpolicy::detail::thread_pool(2, broken), std::runtime_error);
}

TEST_CASE("what an index throws reaches the caller, the lowest index first, and the pool goes on") {
    for (const int threads : {1, 2, 4}) {
        const host ctx(threads);
        for (int round = 0; round < 50; ++round) {
            std::atomic<int> finished{0};
            std::string caught;
            std::atomic<bool> later_one_failed{false};
            try {
                ctx.parallel_for(40, [&](std::int64_t i) {
                    if (i == 7) {
                        // Give a later index the time to fail first, if there is a thread to run it.
                        const auto end =
                            std::chrono::steady_clock::now() + std::chrono::milliseconds(threads > 1 ? 5 : 0);
                        while (!later_one_failed && std::chrono::steady_clock::now() < end) {
                            std::this_thread::yield();
                        }
                    }
                    if (i == 31 || i == 7 || i == 19) {
                        later_one_failed = later_one_failed || i != 7;
                        throw std::runtime_error(std::to_string(i));
                    }
                    ++finished;
                });
            } catch (const std::runtime_error& error) {
                caught = error.what();
            }
            CHECK(caught == "7");
            // Nobody is still at it. (One thread stops where it throws.)
            CHECK(finished == (threads == 1 ? 7 : 37));
            int sum = 0;
            ctx.parallel_for(1, [&](std::int64_t) { ++sum; });
            CHECK(sum == 1);
            std::atomic<int> again{0};
            ctx.parallel_for(10, [&](std::int64_t) { ++again; });
            CHECK(again == 10);
        }
        CHECK_THROWS_AS(ctx.parallel_for(1, [](std::int64_t) { throw 3; }), int);
        CHECK_THROWS_AS(ctx.parallel_for(8, [](std::int64_t) { throw 3; }), int);
    }
}

TEST_CASE("a caller that fails does not disturb another") {
    const host ctx(2);
    std::atomic<int> wrong{0}, failures{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller) {
        callers.emplace_back([&, caller] {
            for (int round = 0; round < 200; ++round) {
                try {
                    ctx.parallel_for(6, [&](std::int64_t i) {
                        if (caller == 0 && i == 3) {
                            throw int{caller};
                        }
                    });
                    wrong += caller == 0 ? 1 : 0;
                } catch (int who) {
                    ++failures;
                    wrong += who == caller && caller == 0 ? 0 : 1;
                }
            }
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
    CHECK(wrong == 0);
    CHECK(failures == 200);
}
#endif
