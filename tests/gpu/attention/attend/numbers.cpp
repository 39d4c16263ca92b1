// Attention on CUDA against the host in double: shapes, masks, frames and numbers that break
// careless kernels.
#include "attend_case.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

using namespace test;

namespace {

AttendCase plain_case(std::string what, std::int32_t batch, std::int32_t kv_heads, std::int32_t group,
                      std::int32_t length, std::int32_t dim) {
    AttendCase c;
    c.what = std::move(what);
    c.batch = batch;
    c.kv_heads = kv_heads;
    c.group = group;
    c.queries = length;
    c.past.rows = length;
    c.head_dim_qk = c.head_dim_vo = dim;
    return c;
}

void expire(AttendCase& c, std::int32_t window, unsigned every, unsigned most) {
    c.past.expiry = policy_lifetimes(c.planes(), c.past.rows, window, every, most, 3);
}

std::vector<float> random_biases(const AttendCase& c, std::int32_t rows, unsigned seed) {
    std::mt19937 generator(seed);
    std::vector<float> bias(c.planes() * static_cast<std::size_t>(rows));
    for (float& x : bias) {
        const unsigned kind = generator() % 8;
        x = kind == 0   ? -std::numeric_limits<float>::infinity()
            : kind == 1 ? -100.0f
            : kind == 2 ? 3.0f
                        : -static_cast<float>(generator() % 1000) / 200.0f;
    }
    return bias;
}

}  // namespace

TEST_CASE("dense, lengths around every tile") {
    for (const std::int32_t length : {1, 7, 47, 48, 49, 63, 64, 65, 127, 128, 129, 193, 500}) {
        check_attend<bf16>(plain_case("dense " + std::to_string(length), 2, 2, 4, length, 128));
    }
}

TEST_CASE("head_dims, one for keys and another for values") {
    for (const std::int32_t dim : {8, 64, 72, 80, 96, 128, 136, 192, 256}) {
        AttendCase c = plain_case("head_dim " + std::to_string(dim), 1, 2, 3, 300, dim);
        expire(c, 40, 5, 300);
        check_attend<bf16>(c);
        check_attend<fp16>(c);
        c.head_dim_vo = dim == 8 ? 128 : dim / 16 * 8;
        c.what += ", values " + std::to_string(c.head_dim_vo);
        check_attend<bf16>(c);
        c.by_token = true;
        c.what += ", by token";
        check_attend<fp16>(c);
    }
}

TEST_CASE("groups of any size") {
    for (const std::int32_t group : {1, 2, 3, 5, 6, 7, 8, 12, 16, 64, 100, 128, 192, 200, 300}) {
        AttendCase c = plain_case("group " + std::to_string(group), 1, 1, group, group > 16 ? 70 : 260, 64);
        expire(c, 30, 4, 200);
        check_attend<bf16>(c);
    }
}

TEST_CASE("masks: budgets, gates open and shut, one key, none, all at once") {
    for (const std::int32_t length : {40, 1500, 2300}) {
        const std::string suffix = " of " + std::to_string(length);
        AttendCase c = plain_case("budget" + suffix, 2, 2, 4, length, 128);
        expire(c, 64, 6, 900);
        check_attend<bf16>(c);
        c.what = "window alone" + suffix;
        expire(c, 64, 0, 0);
        check_attend<bf16>(c);
        c.what = "gates open" + suffix;
        std::fill(c.past.expiry.begin(), c.past.expiry.end(), never);
        check_attend<bf16>(c);
        c.what = "gates shut, window 1" + suffix;
        for (std::size_t i = 0; i < c.past.expiry.size(); ++i) {
            c.past.expiry[i] = static_cast<expiry_t>(i % static_cast<std::size_t>(length)) + 1;
        }
        check_attend<bf16>(c);
        c.what = "all expired from the start, NaN" + suffix;
        for (expiry_t& e : c.past.expiry) {
            e -= 1;
        }
        c.nan_beyond = true;
        check_attend<bf16>(c);
        c.what = "one key lives, the rest NaN" + suffix;
        c.past.expiry[static_cast<std::size_t>(length / 3)] = never;
        check_attend<bf16>(c);
        c.what = "expiries below every position" + suffix;
        std::fill(c.past.expiry.begin(), c.past.expiry.end(), std::numeric_limits<expiry_t>::min());
        check_attend<bf16>(c);
        c.what = "all at once" + suffix;
        c.nan_beyond = false;
        std::fill(c.past.expiry.begin(), c.past.expiry.end(), length * 2 / 3);
        check_attend<bf16>(c);
    }
}

