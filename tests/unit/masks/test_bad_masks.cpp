// What the mask builders refuse, in one sentence and before anything is written; and what they
// take that looks odd.
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/cases.hpp"
#include "support/refusal.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <utility>

using namespace kvpolicy;

namespace {

using P = Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>;
P policy(std::int32_t s = 1, std::int32_t w = 2, std::int32_t k = 3, float log_gamma = 0.0f,
         std::int32_t n = 1) {
    return P{Sink<>{s}, Window<>{w}, TopKBudget<>{k}, Decay<dynamic>{log_gamma, n}};
}

/// A call with good arguments; tests spoil one of them.
struct Call {
    static constexpr std::int32_t batch = 2, heads = 3, length = 12;
    const host ctx{1};
    P head_params = policy();
    test::Plane<float> score_memory{batch, heads, length, 0.5f};
    test::Plane<expiry_t> expiry_memory{batch, heads, length, -77};
    test::Plane<std::int32_t> rank_memory{batch, heads, length, -77},
        cutoff_memory{batch, heads, length, -77};
    plane_view<const float> scores = std::as_const(score_memory).view();
    plane_view<expiry_t> expiry = expiry_memory.view();
    plane_view<std::int32_t> rank = rank_memory.view(), cutoff = cutoff_memory.view();
    Sequences sequences{.batch = batch, .length = length};
    MaskOptions options;
    std::vector<unsigned char> memory = std::vector<unsigned char>(100000);
    workspace_view workspace{memory.data(), memory.size()};
    std::uint32_t status[batch] = {8, 8};
    // With a status, the host reports lengths, edges and NaN scores as a device does, in place of a refusal.
    bool with_status = true;

    void build() {
        MaskOptions all = options;
        all.status = with_status ? status : nullptr;
        build_mask(ctx, head_params, scores, sequences, expiry, workspace, all);
    }
    void cutoffs() {
        build_cutoffs(ctx, head_params, scores, sequences, rank, cutoff, workspace,
                      {.layer = options.layer,
                       .nan_ranks_last = options.nan_ranks_last,
                       .status = with_status ? status : nullptr});
    }
    void convert() {
        expiry_from_cutoffs(ctx, head_params, plane_view<const std::int32_t>(rank),
                            plane_view<const std::int32_t>(cutoff), sequences, expiry, {},
                            {.layer = options.layer});
    }
    [[nodiscard]] bool untouched() const {
        const auto still = [](const auto& data) {
            return std::all_of(data.begin(), data.end(), [](auto x) { return x == -77; });
        };
        return still(expiry_memory.data) && still(rank_memory.data) && still(cutoff_memory.data) &&
               status[0] == 8 && status[1] == 8;
    }
};

template <class Spoil>
void check_both(const std::string& text, Spoil&& spoil) {
    Call call;
    spoil(call);
    CHECK_REFUSED(call.build(), text);
    CHECK_REFUSED(call.cutoffs(), text);
    CHECK(call.untouched());
}

constexpr float quiet_nan = std::numeric_limits<float>::quiet_NaN();

}  // namespace

TEST_CASE("numbers that no policy can have, of the layer that is asked for") {
    check_both("sinks of layer 0, head 0: -1 is not allowed; it must be 0 or more",
               [](Call& c) { c.head_params = policy(-1); });
    check_both("window of layer 0, head 0: 0 is not allowed; it must be 1 or more",
               [](Call& c) { c.head_params = policy(1, 0); });
    check_both("budget k of layer 0, head 0: -2", [](Call& c) { c.head_params = policy(1, 2, -2); });
    check_both("log gamma of layer 0, head 0: 0.25 is not allowed; it must be finite and at most 0",
               [](Call& c) { c.head_params = policy(1, 2, 3, 0.25f); });
    check_both("log gamma of layer 0, head 0", [](Call& c) { c.head_params = policy(1, 2, 3, quiet_nan); });
    check_both("decay step n of layer 0, head 0: 0",
               [](Call& c) { c.head_params = policy(1, 2, 3, 0.0f, 0); });
    check_both("layer: -1 is not allowed; it must be 0 or more", [](Call& c) { c.options.layer = -1; });

    static constexpr std::int32_t windows[] = {1, 2, 3, 4, 5, 0, 7, 8, -9};  // [3 layers, 3 heads]
    const auto per_layer = [](Call& c) {
        c.head_params =
            P{Sink<>{1}, Window<>{per_head(windows, 3, 3)}, TopKBudget<>{3}, Decay<dynamic>{0.0f, 1}};
    };
    check_both("window of layer 2, head 2: -9", [&](Call& c) {
        per_layer(c);
        c.options.layer = 2;
    });
    check_both("window of layer 1, head 2: 0", [&](Call& c) {
        per_layer(c);
        c.options.layer = 1;
    });
    check_both("array of windows: 3 layers x 3 heads is not allowed; it must be 1 or at least 4 layers",
               [&](Call& c) {
                   per_layer(c);
                   c.options.layer = 3;
               });
    check_both("layer: 2147483647 is not allowed; it must be 0 or more", [&](Call& c) {
        per_layer(c);
        c.options.layer = std::numeric_limits<std::int32_t>::max();
    });
    Call good;  // another layer's numbers do not matter
    per_layer(good);
    good.build();
    CHECK(good.expiry_memory.at(1, 2, 0) == never);

    Call gate;
    const Policy<Window<2>, ThresholdGate<above>> open{{}, ThresholdGate<above>{quiet_nan}};
    CHECK_REFUSED(build_mask(gate.ctx, open, gate.scores, gate.sequences, gate.expiry, gate.workspace),
                  "tau of layer 0, head 0");
}

