// The top-k updates of a chunk beside the naive ones: one candidate after another against the worst of all
// keys that hold a slot, in double, from the definition. All numbers are the same.
#include <kvpolicy/caches/cuda/prefill/kernel_decayed_update.cuh>
#include <kvpolicy/caches/cuda/prefill/kernel_top_k_update.cuh>
#include <kvpolicy/caches/layer_ref.hpp>

#include "gpu/support/device.hpp"
#include "score_orders.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

using namespace kvpolicy;
using namespace kvpolicy::cuda_backend;
using test::Device;
using test::Order;
using test::score_of;

namespace {

/// A key's number at query q, from the definition, in double. With decay step 1: its score less its position
/// times log gamma, where positions count from the last multiple of `limit`, which is no more than q. Else
/// its score and log gamma once per decay step of its age: the product is exact, the sum rounded once.
double priority(const HeadParams& head_params, float score, position_t t, position_t q, position_t limit) {
    if (head_params.decay_step != 1) {
        const double age = std::floor(static_cast<double>(q - t) / head_params.decay_step);
        return static_cast<double>(score) + age * static_cast<double>(head_params.log_gamma);
    }
    const position_t base = q - q % limit;
    return static_cast<double>(score) -
           static_cast<double>(t - base) * static_cast<double>(head_params.log_gamma);
}
/// Whether a key with number x at position t stays longer than one with y at u: the larger number, of equal
/// ones (zeros of both signs are) the older key. A NaN is below all numbers.
bool stays_longer(double x, position_t t, double y, position_t u) {
    if (std::isnan(x) || std::isnan(y)) {
        return std::isnan(y) && (!std::isnan(x) || t < u);
    }
    return x != y ? x > y : t < u;
}

/// One head: its numbers, the keys that leave, and what holds the top-k slots.
struct Head {
    top_k_head numbers{};
    std::vector<float> score;         // of the keys that leave, from token 0 on
    std::vector<unsigned char> kind;  // the same
    std::vector<float> slot_score;
    std::vector<position_t> slot_position;
    std::vector<std::int32_t> holder;
    std::vector<unsigned char> slot_protected;
    std::vector<expiry_t> past, chunk;

    [[nodiscard]] std::int32_t name(std::int32_t j) const {
        const position_t u = numbers.base + j - numbers.head_params.window;
        const HeadRows layout{numbers.head_params.sinks, numbers.head_params.window};
        return u < numbers.base ? layout.recent(u)
                                : numbers.capacity + static_cast<std::int32_t>(u - numbers.base);
    }
    void expire(std::int32_t of, expiry_t at) {
        (of < numbers.capacity ? past[static_cast<std::size_t>(of)]
                               : chunk[static_cast<std::size_t>(of - numbers.capacity)]) = at;
    }
    void put(std::size_t p, std::int32_t j, bool is_protected) {
        slot_score[p] = score[static_cast<std::size_t>(j)];
        slot_position[p] = numbers.base + j - numbers.head_params.window;
        holder[p] = name(j);
        slot_protected[p] = is_protected ? 1 : 0;
        expire(holder[p], never);
    }

