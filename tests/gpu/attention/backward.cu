// attend_backward on the device against the host's in double.
#include "backward_case.hpp"

using namespace backward_test;

namespace {

Case plain(const char* name, std::int32_t queries, std::int32_t group) {
    Case c;
    c.name = name;
    c.queries = c.rows = queries;
    c.group = group;
    return c;
}

}  // namespace

TEST_CASE("one tile, dense") {
    check_case<bf16>(plain("64 queries", 64, 1));
    check_case<bf16>(plain("128 queries", 128, 1));
}

TEST_CASE("dense, lengths that fill no tile") {
    for (const std::int32_t queries : {1, 2, 63, 65, 127, 129, 300}) {
        check_case<bf16>(plain(("queries " + std::to_string(queries)).c_str(), queries, 2));
    }
    check_case<bf16>(plain("two super-tiles", 1500, 1));
}

TEST_CASE("groups of any size") {
    for (const std::int32_t group : {1, 3, 4, 5, 6, 7, 12, 16}) {
        Case c = plain(("group " + std::to_string(group)).c_str(), 200, group);
        c.kv_heads = 2;
        c.draw_expiry(30, 300);
        check_case<bf16>(c);
    }
}

TEST_CASE("lifetimes over several super-tiles") {
    Case c = plain("2300 queries", 2300, 2);
    c.draw_expiry(100, 3000);
    check_case<bf16>(c);
}

TEST_CASE("head_dims") {
    for (const auto& [k, v] :
         {std::pair{64, 64}, {80, 80}, {96, 96}, {8, 8}, {32, 64}, {128, 64}, {72, 120}}) {
        Case c = plain(("head_dim " + std::to_string(k) + " and " + std::to_string(v)).c_str(), 230, 3);
        c.head_dim_qk = k;
        c.head_dim_vo = v;
        c.draw_expiry(30, 300);
        check_case<bf16, head_dims<64, 128>>(c);
    }
}

TEST_CASE("biases") {
    for (const bool gone : {false, true}) {
        for (const std::int32_t from : {0, 1, 50, 1000, std::numeric_limits<std::int32_t>::max()}) {
            Case c = plain(("bias from " + std::to_string(from) + (gone ? ", lifetimes" : ", dense")).c_str(),
                           400, 4);
            c.kv_heads = 2;
            c.draw_bias(from);
            if (gone) {
                c.draw_expiry(60, 300);
            }
            check_case<bf16>(c);
        }
    }
}

TEST_CASE("logits_soft_cap, scale") {
    Case c = plain("logits_soft_cap", 300, 4);
    c.attention.logits_soft_cap = 5.0f;
    c.draw_expiry(60, 300);
    check_case<bf16>(c);
    c.name = "logits_soft_cap and bias";
    c.draw_bias(20);
    check_case<bf16>(c);
    c.name = "scale";
    c.attention = {0.3f, 0.0f};
    check_case<bf16>(c);
}

TEST_CASE("gates, sinks and nothing at all") {
    Case c = plain("all expired at once", 300, 4);
    c.expiry.assign(c.planes(), 0);
    check_case<bf16>(c);
    c.name = "every key for its own query only";
    for (std::size_t i = 0; i < c.planes(); ++i) {
        c.expiry[i] = static_cast<std::int32_t>(i) + 1;
    }
    check_case<bf16>(c);
    c.name = "one key";
    c.expiry.assign(c.planes(), 0);
    c.expiry[17] = never;
    check_case<bf16>(c);
    c.name = "all sinks";
    c.expiry.assign(c.planes(), never);
    check_case<bf16>(c);
    c.name = "window only";
    for (std::size_t i = 0; i < c.planes(); ++i) {
        c.expiry[i] = static_cast<std::int32_t>(i) + 40;
    }
    check_case<bf16>(c);
    c.name = "window beyond the sequence";
    for (std::size_t i = 0; i < c.planes(); ++i) {
        c.expiry[i] = static_cast<std::int32_t>(i) + 4000;
    }
    check_case<bf16>(c);
    c.name = "biases of -inf everywhere";
    c.log_bias.assign(c.planes(), -infinity);
    c.bias_from = {25};
    check_case<bf16>(c);
    c.name = "biases of -100 everywhere";
    c.log_bias.assign(c.planes(), -100.0f);
    check_case<bf16>(c);
}