TEST_CASE("lifetimes that many would write to") {
    const auto refused = [](const std::string& text, auto&& spoil) {
        Call call;
        spoil(call);
        CHECK_REFUSED(call.build(), text);
        CHECK(call.untouched());
    };
    refused("expiry: a head stride of 0 is not allowed", [](Call& c) { c.expiry.head_stride = 0; });
    refused("expiry: a batch stride of 0 is not allowed", [](Call& c) { c.expiry.batch_stride = 0; });
    Call shared;  // scores may be many heads'
    shared.scores.head_stride = shared.scores.batch_stride = 0;
    shared.build();
    CHECK(shared.expiry_memory.at(1, 2, 5) == shared.expiry_memory.at(0, 0, 5));
}

TEST_CASE("shapes, lengths and packed edges") {
    check_both("sequences.batch: 1 is not allowed; it must be the views' batch, 2",
               [](Call& c) { c.sequences.batch = 1; });
    check_both("sequences.length: 13 is not allowed; it must be 0 to the views' length, 12",
               [](Call& c) { c.sequences.length = 13; });
    check_both("sequences.length: -1 is not allowed; it must be 0 to the views' length, 12 (it was not set)",
               [](Call& c) { c.sequences.length = -1; });
    // A mask begins at position 0: a chunk's start would have to move sinks and windows.
    static constexpr std::int32_t later[] = {0, 4};
    check_both("sequences.starts: given is not allowed; it must be null",
               [](Call& c) { c.sequences.starts = later; });
    Call chunk;
    chunk.sequences.starts = later;
    CHECK_REFUSED(chunk.convert(), "sequences.starts: given");
    CHECK(chunk.untouched());
    static constexpr std::int32_t below[] = {3, -1}, over[] = {13, 1};
    check_both("sequences.lengths[1]: -1 is not allowed; it must be 0 to sequences.length = 12",
               [](Call& c) { c.sequences.lengths = below, c.with_status = false; });
    check_both("sequences.lengths[0]: 13",
               [](Call& c) { c.sequences.lengths = over, c.with_status = false; });
    check_both("scores.data: null is not allowed; it must be fp32 scores",
               [](Call& c) { c.scores.data = nullptr; });
    check_both("scores: 2 x 2 x 12 is not allowed; it must be 2 x 3 x at least 12",
               [](Call& c) { c.scores.heads = 2; });
    check_both("scores: 1 x 3 x 12", [](Call& c) { c.scores.batch = 1; });
    check_both("scores: 2 x 3 x 11", [](Call& c) { c.scores.length = 11; });

    Call call;
    call.with_status = false;
    const auto edges = [&](std::vector<std::int32_t> cu, const std::string& text) {
        call.sequences.cu_seqlens = cu.data();
        call.sequences.segments = static_cast<std::int32_t>(cu.size()) - 1;
        CHECK_REFUSED(call.build(), text);
    };
    edges({0, 5, 3, 12},
          "sequences.cu_seqlens[2]: 3 is not allowed; it must be no less than the edge before it");
    edges({1, 5, 12}, "sequences.cu_seqlens[0]: 1 is not allowed; it must be 0");
    edges({0, 5, 11},
          "sequences.cu_seqlens's last edge: 11 is not allowed; it must be sequences.length = 12");
    edges({0, 5, 13}, "sequences.cu_seqlens's last edge: 13");
    edges({0, -4, 12}, "sequences.cu_seqlens[1]: -4");
    edges({0}, "sequences.segments: 0 is not allowed; it must be 1 or more where cu_seqlens is given");
    CHECK(call.untouched());
}