    /// The definition. Slots from `numbers.first_slot` on are at the arrays' begin.
    void update(position_t limit) {
        const HeadParams& head_params = numbers.head_params;
        const std::int32_t before = numbers.first_slot;
        for (std::int32_t j = numbers.first_leaving; j < numbers.tokens; ++j) {
            const unsigned char its = kind[static_cast<std::size_t>(j)];
            const position_t q = numbers.base + j, u = q - head_params.window;
            if (its == leaving_kind_evicted) {
                continue;
            }
            if (its == leaving_kind_protected) {
                put(static_cast<std::size_t>(numbers.num_long_range++ - before), j, true);
                ++numbers.num_protected;
                continue;
            }
            if (numbers.num_long_range - numbers.num_protected < head_params.budget) {
                put(static_cast<std::size_t>(numbers.num_long_range++ - before), j, false);
                continue;
            }
            std::size_t worst = slot_score.size();
            double value = 0;
            for (std::size_t p = 0; p < static_cast<std::size_t>(numbers.num_long_range - before); ++p) {
                if (slot_protected[p] != 0) {
                    continue;
                }
                const double its_value = priority(head_params, slot_score[p], slot_position[p], q, limit);
                if (worst == slot_score.size() ||
                    stays_longer(value, slot_position[worst], its_value, slot_position[p])) {
                    worst = p;
                    value = its_value;
                }
            }
            const double mine = priority(head_params, score[static_cast<std::size_t>(j)], u, q, limit);
            if (stays_longer(mine, u, value, slot_position[worst])) {
                expire(holder[worst], j);
                put(worst, j, false);
            }
        }
    }
};

constexpr Order orders[] = {Order::random,     Order::rising, Order::falling,    Order::equal,
                            Order::two_values, Order::level,  Order::special,    Order::sawtooth,
                            Order::tiny,       Order::huge,   Order::best_first, Order::best_late};

struct Case {
    std::int32_t sinks = 0, window = 1, budget = 1, tokens = 0;
    std::int32_t held = 0;  // top-k slots in use before, at most the budget and some protected ones
    position_t base = 0;    // at least sinks + window + held, or small
    float log_gamma = 0;
    std::int32_t step = 1;
    double closed = 0, staying = 0;  // how many keys are evicted by the gate, or protected
    position_t apart = 0;            // of old keys; 0: a few positions
    Order order = Order::random;
};

Head make(const Case& of, std::uint32_t seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    Head head;
    top_k_head& numbers = head.numbers;
    numbers.head_params = {of.sinks, of.window, of.budget, of.step, of.log_gamma, 0.0f};
    numbers.base = of.base;
    numbers.tokens = of.tokens;
    const position_t first = position_t{of.sinks} + of.window - of.base;
    numbers.first_leaving = static_cast<std::int32_t>(std::clamp<position_t>(first, 0, of.tokens));
    numbers.num_long_range = of.held;
    const std::int32_t used = of.sinks + of.window + of.held;
    numbers.capacity = used + of.tokens;
    const bool competes = of.budget != unlimited && of.budget != 0;
    numbers.first_slot = competes ? 0 : of.held;
    const auto chance = [&](double share) {
        return std::uniform_real_distribution<double>()(generator) < share;
    };
    const auto tokens = static_cast<std::size_t>(of.tokens);
    head.score.resize(tokens);
    head.kind.resize(tokens);
    for (std::size_t j = 0; j < tokens; ++j) {
        const position_t u = of.base + static_cast<position_t>(j) - of.window;
        head.score[j] = score_of(of.order, {of.log_gamma, 0, of.tokens, static_cast<std::int32_t>(j), u},
                                 normal, generator);
        head.kind[j] = chance(of.staying)                    ? leaving_kind_protected
                       : of.budget == 0 || chance(of.closed) ? leaving_kind_evicted
                                                             : leaving_kind_competes;
    }
    const std::size_t of_slots = static_cast<std::size_t>(of.held - numbers.first_slot) + tokens;
    head.slot_score.assign(of_slots, -7.0f);
    head.slot_position.assign(of_slots, -7);
    head.holder.assign(of_slots, -7);
    head.slot_protected.assign(of_slots, 0);
    // Any old positions, in any order of top-k slots.
    std::vector<position_t> old(static_cast<std::size_t>(of.held - numbers.first_slot));
    const position_t until = of.base - of.window;
    for (std::size_t p = 0; p < old.size(); ++p) {
        const position_t apart = of.apart != 0 ? of.apart : until > 4 * of.held ? 3 : 1;
        old[p] = until - 1 - static_cast<position_t>(p) * apart;
    }
    std::shuffle(old.begin(), old.end(), generator);
    for (std::size_t p = 0; p < old.size(); ++p) {
        head.slot_position[p] = old[p];
        head.slot_score[p] = score_of(
            of.order, {of.log_gamma, 0, of.held, static_cast<std::int32_t>(p), old[p]}, normal, generator);
        head.holder[p] = of.sinks + of.window + static_cast<std::int32_t>(p);
        head.slot_protected[p] = chance(of.staying) ? 1 : 0;
        numbers.num_protected += head.slot_protected[p];
    }
    // No more competitors than the budget.
    for (std::size_t p = 0; competes && of.held - numbers.num_protected > of.budget; ++p) {
        numbers.num_protected += head.slot_protected[p] == 0 ? 1 : 0;
        head.slot_protected[p] = 1;
    }
    head.past.assign(static_cast<std::size_t>(used), never);
    head.chunk.resize(tokens);
    for (std::size_t j = 0; j < tokens; ++j) {
        head.chunk[j] = static_cast<expiry_t>(j) + of.window;
    }
    return head;
}

/// All heads' numbers one after another, `each` a head.
template <class T>
std::vector<T> joined(const std::vector<Head>& heads, std::size_t each, std::vector<T> Head::*of) {
    std::vector<T> all(heads.size() * each);
    for (std::size_t h = 0; h < heads.size(); ++h) {
        const std::vector<T>& one = heads[h].*of;
        std::copy(one.begin(), one.end(), all.begin() + static_cast<std::ptrdiff_t>(h * each));
    }
    return all;
}

template <class T>
bool same(T a, T b) {
    return a == b || (a != a && b != b);
}

/// Runs a kernel, which ranks up to `members` keys at once, on all cases at once and compares. Returns
/// milliseconds of a run.
template <class Launch>
double check_kernel(const Launch& launch_kernel, std::int32_t members_each, const std::vector<Case>& cases,
                    position_t limit, bool timed) {
    std::vector<Head> heads;
    std::size_t tokens = 0, of_slots = 0, entries = 0;
    for (std::size_t i = 0; i < cases.size(); ++i) {
        heads.push_back(make(cases[i], static_cast<std::uint32_t>(i) + 1));
        tokens = std::max(tokens, heads.back().score.size());
        of_slots = std::max(of_slots, heads.back().slot_score.size());
        entries = std::max(entries, heads.back().past.size());
    }
    std::vector<top_k_head> numbers;
    for (const Head& head : heads) {
        numbers.push_back(head.numbers);
    }
    const Device<top_k_head> of_numbers(numbers);
    const Device<float> score(joined(heads, tokens, &Head::score));
    const Device<unsigned char> kind(joined(heads, tokens, &Head::kind));
    const Device<float> slot_score(joined(heads, of_slots, &Head::slot_score));
    const Device<position_t> slot_position(joined(heads, of_slots, &Head::slot_position));
    const Device<std::int32_t> holder(joined(heads, of_slots, &Head::holder));
    const Device<unsigned char> slot_protected(joined(heads, of_slots, &Head::slot_protected));
    const Device<expiry_t> past(joined(heads, entries, &Head::past));
    const Device<expiry_t> chunk(joined(heads, tokens, &Head::chunk));
    const Device<std::int32_t> members(heads.size() * 3 * static_cast<std::size_t>(members_each));
    std::vector<std::int32_t> counts, protected_counts;
    for (const Head& head : heads) {
        counts.push_back(head.numbers.num_long_range);
        protected_counts.push_back(head.numbers.num_protected);
    }
    const Device<std::int32_t> num_long_range(counts), num_protected(protected_counts);
    top_k_update_params params;
    params.heads = of_numbers.data();
    params.leaving_score = score.data();
    params.leaving_kind = kind.data();
    params.slot_score = slot_score.data();
    params.slot_position = slot_position.data();
    params.holder = holder.data();
    params.slot_protected = slot_protected.data();
    params.past_expiry = past.data();
    params.chunk_expiry = chunk.data();
    params.members = members.data();
    params.num_long_range = num_long_range.data();
    params.num_protected = num_protected.data();
    params.most = static_cast<std::int32_t>(tokens);
    params.top_k_slots = static_cast<std::int32_t>(of_slots);
    params.max_entries = static_cast<std::int32_t>(entries);
    params.max_members = members_each;
    params.rebase_limit = limit;
    const kvpolicy::cuda ctx{};
    cudaEvent_t begin{}, end{};
    test::ok(cudaEventCreate(&begin));
    test::ok(cudaEventCreate(&end));
    test::ok(cudaEventRecord(begin));
    launch_kernel(ctx, static_cast<std::int64_t>(heads.size()), params);
    test::ok(cudaEventRecord(end));
    test::ok(cudaDeviceSynchronize());
    float ms = 0;
    test::ok(cudaEventElapsedTime(&ms, begin, end));
    if (timed) {
        return ms;
    }
    const std::vector<float> new_score = slot_score.read();
    const std::vector<position_t> new_position = slot_position.read();
    const std::vector<std::int32_t> new_holder = holder.read(), new_count = num_long_range.read(),
                                    new_protected_count = num_protected.read();
    const std::vector<unsigned char> new_protected = slot_protected.read();
    const std::vector<expiry_t> new_past = past.read(), new_chunk = chunk.read();
    for (std::size_t h = 0; h < heads.size(); ++h) {
        Head& head = heads[h];
        head.update(limit);
        CAPTURE(h);
        CAPTURE(static_cast<int>(cases[h].order));
        CAPTURE(cases[h].budget);
        CAPTURE(cases[h].tokens);
        CAPTURE(cases[h].held);
        CAPTURE(cases[h].log_gamma);
        CAPTURE(cases[h].step);
        CHECK(new_count[h] == head.numbers.num_long_range);
        CHECK(new_protected_count[h] == head.numbers.num_protected);
        std::int32_t wrong = 0;
        const auto used = static_cast<std::size_t>(head.numbers.num_long_range - head.numbers.first_slot);
        for (std::size_t p = 0; p < used; ++p) {
            const std::size_t at = h * of_slots + p;
            wrong += same(new_score[at], head.slot_score[p]) && new_position[at] == head.slot_position[p] &&
                             new_holder[at] == head.holder[p] && new_protected[at] == head.slot_protected[p]
                         ? 0
                         : 1;
        }
        CHECK(wrong == 0);
        std::int32_t wrong_expiries = 0;
        for (std::size_t r = 0; r < head.past.size(); ++r) {
            wrong_expiries += new_past[h * entries + r] == head.past[r] ? 0 : 1;
        }
        for (std::size_t j = 0; j < head.chunk.size(); ++j) {
            wrong_expiries += new_chunk[h * tokens + j] == head.chunk[j] ? 0 : 1;
        }
        CHECK(wrong_expiries == 0);
    }
    return ms;
}

/// The kernel for static priorities.
template <int Threads, int Items>
double check(const std::vector<Case>& cases, position_t limit = rebase_limit, bool timed = false) {
    const auto launch_kernel = [](const kvpolicy::cuda& ctx, std::int64_t heads,
                                  const top_k_update_params& params) {
        launch("top_k_update_kernel", top_k_update_kernel<Threads, Items>, heads, Threads,
               sizeof(typename agent_top_k_update<Threads, Items>::shared), ctx, params);
    };
    return check_kernel(launch_kernel, Threads * Items, cases, limit, timed);
}

/// The kernel for keys that rank by the query.
double check_decayed(const std::vector<Case>& cases, bool timed = false) {
    const auto launch_kernel = [](const kvpolicy::cuda& ctx, std::int64_t heads,
                                  const top_k_update_params& params) {
        launch("decayed_update_kernel", decayed_update_kernel<top_k_update_params>, heads,
               decayed_round_threads, sizeof(decayed_update_memory), ctx, params);
    };
    return check_kernel(launch_kernel, decayed_round_keys, cases, rebase_limit, timed);
}

/// Orders of scores, decays and steps, for these sizes: one in `every`.
std::vector<Case> decays_of(const Case& sizes, const std::vector<std::int32_t>& steps, int every = 1) {
    std::vector<Case> cases;
    int number = 0;
    for (const std::int32_t step : steps) {
        for (const Order order : orders) {
            for (const float log_gamma : {-0.05f, -0x1p-10f, -1e-7f, -3.0f, -1e-40f}) {
                Case one = sizes;
                one.order = order;
                one.log_gamma = log_gamma;
                one.step = step;
                one.closed = one.staying = number % 2 == 0 ? 0.0 : 0.1;
                if (number++ % every == 0) {
                    cases.push_back(one);
                }
            }
        }
    }
    return cases;
}
const std::vector<std::int32_t> all_steps{2, 3, 7, 32, 33, 64, 1000, 1024, 1025};

/// Every order with and without decay, for these sizes.
std::vector<Case> orders_of(const Case& sizes) {
    std::vector<Case> cases;
    for (const Order order : orders) {
        for (const float log_gamma : {0.0f, -0.001f, -1e-7f}) {
            for (const double share : {0.0, 0.1}) {
                Case one = sizes;
                one.order = order;
                one.log_gamma = log_gamma;
                one.closed = one.staying = share;
                cases.push_back(one);
            }
        }
    }
    return cases;
}

/// A third of them, since naive updates take their time.
std::vector<Case> some_of(const Case& sizes) {
    std::vector<Case> all = orders_of(sizes), some;
    for (std::size_t i = static_cast<std::size_t>(sizes.held) % 3; i < all.size(); i += 3) {
        some.push_back(all[i]);
    }
    return some;
}

}  // namespace

