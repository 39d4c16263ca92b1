#include <kvpolicy/core/types.hpp>

#include "device.hpp"
#include "kernels.hpp"

#include <stdexcept>
#include <type_traits>

namespace llama {
namespace {

using kvpolicy::bf16;

constexpr int threads = 256, warps = threads / 32;

template <class T>
struct type_tag {
    using type = T;
};

/// Calls body(type_tag<T>) for the C++ type of `type`.
template <class Body>
void with_type(DType type, const Body& body) {
    switch (type) {
        case DType::f32:
            body(type_tag<float>{});
            break;
        case DType::bf16:
            body(type_tag<bf16>{});
            break;
        default:
            throw std::invalid_argument("type: F16 is not allowed on a GPU; it must be F32 or BF16");
    }
}

unsigned blocks_for(std::int64_t count) { return static_cast<unsigned>((count + threads - 1) / threads); }

__device__ std::int64_t global_thread() { return std::int64_t{blockIdx.x} * threads + threadIdx.x; }

template <class W>
__global__ void embed_kernel(const std::int32_t* tokens, std::int64_t numbers, const W* embedding, int width,
                             float* hidden) {
    const std::int64_t i = global_thread();
    if (i < numbers) {
        hidden[i] = static_cast<float>(embedding[std::int64_t{tokens[i / width]} * width + i % width]);
    }
}

template <class To>
__global__ void __launch_bounds__(threads)
    rms_norm_kernel(const float* x, int width, const float* weight, double eps, To* out) {
    __shared__ float parts[warps];
    const float* const row = x + std::int64_t{blockIdx.x} * width;
    float sum = 0.0f;
    for (int i = static_cast<int>(threadIdx.x); i < width; i += threads) {
        sum += row[i] * row[i];
    }
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
    }
    if (threadIdx.x % 32 == 0) {
        parts[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    sum = 0.0f;
    for (int i = 0; i < warps; ++i) {
        sum += parts[i];
    }
    const auto scale = static_cast<float>(1.0 / sqrt(double{sum} / width + eps));
    for (int i = static_cast<int>(threadIdx.x); i < width; i += threads) {
        out[std::int64_t{blockIdx.x} * width + i] = To(row[i] * scale * weight[i]);
    }
}

__global__ void rope_angles_kernel(const std::int64_t* length, int numbers, const double* frequency, int half,
                                   float* cos_out, float* sin_out) {
    const std::int64_t i = global_thread();
    if (i < numbers) {
        double sine = 0.0, cosine = 0.0;
        sincos(static_cast<double>(*length + i / half) * frequency[i % half], &sine, &cosine);
        cos_out[i] = static_cast<float>(cosine);
        sin_out[i] = static_cast<float>(sine);
    }
}

template <class To>
__global__ void rotate_kernel(const float* qkv, std::int64_t pairs, int rotated, int heads, int half,
                              const float* cos, const float* sin, To* out) {
    const std::int64_t pair = global_thread();
    if (pair >= pairs) {
        return;
    }
    const std::int64_t head = pair / half;  // of all heads of all tokens
    const std::int64_t angle = head / heads * half + pair % half;
    const std::int64_t at = head * 2 * half + pair % half;
    float a = qkv[at], b = qkv[at + half];
    if (head % heads < rotated) {
        const float turned = a * cos[angle] - b * sin[angle];
        b = b * cos[angle] + a * sin[angle];
        a = turned;
    }
    out[at] = To(a);
    out[at + half] = To(b);
}

template <class To>
__global__ void swiglu_kernel(const float* gate_up, std::int64_t numbers, int inner, To* out) {
    const std::int64_t i = global_thread();
    if (i < numbers) {
        const float* const row = gate_up + i / inner * 2 * inner;
        const float gate = row[i % inner];
        out[i] = To(gate * (row[inner + i % inner] / (1.0f + expf(-gate))));
    }
}

template <class From, class To>
__global__ void convert_kernel(const From* from, To* to, std::int64_t count) {
    const std::int64_t i = global_thread();
    if (i < count) {
        to[i] = To(static_cast<float>(from[i]));
    }
}

// ---- the next token ---------------------------------------------------------------------------------------

// A candidate is one number that orders as logits do, ties to the smaller id: the logit's bits in the upper
// half, the id's complement in the lower. 0 is none.
constexpr std::uint64_t nan_candidate = ~std::uint64_t{0};

__device__ std::uint64_t candidate_of(float logit, int id) {
    if (isnan(logit)) {
        return nan_candidate;  // above all others, so that it is found
    }
    const std::uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 is 0
    const std::uint32_t order = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
    return (std::uint64_t{order} << 32) | static_cast<std::uint32_t>(~id);
}
__device__ int id_of(std::uint64_t candidate) {
    return static_cast<int>(~static_cast<std::uint32_t>(candidate));
}
__device__ float logit_of(std::uint64_t candidate) {
    const auto order = static_cast<std::uint32_t>(candidate >> 32);
    return __uint_as_float((order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order);
}

/// The largest number of a block, in all threads. `workspace` is [warps].
__device__ std::uint64_t block_largest(std::uint64_t x, std::uint64_t* workspace) {
    for (int step = 16; step > 0; step /= 2) {
        const std::uint64_t other = __shfl_xor_sync(~0u, x, step);
        x = other > x ? other : x;
    }
    __syncthreads();  // the round before may still read the workspace
    if (threadIdx.x % 32 == 0) {
        workspace[threadIdx.x / 32] = x;
    }
    __syncthreads();
    x = workspace[0];
    for (int i = 1; i < warps; ++i) {
        x = workspace[i] > x ? workspace[i] : x;
    }
    return x;
}

/// The `kept` best of every tile of the logits, best first; 0 where a tile has fewer.
__global__ void __launch_bounds__(threads)
    candidates_kernel(const float* logits, int vocab, int kept, std::uint64_t* candidates) {
    __shared__ std::uint64_t workspace[warps];
    constexpr int each = candidate_tile / threads;
    std::uint64_t mine[each];
    for (int i = 0; i < each; ++i) {
        const int id =
            static_cast<int>(blockIdx.x) * candidate_tile + i * threads + static_cast<int>(threadIdx.x);
        mine[i] = id < vocab ? candidate_of(logits[id], id) : 0;
    }
    for (int round = 0; round < kept; ++round) {
        std::uint64_t best = 0;
        for (int i = 0; i < each; ++i) {
            best = mine[i] > best ? mine[i] : best;
        }
        best = block_largest(best, workspace);
        for (int i = 0; i < each; ++i) {
            mine[i] = mine[i] == best ? 0 : mine[i];
        }
        if (threadIdx.x == 0) {
            candidates[std::int64_t{blockIdx.x} * kept + round] = best;
        }
    }
}

__device__ std::uint64_t draw(MersenneTwister& random) {
    constexpr int n = MersenneTwister::size, m = 156;
    const int i = random.next, after = i + 1 == n ? 0 : i + 1, far = i + m < n ? i + m : i + m - n;
    const std::uint64_t joined =
        (random.words[i] & 0xffffffff80000000u) | (random.words[after] & 0x7fffffffu);
    std::uint64_t x = random.words[far] ^ (joined >> 1) ^ ((joined & 1) != 0 ? 0xb5026f5aa96619e9u : 0);
    random.words[i] = x;
    random.next = after;
    x ^= (x >> 29) & 0x5555555555555555u;
    x ^= (x << 17) & 0x71d67fffeda60000u;
    x ^= (x << 37) & 0xfff7eee000000000u;
    return x ^ (x >> 43);
}

/// Sampler's arithmetic, in its order: `best` are the `count` likeliest candidates, likeliest first.
__device__ int pick(const std::uint64_t* best, int count, const DeviceSampling& how, MersenneTwister& random,
                    double* weights) {
    const float first = logit_of(best[0]);
    double total = 0.0;
    for (int i = 0; i < count; ++i) {
        const float logit = logit_of(best[i]);
        const double below = logit == first ? 0.0 : double{logit} - double{first};
        total += weights[i] = exp(below / how.temperature);
    }
    if (how.top_p < 1.0) {
        const double enough = how.top_p * total;
        int kept = 0;
        for (total = 0.0; kept < count && total < enough; ++kept) {
            total += weights[kept];
        }
        count = kept;
    }
    double left = static_cast<double>(draw(random) >> 11) * 0x1p-53 * total;
    for (int i = 0; i + 1 < count; ++i) {
        left -= weights[i];
        if (left < 0.0) {
            return id_of(best[i]);
        }
    }
    return id_of(best[count - 1]);
}

/// One block: the best of all tiles' candidates, and one of them.
__global__ void __launch_bounds__(threads)
    pick_kernel(std::uint64_t* candidates, int count, DeviceSampling how, TextState text) {
    __shared__ std::uint64_t workspace[warps], best[max_candidates];
    __shared__ double weights[max_candidates];
    int kept = 0;
    for (; kept < how.top_k; ++kept) {
        std::uint64_t mine = 0;
        int at = -1;
        for (int i = static_cast<int>(threadIdx.x); i < count; i += threads) {
            if (candidates[i] > mine) {
                mine = candidates[i];
                at = i;
            }
        }
        const std::uint64_t largest = block_largest(mine, workspace);
        if (largest == 0) {
            break;  // fewer tokens than top_k
        }
        if (mine == largest && at >= 0) {
            candidates[at] = 0;
        }
        if (threadIdx.x == 0) {
            best[kept] = largest;
        }
    }
    if (threadIdx.x != 0) {
        return;
    }
    const bool nan = best[0] == nan_candidate;
    const int token = nan                      ? 0
                      : how.temperature == 0.0 ? id_of(best[0])
                                               : pick(best, kept, how, *text.random, weights);
    *text.token = token;
    const std::int64_t at = (*text.written)++;
    if (at < text.capacity) {
        *static_cast<volatile std::int32_t*>(text.text + at) = nan ? nan_token : token;
    }
}

}  // namespace

void embed(cudaStream_t stream, const std::int32_t* tokens, int count, const void* embedding, DType type,
           int width, float* hidden) {
    const std::int64_t numbers = std::int64_t{count} * width;
    with_type(type, [&](auto tag) {
        using W = typename decltype(tag)::type;
        embed_kernel<<<blocks_for(numbers), threads, 0, stream>>>(
            tokens, numbers, static_cast<const W*>(embedding), width, hidden);
    });
    ok(cudaGetLastError(), "embed_kernel");
}

void rms_norm(cudaStream_t stream, const float* x, int count, int width, const float* weight, double eps,
              void* out, DType type) {
    with_type(type, [&](auto tag) {
        using To = typename decltype(tag)::type;
        rms_norm_kernel<<<static_cast<unsigned>(count), threads, 0, stream>>>(x, width, weight, eps,
                                                                              static_cast<To*>(out));
    });
    ok(cudaGetLastError(), "rms_norm_kernel");
}

void rope_angles(cudaStream_t stream, const std::int64_t* length, int count, const double* frequency,
                 int half, float* cos, float* sin) {
    rope_angles_kernel<<<blocks_for(std::int64_t{count} * half), threads, 0, stream>>>(
        length, count * half, frequency, half, cos, sin);
    ok(cudaGetLastError(), "rope_angles_kernel");
}

void rotate(cudaStream_t stream, const float* qkv, int count, int heads, int kv_heads, int head_dim,
            const float* cos, const float* sin, void* out, DType type) {
    const int all = heads + 2 * kv_heads;
    const std::int64_t pairs = std::int64_t{count} * all * (head_dim / 2);
    with_type(type, [&](auto tag) {
        using To = typename decltype(tag)::type;
        rotate_kernel<<<blocks_for(pairs), threads, 0, stream>>>(
            qkv, pairs, heads + kv_heads, all, head_dim / 2, cos, sin, static_cast<To*>(out));
    });
    ok(cudaGetLastError(), "rotate_kernel");
}

void swiglu(cudaStream_t stream, const float* gate_up, int count, int inner, void* out, DType type) {
    const std::int64_t numbers = std::int64_t{count} * inner;
    with_type(type, [&](auto tag) {
        using To = typename decltype(tag)::type;
        swiglu_kernel<<<blocks_for(numbers), threads, 0, stream>>>(gate_up, numbers, inner,
                                                                   static_cast<To*>(out));
    });
    ok(cudaGetLastError(), "swiglu_kernel");
}

void convert(cudaStream_t stream, const void* from, DType from_type, void* to, DType to_type,
             std::int64_t count) {
    with_type(from_type, [&](auto from_tag) {
        with_type(to_type, [&](auto to_tag) {
            using From = typename decltype(from_tag)::type;
            using To = typename decltype(to_tag)::type;
            convert_kernel<<<blocks_for(count), threads, 0, stream>>>(static_cast<const From*>(from),
                                                                      static_cast<To*>(to), count);
        });
    });
    ok(cudaGetLastError(), "convert_kernel");
}

MersenneTwister::MersenneTwister(std::uint64_t seed) {
    words[0] = seed;
    for (int i = 1; i < size; ++i) {
        words[i] = 6364136223846793005u * (words[i - 1] ^ (words[i - 1] >> 62)) + static_cast<unsigned>(i);
    }
}

std::int64_t sampling_capacity(int vocab, int top_k) {
    return (std::int64_t{vocab} + candidate_tile - 1) / candidate_tile * top_k;
}

void sample(cudaStream_t stream, const float* logits, int vocab, const DeviceSampling& how,
            std::uint64_t* candidates, const TextState& text) {
    const auto tiles = static_cast<unsigned>((vocab + candidate_tile - 1) / candidate_tile);
    candidates_kernel<<<tiles, threads, 0, stream>>>(logits, vocab, how.top_k, candidates);
    ok(cudaGetLastError(), "candidates_kernel");
    pick_kernel<<<1, threads, 0, stream>>>(candidates, static_cast<int>(sampling_capacity(vocab, how.top_k)),
                                           how, text);
    ok(cudaGetLastError(), "pick_kernel");
}

}  // namespace llama
