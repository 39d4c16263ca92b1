// Bad input to attend gets a sentence, before anything is written.
#include "../../support/refusal.hpp"
#include "attention_reference.hpp"

using namespace attention_test;

namespace {

struct Call {
    Problem<float> problem{Shape{2, 2, 3, 8, 8, 64, 64}, 1};
    host ctx{1};
    kvpolicy::kv_view<float> all = problem.key_views();
    rows_view<const float> q = problem.q_view();
    Sequences sequences = problem.sequences();
    Result<float> result{problem.shape};
    rows_view<float> out = result.out_view();
    plane_view<float> lse = result.lse_view();
    AttentionParams attention;
    std::vector<unsigned char> memory =
        std::vector<unsigned char>(attend_workspace_bytes(ctx, attention, q, all, sequences));

    void run() { attend(ctx, attention, q, all, sequences, out, lse, {memory.data(), memory.size()}); }
    void run(const kvpolicy::kv_view<float>& self) {
        attend(ctx, attention, q, all, self, sequences, out, lse, {memory.data(), memory.size()});
    }
    [[nodiscard]] bool untouched() const {
        for (const float x : result.out) {
            if (x != -77.0f) {
                return false;
            }
        }
        for (const float x : result.lse) {
            if (x != -77.0f) {
                return false;
            }
        }
        return true;
    }
};

/// Changes a good call and expects a refusal that names the argument.
template <class Change>
void refused(const char* names, Change&& change) {
    Call call;
    change(call);
    CHECK_REFUSED(call.run(), names);
    CHECK(call.untouched());
}

}  // namespace

TEST_CASE("the good call is taken") {
    Call call;
    call.run();
    check(call.problem, call.result);
}

TEST_CASE("shapes that disagree") {
    refused("q.heads: 5", [](Call& c) { c.q.heads = 5; });
    refused("keys.v", [](Call& c) { c.all.v.length = 7; });
    refused("keys.v", [](Call& c) { c.all.v.heads = 1; });
    refused("keys.k", [](Call& c) { c.all.k.batch = 1; });
    refused("keys.k.dim", [](Call& c) { c.all.k.dim = 72; });
    refused("keys.mask.expiry", [](Call& c) {
        static const expiry_t expiry[1] = {never};
        c.all.mask.expiry = view_bhs<const expiry_t>(expiry, 1, 1, 1);
    });
    refused("keys.mask.log_bias", [](Call& c) {
        static const float bias[1] = {0.0f};
        c.all.mask.log_bias = view_bhs<const float>(bias, 2, 2, 7);
    });
    refused("keys.position", [](Call& c) {
        static const std::int32_t position[1] = {0};
        c.all.position = view_bhs<const std::int32_t>(position, 2, 1, 8);
    });
    refused("out", [](Call& c) { c.out.length = 9; });
    refused("out.dim", [](Call& c) { c.out.dim = 32; });
    refused("lse", [](Call& c) { c.lse.heads = 2; });
    refused("sequences.batch", [](Call& c) { c.sequences.batch = 3; });
}

TEST_CASE("head dimensions without a body") {
    for (const std::int32_t dim : {65, 4, 0, 1032}) {
        refused("q.dim", [&](Call& c) { c.q.dim = c.all.k.dim = dim; });
        refused("head_dim", [&](Call& c) { c.q.dim = c.all.k.dim = dim; });
        refused("v.dim", [&](Call& c) { c.all.v.dim = c.out.dim = dim; });
    }
}

TEST_CASE("lengths, starts and segments") {
    static std::int32_t lengths[2] = {8, -1};
    refused("sequences.lengths[1]: -1", [](Call& c) { c.sequences.lengths = lengths; });
    static std::int32_t longer[2] = {9, 8};
    refused("sequences.lengths[0]: 9", [](Call& c) { c.sequences.lengths = longer; });
    refused("sequences.length", [](Call& c) { c.sequences.length = 9; });
    refused("sequences.length", [](Call& c) { c.sequences.length = -1; });
    static std::int32_t starts[2] = {0, std::numeric_limits<std::int32_t>::max()};
    refused("sequences.starts[1]", [](Call& c) { c.sequences.starts = starts; });
    refused("keys.first", [](Call& c) { c.all.first = std::numeric_limits<std::int32_t>::min(); });
    refused("keys.lengths[1]", [](Call& c) { c.all.lengths = lengths; });
    static std::int32_t edges[3] = {0, 5, 7};
    refused("cu_seqlens", [](Call& c) { c.sequences.cu_seqlens = edges, c.sequences.segments = 2; });
    static std::int32_t good_edges[3] = {0, 5, 8};
    static std::int32_t zeros[2] = {0, 0};
    refused("sequences.starts", [](Call& c) {
        c.sequences.cu_seqlens = good_edges, c.sequences.segments = 2;
        c.sequences.starts = zeros;
    });
}

