// What every CUDA operation promises: errors that say what failed, no hidden work, graphs.
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/refusal.hpp"
#include "../support/mask_check.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

using namespace kvpolicy;
using namespace test;

namespace {

using Budget = Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>;

class Stream {
  public:
    Stream() { ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
    [[nodiscard]] cudaStream_t get() const { return stream_; }

  private:
    cudaStream_t stream_ = nullptr;
};

}  // namespace

TEST_CASE("the context is a plain value that knows its device") {
    static_assert(std::is_trivially_copyable_v<kvpolicy::cuda> && std::is_aggregate_v<kvpolicy::cuda>);
    const Stream stream;
    const kvpolicy::cuda ctx{stream.get()};
    int device = -1;
    ok(cudaGetDevice(&device));
    CHECK(cuda_backend::device_of(ctx) == device);
    CHECK(cuda_backend::device_of(kvpolicy::cuda{}) == device);
    CHECK(cuda_backend::device_of(kvpolicy::cuda{nullptr, 3}) == 3);
    const cuda_backend::device_scope scope(ctx);
    CHECK(scope.capability() >= 80);
}

TEST_CASE("a failed call throws its name, CUDA's text, file and line, and leaves no error behind") {
    try {
        cuda_backend::check(cudaErrorInvalidValue, "cudaSomething");
        FAIL("not thrown");
    } catch (const cuda_error& error) {
        const std::string text = error.what();
        CAPTURE(text);
        CHECK(text.find("cudaSomething failed: cudaErrorInvalidValue") == 0);
        CHECK(text.find("groundwork.cu:") != std::string::npos);
        CHECK(error.code() == cudaErrorInvalidValue);
        CHECK(error.line() > 0);
    }
    // The second is what relocatable device code reports.
    for (const cudaError_t missing : {cudaErrorNoKernelImageForDevice, cudaErrorSymbolNotFound}) {
        try {
            cuda_backend::check(missing, "a_kernel");
            FAIL("not thrown");
        } catch (const cuda_error& error) {
            const std::string text = error.what();
            CAPTURE(text);
            CHECK(text.find("has no code that runs on the present GPU") != std::string::npos);
        }
    }
    // A failure that CUDA itself reports: more threads than a block can have. More shared memory than any GPU
    // has is refused before.
    const auto launched = [](int threads, std::size_t shared_bytes) {
        using Params = cuda_backend::mask_params<detail::no_gate, detail::keep_set<>>;
        cuda_backend::launch("expire_kernel", cuda_backend::expire_kernel<std::uint16_t, Params>, 1, threads,
                             shared_bytes, kvpolicy::cuda{}, Params{}, cuda_backend::ranking<std::uint16_t>{},
                             cuda_backend::mask_output{});
    };
    try {
        launched(2048, 0);
        FAIL("not thrown");
    } catch (const cuda_error& error) {
        CHECK(std::string(error.what()).find("expire_kernel failed") == 0);
    }
    CHECK_REFUSED(launched(512, std::size_t{1} << 20), "expire_kernel: 1048576");
    CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("bad arguments are refused before anything is enqueued") {
    const Budget policy(Sink<>{4}, Window<>{16}, TopKBudget<>{32}, Decay<dynamic>{0.0f, 1});
    const Device<float> scores(std::vector<float>(2 * 3 * 100, 0.0f));
    const Device<expiry_t> expiry(std::vector<expiry_t>(2 * 3 * 100, untouched));
    Sequences sequences{2, 100};
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> workspace(build_mask_workspace_bytes(ctx, policy, sequences, 3));
    const auto call = [&](const Budget& with, plane_view<const float> in, const Sequences& of,
                          plane_view<expiry_t> out, workspace_view memory, const MaskOptions& options = {}) {
        build_mask(ctx, with, in, of, out, memory, options);
    };
    const auto in = view_bhs<const float>(scores.data(), 2, 3, 100);
    const auto out = view_bhs(expiry.data(), 2, 3, 100);
    CHECK_REFUSED(call(policy, in, sequences, out, {workspace.data(), workspace.bytes() - 1}),
                  "workspace.bytes");
    CHECK_REFUSED(call(policy, in, sequences, out, {}), "workspace.bytes");
    CHECK_REFUSED(call(policy, {}, sequences, out, workspace), "scores");
    CHECK_REFUSED(call(policy, view_bhs<const float>(scores.data(), 2, 2, 100), sequences, out, workspace),
                  "2 x 3");
    CHECK_REFUSED(call(policy, in, {3, 100}, out, workspace), "sequences.batch");
    CHECK_REFUSED(call(policy, in, {2, 101}, out, workspace), "sequences.length");
    CHECK_REFUSED(call(policy, in, {2, -1}, out, workspace), "sequences.length");
    MaskOptions options;
    options.rebase_limit = 0;
    CHECK_REFUSED(call(policy, in, sequences, out, workspace, options), "rebase_limit");
    CHECK_REFUSED(call(Budget(Sink<>{4}, Window<>{0}, TopKBudget<>{32}, Decay<dynamic>{0.0f, 1}), in,
                       sequences, out, workspace),
                  "window of layer 0, head 0");
    CHECK_REFUSED(call(Budget(Sink<>{-1}, Window<>{1}, TopKBudget<>{32}, Decay<dynamic>{0.0f, 1}), in,
                       sequences, out, workspace),
                  "sinks");
    CHECK(expiry.read() == std::vector<expiry_t>(2 * 3 * 100, untouched));
}

TEST_CASE("a workspace is not asked for shapes that cannot be, and no call for grids that do not fit") {
    const std::vector<std::int32_t> budgets{32, 700};
    const Budget policy(Sink<>{4}, Window<>{16}, TopKBudget<>{per_head(budgets.data(), 1, 2)},
                        Decay<dynamic>{0.0f, 1});
    const kvpolicy::cuda ctx{};
    const auto bytes = [&](const Sequences& sequences, std::int32_t heads, std::int32_t layer = 0) {
        MaskOptions options;
        options.layer = layer;
        return build_mask_workspace_bytes(ctx, policy, sequences, heads, options);
    };
    CHECK(bytes({1, 100}, 2) > 0);
    CHECK_REFUSED(bytes({1, 100}, 3), "array of budgets");
    CHECK_REFUSED(bytes({1, 100}, 2, -1), "layer");
    CHECK_REFUSED(bytes({1, 100}, -1), "heads");
    CHECK_REFUSED(bytes({-1, 100}, 2), "sequences.batch");
    CHECK_REFUSED(bytes({1, -1}, 2), "sequences.length");
    CHECK_REFUSED(bytes({1, never}, 2), "sequences.length");
    CHECK_REFUSED(bytes({1 << 30, 1}, 2), "split the batch");
    CHECK_REFUSED(bytes({1 << 14, 1 << 17}, 2), "split the batch");
    Sequences packed{1 << 11, 100};
    const std::int32_t edge = 0;
    packed.cu_seqlens = &edge;  // not read here
    packed.segments = 1 << 20;
    CHECK_REFUSED(bytes(packed, 2), "split the batch");
    packed.segments = 0;
    CHECK_REFUSED(bytes(packed, 2), "sequences.segments");
    CHECK_REFUSED(build_cutoffs_workspace_bytes(ctx, policy, {1, -1}, 2), "sequences.length");
    CHECK_REFUSED(expiry_from_cutoffs_workspace_bytes(ctx, policy, {1, 100}, -1), "heads");
}

TEST_CASE("nothing to do is done") {
    const Budget policy(Sink<>{4}, Window<>{16}, TopKBudget<>{32}, Decay<dynamic>{-0.1f, 1});
    const kvpolicy::cuda ctx{};
    for (const std::int32_t length : {100, 100000}) {
        for (const std::int32_t batch : {0, 2}) {
            const std::int32_t heads = batch == 0 ? 3 : 0;
            const Sequences sequences{batch, length};
            const Device<unsigned char> workspace(build_mask_workspace_bytes(ctx, policy, sequences, heads));
            build_mask(ctx, policy, view_bhs<const float>(nullptr, batch, heads, length), sequences,
                       view_bhs<expiry_t>(nullptr, batch, heads, length), workspace);
            const Device<unsigned char> more(
                build_cutoffs_workspace_bytes<FenwickCutoff>(ctx, policy, sequences, heads));
            build_cutoffs<FenwickCutoff>(ctx, policy, view_bhs<const float>(nullptr, batch, heads, length),
                                         sequences, view_bhs<std::int32_t>(nullptr, batch, heads, length),
                                         view_bhs<std::int32_t>(nullptr, batch, heads, length), more);
            ok(cudaDeviceSynchronize());
        }
    }
}

TEST_CASE("calls are captured in a graph that serves later inputs") {
    const std::vector<std::int32_t> budgets{32, 700};
    for (const std::int32_t length : {3000, 20000}) {
        for (const std::int32_t step : {1, 16}) {
            const Budget policy(Sink<>{4}, Window<>{16}, TopKBudget<>{per_head(budgets.data(), 1, 2)},
                                Decay<dynamic>{-0.01f, step});
            MaskCase input{Plane<float>(1, 2, length), {length}, {0, length / 3, length}, {}};
            const Device<float> scores(input.scores.data.size());
            const Device<expiry_t> expiry(input.scores.data.size());
            const Device<std::int32_t> lengths(input.lengths);
            const Device<std::int32_t> edges(input.cu_seqlens);
            const Device<std::uint32_t> status(std::vector<std::uint32_t>(1, 0));
            const Sequences sequences = input.sequences(lengths.data(), edges.data());
            const Stream stream;
            const kvpolicy::cuda ctx{stream.get()};
            const Device<unsigned char> workspace(build_mask_workspace_bytes(ctx, policy, sequences, 2));
            const auto call = [&] {
                build_mask(ctx, policy, view_bhs<const float>(scores.data(), 1, 2, length), sequences,
                           view_bhs(expiry.data(), 1, 2, length), workspace, {.status = status.data()});
            };
            // Modules load at a kernel's first use, which a capture may not do: run once before, as
            // any engine does.
            ok(cudaMemset(scores.data(), 0, scores.bytes()));
            call();
            ok(cudaStreamSynchronize(stream.get()));

            cudaGraph_t graph = nullptr;
            cudaGraphExec_t ready = nullptr;
            ok(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
            call();
            ok(cudaStreamEndCapture(stream.get(), &graph));
            ok(cudaGraphInstantiate(&ready, graph, 0));
            for (unsigned run = 0; run < 3; ++run) {
                std::mt19937 generator(run);
                fill_scores(input.scores, run == 1 ? Scores::improving : Scores::random, generator);
                input.lengths[0] = run == 2 ? length / 2 : length;  // read from device memory by the replay
                ok(cudaMemcpy(scores.data(), input.scores.data.data(), scores.bytes(),
                              cudaMemcpyHostToDevice));
                ok(cudaMemcpy(lengths.data(), input.lengths.data(), lengths.bytes(), cudaMemcpyHostToDevice));
                ok(cudaMemset(workspace.data(), 0x5a + static_cast<int>(run), workspace.bytes()));
                const std::vector<expiry_t> sentinel(input.scores.data.size(), untouched);
                ok(cudaMemcpy(expiry.data(), sentinel.data(), expiry.bytes(), cudaMemcpyHostToDevice));
                ok(cudaGraphLaunch(ready, stream.get()));
                ok(cudaStreamSynchronize(stream.get()));
                same(expiry.read(), host_mask(policy, input).expiry, length,
                     "replay " + std::to_string(run) + ", length " + std::to_string(length) + ", step " +
                         std::to_string(step));
            }
            ok(cudaGraphExecDestroy(ready));
            ok(cudaGraphDestroy(graph));
        }
    }
}

TEST_CASE("a capture notices a call that waits or allocates") {
    // The test above proves something only if this is so.
    const Stream stream;
    ok(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
    CHECK(cudaStreamSynchronize(stream.get()) != cudaSuccess);
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(stream.get(), &graph) != cudaSuccess);
    static_cast<void>(cudaGetLastError());
    const Stream other;
    ok(cudaStreamBeginCapture(other.get(), cudaStreamCaptureModeGlobal));
    void* memory = nullptr;
    CHECK(cudaMalloc(&memory, 16) != cudaSuccess);
    static_cast<void>(cudaStreamEndCapture(other.get(), &graph));
    static_cast<void>(cudaGetLastError());
}
