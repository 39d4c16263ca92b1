// The bounded caches of benchmarks/baselines/first_token.py, as C functions over plain pointers that ctypes
// calls. A library, not a program: PyTorch has the decoder's matrix products and all memory, so that its
// count of memory is complete.
//
// One sequence of a Qwen3-8B-shaped decoder: 32 query heads, 8 KV heads, head_dim 128, bf16. Every KV head
// keeps 4 sinks, a window of 256 and 3836 top-k keys: 4096 entries.
//
// Functions with a result of int32 return 0, or 1 on an error; those that return a size or a pointer return
// -1 or null. first_token_error() has the message. Calls enqueue work on `stream`, a cudaStream_t; bind also
// waits for it. Pointers are device memory.
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/mlstm.hpp>

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace kvp = kvpolicy;

// Hidden, the library's copy of kvpolicy is its own; these functions are what it shows.
#define SHOWN __attribute__((visibility("default")))

namespace {

using kvp::bf16;
using Dims = kvp::head_dims<128>;
using Scorer = kvp::mLSTMScorer<>;
template <class... ScorerType>
using Bounded = kvp::Policy<kvp::Sink<4>, kvp::Window<256>, kvp::TopKBudget<3836>, ScorerType...>;

constexpr std::int32_t query_heads = 32, heads = 8, dim = 128;

/// One layer's chunk of a prompt.
struct Chunk {
    std::int32_t tokens = 0;
    const bf16* q = nullptr;  // [tokens, query_heads, dim]
    const bf16* k = nullptr;  // [tokens, heads, dim]
    const bf16* v = nullptr;  // [tokens, heads, dim]
    std::int64_t qkv_stride = 0;
    bf16* out = nullptr;  // [tokens, query_heads, dim]
    std::int64_t out_stride = 0;
    const float* scores = nullptr;  // [heads, tokens]
    std::int64_t scores_stride = 0;
};

template <class T>
kvp::rows_view<T> rows_of(T* data, std::int32_t count, std::int32_t tokens, std::int64_t row_stride) {
    return {data, 1, count, tokens, dim, row_stride * tokens, dim, row_stride};
}

class Prompt {
  public:
    Prompt() = default;
    Prompt(const Prompt&) = delete;
    Prompt& operator=(const Prompt&) = delete;
    virtual ~Prompt() = default;
    [[nodiscard]] virtual std::size_t bytes() const = 0;
    [[nodiscard]] virtual std::size_t workspace_bytes(std::int32_t tokens) const = 0;
    virtual void bind(cudaStream_t stream, void* memory, std::size_t bytes) = 0;
    virtual void prefill(cudaStream_t stream, std::int32_t layer, const Chunk& chunk,
                         kvp::workspace_view workspace, std::uint32_t* status) = 0;
    virtual void advance(cudaStream_t stream, std::uint32_t* status) = 0;
    virtual void clear(cudaStream_t stream) = 0;
};

template <class P>
class PromptOf final : public Prompt {
    using scorer_type = typename P::scorer_type;

  public:
    /// `scorers`: one per layer, or none for scores that the caller provides.
    PromptOf(std::int32_t layers, std::int32_t device, std::vector<scorer_type> scorers)
        : device_(device),
          scorers_(std::move(scorers)),
          cache_({.layers = layers,
                  .max_sequences = 1,
                  .query_heads = query_heads,
                  .kv_heads = heads,
                  .head_dim = dim},
                 P{}, scorers_.empty() ? nullptr : scorers_.data()) {}

    [[nodiscard]] std::size_t bytes() const override { return cache_.bytes().total(); }
    [[nodiscard]] std::size_t workspace_bytes(std::int32_t tokens) const override {
        return cache_.template workspace_bytes<Dims>(on(nullptr), {.batch = 1, .tokens = tokens});
    }
    void bind(cudaStream_t stream, void* memory, std::size_t bytes) override {
        cache_.bind(on(stream), memory, bytes);
    }
    void prefill(cudaStream_t stream, std::int32_t layer, const Chunk& chunk, kvp::workspace_view workspace,
                 std::uint32_t* status) override {
        kvp::StepIO<bf16> io{.q = rows_of(chunk.q, query_heads, chunk.tokens, chunk.qkv_stride),
                             .k = rows_of(chunk.k, heads, chunk.tokens, chunk.qkv_stride),
                             .v = rows_of(chunk.v, heads, chunk.tokens, chunk.qkv_stride),
                             .out = rows_of(chunk.out, query_heads, chunk.tokens, chunk.out_stride)};
        if constexpr (scorer_type::when == kvp::score_time::given) {
            io.scores = {chunk.scores,       1, heads, chunk.tokens, chunk.scores_stride * heads,
                         chunk.scores_stride};
        }
        kvp::prefill<Dims>(on(stream), cache_.layer(layer), io, workspace, {.status = status});
    }
    void advance(cudaStream_t stream, std::uint32_t* status) override {
        cache_.advance(on(stream), {}, {.status = status});
    }
    void clear(cudaStream_t stream) override { cache_.clear(on(stream), 0); }

  private:
    [[nodiscard]] kvp::cuda on(cudaStream_t stream) const { return {stream, device_}; }

