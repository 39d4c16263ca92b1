// The top-k set of masks, chunks and losses beside a naive one, which looks at every key: for decay steps of
// every kind, scores that are hard to tell apart, keys from long before, and bases that move.
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/masks/top_k_set.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

using namespace kvpolicy;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();

struct Key {
    position_t position;
    float score;
    std::int32_t key, slot;
};

/// From the definition: priorities of decay step 1 count from the last multiple of `limit`, effective scores
/// of larger steps at the query. Larger first, then the older key; NaN last.
struct Naive {
    HeadParams head_params;
    position_t limit;
    std::vector<Key> held;

    [[nodiscard]] double value(const Key& one, position_t q) const {
        const std::int32_t n = head_params.decay_step;
        const position_t age = n == 1 ? (q - q % limit) - one.position : (q - one.position) / n;
        return std::fma(static_cast<double>(age), static_cast<double>(head_params.log_gamma),
                        static_cast<double>(one.score));
    }
    [[nodiscard]] bool better(const Key& a, const Key& b, position_t q) const {
        const double x = value(a, q), y = value(b, q);
        if (std::isnan(x) != std::isnan(y)) {
            return std::isnan(y);
        }
        return x > y || (!(x < y) && a.position < b.position);
    }
    [[nodiscard]] std::size_t worst(position_t q) const {
        std::size_t at = 0;
        for (std::size_t i = 1; i < held.size(); ++i) {
            at = better(held[at], held[i], q) ? i : at;
        }
        return at;
    }
    detail::top_k_outcome update(const Key& candidate, position_t q) {
        if (held.size() < static_cast<std::size_t>(head_params.budget)) {
            held.push_back(candidate);
            return {detail::top_k_outcome::took_free_slot, candidate.slot, -1};
        }
        if (head_params.budget == 0) {
            return {detail::top_k_outcome::refused, -1, candidate.key};
        }
        Key& one = held[worst(q)];
        if (!better(candidate, one, q)) {
            return {detail::top_k_outcome::refused, -1, candidate.key};
        }
        const Key evicted = one;
        one = candidate;
        one.slot = evicted.slot;
        return {detail::top_k_outcome::replaced, one.slot, evicted.key};
    }
};

/// A set in memory of its own.
struct Set {
    std::vector<std::byte> memory;
    detail::top_k_set set;

    Set(const HeadParams& head_params, position_t limit, position_t base, std::int32_t tokens)
        : memory(detail::top_k_set::bytes(head_params, slots(head_params)) + detail::alignment),
          set(detail::aligned(memory.data()), slots(head_params), head_params, limit, base, tokens) {}
    [[nodiscard]] std::vector<Key> held() const {
        std::vector<Key> keys;
        const detail::top_k_entry* const entries =
            detail::top_k_set::entries(detail::aligned(const_cast<std::byte*>(memory.data())));
        for (std::int32_t i = 0; i < set.size(); ++i) {
            keys.push_back({entries[i].position, entries[i].score, entries[i].key, entries[i].slot});
        }
        return keys;
    }
    static std::size_t slots(const HeadParams& head_params) {
        return static_cast<std::size_t>(head_params.budget);
    }
};

bool same(std::vector<Key> a, std::vector<Key> b) {
    const auto by_slot = [](const Key& x, const Key& y) { return x.slot < y.slot; };
    std::sort(a.begin(), a.end(), by_slot);
    std::sort(b.begin(), b.end(), by_slot);
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Key& x, const Key& y) {
        return x.position == y.position && x.key == y.key && x.slot == y.slot &&
               (x.score == y.score || (std::isnan(x.score) && std::isnan(y.score)));
    });
}

}  // namespace