TEST_CASE("lengths whose positions 31 bits do not hold") {
    const host ctx(1);
    constexpr std::int32_t most = 1 << 30;
    const auto bytes = [&](std::int32_t queries, std::int32_t rows) {
        const rows_view<const float> q{nullptr, 0, 2, queries, 8, 0, 0, 0},
            k{nullptr, 0, 1, rows, 8, 0, 0, 0};
        const kv_view all{k, k};
        const Sequences sequences{.batch = 0, .length = queries};
        static_cast<void>(attend_backward_workspace_bytes<float>(ctx, {}, q, all, sequences));
        static_cast<void>(attend_workspace_bytes<float>(ctx, {}, q, all, sequences));
    };
    bytes(most, most);
    CHECK_REFUSED(bytes(most + 1, most),
                  "sequences.length: 1073741825 is not allowed; it must be at most 2^30");
    CHECK_REFUSED(bytes(most, std::numeric_limits<std::int32_t>::max()), "keys.k.length: 2147483647");
}

TEST_CASE("numbers, memory and null pointers") {
    refused("attention.sm_scale",
            [](Call& c) { c.attention.sm_scale = std::numeric_limits<float>::quiet_NaN(); });
    refused("attention.sm_scale",
            [](Call& c) { c.attention.sm_scale = std::numeric_limits<float>::infinity(); });
    refused("attention.logits_soft_cap", [](Call& c) { c.attention.logits_soft_cap = -1.0f; });
    static const float bias[32] = {};
    static const std::int32_t bias_from[2] = {0, -4};
    refused("bias_from[1]: -4", [](Call& c) {
        c.all.mask.log_bias = view_bhs<const float>(bias, 2, 2, 8);
        c.all.mask.bias_from = bias_from;
    });
    refused("workspace.bytes", [](Call& c) { c.memory.pop_back(); });
    refused("q: null", [](Call& c) { c.q.data = nullptr; });
    refused("keys.k: null", [](Call& c) { c.all.k.data = nullptr; });
    refused("keys.v: null", [](Call& c) { c.all.v.data = nullptr; });
    refused("out: null", [](Call& c) { c.out.data = nullptr; });
}

TEST_CASE("results that many would write to; inputs that many read are fine") {
    refused("out: a batch stride of 0", [](Call& c) { c.out.batch_stride = 0; });
    refused("out: a head stride of 0", [](Call& c) { c.out.head_stride = 0; });
    refused("out: a row stride of 0", [](Call& c) { c.out.row_stride = 0; });
    refused("lse: a batch stride of 0", [](Call& c) { c.lse.batch_stride = 0; });
    refused("lse: a head stride of 0", [](Call& c) { c.lse.head_stride = 0; });
    // One KV head's keys for both, one sequence's queries for both: as if they were there twice.
    Call wanted, call;
    Problem<float>& p = wanted.problem;
    for (std::vector<float>* rows : {&p.k, &p.v}) {
        for (std::ptrdiff_t half = 0; half < 4; half += 2) {
            std::copy_n(rows->begin() + half * 8 * 64, 8 * 64, rows->begin() + (half + 1) * 8 * 64);
        }
    }
    std::copy_n(p.q.begin(), p.q.size() / 2, p.q.begin() + static_cast<std::ptrdiff_t>(p.q.size() / 2));
    wanted.run();
    call.all.k.head_stride = call.all.v.head_stride = call.q.batch_stride = 0;
    call.run();
    CHECK(call.result.out == wanted.result.out);
    CHECK(call.result.lse == wanted.result.lse);
}

TEST_CASE("the two segments of a chunk") {
    const auto refused_self = [](const char* names, auto&& change) {
        Call call;
        kvpolicy::kv_view<float> self = call.problem.key_views();
        change(call, self);
        CHECK_REFUSED(call.run(self), names);
        CHECK(call.untouched());
    };
    refused_self("self.k.length",
                 [](Call&, kvpolicy::kv_view<float>& self) { self.k.length = self.v.length = 7; });
    refused_self("self.first", [](Call&, kvpolicy::kv_view<float>& self) { self.first = 3; });
    static std::int32_t counts[2] = {8, 8};
    refused_self("self.lengths", [](Call&, kvpolicy::kv_view<float>& self) { self.lengths = counts; });
    refused_self("self.k.heads",
                 [](Call&, kvpolicy::kv_view<float>& self) { self.k.heads = self.v.heads = 1; });
    static std::int32_t edges[2] = {0, 8};
    refused_self("cu_seqlens", [](Call& c, kvpolicy::kv_view<float>&) {
        c.sequences.cu_seqlens = edges, c.sequences.segments = 1;
    });
}