    std::int32_t device_;
    std::vector<scorer_type> scorers_;
    kvp::FixedBudgetCache<P, bf16> cache_;
};

/// The scorer of one layer, without weights.
Scorer plain_scorer() {
    Scorer scorer{};
    scorer.heads = heads;
    scorer.head_dim_qk = scorer.head_dim_vo = dim;
    return scorer;
}

/// Takes the weights of one scorer from `weights`; returns how many there are.
std::size_t take_weights(Scorer& scorer, const float* weights) {
    std::size_t taken = 0;
    kvp::for_each_parameter(scorer, scorer.weights,
                            [&](const char*, const float*& array, std::size_t count, bool optional) {
                                if (count != 0 && !optional) {
                                    array = weights == nullptr ? nullptr : weights + taken;
                                    taken += count;
                                }
                            });
    return taken;
}

std::unique_ptr<Prompt> prompt_of(std::int32_t layers, std::int32_t device, const float* weights) {
    if (weights == nullptr) {
        return std::make_unique<PromptOf<Bounded<>>>(layers, device, std::vector<kvp::GivenScores>{});
    }
    std::vector<Scorer> scorers;
    for (std::int32_t layer = 0; layer < layers; ++layer) {
        scorers.push_back(plain_scorer());
        weights += take_weights(scorers.back(), weights);
    }
    return std::make_unique<PromptOf<Bounded<Scorer>>>(layers, device, std::move(scorers));
}

std::string& message() {
    thread_local std::string last;
    return last;
}

/// No exception leaves a C function: body()'s result, or `failed` with the message kept.
template <class Result, class Body>
Result answer(Result failed, const Body& body) noexcept {
    try {
        return body();
    } catch (const std::exception& error) {
        message() = error.what();
        return failed;
    }
}
template <class Body>
std::int32_t done(const Body& body) noexcept {
    return answer(std::int32_t{1}, [&] {
        body();
        return std::int32_t{0};
    });
}

}  // namespace

extern "C" {

/// The message of the last call of this thread that failed.
SHOWN const char* first_token_error() { return message().c_str(); }

/// Bytes of the fp32 weights of all layers' scorers.
SHOWN std::int64_t first_token_weight_bytes(std::int32_t layers) {
    Scorer scorer = plain_scorer();
    return static_cast<std::int64_t>(take_weights(scorer, nullptr) * sizeof(float)) * layers;
}

/// A cache of one sequence. `weights`: first_token_weight_bytes of the scorers, which must outlive the cache;
/// null for a cache whose scores every call provides.
SHOWN Prompt* first_token_create(std::int32_t layers, std::int32_t device, const float* weights) {
    return answer(static_cast<Prompt*>(nullptr),
                  [&] { return prompt_of(layers, device, weights).release(); });
}
SHOWN void first_token_destroy(Prompt* prompt) { delete prompt; }

/// Bytes of memory that bind takes.
SHOWN std::int64_t first_token_cache_bytes(const Prompt* prompt) {
    return answer(std::int64_t{-1}, [&] { return static_cast<std::int64_t>(prompt->bytes()); });
}
/// Bytes of workspace for one layer and at most so many tokens.
SHOWN std::int64_t first_token_workspace_bytes(const Prompt* prompt, std::int32_t tokens) {
    return answer(std::int64_t{-1},
                  [&] { return static_cast<std::int64_t>(prompt->workspace_bytes(tokens)); });
}

/// Takes the cache's memory and empties the cache.
SHOWN std::int32_t first_token_bind(Prompt* prompt, void* memory, std::int64_t bytes, void* stream) {
    return done(
        [&] { prompt->bind(static_cast<cudaStream_t>(stream), memory, static_cast<std::size_t>(bytes)); });
}

/// One layer reads `tokens` tokens. q [tokens, 32, 128], k and v [tokens, 8, 128], bf16: tokens qkv_stride
/// elements apart. out [tokens, 32, 128], bf16, is overwritten: tokens out_stride elements apart. scores
/// [8, tokens], fp32, for a cache without a scorer (else null): heads are scores_stride elements apart.
/// status, one word, is OR-ed into.
SHOWN std::int32_t first_token_prefill(Prompt* prompt, std::int32_t layer, std::int32_t tokens, const void* q,
                                       const void* k, const void* v, std::int64_t qkv_stride, void* out,
                                       std::int64_t out_stride, const float* scores,
                                       std::int64_t scores_stride, void* workspace,
                                       std::int64_t workspace_bytes, std::uint32_t* status, void* stream) {
    return done([&] {
        const Chunk chunk{.tokens = tokens,
                          .q = static_cast<const bf16*>(q),
                          .k = static_cast<const bf16*>(k),
                          .v = static_cast<const bf16*>(v),
                          .qkv_stride = qkv_stride,
                          .out = static_cast<bf16*>(out),
                          .out_stride = out_stride,
                          .scores = scores,
                          .scores_stride = scores_stride};
        prompt->prefill(static_cast<cudaStream_t>(stream), layer, chunk,
                        {workspace, static_cast<std::size_t>(workspace_bytes)}, status);
    });
}

/// Counts the tokens that all layers have read. Call it once per chunk, after the last layer.
SHOWN std::int32_t first_token_advance(Prompt* prompt, std::uint32_t* status, void* stream) {
    return done([&] { prompt->advance(static_cast<cudaStream_t>(stream), status); });
}

/// Empties the cache: the next token has position 0.
SHOWN std::int32_t first_token_clear(Prompt* prompt, void* stream) {
    return done([&] { prompt->clear(static_cast<cudaStream_t>(stream)); });
}

}  // extern "C"
