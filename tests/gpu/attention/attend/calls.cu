// What surrounds a call on CUDA: graphs that serve other lengths, views of other layouts, workspaces,
// refusals, status.
#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/core/status.hpp>

#include "../../../support/refusal.hpp"
#include "../../support/device.hpp"
#include "attend_case.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

using namespace kvpolicy;
using namespace test;

namespace {

std::vector<bf16> random_values(std::size_t count, unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    std::vector<bf16> values(count);
    for (bf16& x : values) {
        x = bf16(normal(generator));
    }
    return values;
}

/// One sequence batch of head_dim 64, and its outputs.
struct Call {
    static constexpr std::int32_t batch = 2, kv_heads = 2, group = 3, length = 1500, dim = 64;
    Device<bf16> q{random_values(std::size_t{batch} * kv_heads * group * length * dim, 1)};
    Device<bf16> k{random_values(std::size_t{batch} * kv_heads * length * dim, 2)};
    Device<bf16> v{random_values(std::size_t{batch} * kv_heads * length * dim, 3)};
    Device<expiry_t> expiry{policy_lifetimes(std::size_t{batch} * kv_heads, length, 70, 5, 700, 4)};
    Device<std::int32_t> lengths{std::vector<std::int32_t>{length, length}};
    Device<std::uint32_t> status{std::vector<std::uint32_t>{0, 0}};
    Device<bf16> out{std::size_t{batch} * kv_heads * group * length * dim};
    Device<float> lse{std::size_t{batch} * kv_heads * group * length};
    Sequences sequences;
    AttendOptions options;
    kvpolicy::cuda ctx{};