TEST_CASE("top-k updates of small chunks equal naive ones") {
    for (const std::int32_t tokens : {1, 2, 31, 32, 33, 63, 64}) {
        for (const std::int32_t budget : {0, 1, 2, 31, 64, 100, unlimited}) {
            for (const std::int32_t held : {0, 1, budget / 2, budget}) {
                if (held > 200 || held > budget) {
                    continue;
                }
                check<128, 1>(orders_of({.sinks = 1,
                                         .window = 5,
                                         .budget = budget,
                                         .tokens = tokens,
                                         .held = held,
                                         .base = 6 + held + 1000}));
            }
        }
    }
}

TEST_CASE("top-k updates of larger chunks equal naive ones") {
    for (const std::int32_t tokens : {65, 127, 511, 1023, 1024, 1025, 2300}) {
        for (const std::int32_t budget : {1, 33, 300, 1024, unlimited}) {
            const std::int32_t most = budget == unlimited ? 50 : budget;
            for (const std::int32_t held : {0, most / 2, most}) {
                check<1024, 16>(orders_of({.sinks = 4,
                                           .window = 64,
                                           .budget = budget,
                                           .tokens = tokens,
                                           .held = held,
                                           .base = held == 0 ? 0 : 68 + 4 * held + tokens}));
            }
        }
    }
}

