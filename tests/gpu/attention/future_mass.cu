// The future-attention target and the dense normalizer on CUDA against the host in double
// (KVpop, 3.1, 3.2, D).
#include "../../support/refusal.hpp"
#include "../support/mass_check.hpp"

#include <cstring>

using namespace kvpolicy;
using namespace test;

namespace {

FutureMassOptions options_of(std::int32_t window, float beta = 1.0f, std::int32_t look_ahead = unlimited) {
    FutureMassOptions options;
    options.window = window;
    options.beta = beta;
    options.look_ahead = look_ahead;
    return options;
}

constexpr float betas[] = {1.0f, 2.0f, 7.5f, infinity};

/// Every kernel of a head_dim once.
void check_kernels(std::int32_t dim) {
    for (const float beta : betas) {
        MassCase c{.length = 300, .kv_heads = 1, .group = 2, .dim = dim, .options = options_of(9, beta)};
        check_mass<bf16>(c);
        c.lse = Lse::far_below;
        check_mass<fp16>(c);
    }
}

/// A quick pass that overflows, the careful one after it, and the largest exponents alone, at a size for
/// compute-sanitizer: tiles in whose pairs all count, and others.
void check_small(qk_reduce_path path) {
    MassCase c{.length = 300, .dim = 64, .options = options_of(9), .lse = Lse::far_below, .spread = 1.5f};
    MassTest<bf16>(c).check(path);
    c.options = options_of(9, infinity);
    MassTest<bf16>(c).check(path);
}

}  // namespace

TEST_CASE("small future masses by Hopper's kernel") { check_small(qk_reduce_path::hopper); }
TEST_CASE("small future masses by the portable kernel") { check_small(qk_reduce_path::portable); }
TEST_CASE("small future masses by the plain kernels") {
    const std::vector<std::int32_t> windows = {3, 300};
    FutureMassOptions by_head;
    by_head.window = per_head(windows.data(), 1, 2);
    check_mass<float>({.length = 70, .kv_heads = 2, .dim = 24, .options = by_head});
    check_mass<float>({.length = 70, .kv_heads = 2, .dim = 24, .options = options_of(2, infinity)});
}

TEST_CASE("future masses of head_dim 64") { check_kernels(64); }
TEST_CASE("future masses of head_dim 128") { check_kernels(128); }
TEST_CASE("future masses of head_dim 256") { check_kernels(256); }

TEST_CASE("future mass at sequence lengths around tiles") {
    for (const std::int32_t length : {1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 640, 1000}) {
        for (const std::int32_t window : {1, 7, 256, length, length + 5}) {
            check_mass<bf16>(
                {.length = length, .kv_heads = 2, .group = 2, .dim = 128, .options = options_of(window)});
        }
    }
}

TEST_CASE("future mass with every option") {
    for (const float beta : betas) {
        for (const std::int32_t look_ahead : {0, 1, 40, 200, unlimited}) {
            for (const group_aggregate aggregate : {group_aggregate::max, group_aggregate::mean}) {
                MassCase c{.length = 333,
                           .kv_heads = 2,
                           .group = 3,
                           .dim = 128,
                           .options = options_of(17, beta, look_ahead)};
                c.options.aggregate = aggregate;
                c.options.normalize = look_ahead != 40;
                check_mass<bf16>(c);
                check_mass<fp16>(c);
            }
        }
    }
}

TEST_CASE("future mass of any group and head_dim, with logits_soft_cap and scale") {
    for (const std::int32_t group : {1, 3, 5, 12}) {
        check_mass<bf16>({.length = 200, .kv_heads = 2, .group = group, .dim = 64, .options = options_of(5)});
    }
    for (const std::int32_t dim : {8, 40, 72, 80, 96, 136, 192, 256, 264}) {
        check_mass<bf16>({.length = 300, .group = 2, .dim = dim, .options = options_of(5, 2.0f)});
        check_mass<fp16>({.length = 300,
                          .group = 2,
                          .dim = dim,
                          .options = options_of(5),
                          .logits_soft_cap = 5.0f,
                          .spread = 2.0f});
    }
    check_mass<bf16>({.length = 300, .dim = 128, .options = options_of(5), .scale = -0.2f});
    check_mass<bf16>(
        {.length = 300, .dim = 128, .options = options_of(5, 2.0f), .logits_soft_cap = 30.0f, .scale = 0.3f});
    check_mass<float>(
        {.length = 150, .group = 2, .dim = 40, .options = options_of(5, 3.0f), .logits_soft_cap = 5.0f});
}