    Call() {
        sequences.batch = batch;
        sequences.length = length;
        sequences.lengths = lengths.data();
        options.status = status.data();
    }
    [[nodiscard]] rows_view<const bf16> q_view() const {
        return view_bhsd<const bf16>(q.data(), batch, kv_heads * group, length, dim);
    }
    [[nodiscard]] kv_view<bf16> all() const {
        mask_view mask;
        mask.expiry = view_bhs<const expiry_t>(expiry.data(), batch, kv_heads, length);
        return {view_bhsd<const bf16>(k.data(), batch, kv_heads, length, dim),
                view_bhsd<const bf16>(v.data(), batch, kv_heads, length, dim), mask};
    }
    [[nodiscard]] std::size_t bytes() const {
        return attend_workspace_bytes<bf16>(ctx, {}, q_view(), all(), sequences, options);
    }
    void run(workspace_view workspace) const {
        attend<bf16>(ctx, {}, q_view(), all(), sequences,
                     view_bhsd(out.data(), batch, kv_heads * group, length, dim),
                     view_bhs(lse.data(), batch, kv_heads * group, length), workspace, options);
    }
    void set_lengths(std::int32_t a, std::int32_t b) const {
        const std::int32_t values[] = {a, b};
        ok(cudaMemcpy(lengths.data(), values, sizeof values, cudaMemcpyHostToDevice));
    }
    void poison() const {
        ok(cudaMemset(out.data(), 0xa5, out.bytes()));
        ok(cudaMemset(lse.data(), 0xa5, lse.bytes()));
    }
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace

TEST_CASE("a graph captured at one length serves others, with the workspace poisoned in between") {
    for (const bool portable : {false, true}) {
        for (const attend_path path : {attend_path::gather, attend_path::scan}) {
            Call call;
            call.options.portable = portable;
            call.options.path = path;
            const Device<unsigned char> workspace(call.bytes());
            call.set_lengths(16, 3);
            call.run(workspace);  // loads the kernels, which a capture may not
            ok(cudaDeviceSynchronize());
            cudaStream_t stream = nullptr;
            ok(cudaStreamCreate(&stream));
            call.ctx = kvpolicy::cuda{stream};
            ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
            call.run(workspace);
            cudaGraph_t graph = nullptr;
            ok(cudaStreamEndCapture(stream, &graph));
            cudaGraphExec_t executable = nullptr;
            ok(cudaGraphInstantiate(&executable, graph, 0));
            for (const auto& [a, b] :
                 {std::pair<std::int32_t, std::int32_t>{64, 700}, {1500, 0}, {1024, 1500}}) {
                call.set_lengths(a, b);
                ok(cudaMemset(workspace.data(), 0xff, workspace.bytes()));
                call.poison();
                ok(cudaGraphLaunch(executable, stream));
                ok(cudaStreamSynchronize(stream));
                const auto out = call.out.read();
                const auto lse = call.lse.read();
                call.ctx = kvpolicy::cuda{};
                call.poison();
                call.run(workspace);
                CHECK(same_bits(call.out.read(), out));
                CHECK(same_bits(call.lse.read(), lse));
                call.ctx = kvpolicy::cuda{stream};
            }
            ok(cudaGraphExecDestroy(executable));
            ok(cudaGraphDestroy(graph));
            ok(cudaStreamDestroy(stream));
        }
    }
}

TEST_CASE(
    "q as a slice of fused rows, K and V as views of one pool: the bits are those of separate tensors") {
    Call call;
    const Device<unsigned char> workspace(call.bytes());
    call.run(workspace);
    const auto wanted = call.out.read();
    // [B, S, Hq q, Hkv k, Hkv v, D]
    constexpr std::int32_t all_heads = Call::kv_heads * (Call::group + 2);
    std::vector<bf16> fused(std::size_t{Call::batch} * Call::length * all_heads * Call::dim);
    const auto q = call.q.read(), k = call.k.read(), v = call.v.read();
    const auto place = [&](const std::vector<bf16>& from, std::int32_t heads, std::int32_t first) {
        for (std::int32_t b = 0; b < Call::batch; ++b) {
            for (std::int32_t h = 0; h < heads; ++h) {
                for (std::int32_t t = 0; t < Call::length; ++t) {
                    std::copy_n(
                        from.begin() + ((std::int64_t{b} * heads + h) * Call::length + t) * Call::dim,
                        Call::dim,
                        fused.begin() +
                            ((std::int64_t{b} * Call::length + t) * all_heads + first + h) * Call::dim);
                }
            }
        }
    };
    place(q, Call::kv_heads * Call::group, 0);
    place(k, Call::kv_heads, Call::kv_heads * Call::group);
    place(v, Call::kv_heads, Call::kv_heads * (Call::group + 1));
    const Device<bf16> pool(fused);
    const auto view = [&](std::int32_t heads, std::int32_t first) {
        const std::int64_t row = std::int64_t{all_heads} * Call::dim;
        return rows_view<const bf16>{pool.data() + first * Call::dim,
                                     Call::batch,
                                     heads,
                                     Call::length,
                                     Call::dim,
                                     row * Call::length,
                                     Call::dim,
                                     row};
    };
    kv_view<bf16> all = call.all();
    all.k = view(Call::kv_heads, Call::kv_heads * Call::group);
    all.v = view(Call::kv_heads, Call::kv_heads * (Call::group + 1));
    call.poison();
    attend<bf16>(
        call.ctx, {}, view(Call::kv_heads * Call::group, 0), all, call.sequences,
        view_bhsd(call.out.data(), Call::batch, Call::kv_heads * Call::group, Call::length, Call::dim),
        view_bhs(call.lse.data(), Call::batch, Call::kv_heads * Call::group, Call::length), workspace);
    CHECK(same_bits(call.out.read(), wanted));
    call.poison();
    attend<bf16>(
        call.ctx, {}, view(Call::kv_heads * Call::group, 0), all, call.sequences,
        view_bhsd(call.out.data(), Call::batch, Call::kv_heads * Call::group, Call::length, Call::dim), {},
        workspace);  // no lse
    CHECK(same_bits(call.out.read(), wanted));
}

TEST_CASE("lengths that cannot be count as 0 and are reported") {
    Call call;
    call.set_lengths(-1, 1501);
    const Device<unsigned char> workspace(call.bytes());
    call.poison();
    call.run(workspace);
    CHECK(call.status.read() == std::vector<std::uint32_t>{status_bad_length, status_bad_length});
    std::vector<bf16> untouched(call.out.size());
    std::memset(untouched.data(), 0xa5, untouched.size() * sizeof(bf16));
    CHECK(same_bits(call.out.read(), untouched));
}

TEST_CASE("a workspace of the longest call serves shorter ones") {
    Call call;
    const std::size_t most = call.bytes();
    for (std::int32_t length = 0; length < Call::length; length += 61) {
        call.sequences.length = length;
        CHECK(call.bytes() <= most);
    }
}

// Sizes alone are asked for, so the views may be of more memory than there is.
TEST_CASE("workspaces do not shrink with more queries, rows, heads or entries") {
    Call call;
    const auto bytes = [&](std::int32_t batch, std::int32_t kv_heads, std::int32_t rows, std::int32_t queries,
                           bool causal) {
        constexpr std::int32_t longest = 40'000;
        const auto q =
            view_bhsd<const bf16>(call.q.data(), batch, kv_heads * Call::group, longest, Call::dim);
        kv_view<bf16> all{view_bhsd<const bf16>(call.k.data(), batch, kv_heads, rows, Call::dim),
                          view_bhsd<const bf16>(call.v.data(), batch, kv_heads, rows, Call::dim),
                          {}};
        all.mask.expiry = view_bhs<const expiry_t>(call.expiry.data(), batch, kv_heads, rows);
        if (!causal) {  // rows in any order
            all.position = view_bhs<const std::int32_t>(call.lengths.data(), batch, kv_heads, rows);
        }
        Sequences sequences;
        sequences.batch = batch;
        sequences.length = queries;
        return attend_workspace_bytes<bf16>(call.ctx, {}, q, all, sequences, call.options);
    };
    for (const bool portable : {false, true}) {
        for (const attend_path path : {attend_path::automatic, attend_path::gather, attend_path::scan}) {
            for (const bool causal : {false, true}) {
                call.options.portable = portable;
                call.options.path = path;
                std::size_t before = 0;
                for (const std::int32_t queries : {0, 1, 63, 64, 399, 400, 401, 1023, 1024, 1025, 4000, 4095,
                                                   4096, 4097, 4500, 8192, 30'000, 33'000, 40'000}) {
                    const std::size_t now = bytes(2, 2, 40'000, queries, causal);
                    CHECK(now >= before);
                    before = now;
                    CHECK(bytes(3, 2, 40'000, queries, causal) >= now);
                    CHECK(bytes(2, 3, 40'000, queries, causal) >= now);
                }
                for (const std::int32_t queries : {700, 5000, 40'000}) {
                    before = 0;
                    for (const std::int32_t rows : {0, 1, 100, 4095, 4096, 40'000, 50'000}) {
                        const std::size_t now =
                            bytes(2, 2, rows, causal ? std::min(queries, rows) : queries, causal);
                        CHECK(now >= before);
                        before = now;
                    }
                }
            }
        }
    }
}

TEST_CASE("refusals: one sentence, before anything runs") {
    Call call;
    const Device<unsigned char> workspace(call.bytes());
    const auto out =
        view_bhsd(call.out.data(), Call::batch, Call::kv_heads * Call::group, Call::length, Call::dim);
    const plane_view<float> lse{};
    const workspace_view provided = workspace;
    CHECK_REFUSED(
        attend<bf16>(call.ctx, {}, call.q_view(), call.all(), call.sequences, out, lse, {provided.data, 8}),
        "workspace.bytes");
    CHECK_REFUSED(
        attend<bf16>(call.ctx, {-1.0f, -2.0f}, call.q_view(), call.all(), call.sequences, out, lse, provided),
        "attention.logits_soft_cap");
    rows_view<const bf16> q = call.q_view();
    q.heads = 5;
    CHECK_REFUSED(attend<bf16>(call.ctx, {}, q, call.all(), call.sequences, out, lse, provided), "q.heads");
    q = call.q_view();
    q.dim = 60;
    CHECK_REFUSED(attend<bf16>(call.ctx, {}, q, call.all(), call.sequences, out, lse, provided), "q.dim");
    q = call.q_view();
    q.data += 1;
    CHECK_REFUSED(attend<bf16>(call.ctx, {}, q, call.all(), call.sequences, out, lse, provided),
                  "aligned to 16 bytes");
    q = call.q_view();
    q.row_stride = 68;
    CHECK_REFUSED(attend<bf16>(call.ctx, {}, q, call.all(), call.sequences, out, lse, provided),
                  "aligned to 16 bytes");
    q = call.q_view();
    q.dim = 264;
    kv_view<bf16> all = call.all();
    all.k.dim = 264;
    CHECK_REFUSED(attend<bf16>(call.ctx, {}, q, all, call.sequences, out, lse, provided), "head_dim");
    Sequences sequences = call.sequences;
    sequences.length = 1501;
    CHECK_REFUSED(attend<bf16>(call.ctx, {}, call.q_view(), call.all(), sequences, out, lse, provided),
                  "sequences.length");
    sequences = call.sequences;
    sequences.cu_seqlens = call.lengths.data();
    CHECK_REFUSED(attend<bf16>(call.ctx, {}, call.q_view(), call.all(), sequences, out, lse, provided),
                  "segments");
    sequences.segments = 1;
    CHECK_REFUSED(
        attend<bf16>(call.ctx, {}, call.q_view(), call.all(), call.all(), sequences, out, lse, provided),
        "cu_seqlens");
}
