#include "engine.hpp"

#include <kvpolicy/core/types.hpp>

#include "../error.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <initializer_list>
#include <thread>

namespace llama {
namespace {

/// Matrices of one width below each other, on the GPU.
DeviceMatrix upload(DType type, std::initializer_list<const Matrix*> parts) {
    DeviceMatrix all;
    all.type = type;
    std::vector<std::byte> bytes;
    for (const Matrix* part : parts) {
        all.rows += part->rows;
        all.cols = part->cols;
        const auto append = [&](const auto* values, std::size_t count) {
            const auto* const from = reinterpret_cast<const std::byte*>(values);
            bytes.insert(bytes.end(), from, from + count * sizeof *values);
        };
        if (type == DType::f32) {
            append(part->values.data(), part->values.size());
        } else {
            std::vector<kvpolicy::bf16> rounded(part->values.size());
            std::ranges::transform(part->values, rounded.begin(), [](float x) { return kvpolicy::bf16(x); });
            append(rounded.data(), rounded.size());
        }
    }
    all.values = DeviceArray<std::byte>(std::span<const std::byte>(bytes));
    return all;
}

DeviceArray<float> upload(const std::vector<float>& values) {
    return DeviceArray<float>(std::span<const float>(values));
}

std::size_t size(int count, int width) {
    return static_cast<std::size_t>(count) * static_cast<std::size_t>(width);
}

/// Text that the GPU is writing: host memory, -1 where no token is yet.
std::int32_t wait_for(const SharedArray<std::int32_t>& text, std::size_t at, cudaStream_t stream) {
    const volatile std::int32_t* const place = text.data() + at;
    for (;;) {
        if (const std::int32_t token = *place; token != -1) {
            return token;
        }
        const cudaError_t state = cudaStreamQuery(stream);
        if (state != cudaErrorNotReady) {
            ok(state, "decode step");
            if (*place == -1) {
                fail("the GPU has finished its work, but token {} of the text is not there", at);
            }
        }
        std::this_thread::yield();
    }
}

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

DeviceEngine::DeviceEngine(const Model& model, DType weights) : config_(model.config), type_(weights) {
    if (weights != DType::f32 && weights != DType::bf16)
        fail("weights: {} is not allowed on a GPU; it must be F32 or BF16", name_of(weights));
    embedding_ = upload(type_, {&model.embedding});
    if (!config_.tied_embeddings) lm_head_ = upload(type_, {&model.lm_head});
    for (const llama::Layer& layer : model.layers) {
        Layer& made = layers_.emplace_back();
        made.attention_norm = upload(layer.attention_norm);
        made.qkv = upload(type_, {&layer.q, &layer.k, &layer.v});
        made.o = upload(type_, {&layer.o});
        made.mlp_norm = upload(layer.mlp_norm);
        made.gate_up = upload(type_, {&layer.gate, &layer.up});
        made.down = upload(type_, {&layer.down});
    }
    final_norm_ = upload(model.final_norm);
    std::vector<double> frequency;
    for (int i = 0; i < config_.head_dim / 2; ++i)
        frequency.push_back(std::pow(config_.rope_theta, -2.0 * i / config_.head_dim));
    frequency_ = DeviceArray<double>(std::span<const double>(frequency));
    allocate_buffers();
    ok(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // the copies went to another stream
}

void DeviceEngine::allocate_buffers() {
    const Config& c = config_;
    const int all = (c.heads + 2 * c.kv_heads) * c.head_dim;
    const auto bytes = [](int width) { return DeviceArray<std::byte>(size(chunk, width) * sizeof(float)); };
    tokens_ = DeviceArray<std::int32_t>(chunk);
    hidden_ = DeviceArray<float>(size(chunk, c.hidden_size));
    wide_ = DeviceArray<float>(size(chunk, std::max(all, 2 * c.intermediate_size)));
    cos_ = DeviceArray<float>(size(chunk, c.head_dim / 2));
    sin_ = DeviceArray<float>(size(chunk, c.head_dim / 2));
    normed_ = bytes(c.hidden_size);
    inner_ = bytes(c.intermediate_size);
    rows_ = bytes(all);
    attended_ = bytes(c.heads * c.head_dim);
    converted_ = bytes(c.heads * c.head_dim);
    logits_ = DeviceArray<float>(size(1, c.vocab_size));
}

void DeviceEngine::check_tokens(std::span<const std::int32_t> tokens, const char* name) const {
    if (tokens.empty()) fail("{}: 0 tokens are not allowed; there must be 1 or more", name);
    for (std::size_t i = 0; i < tokens.size(); ++i)
        if (tokens[i] < 0 || tokens[i] >= config_.vocab_size)
            fail("{}[{}] is {}, it must be from 0 to {}", name, i, tokens[i], config_.vocab_size - 1);
}

/// `count` tokens through all layers, into hidden_.
void DeviceEngine::layers(const std::int32_t* tokens, int count, DeviceAttention& attention) {
    const Config& c = config_;
    cudaStream_t ctx = stream_.get();
    const DType rows = attention.rows();
    const auto width = static_cast<std::int64_t>(c.heads) * c.head_dim;
    embed(ctx, tokens, count, embedding_.values.data(), type_, c.hidden_size, hidden_.data());
    rope_angles(ctx, attention.length_on_device(), count, frequency_.data(), c.head_dim / 2, cos_.data(),
                sin_.data());
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        const Layer& layer = layers_[i];
        rms_norm(ctx, hidden_.data(), count, c.hidden_size, layer.attention_norm.data(), c.rms_norm_eps,
                 normed_.data(), type_);
        products_.multiply(ctx, normed_.data(), count, layer.qkv, wide_.data());
        rotate(ctx, wide_.data(), count, c.heads, c.kv_heads, c.head_dim, cos_.data(), sin_.data(),
               rows_.data(), rows);
        attention(static_cast<int>(i), count, {normed_.data(), type_}, rows_.data(), attended_.data());
        const std::byte* attended = attended_.data();
        if (rows != type_) {
            convert(ctx, attended_.data(), rows, converted_.data(), type_, count * width);
            attended = converted_.data();
        }
        products_.multiply(ctx, attended, count, layer.o, hidden_.data(), /*add=*/true);
        rms_norm(ctx, hidden_.data(), count, c.hidden_size, layer.mlp_norm.data(), c.rms_norm_eps,
                 normed_.data(), type_);
        products_.multiply(ctx, normed_.data(), count, layer.gate_up, wide_.data());
        swiglu(ctx, wide_.data(), count, c.intermediate_size, inner_.data(), type_);
        products_.multiply(ctx, inner_.data(), count, layer.down, hidden_.data(), /*add=*/true);
    }
    attention.advance(count);
}

/// Logits of `count` tokens of the last layers() call.
void DeviceEngine::logits(int first, int count) {
    const Config& c = config_;
    rms_norm(stream_.get(), hidden_.data() + size(first, c.hidden_size), count, c.hidden_size,
             final_norm_.data(), c.rms_norm_eps, normed_.data(), type_);
    products_.multiply(stream_.get(), normed_.data(), count, c.tied_embeddings ? embedding_ : lm_head_,
                       logits_.data());
}

template <class Done>
void DeviceEngine::chunks(std::span<const std::int32_t> tokens, DeviceAttention& attention,
                          const Done& done) {
    for (std::size_t at = 0; at < tokens.size(); at += chunk) {
        const std::size_t count = std::min<std::size_t>(chunk, tokens.size() - at);
        ok(cudaMemcpyAsync(tokens_.data(), tokens.data() + at, count * sizeof(std::int32_t),
                           cudaMemcpyHostToDevice, stream_.get()),
           "cudaMemcpyAsync");
        layers(tokens_.data(), static_cast<int>(count), attention);
        done(at, count);
    }
}

void DeviceEngine::read(std::span<const std::int32_t> tokens, DeviceAttention& attention) {
    check_tokens(tokens, "tokens");
    chunks(tokens, attention, [](std::size_t, std::size_t) {});
    stream_.wait();
    attention.check();
}

void DeviceEngine::forward(std::span<const std::int32_t> tokens, DeviceAttention& attention,
                           std::span<float> logits_out) {
    check_tokens(tokens, "tokens");
    const auto vocab = static_cast<std::size_t>(config_.vocab_size);
    if (logits_out.size() != tokens.size() * vocab)
        fail("logits: {} numbers are not allowed; there must be {} x {}", logits_out.size(), tokens.size(),
             vocab);
    chunks(tokens, attention, [&](std::size_t at, std::size_t count) {
        if (logits_.size() < count * vocab) logits_ = DeviceArray<float>(count * vocab);
        logits(0, static_cast<int>(count));
        ok(cudaMemcpyAsync(logits_out.data() + at * vocab, logits_.data(), count * vocab * sizeof(float),
                           cudaMemcpyDeviceToHost, stream_.get()),
           "cudaMemcpyAsync");
        stream_.wait();
    });
    attention.check();
}

int DeviceEngine::write(std::span<const std::int32_t> prompt, DeviceAttention& attention,
                        const SamplerOptions& options, int count,
                        const std::function<bool(std::int32_t)>& take, Replay how) {
    check_tokens(prompt, "prompt");
    if (count < 0) fail("count: {} is not allowed; it must be 0 or more", count);
    static_cast<void>(Sampler(options));  // refuses what it refuses
    DeviceSampling sampling{options.temperature, 1, options.top_p};
    if (options.temperature > 0) {
        sampling.top_k =
            options.top_k == 0 ? config_.vocab_size : std::min(options.top_k, config_.vocab_size);
        if (sampling.top_k > max_candidates)
            fail("top_k is {}, on a GPU it must be from 1 to {}", options.top_k, max_candidates);
    }
    if (count == 0) return 0;

    // What a step reads and leaves to the next.
    cudaStream_t ctx = stream_.get();
    SharedArray<std::int32_t> text(static_cast<std::size_t>(count));
    std::fill_n(text.data(), text.size(), -1);
    const MersenneTwister seeded(options.seed);
    const DeviceArray<MersenneTwister> random(std::span<const MersenneTwister>(&seeded, 1));
    const std::int64_t none = 0;
    const DeviceArray<std::int64_t> written(std::span<const std::int64_t>(&none, 1));
    const DeviceArray<std::uint64_t> candidates(
        static_cast<std::size_t>(sampling_capacity(config_.vocab_size, sampling.top_k)));
    const DeviceArray<std::int32_t> token(prompt.last(1));
    ok(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // the copies went to another stream
    const TextState state{token.data(), written.data(), text.data(), count, random.data()};

    const auto begin = Clock::now();
    const auto before = prompt.first(prompt.size() - 1);
    chunks(before, attention, [](std::size_t, std::size_t) {});
    const auto next = [&] {
        layers(token.data(), 1, attention);
        logits(0, 1);
        sample(ctx, logits_.data(), config_.vocab_size, sampling, candidates.data(), state);
    };
    next();
    static_cast<void>(wait_for(text, 0, ctx));
    Graph graph;
    if (how == Replay::graph && count > 1) {
        graph = Graph::capture(ctx, next);
    }
    prompt_seconds_ = seconds_since(begin);

    const auto start = Clock::now();
    constexpr int ahead = 16;  // steps that the GPU may be in front of the reader
    int enqueued = 1, taken = 0;
    while (taken < count) {
        for (; enqueued < count && enqueued < taken + ahead; ++enqueued) {
            if (graph.empty()) {
                next();
            } else {
                graph.launch(ctx);
            }
        }
        const std::int32_t made = wait_for(text, static_cast<std::size_t>(taken), ctx);
        if (made == nan_token) {
            stream_.wait();
            fail("logits of token {} of the text: NaN is not allowed; they must be numbers", taken);
        }
        if (!take(made)) {
            break;
        }
        ++taken;
    }
    stream_.wait();
    tokens_per_second_ = (enqueued - 1) / seconds_since(start);  // those that were not taken, too
    attention.check();
    return taken;
}

}  // namespace llama