TEST_CASE("future mass where exponentials leave fp32") {
    for (const float beta : betas) {
        for (const Lse lse : {Lse::sparse, Lse::far_below, Lse::partly_nothing, Lse::nothing}) {
            for (const float epsilon : {1e-8f, 1e-30f, 0.0f}) {
                MassCase c{.length = 310,
                           .kv_heads = 2,
                           .group = 2,
                           .dim = 128,
                           .options = options_of(9, beta),
                           .lse = lse,
                           .spread = 1.5f};
                c.options.epsilon = epsilon;
                check_mass<bf16>(c);
                c.options.aggregate = group_aggregate::mean;
                check_mass<bf16>(c);
            }
        }
        for (const float epsilon : {1e-8f, 0.0f}) {
            // Masses of e^-1e5 are 0 to the host, which leaves the logarithm at its end; the tensor kernels'
            // own are compared where epsilon hides them.
            MassCase c{
                .length = 290, .group = 2, .dim = 64, .options = options_of(9, beta), .logits = Logits::huge};
            c.options.epsilon = std::max(epsilon, 1e-20f);
            check_mass<bf16>(c);
        }
    }
    check_mass<fp16>(
        {.length = 290, .group = 2, .dim = 128, .options = options_of(9), .logits = Logits::huge});
}

TEST_CASE("normalizers of logits that grow along the sequence, and of some that fall") {
    for (const std::int32_t dim : {64, 128, 256}) {
        for (const float most : {30.0f, 60.0f, 90.0f, 400.0f, -90.0f, -400.0f}) {
            MassCase c{.length = 700, .group = 2, .dim = dim, .options = options_of(9), .slope = most};
            MassTest<bf16> test(c);
            for (const qk_reduce_path path : {qk_reduce_path::portable, qk_reduce_path::hopper}) {
                test.check(path);
            }
        }
    }
}

// These have a kernel of their own on Hopper.
TEST_CASE("normalizers of long sequences, one of them with logits that grow") {
    for (const float most : {0.0f, 400.0f}) {
        MassCase c{.length = 8200, .dim = 128, .options = options_of(9), .slope = most};
        c.lengths = {8191};
        MassTest<bf16>(c).check(qk_reduce_path::hopper);
    }
}

// Some exponentials go by a polynomial that would make a number of it.
TEST_CASE("a key that is not a number reaches every normalizer that sees it") {
    const auto check = [](qk_reduce_path path, std::int32_t length, std::int32_t dim, std::int32_t spoilt) {
        std::mt19937 generator(7);
        Tensor<bf16> q(1, 1, length, dim), k(1, 1, length, dim);
        q.fill_normal(generator, 1.0f);
        k.fill_normal(generator, 1.0f);
        std::fill_n(k.data.begin() + static_cast<std::ptrdiff_t>(spoilt) * dim, dim,
                    bf16(std::numeric_limits<float>::quiet_NaN()));
        const Device<bf16> q_there(q.data), k_there(k.data);
        const Device<float> lse(std::vector<float>(static_cast<std::size_t>(length), -77.0f));
        const auto of_q = view_bhsd<const bf16>(q_there.data(), 1, 1, length, dim);
        const auto of_k = view_bhsd<const bf16>(k_there.data(), 1, 1, length, dim);
        const kvpolicy::cuda ctx{};
        const Device<unsigned char> workspace(future_mass_workspace_bytes<bf16>(ctx, of_q, of_k));
        cuda_backend::causal_lse_by<bf16>(ctx, path, {}, of_q, of_k, {.batch = 1, .length = length},
                                          view_bhs(lse.data(), 1, 1, length), workspace);
        const std::vector<float> got = lse.read();
        std::int32_t wrong = 0;
        for (std::int32_t i = 0; i < length; ++i) {
            const float x = got[static_cast<std::size_t>(i)];
            wrong += i < spoilt ? (x > -100.0f && x < 100.0f && x != -77.0f ? 0 : 1) : (x != x ? 0 : 1);
        }
        CHECK_MESSAGE(wrong == 0, "path ", static_cast<int>(path), ", length ", length, ", head_dim ", dim,
                      ", key ", spoilt, ": ", wrong, " wrong");
    };
    for (const qk_reduce_path path : all_paths) {
        for (const std::int32_t dim : {64, 128, 256}) {
            for (std::int32_t spoilt = 0; spoilt < 16; ++spoilt) {
                check(path, 700, dim, spoilt);
                check(path, 700, dim, 300 + spoilt);
            }
        }
    }
    for (const std::int32_t spoilt : {9, 4000, 4009, 8190}) {
        check(qk_reduce_path::hopper, 8200, 128, spoilt);
    }
}