TEST_CASE("NaN in rows that nobody sees") {
    Case c = plain("NaN", 300, 2);
    c.draw_expiry(30, 200);
    c.edit = [&c](std::vector<double>&, std::vector<double>& k, std::vector<double>& v) {
        for (std::size_t t = 0; t < c.planes(); ++t) {
            if (c.expiry[t] <= static_cast<std::int32_t>(t)) {
                std::fill_n(k.begin() + static_cast<std::ptrdiff_t>(t * 128), 128, std::nan(""));
                std::fill_n(v.begin() + static_cast<std::ptrdiff_t>(t * 128), 128, std::nan(""));
            }
        }
    };
    check_case<bf16>(c);
    c.name = "NaN behind a bias of -inf";
    c.log_bias.assign(c.planes(), -1.0f);
    c.bias_from = {0};
    for (std::size_t t = 0; t < c.planes(); ++t) {
        if (c.expiry[t] <= static_cast<std::int32_t>(t)) {
            c.log_bias[t] = -infinity;
            c.expiry[t] = never;
        }
    }
    c.edit = [&c](std::vector<double>&, std::vector<double>& k, std::vector<double>& v) {
        for (std::size_t t = 0; t < c.planes(); ++t) {
            if (c.log_bias[t] == -infinity) {
                std::fill_n(k.begin() + static_cast<std::ptrdiff_t>(t * 128), 128, std::nan(""));
                std::fill_n(v.begin() + static_cast<std::ptrdiff_t>(t * 128), 128, std::nan(""));
            }
        }
    };
    check_case<bf16>(c);
}

TEST_CASE("NaN in keys and values reaches nobody but those who see them") {
    Case c = plain("spoilt keys", 700, 3);
    c.kv_heads = 2;
    c.draw_expiry(10, 40);
    for (expiry_t& e : c.expiry) {
        e = e == never ? 30 : e;
    }
    c.spoilt.resize(c.planes());
    for (std::size_t t = 0; t < c.planes(); ++t) {
        c.spoilt[t] = t % 60 == 7 ? 1 : (t % 60 == 41 ? 2 : 0);
    }
    check_case<bf16>(c);
    c.name = "spoilt keys, logits_soft_cap and biases";
    c.attention.logits_soft_cap = 5.0f;
    c.draw_bias(5);
    check_case<bf16>(c);
    c = plain("spoilt last keys, dense", 300, 4);
    c.spoilt.resize(c.planes());
    c.spoilt[290] = 1;
    c.spoilt[295] = 2;
    check_case<bf16>(c);
}

TEST_CASE("NaN beyond the lengths of sequences and of keys") {
    for (const std::int32_t group : {4, 3}) {
        Case c = plain(("NaN beyond, group " + std::to_string(group)).c_str(), 200, group);
        c.batch = 3;
        c.kv_heads = 2;
        c.lengths = {200, 37, 0};
        c.key_lengths = {200, 64, 10};
        c.draw_expiry(30, 150);
        c.edit = [&c](std::vector<double>& q, std::vector<double>& k, std::vector<double>& v) {
            const auto spoil = [&c](std::vector<double>& rows, std::int32_t heads,
                                    const std::vector<std::int32_t>& lengths) {
                for (std::size_t i = 0; i < rows.size(); ++i) {
                    const auto row = static_cast<std::int32_t>(i / 128) % 200;
                    const auto b = i / 128 / 200 / static_cast<std::size_t>(heads);
                    rows[i] = row < lengths[b] ? rows[i] : std::nan("");
                }
            };
            spoil(q, c.heads(), c.lengths);
            spoil(k, c.kv_heads, c.key_lengths);
            spoil(v, c.kv_heads, c.key_lengths);
        };
        check_case<bf16>(c);
        c.edit = nullptr;
        c.name = "the same without NaN";
        check_case<bf16>(c);
    }
}