TEST_CASE("top-k updates in rounds equal naive ones") {
    // More keys than a block of 4096 ranks at once, and more old keys than half of them.
    for (const std::int32_t budget : {700, 2049, 3000}) {
        for (const std::int32_t held : {0, budget}) {
            check<1024, 4>(some_of({.window = 16,
                                    .budget = budget,
                                    .tokens = 5100,
                                    .held = held,
                                    .base = held == 0 ? 0 : 40000}));
        }
    }
    check<1024, 16>(some_of({.window = 256, .budget = 1836, .tokens = 17000}));
    check<1024, 16>(some_of({.window = 256, .budget = 9000, .tokens = 9500, .held = 9000, .base = 60000}));
}

TEST_CASE("more keys in top-k slots than half of a block's, and all in one round") {
    for (const std::int32_t held : {2047, 2048, 2049, 3000, 4095, 4096, 5000}) {
        for (const std::int32_t tokens : {1, 1000, 2047, 2049}) {
            check<1024, 4>(some_of(
                {.sinks = 4, .window = 16, .budget = held, .tokens = tokens, .held = held, .base = 40000}));
        }
    }
}

TEST_CASE("the base of priorities may move within a chunk") {
    for (const position_t limit : {64, 1000}) {
        check<128, 1>(orders_of({.window = 3, .budget = 40, .tokens = 64, .held = 40, .base = 5000}), limit);
        check<1024, 16>(orders_of({.window = 3, .budget = 300, .tokens = 1500, .held = 300, .base = 5000}),
                        limit);
    }
    const position_t far = (position_t{1} << 33) - 100;
    check<1024, 16>(orders_of({.window = 3, .budget = 300, .tokens = 1500, .held = 300, .base = far}));
    // Beyond 2^32, where positions take both of their halves to sort.
    for (const position_t base : {(position_t{1} << 32) - 700, (position_t{1} << 40) + 5}) {
        const Case far_off{.window = 3, .budget = 300, .tokens = 1500, .held = 300, .base = base};
        check<1024, 16>(orders_of(far_off), 1000);
        check<1024, 4>(orders_of(far_off));
    }
}