TEST_CASE("with a status, a length out of range counts as 0, and edges that do not rise leave no tokens") {
    static constexpr std::int32_t over[] = {13, 1}, falling[] = {0, 5, 3, 12};
    Call call;
    call.sequences.lengths = over;
    call.build();
    CHECK(call.status[0] == (8u | status_bad_length));
    CHECK(call.status[1] == 8u);
    CHECK(call.expiry.head(0, 0)[0] == -77);
    CHECK(call.expiry.head(1, 0)[0] != -77);

    Call packed;
    packed.sequences.cu_seqlens = falling;
    packed.sequences.segments = 3;
    packed.build();
    CHECK(packed.status[0] == (8u | status_bad_length));
    CHECK(packed.status[1] == (8u | status_bad_length));
    CHECK(packed.expiry.head(0, 0)[0] == -77);
}

TEST_CASE("null and small outputs, small workspaces, limits of rebasing") {
    Call call;
    call.expiry.data = nullptr;
    CHECK_REFUSED(call.build(), "expiry: null");
    CHECK_REFUSED(call.convert(), "expiry: null");
    call.expiry = call.expiry_memory.view();
    call.rank.data = nullptr;
    CHECK_REFUSED(call.cutoffs(), "rank: null");
    CHECK_REFUSED(call.convert(), "rank: null");
    call.rank = call.rank_memory.view();
    call.cutoff.data = nullptr;
    CHECK_REFUSED(call.cutoffs(), "cutoff: null");
    CHECK_REFUSED(call.convert(), "cutoff: null");
    call.cutoff = call.cutoff_memory.view();
    call.cutoff.length = 11;
    CHECK_REFUSED(call.cutoffs(), "cutoff: 2 x 3 x 11 is not allowed; it must be 2 x 3 x at least 12");
    CHECK_REFUSED(call.convert(), "cutoff: 2 x 3 x 11 is not allowed; it must be 2 x 3 x at least 12");
    call.cutoff = call.cutoff_memory.view();
    call.cutoff.heads = 2;
    CHECK_REFUSED(call.cutoffs(), "cutoff");
    CHECK_REFUSED(call.convert(), "cutoff");
    call.cutoff = call.cutoff_memory.view();
    call.rank.length = 11;
    CHECK_REFUSED(call.convert(), "rank: 2 x 3 x 11 is not allowed");
    call.rank = call.rank_memory.view();

    call.workspace.bytes = build_mask_workspace_bytes(call.ctx, call.head_params, call.sequences, 3) - 1;
    CHECK_REFUSED(call.build(),
                  "workspace.bytes: " + std::to_string(call.workspace.bytes) + " is not allowed");
    call.workspace.bytes = build_cutoffs_workspace_bytes(call.ctx, call.head_params, call.sequences, 3) - 1;
    CHECK_REFUSED(call.cutoffs(), "workspace.bytes: " + std::to_string(call.workspace.bytes));
    call.workspace = {nullptr, 100000};
    CHECK_REFUSED(call.build(), "workspace.data: null");
    CHECK_REFUSED(call.cutoffs(), "workspace.data: null");
    call.workspace = {call.memory.data(), call.memory.size()};

    call.options.rebase_limit = 0;
    CHECK_REFUSED(call.build(), "rebase_limit: 0 is not allowed; it must be 1 to 2^29");
    call.options.rebase_limit = rebase_limit + 1;
    CHECK_REFUSED(call.build(), "rebase_limit: 536870913");
    CHECK(call.untouched());
}

TEST_CASE("cutoffs are for whole sequences and decay step 1") {
    Call call;
    call.head_params = policy(1, 2, 3, -0.1f, 2);
    CHECK_REFUSED(call.cutoffs(), "decay step n: 2 is not allowed; it must be 1");
    call.head_params = policy();
    const std::int32_t edges[] = {0, 12};
    call.sequences.cu_seqlens = edges;
    call.sequences.segments = 1;
    CHECK_REFUSED(call.cutoffs(), "sequences.cu_seqlens: given is not allowed; it must be null");
    CHECK_REFUSED(call.convert(), "sequences.cu_seqlens: given is not allowed; it must be null");
    CHECK(call.untouched());
}