TEST_CASE("logits of 60000") {
    // One column carries the logit, so that products are exact; the sum's fp32 rounding, 2^-8 of a log2,
    // remains. All keys that have a weight are alike in that column, so its d_q is 234 times a sum of
    // gradients that is 0: rounding alone.
    Case c = plain("logits of +-60000", 200, 2);
    c.carrier = 0;
    c.draw_expiry(50, 200);
    c.attention.sm_scale = 1.0f;
    c.edit = [](std::vector<double>& q, std::vector<double>& k, std::vector<double>&) {
        for (std::size_t i = 0; i < q.size(); ++i) {
            q[i] = i % 128 == 0 ? 256.0 : (i % 128 < 9 ? q[i] * 0.25 : 0.0);
        }
        for (std::size_t i = 0; i < k.size(); ++i) {
            k[i] = i % 128 == 0 ? (i / 128 % 3 == 0 ? -234.0 : 234.0) : k[i];
        }
    };
    check_case<bf16>(c, {8e-3});
}

TEST_CASE("frames: starts, first, positions, lengths") {
    Case c = plain("a chunk behind its cache", 150, 3);
    c.batch = 2;
    c.rows = 420;
    c.starts = {270, 100};
    check_case<bf16>(c);
    c.name = "with lifetimes";
    c.draw_expiry(60, 400);
    check_case<bf16>(c);
    c.name = "two lengths";
    c.lengths = {150, 37};
    c.key_lengths = {420, 222};
    check_case<bf16>(c);
    c.name = "two lengths, dense";
    c.expiry.clear();
    check_case<bf16>(c);
    c.name = "nothing in one sequence";
    c.lengths = {0, 150};
    c.key_lengths = {420, 0};
    check_case<bf16>(c);
    c.name = "first";
    c.lengths.clear();
    c.key_lengths.clear();
    c.first = 60;
    check_case<bf16>(c);
    c.name = "keys as early and queries as late as can be";
    c.first = -(1 << 30);
    c.starts = {1 << 30, (1 << 30) - 1};
    check_case<bf16>(c);
    c.starts = {270, 100};
    c.name = "positions in any order";
    c.first = 0;
    c.position.resize(c.planes());
    std::mt19937 generator(5);
    for (std::size_t i = 0; i < c.position.size(); ++i) {
        c.position[i] = static_cast<std::int32_t>(generator() % 430);
    }
    c.draw_expiry(200, 500);
    check_case<bf16>(c);
}

TEST_CASE("more rows that begin in a super-tile than it has queries") {
    Case c = plain("rows that share positions", 1100, 1);
    c.kv_heads = 2;
    c.rows = 3100;
    c.draw_positions(1080);
    check_case<bf16>(c);
    c.name = "rows that share positions, biases";
    c.draw_bias(30);
    check_case<bf16>(c);
}

TEST_CASE("packed segments") {
    Case c = plain("packed, dense", 500, 2);
    c.edges = {0, 130, 131, 400, 400, 500};
    check_case<bf16>(c);
    c.name = "packed, lifetimes and biases";
    c.draw_expiry(60, 300);
    c.draw_bias(30);
    check_case<bf16>(c);
}

TEST_CASE("strides") {
    Case c = plain("rows of interleaved heads with gaps", 300, 3);
    c.batch = 2;
    c.kv_heads = 2;
    c.interleaved = true;
    c.draw_expiry(60, 300);
    check_case<bf16>(c);
}