TEST_CASE("top-k updates whose order depends on the query, of small chunks") {
    for (const std::int32_t tokens : {1, 2, 16, 17, 33, 64, 100}) {  // up to 16 are updated by scans
        for (const std::int32_t budget : {1, 2, 31, 64, 100}) {
            for (const std::int32_t held : {0, budget / 2, budget}) {
                check_decayed(decays_of({.sinks = 1,
                                         .window = 5,
                                         .budget = budget,
                                         .tokens = tokens,
                                         .held = held,
                                         .base = 6 + held + 1000},
                                        all_steps));
            }
        }
    }
}

TEST_CASE("top-k updates whose order depends on the query, of larger chunks") {
    for (const std::int32_t tokens : {511, 512, 513, 1300}) {
        for (const std::int32_t budget : {1, 33, 300, 1024}) {
            for (const std::int32_t held : {0, budget / 2, budget}) {
                check_decayed(decays_of({.sinks = 4,
                                         .window = 64,
                                         .budget = budget,
                                         .tokens = tokens,
                                         .held = held,
                                         .base = held == 0 ? 0 : 68 + 4 * held + tokens},
                                        all_steps, 7));
            }
        }
    }
}

TEST_CASE("top-k updates whose order depends on the query, in rounds and beyond") {
    const auto sizes = [](std::int32_t budget, std::int32_t tokens, std::int32_t held) {
        return Case{.window = 16,
                    .budget = budget,
                    .tokens = tokens,
                    .held = held,
                    .base = held == 0 ? 0 : position_t{40000}};
    };
    check_decayed(decays_of(sizes(700, 9000, 700), {3, 64}, 7));
    check_decayed(decays_of(sizes(3000, 8000, 0), {3, 40}, 11));
    // Around the largest budget that rounds take.
    for (const std::int32_t budget : {4607, 4608, 4609}) {
        check_decayed(decays_of(sizes(budget, 3300, budget), {3}, 17));
    }
    // Positions beyond 31 bits, and keys that are too far apart for rounds.
    for (const position_t base : {(position_t{1} << 33) + 5, (position_t{1} << 40) - 100}) {
        Case far = sizes(300, 1000, 300);
        far.base = base;
        check_decayed(decays_of(far, {2, 33}, 7));
        far.apart = 1 << 21;
        check_decayed(decays_of(far, {2, 33}, 7));
    }
}

