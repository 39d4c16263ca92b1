// attend_backward in other types and head_dims, what it refuses, and that it repeats itself.
#include "../../support/refusal.hpp"
#include "backward_case.hpp"

#include <cstring>

using namespace backward_test;

namespace {

Case small(const char* name, std::int32_t dim) {
    Case c;
    c.name = name;
    c.queries = c.rows = 230;
    c.group = 3;
    c.kv_heads = 2;
    c.head_dim_qk = c.head_dim_vo = dim;
    c.draw_expiry(40, 300);
    return c;
}

}  // namespace

TEST_CASE("fp16") {
    Case c = small("fp16", 128);
    check_case<fp16>(c);
    c.draw_bias(30);
    check_case<fp16>(c);
}

TEST_CASE("fp64, plain loops") {
    // The lse is fp32 on both sides.
    Case c = small("fp64", 80);
    c.draw_bias(30);
    check_case<double>(c, {1e-12, 1e-13, 1e-12});
}

TEST_CASE("fp32, plain loops") {
    Case c = small("fp32", 80);
    check_case<float>(c);
    c.draw_bias(30);
    c.attention.logits_soft_cap = 4.0f;
    check_case<float>(c);
    c = small("fp32 of several super-tiles", 64);
    c.kv_heads = 1;
    c.queries = c.rows = 1300;
    c.draw_expiry(100, 2000);
    check_case<float>(c);
    // More rows begin in the super-tile than it has queries.
    c = small("fp32, rows that share positions", 24);
    c.rows = 3100;
    c.draw_positions(220);
    check_case<float>(c);
}

TEST_CASE("head_dims up to 256") {
    using Dims = head_dims<256>;
    Case c = small("head_dim 256", 256);
    check_case<bf16, Dims>(c);
    c.attention.logits_soft_cap = 5.0f;
    c.name = "head_dim 256, logits_soft_cap";
    check_case<bf16, Dims>(c);
    c.head_dim_vo = 136;
    c.draw_bias(30);
    c.name = "head_dims 256 and 136, logits_soft_cap and biases";
    check_case<bf16, Dims>(c);
    c.attention.logits_soft_cap = 0.0f;
    c.head_dim_qk = 192;
    c.interleaved = true;
    c.name = "head_dims 192 and 136, biases";
    check_case<bf16, Dims>(c);
    c = small("head_dim 256, two super-tiles", 256);
    c.queries = c.rows = 1300;
    c.kv_heads = 1;
    c.draw_expiry(100, 2000);
    check_case<bf16, Dims>(c);
    c.expiry.clear();
    c.name = "head_dim 256, dense";
    check_case<bf16, Dims>(c);
    for (const std::int32_t queries : {1, 63, 64, 65, 129}) {
        c.queries = c.rows = queries;
        c.name = "head_dim 256, dense, queries " + std::to_string(queries);
        check_case<bf16, Dims>(c);
    }
    c = small("head_dim 256, spoilt keys", 256);
    c.draw_expiry(10, 40);
    for (expiry_t& e : c.expiry) {
        e = e == never ? 30 : e;
    }
    c.spoilt.resize(c.planes());
    for (std::size_t t = 0; t < c.planes(); ++t) {
        c.spoilt[t] = t % 60 == 7 ? 1 : (t % 60 == 41 ? 2 : 0);
    }
    check_case<bf16, Dims>(c);
}

TEST_CASE("deterministic: a hundred times the same bits") {
    Case c = small("repeated", 128);
    c.queries = c.rows = 1500;
    c.draw_expiry(100, 2000);
    c.draw_bias(50);
    Inputs<bf16> in(c);
    static_cast<void>(expected(c, in));
    for (const bool portable : {false, true}) {
        const BackwardOptions options{true, portable};
        const OnDevice<bf16, head_dims<128>> call(c, in);
        const Device<unsigned char> workspace(call.bytes(options));
        Gradients before;
        std::int32_t different = 0;
        for (std::int32_t i = 0; i < 100; ++i) {
            call.run({}, options, workspace);
            const Gradients now = call.read();
            if (i > 0) {
                different +=
                    now.q != before.q || now.k != before.k || now.v != before.v || now.bias != before.bias;
            }
            before = now;
        }
        CHECK_MESSAGE(different == 0, std::string(portable ? "portable: " : ""), different);
    }
}

TEST_CASE("a captured graph serves other lengths") {
    Case c = small("graph", 128);
    c.batch = 2;
    c.lengths = {230, 100};
    c.key_lengths = {230, 230};
    c.expiry.clear();
    c.draw_expiry(40, 300);
    Inputs<bf16> in(c);
    static_cast<void>(expected(c, in));
    const BackwardOptions options{};
    const OnDevice<bf16, head_dims<128>> call(c, in);
    const Device<unsigned char> workspace(call.bytes(options));
    cudaStream_t stream = nullptr;
    test::ok(cudaStreamCreate(&stream));
    const kvpolicy::cuda ctx{stream};
    call.run(ctx, options, workspace);
    test::ok(cudaStreamSynchronize(stream));
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    test::ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    call.run(ctx, options, workspace);
    test::ok(cudaStreamEndCapture(stream, &graph));
    test::ok(cudaGraphInstantiate(&exec, graph, 0));
    c.lengths = {61, 230};
    test::ok(cudaMemcpy(call.lengths.data(), c.lengths.data(), 8, cudaMemcpyHostToDevice));
    const Gradients wanted = expected(c, in);
    test::ok(cudaMemcpy(call.out.memory.data(),
                        Rows<bf16>::spread(c, in.out, c.heads(), c.queries, c.head_dim_vo).data(),
                        call.out.memory.bytes(), cudaMemcpyHostToDevice));
    test::ok(cudaMemcpy(call.lse.data(), in.lse.data(), call.lse.bytes(), cudaMemcpyHostToDevice));
    test::ok(cudaGraphLaunch(exec, stream));
    test::ok(cudaStreamSynchronize(stream));
    const Gradients got = call.read();
    compare("graph, d_k", got.k, wanted.k, tolerance<bf16>(), 1e-4);
    compare("graph, d_v", got.v, wanted.v, tolerance<bf16>(), 1e-4);
    test::ok(cudaGraphExecDestroy(exec));
    test::ok(cudaGraphDestroy(graph));
    test::ok(cudaStreamDestroy(stream));
}