TEST_CASE("future mass of sequences of different lengths, of strided views, and NaN beyond them") {
    check_mass<bf16>({.batch = 5,
                      .length = 400,
                      .kv_heads = 2,
                      .group = 2,
                      .dim = 128,
                      .options = options_of(30),
                      .lengths = {400, 0, 129, 1, 256}});
    check_mass<bf16>({.batch = 2,
                      .length = 300,
                      .kv_heads = 2,
                      .group = 2,
                      .dim = 80,
                      .options = options_of(30, 2.0f),
                      .lengths = {300, 170},
                      .extra = 8});
    check_mass<bf16>({.batch = 2,
                      .length = 300,
                      .kv_heads = 2,
                      .group = 2,
                      .dim = 128,
                      .options = options_of(30),
                      .lengths = {299, 31},
                      .extra = 3});  // no 16-byte copies
    std::vector<std::int32_t> windows;
    for (std::int32_t h = 0; h < 300; ++h) {
        windows.push_back(1 + h % 90);
    }
    FutureMassOptions options;
    options.window = per_head(windows.data(), 1, 300);
    check_mass<bf16>({.length = 140, .kv_heads = 300, .dim = 64, .options = options});
}

TEST_CASE(
    "future mass of more rows than the GPU takes at once, of which some overflow and some sequences are "
    "short") {
    MassCase c{.batch = 6,
               .length = 600,
               .kv_heads = 30,
               .group = 2,
               .dim = 64,
               .options = options_of(30),
               .lengths = {600, 0, 129, 599, 1, 256}};
    check_mass<bf16>(c);
    c.lse = Lse::far_below;
    c.spread = 1.5f;
    check_mass<bf16>(c);
    c.options = options_of(30, infinity);
    check_mass<bf16>(c);
    c = {.batch = 3,
         .length = 700,
         .kv_heads = 24,
         .group = 1,
         .dim = 128,
         .options = options_of(600, 1.0f, 50)};
    check_mass<fp16>(c);
}

TEST_CASE("future mass gives the same bits every time") {
    MassTest<bf16> test({.batch = 2,
                         .length = 700,
                         .kv_heads = 4,
                         .group = 4,
                         .dim = 128,
                         .options = options_of(64),
                         .lse = Lse::sparse});
    for (const qk_reduce_path path : {qk_reduce_path::portable, qk_reduce_path::hopper}) {
        const std::vector<float> first = test.check(path);
        bool same = true;
        for (int i = 0; i < 100; ++i) {
            const std::vector<float> again = test.check(path, false);
            same = same && std::memcmp(first.data(), again.data(), first.size() * sizeof(float)) == 0;
        }
        CHECK(same);
    }
}

TEST_CASE("future mass on CUDA refuses what the host refuses") {
    const Device<bf16> q(4 * 8 * 16), k(2 * 8 * 16);
    const Device<float> lse(4 * 8), target(2 * 8);
    const kvpolicy::cuda ctx{};
    const Sequences sequences{.batch = 1, .length = 8};
    const Device<unsigned char> memory(4096);
    const auto call = [&](const FutureMassOptions& options, workspace_view provided, std::int32_t dim = 16) {
        future_mass<bf16>(ctx, {}, view_bhsd<const bf16>(q.data(), 1, 4, 8, dim),
                          view_bhsd<const bf16>(k.data(), 1, 2, 8, dim),
                          view_bhs<const float>(lse.data(), 1, 4, 8), sequences,
                          view_bhs(target.data(), 1, 2, 8), provided, options);
    };
    FutureMassOptions options;
    options.beta = 0.5f;
    CHECK_REFUSED(call(options, memory), "beta: 0.5");
    options = {};
    options.window = 0;
    CHECK_REFUSED(call(options, memory), "window: 0");
    options = {};
    options.look_ahead = -1;
    CHECK_REFUSED(call(options, memory), "look_ahead: -1");
    options = {};
    options.epsilon = -1.0f;
    CHECK_REFUSED(call(options, memory), "epsilon: -1");
    CHECK_REFUSED(call({}, workspace_view{}), "workspace.bytes: 0");
    CHECK_REFUSED(call({}, memory, 12), "head_dim: 12");
    CHECK_REFUSED(
        causal_lse<bf16>(ctx, {.logits_soft_cap = -1.0f}, view_bhsd<const bf16>(q.data(), 1, 4, 8, 16),
                         view_bhsd<const bf16>(k.data(), 1, 2, 8, 16), sequences,
                         view_bhs(lse.data(), 1, 4, 8), memory),
        "logits_soft_cap");
    CHECK_REFUSED(causal_lse<bf16>(ctx, {}, view_bhsd<const bf16>(q.data(), 1, 4, 8, 16),
                                   view_bhsd<const bf16>(nullptr, 1, 2, 8, 16), sequences,
                                   view_bhs(lse.data(), 1, 4, 8), memory),
                  "k: null");
}