TEST_CASE("a NaN score without a status: refused where it is read, with its place") {
    check_both("scores[1][2][9]: NaN is not allowed; it must be a number", [](Call& c) {
        c.with_status = false;
        c.score_memory.at(1, 2, 9) = quiet_nan;
    });
    check_both("scores[0][1][1]: NaN", [](Call& c) {
        c.with_status = false;
        c.score_memory.at(0, 1, 1) = quiet_nan;
    });
}

TEST_CASE("a NaN score with a status, or on request, ranks last, as on a device") {
    Call call;
    call.score_memory.at(0, 0, 0) = quiet_nan;   // a sink
    call.score_memory.at(0, 1, 10) = quiet_nan;  // never leaves the window
    call.score_memory.at(1, 2, 11) = quiet_nan;
    call.build();
    CHECK(call.status[0] == 8);

    // s = 1, w = 2, k = 3: NaN at 3 has a place while there are free ones and is the first to go.
    Call last;
    last.score_memory.at(1, 0, 3) = quiet_nan;
    last.score_memory.at(1, 0, 5) = quiet_nan;
    last.build();
    const expiry_t* expiry = last.expiry.head(1, 0);
    CHECK(expiry[1] == never);
    CHECK(expiry[2] == never);
    CHECK(expiry[3] == 6);  // when 4 leaves the window: a number beats it
    CHECK(expiry[4] == never);
    CHECK(expiry[5] == 7);  // enters never
    CHECK(last.status[0] == 8);
    CHECK(last.status[1] == (8 | status_nan_score));
    const std::vector<expiry_t> reported_expiry = last.expiry_memory.data;

    // Ranks and cutoffs say the same.
    last.status[1] = 8;
    last.cutoffs();
    CHECK(last.status[0] == 8);
    CHECK(last.status[1] == (8 | status_nan_score));
    CHECK(last.rank_memory.at(1, 0, 3) == 7);  // of the 9 keys that compete the last two, the older first
    CHECK(last.rank_memory.at(1, 0, 5) == 8);
    last.convert();
    CHECK(last.expiry_memory.data == reported_expiry);

    // On request without a status.
    last.with_status = false;
    last.options.nan_ranks_last = true;
    last.build();
    CHECK(last.expiry_memory.data == reported_expiry);
    last.cutoffs();
    CHECK(last.rank_memory.at(1, 0, 5) == 8);

    // A gate is closed to NaN.
    const Policy<Window<2>, ThresholdGate<at_least>> gated{
        {}, ThresholdGate<at_least>{-std::numeric_limits<float>::infinity()}};
    std::uint32_t status[2] = {0, 0};
    MaskOptions reported = last.options;
    reported.status = status;
    build_mask(last.ctx, gated, last.scores, last.sequences, last.expiry, last.workspace, reported);
    CHECK(last.expiry.head(1, 0)[3] == 5);
    CHECK(last.expiry.head(1, 0)[4] == never);
    CHECK(status[0] == 0);
    CHECK(status[1] == status_nan_score);
}

TEST_CASE("sequences of no tokens, and views longer than the sequences") {
    Call call;
    call.sequences.length = 0;
    call.workspace = {};
    call.build();
    CHECK(call.untouched());
    const host ctx(1);
    build_mask(ctx, policy(), {}, {.batch = 0, .length = 0}, {}, {});
    const std::int32_t lengths[] = {0, 5};
    Call some;
    some.sequences.lengths = lengths;
    some.build();
    CHECK(some.expiry_memory.at(1, 0, 4) != -77);
    CHECK(some.expiry_memory.at(1, 0, 5) == -77);
    CHECK(some.expiry_memory.at(0, 0, 0) == -77);
}

TEST_CASE("a workspace is not asked for shapes that cannot be") {
    const std::int32_t budgets[2] = {3, 4};
    const P head_params{Sink<>{1}, Window<>{2}, TopKBudget<>{per_head(budgets, 1, 2)},
                        Decay<dynamic>{0.0f, 1}};
    const host ctx{1};
    CHECK(build_mask_workspace_bytes(ctx, head_params, {1, 12}, 2) > 0);
    CHECK_REFUSED(build_mask_workspace_bytes(ctx, head_params, {1, 12}, 3), "array of budgets");
    CHECK_REFUSED(build_mask_workspace_bytes(ctx, head_params, {1, 12}, -1), "heads");
    CHECK_REFUSED(build_mask_workspace_bytes(ctx, head_params, {-1, 12}, 2), "sequences.batch");
    CHECK_REFUSED(build_mask_workspace_bytes(ctx, head_params, {1, -1}, 2), "sequences.length");
    CHECK_REFUSED(build_cutoffs_workspace_bytes(ctx, head_params, {1, -1}, 2), "sequences.length");
}