TEST_CASE("lengths that no view holds count as 0 and are reported") {
    Case c = small("lengths", 128);
    c.batch = 3;
    c.lengths = {230, 0, 0};
    c.key_lengths = {230, 230, 0};
    c.expiry.clear();
    c.draw_expiry(40, 300);
    Inputs<bf16> in(c);
    const Gradients wanted = expected(c, in);
    c.lengths = {230, 231, -1};
    c.key_lengths = {230, 230, 1000};
    const OnDevice<bf16, head_dims<128>> call(c, in);
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(3, 0));
    const BackwardOptions options{false, false, status.data()};
    const Device<unsigned char> workspace(call.bytes(options));
    call.run({}, options, workspace);
    const Gradients got = call.read();
    compare("bad lengths, d_q", got.q, wanted.q, tolerance<bf16>(), 1e-4);
    compare("bad lengths, d_k", got.k, wanted.k, tolerance<bf16>(), 1e-4);
    const auto words = status.read();
    CHECK(words[0] == 0);
    CHECK(words[1] == static_cast<std::uint32_t>(status_bad_length));
    CHECK(words[2] == static_cast<std::uint32_t>(status_bad_length));
}

TEST_CASE("fewer keys take no more workspace, none at all included") {
    // Any address stands for a tensor.
    auto* const rows = reinterpret_cast<bf16*>(std::uintptr_t{1} << 20);
    auto* const positions = reinterpret_cast<std::int32_t*>(std::uintptr_t{1} << 20);
    const std::int32_t queries = 100000;
    const auto q = view_bhsd<const bf16>(rows, 1, 2, queries, 64);
    std::size_t before = 0;
    for (const std::int32_t length : {0, 1, 500, 5000, 100000}) {
        kv_view<bf16> all{view_bhsd<const bf16>(rows, 1, 1, length, 64),
                          view_bhsd<const bf16>(rows, 1, 1, length, 64)};
        all.position = view_bhs<const std::int32_t>(positions, 1, 1, length);
        const std::size_t bytes = attend_backward_workspace_bytes<bf16, head_dims<128>>(
            kvpolicy::cuda{}, AttentionParams{}, q, all, {.batch = 1, .length = queries});
        CHECK_MESSAGE(bytes >= before, length);
        before = bytes;
    }
}

TEST_CASE("refusals") {
    Case c = small("refused", 128);
    Inputs<bf16> in(c);
    static_cast<void>(expected(c, in));
    const OnDevice<bf16, head_dims<128>> call(c, in);
    const Device<unsigned char> workspace(call.bytes({}));
    const rows_view<const bf16> q = call.q.view;
    const auto refused = [&](auto&& change, const char* text) {
        kv_view<bf16> all = call.all;
        AttentionParams attention;
        SavedForward<bf16> saved = call.saved;
        AttentionGrads<bf16> grads = call.grads;
        workspace_view memory = workspace;
        change(all, attention, saved, grads, memory);
        const std::string got = test::refusal_of([&] {
            attend_backward<bf16, head_dims<128>>(kvpolicy::cuda{}, attention, q, all, call.sequences, saved,
                                                  grads, memory);
        });
        CHECK_MESSAGE(got.find(text) != std::string::npos, got);
    };
    refused([](auto&, auto&, auto&, auto&, auto& memory) { memory.bytes -= 1; }, "workspace.bytes");
    refused([](auto& all, auto&, auto&, auto&, auto&) { all.k.dim = 120; }, "keys.k.dim");
    refused([](auto& all, auto&, auto&, auto&, auto&) { all.k.row_stride += 1; }, "aligned to 16 bytes");
    refused([](auto&, auto& attention, auto&, auto&, auto&) { attention.logits_soft_cap = -1.0f; },
            "attention.logits_soft_cap");
    refused([](auto&, auto&, auto& saved, auto&, auto&) { saved.lse = {}; }, "lse");
    refused([](auto&, auto&, auto&, auto& grads, auto&) { grads.d_v.heads = 1; }, "d_v");
    CHECK_MESSAGE(test::refusal_of([&] {
                      static_cast<void>(attend_backward_workspace_bytes<bf16, head_dims<64>>(
                          kvpolicy::cuda{}, AttentionParams{}, q, call.all, call.sequences));
                  }).find("head_dim") != std::string::npos,
                  "the head_dim to compile for");
    rows_view<const bf16> many = q;
    many.heads = 2 * 8192;
    CHECK_MESSAGE(test::refusal_of([&] {
                      static_cast<void>(attend_backward_workspace_bytes<bf16, head_dims<128>>(
                          kvpolicy::cuda{}, AttentionParams{}, many, call.all, call.sequences));
                  }).find("8191") != std::string::npos,
                  "query heads a KV head");
}