TEST_CASE("time of top-k updates whose order depends on the query, 8 heads" * doctest::skip()) {
    for (const std::int32_t step : {3, 32, 64, 1000}) {
        for (const std::int32_t held : {0, 3836}) {
            for (const Order order : {Order::random, Order::rising, Order::falling, Order::equal}) {
                Case one{.sinks = 4,
                         .window = 256,
                         .budget = 3836,
                         .tokens = 16384,
                         .held = held,
                         .base = held == 0 ? 0 : 100000,
                         .log_gamma = -1e-3f,
                         .step = step};
                one.order = order;
                double least = 1e9;
                for (int i = 0; i < 3; ++i) {
                    least = std::min(least, check_decayed(std::vector<Case>(8, one), true));
                }
                std::printf("step %d held %d order %d: %.3f ms\n", step, held, static_cast<int>(order),
                            least);
            }
        }
    }
}

TEST_CASE("time of top-k updates, 8 heads" * doctest::skip()) {
    for (const std::int32_t held : {0, 3836}) {
        for (const std::int32_t tokens : {2048, 8192, 16384, 131072}) {
            for (const Order order : {Order::random, Order::rising, Order::falling, Order::equal}) {
                Case one{.sinks = 4,
                         .window = 256,
                         .budget = 3836,
                         .tokens = tokens,
                         .held = held,
                         .base = held == 0 ? 0 : 100000};
                one.order = order;
                double least = 1e9;
                for (int i = 0; i < 3; ++i) {
                    least = std::min(least, check<1024, 16>(std::vector<Case>(8, one), rebase_limit, true));
                }
                std::printf("held %d tokens %d order %d: %.3f ms\n", held, tokens, static_cast<int>(order),
                            least);
            }
        }
    }
}