// Super-tiles are longer from 4097 queries on.
TEST_CASE("more than 4096 queries") {
    for (const std::int32_t length : {4096, 4097, 5000}) {
        AttendCase c = plain_case(std::to_string(length) + " queries", 1, 1, 3, length, 64);
        expire(c, 50, 40, 1500);
        check_attend<bf16>(c);
        c.what += ", in two segments";
        c.queries = length;
        c.self.rows = length;
        c.self.expiry = std::move(c.past.expiry);
        c.past.rows = 70;
        c.past.first = -70;
        c.past.expiry.assign(70, 900);
        check_attend<bf16>(c);
    }
}

// Lists of all rows for 32 super-tiles at most are made at once: more queries than rows take more rounds.
TEST_CASE("several rounds of lists") {
    for (const std::int32_t queries : {32 * 1024 + 1, 34'000, 70'000}) {
        AttendCase c = plain_case(std::to_string(queries) + " queries of few rows", 1, 1, 2, queries, 64);
        c.head_dim_vo = 8;
        c.past.rows = 60;
        std::mt19937 generator(6);
        for (std::int32_t r = 0; r < c.past.rows; ++r) {
            const auto position = static_cast<std::int32_t>(generator() % static_cast<unsigned>(queries));
            c.past.position.push_back(position);
            c.past.expiry.push_back(
                r % 7 == 0 ? never : position + 1 + static_cast<std::int32_t>(generator() % 20'000));
        }
        check_attend<bf16>(c);
        if (queries == 34'000) {
            c.what += ", biases";
            c.past.log_bias = random_biases(c, c.past.rows, 5);
            c.bias_from = {3};
            check_attend<bf16>(c);
        }
    }
}

TEST_CASE("gates in runs") {
    for (const std::int32_t dim : {128, 64, 72}) {
        for (const std::int32_t run : {3, 8, 29, 200}) {
            AttendCase c = plain_case("runs of " + std::to_string(run) + ", head_dim " + std::to_string(dim),
                                      2, 2, 4, 1700, dim);
            expire(c, 64, 0, 0);
            for (std::size_t i = 0; i < c.past.expiry.size(); ++i) {
                const auto number = static_cast<std::int32_t>(i) / run;
                if (number * 7 % 4 == 0) {
                    c.past.expiry[i] = number % 3 == 0 ? 1500 : never;
                }
            }
            c.by_token = run == 29;
            check_attend<bf16>(c);
            c.what += ", another for values";
            c.head_dim_vo = dim - 8;
            check_attend<fp16>(c);
        }
    }
}

TEST_CASE("lengths of sequences and of keys, NaN beyond them") {
    AttendCase c = plain_case("lengths", 5, 2, 4, 400, 64);
    c.lengths = {400, 0, 1, 399, 130};
    check_attend<bf16>(c);
    expire(c, 50, 3, 200);
    c.what = "lengths, lifetimes";
    check_attend<bf16>(c);
    c.past.lengths = {10, 400, 0, 399, 100};
    c.nan_beyond = true;
    c.what = "lengths of keys";
    check_attend<bf16>(c);
    c.past.expiry.clear();
    c.what = "lengths of keys, dense";
    check_attend<bf16>(c);
}

TEST_CASE("more queries than keys, and keys that begin later") {
    AttendCase c = plain_case("five queries, two keys", 1, 1, 4, 5, 64);
    c.past.rows = 2;
    c.past.first = 3;
    check_attend<bf16>(c);
    c = plain_case("no keys", 2, 2, 2, 50, 128);
    c.past.rows = 0;
    check_attend<bf16>(c);
    c = plain_case("keys before 0", 1, 2, 2, 300, 128);
    c.past.first = -200;
    c.past.rows = 350;
    check_attend<bf16>(c);
}

TEST_CASE("chunks: starts, positions in any order, two segments") {
    for (const std::int32_t queries : {1, 33, 500}) {
        AttendCase c = plain_case("chunk of " + std::to_string(queries), 3, 2, 4, queries, 128);
        c.starts = {-30, 900, 1 << 30};
        c.past.rows = 700;
        std::mt19937 generator(5);
        for (std::size_t b = 0; b < 3; ++b) {
            for (std::int32_t h = 0; h < 2; ++h) {
                std::vector<std::int32_t> position(700);
                std::iota(position.begin(), position.end(), c.starts[b] - 650);
                std::shuffle(position.begin(), position.end(), generator);
                for (const std::int32_t p : position) {
                    c.past.position.push_back(p);
                    c.past.expiry.push_back(
                        generator() % 4 == 0 ? never : p + 20 + static_cast<std::int32_t>(generator() % 900));
                }
            }
        }
        check_attend<bf16>(c);
        c.self.rows = queries;
        c.what += ", two segments";
        check_attend<bf16>(c);
        c.self.expiry = c.past.expiry;
        c.self.expiry.resize(c.planes() * static_cast<std::size_t>(queries), never);
        c.lengths = {queries, queries / 2, 0};
        c.past.lengths = {700, 3, 100};
        c.what += ", lengths";
        check_attend<bf16>(c);
        c.past.log_bias = random_biases(c, 700, 6);
        c.bias_from = {30, 0};
        c.what += ", one biased";
        check_attend<bf16>(c);
        c.past.position.clear();
        c.past.expiry.clear();
        c.self.expiry.clear();
        c.past.first = 250;
        c.past.log_bias.clear();
        c.what = "dense in two segments, " + std::to_string(queries);
        check_attend<bf16>(c);
    }
}

TEST_CASE("packed segments") {
    AttendCase c = plain_case("packed", 2, 2, 4, 1300, 64);
    c.edges = {0, 0, 1, 40, 513, 1024, 1024, 1300};
    check_attend<bf16>(c);
    expire(c, 100, 4, 500);
    c.what = "packed, lifetimes";
    check_attend<bf16>(c);
}

TEST_CASE("values that are not finite reach nobody but those who see them") {
    for (const std::int32_t dim : {64, 128, 256}) {
        AttendCase c = plain_case("spoilt values, head_dim " + std::to_string(dim), 2, 2, 4, 700, dim);
        c.spoilt = 40;
        for (std::size_t i = 0; i < c.planes() * 700; ++i) {  // every key lives for few queries
            c.past.expiry.push_back(static_cast<expiry_t>(i % 700 + 1 + i * 7 % 23));
        }
        check_attend<bf16>(c);
        c.lengths = {700, 301};
        c.attention.logits_soft_cap = 10.0f;
        c.past.log_bias = random_biases(c, 700, 8);
        c.bias_from = {5, 0};
        c.what += ", biases and logits_soft_cap";
        check_attend<fp16>(c);
    }
    AttendCase c = plain_case("spoilt values, the last tokens of all", 1, 2, 4, 300, 128);
    c.spoilt = 150;
    check_attend<bf16>(c);
    c.self.rows = 300;
    c.past.rows = 100;
    c.starts = {100};
    c.what += ", two segments";
    check_attend<bf16>(c);
}

TEST_CASE("small: every kernel, at a size for compute-sanitizer") {
    AttendCase c = plain_case("small, packed", 1, 1, 3, 130, 64);
    c.edges = {0, 40, 130};
    expire(c, 20, 4, 60);
    check_attend<bf16>(c);
    c.edges.clear();
    c.past.log_bias = random_biases(c, 130, 8);
    c.bias_from = {20};
    c.attention.logits_soft_cap = 20.0f;
    c.what = "small, biases and logits_soft_cap";
    check_attend<bf16>(c);
    c = plain_case("small, plain", 1, 1, 2, 40, 40);
    expire(c, 10, 4, 20);
    check_attend<float>(c);
    check_attend<double>(c);
}

TEST_CASE("logits_soft_cap, scales of both signs, biases") {
    for (const std::int32_t dim : {64, 128, 256}) {
        AttendCase c = plain_case("logits_soft_cap, head_dim " + std::to_string(dim), 1, 2, 4, 400, dim);
        expire(c, 60, 4, 300);
        c.attention.logits_soft_cap = 5.0f;
        c.scale_q = 3.0f;
        check_attend<bf16>(c);
        c.attention.sm_scale = -0.2f;
        c.what = "logits_soft_cap, negative scale";
        check_attend<bf16>(c);
        c.attention.logits_soft_cap = 0.0f;
        c.what = "negative scale";
        check_attend<bf16>(c);
        c.attention.sm_scale = 0.3f;
        c.past.log_bias = random_biases(c, 400, 8);
        c.bias_from = {60, 3};
        c.what = "biases, head_dim " + std::to_string(dim);
        check_attend<bf16>(c);
        check_attend<fp16>(c);
        c.attention.logits_soft_cap = 20.0f;
        c.what = "biases and logits_soft_cap";
        check_attend<bf16>(c);
        c.past.expiry.clear();
        c.what = "biases, dense";
        check_attend<bf16>(c);
        c.bias_from = {0, 0};
        c.nan_beyond = true;
        c.what = "NaN behind biases of -inf, dense";
        check_attend<bf16>(c);
        c.nan_beyond = false;
        c.bias_from = {60, 3};
        std::fill(c.past.log_bias.begin(), c.past.log_bias.end(), -std::numeric_limits<float>::infinity());
        c.what = "biases of -inf";
        check_attend<bf16>(c);
    }
}

TEST_CASE("logits of 6e4 of both signs") {
    for (const float scale : {6e3f, -6e3f}) {
        AttendCase c = plain_case("huge logits", 1, 1, 4, 300, 64);
        expire(c, 60, 4, 300);
        c.attention.sm_scale = scale / 8.0f;
        check_attend<bf16>(c);
        c.past.log_bias = random_biases(c, 300, 9);
        c.what = "huge logits, biases";
        check_attend<bf16>(c);
    }
}

TEST_CASE("logits that outgrow those of the first block, in some rows and in all") {
    for (const std::int32_t dim : {64, 128, 256}) {
        for (const float spread : {2.5f, 5.0f, 40.0f}) {
            AttendCase c =
                plain_case("spread of " + std::to_string(spread) + ", head_dim " + std::to_string(dim), 1, 2,
                           4, 700, dim);
            c.scale_q = spread;
            check_attend<bf16>(c);
            if (spread < 40.0f) {  // outputs below what fp16 holds in full are no test of this
                check_attend<fp16>(c);
            }
            expire(c, 60, 4, 300);
            c.what += ", lifetimes";
            check_attend<bf16>(c);
            c.past.log_bias = random_biases(c, 700, 8);
            c.bias_from = {60, 3};
            c.what += ", biases";
            check_attend<bf16>(c);
        }
    }
}

TEST_CASE("fp32 and double by the plain kernels") {
    AttendCase c = plain_case("plain", 2, 2, 3, 200, 72);
    expire(c, 30, 4, 100);
    c.lengths = {200, 77};
    check_attend<float>(c);
    check_attend<double>(c);
    c.past.log_bias = random_biases(c, 200, 8);
    c.bias_from = {30, 3};
    c.attention.logits_soft_cap = 5.0f;
    check_attend<float>(c);
    check_attend<double>(c);
    c = plain_case("plain, wide", 1, 1, 2, 70, 1024);
    c.head_dim_vo = 320;
    check_attend<float>(c);
}

TEST_CASE("a hundred runs give the same bits") {
    AttendCase c = plain_case("repeats", 1, 4, 4, 1200, 128);
    expire(c, 64, 5, 600);
    const AttendTensors<bf16> tensors = random_tensors<bf16>(c, 4);
    for (const bool portable : {false, true}) {
        attend_on_device(c, tensors, {false, false, portable}, 100);
    }
}