TEST_CASE("top-k updates equal naive ones") {
    std::mt19937 generator(11);
    const auto pick = [&](auto... values) {
        const std::common_type_t<decltype(values)...> all[] = {values...};
        return all[generator() % sizeof...(values)];
    };
    for (std::int32_t trial = 0; trial < 900; ++trial) {
        HeadParams head_params{};
        head_params.budget = pick(0, 1, 2, 5, 64, 130, 230);
        head_params.window = pick(1, 3, 17);
        head_params.decay_step = pick(1, 1, 2, 3, 7, 64, 256, 257);
        head_params.log_gamma = pick(0.0f, -1e-6f, -0.03f, -0.5f, -0x1p-60f, -3e10f);
        // From a sequence's begin, as in masks; near it; where priorities are rounded; beyond int32.
        const position_t base =
            pick(position_t{0}, position_t{40}, (position_t{1} << 26) + 3, (position_t{1} << 33) + 5);
        const position_t limit = pick(position_t{7}, position_t{64}, rebase_limit);
        const std::int32_t tokens = pick(3, 40, 300), kind = pick(0, 1, 2, 3, 4, 5);
        const auto score = [&](std::int32_t t) {
            const auto small = static_cast<float>(generator() % 7);
            switch (kind) {
                case 0:
                    return small;
                case 1:
                    return static_cast<float>(t);
                case 2:
                    return 1e9f * (small + 1.0f);  // absorbs some of the decay
                case 3:
                    return pick(inf, -inf, 0.0f, -0.0f, small);
                case 4:
                    return pick(inf, -inf, std::numeric_limits<float>::quiet_NaN(), small);
                default:
                    return static_cast<float>(generator() % 100000) * 1e-4f;
            }
        };
        CAPTURE(trial);
        Set got(head_params, limit, base, tokens);
        Naive wanted{head_params, limit, {}};
        // Keys from before the chunk, some of them from long before, in top-k slots of any order.
        const std::int32_t restored = std::min(pick(0, 1, 60), head_params.budget);
        const position_t oldest = pick(position_t{0}, base - 40);
        for (std::int32_t i = 0; i < restored; ++i) {
            const position_t t = i < 20 ? oldest + i : base - head_params.window - 1 - 60 + i;
            if (t < 0 || t >= base - head_params.window || (i >= 20 && t < oldest + 20)) {
                continue;
            }
            const Key key{t, score(i), i, got.set.size()};
            got.set.restore(key.position, key.score, key.key, key.slot);
            wanted.held.push_back(key);
        }
        bool right = true, right_worst = true;
        for (std::int32_t j = 0; j < tokens; ++j) {
            const position_t q = base + j, u = q - head_params.window;
            if (generator() % 5 == 0 || u < 0) {  // its gate is closed
                continue;
            }
            const Key key{u, score(j + 1000), 5000 + j, got.set.size()};
            const auto mine = got.set.update(u, key.score, key.key, q);
            const auto naive = wanted.update(key, q);
            right = right && mine.kind == naive.kind && mine.slot == naive.slot && mine.lost == naive.lost;
            if (head_params.budget != 0 && mine.kind != detail::top_k_outcome::took_free_slot) {
                right_worst = right_worst && got.set.worst().key == wanted.held[wanted.worst(q)].key;
            }
        }
        CHECK(right);
        CHECK(right_worst);
        CHECK(same(got.held(), wanted.held));
    }
}

TEST_CASE("free slots are the caller's, or counted") {
    HeadParams head_params{};
    head_params.budget = 2;
    Set counted(head_params, rebase_limit, 0, 10), named(head_params, rebase_limit, 0, 10);
    for (std::int32_t t = 0; t < 2; ++t) {
        CHECK(counted.set.update(t, 1.0f, t, t + 1).slot == t);
        CHECK(named.set.update(t, 1.0f, t, t + 1, 7 - t).slot == 7 - t);
    }
    CHECK(named.set.update(2, 2.0f, 2, 3, 100).slot == 6);  // of the younger of two equal keys
    CHECK(counted.set.size() == 2);
}

TEST_CASE("bytes do not depend on a decay that is learned") {
    for (const std::int32_t step : {1, 2, 64, 256, 257}) {
        HeadParams head_params{};
        head_params.budget = 600;
        head_params.decay_step = step;
        const std::size_t without = detail::top_k_set::bytes(head_params, 33);
        head_params.log_gamma = -0.1f;
        CHECK(detail::top_k_set::bytes(head_params, 33) == without);
    }
}
