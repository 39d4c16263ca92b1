// The engine's own kernels, as functions that enqueue them. Arrays are device memory, row-major, one row a
// token; activations are fp32 unless a type is named, sums are fp32. All of them overwrite, none waits.
#pragma once

#include "../safetensors.hpp"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace llama {

/// hidden [count, width] = rows `tokens` [count] of the embedding [vocab, width], which is of `type`. Tokens
/// are checked by the caller, or come from the sampler.
void embed(cudaStream_t stream, const std::int32_t* tokens, int count, const void* embedding, DType type,
           int width, float* hidden);

/// out [count, width], of `type`, = x / sqrt(mean(x^2) + eps) * weight
void rms_norm(cudaStream_t stream, const float* x, int count, int width, const float* weight, double eps,
              void* out, DType type);

/// cos and sin [count, half] of position * frequency [half], in double until they are rounded. Row i has
/// position *length + i.
void rope_angles(cudaStream_t stream, const std::int64_t* length, int count, const double* frequency,
                 int half, float* cos, float* sin);

/// out [count, heads + 2 kv_heads, head_dim], of `type`, = qkv with queries and keys turned: element i with
/// element i + head_dim / 2, as Hugging Face lays them out. Values are rounded only.
void rotate(cudaStream_t stream, const float* qkv, int count, int heads, int kv_heads, int head_dim,
            const float* cos, const float* sin, void* out, DType type);

/// out [count, inner], of `type`, = gate * sigmoid(gate) * up, of rows [gate | up]
void swiglu(cudaStream_t stream, const float* gate_up, int count, int inner, void* out, DType type);

/// Rounds or widens `count` numbers.
void convert(cudaStream_t stream, const void* from, DType from_type, void* to, DType to_type,
             std::int64_t count);

// ---- the next token ---------------------------------------------------------------------------------------

/// std::mt19937_64, word by word: a draw makes its own word anew, which gives the same numbers as
/// making all at once.
struct MersenneTwister {
    static constexpr int size = 312;
    std::uint64_t words[size];
    std::int32_t next = 0;

    explicit MersenneTwister(std::uint64_t seed);
};

inline constexpr int max_candidates = 64;  ///< the largest top_k of a GPU's sampler
inline constexpr int candidate_tile = 1024;

struct DeviceSampling {
    double temperature = 0.0;  ///< 0: the largest logit, the smaller id of equals
    int top_k = 1;             ///< 1 to max_candidates
    double top_p = 1.0;
};

/// What takes a token from step to step, in device memory but for `text`.
struct TextState {
    std::int32_t* token = nullptr;    ///< the token that the next step reads
    std::int64_t* written = nullptr;  ///< how many were written
    std::int32_t* text = nullptr;     ///< host memory that a GPU writes to, [capacity]
    std::int64_t capacity = 0;        ///< what comes after that is not written
    MersenneTwister* random = nullptr;
};

/// Written in place of a token whose logits hold a NaN.
inline constexpr std::int32_t nan_token = -2;

/// Picks a token from `logits` [vocab] as Sampler does on the host, and puts it into *token and the text.
/// `candidates` has space for sampling_capacity(vocab, top_k) numbers.
void sample(cudaStream_t stream, const float* logits, int vocab, const DeviceSampling& how,
            std::uint64_t* candidates, const TextState& text);
std::int64_t sampling_capacity(int vocab, int top_k);

}  // namespace llama
