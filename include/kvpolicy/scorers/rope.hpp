// Rotary position embeddings, to be undone: scorers that look at keys before RoPE get them from
// the stored ones.
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/types.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace kvpolicy {

/// Which numbers of a key are rotated together.
enum class rope_layout : std::uint8_t {
    none,         ///< keys are stored as they were before RoPE, or the model has none
    interleaved,  ///< pair i is (x[2 i], x[2 i + 1]): the original paper's, GPT-J's, GGUF's Llama
    half_split,   ///< pair i is (x[i], x[i + dims / 2]): NeoX's, and that of Llama and Qwen in
                  ///< Hugging Face's format
};

/// The largest position for which angles are products in fp32.
inline constexpr position_t max_fp32_position = position_t{1} << 24;

/// How stored keys were rotated. The key of position t has its pair i turned by t * f_i radians, with f_i =
/// base^(-2 i / dims) rounded to fp32. Up to position 2^24 the angle is one fp32 product, as engines compute
/// it. Beyond, fp32 cannot tell neighbors apart, and the angle is the product in double. A plain value.
struct Rope {
    rope_layout layout = rope_layout::none;
    float base = 10000.0f;  ///< theta
    std::int32_t dims = 0;  ///< the first numbers of a key that are rotated, even; 0 stands for all
    /// f_i [dims / 2], the caller's, where they are not the powers of a base (scaled RoPE); null otherwise.
    const float* frequencies = nullptr;

    [[nodiscard]] std::int32_t rotated(std::int32_t head_dim_qk) const {
        return layout == rope_layout::none ? 0 : dims == 0 ? head_dim_qk : dims;
    }

    /// f_i: a power where no frequencies are given, so who turns many keys fills an array first.
    [[nodiscard]] float frequency(std::int32_t head_dim_qk, std::int32_t i) const {
        return frequencies != nullptr
                   ? frequencies[i]
                   : static_cast<float>(std::pow(static_cast<double>(base), -2.0 * i / rotated(head_dim_qk)));
    }
    /// Writes f_i to out [rotated(head_dim_qk) / 2].
    void fill_frequencies(std::int32_t head_dim_qk, float* out) const {
        for (std::int32_t i = 0; i < rotated(head_dim_qk) / 2; ++i) {
            out[i] = frequency(head_dim_qk, i);
        }
    }

    /// Turns one key back, in place: from after RoPE at position t to before it. `f` are the
    /// frequencies, or null.
    template <class Real>
    void undo(position_t t, std::int32_t head_dim_qk, const float* f, Real* key) const {
        turn<-1>(t, head_dim_qk, f, key);
    }
    /// Rotates one key, in place. It is also the backward pass of undo(), since rotations are orthogonal.
    template <class Real>
    void apply(position_t t, std::int32_t head_dim_qk, const float* f, Real* key) const {
        turn<1>(t, head_dim_qk, f, key);
    }

    /// Refuses a layout, a number of dims or a base that keys of this width cannot have. `of` is
    /// the scorer's name.
    void check(const char* of, std::int32_t head_dim_qk) const {
        if (layout == rope_layout::none) {
            return;
        }
        const auto name = [&](const char* what) { return [=] { return detail::text(of, ".rope.", what); }; };
        detail::require(layout <= rope_layout::half_split, name("layout"), static_cast<std::int32_t>(layout),
                        "a rope_layout");
        detail::require(
            rotated(head_dim_qk) % 2 == 0 && rotated(head_dim_qk) >= 2 && rotated(head_dim_qk) <= head_dim_qk,
            name("dims"), rotated(head_dim_qk),
            [&] { return detail::text("an even number up to the keys' ", head_dim_qk); });
        detail::require(frequencies != nullptr || (base > 0.0f && std::isfinite(base)), name("base"), base,
                        "a positive number");
    }

  private:
    template <int Sign, class Real>
    void turn(position_t t, std::int32_t head_dim_qk, const float* f, Real* key) const {
        const std::int32_t pairs = rotated(head_dim_qk) / 2;
        const std::int32_t apart = layout == rope_layout::interleaved ? 1 : pairs;
        const std::int32_t step = layout == rope_layout::interleaved ? 2 : 1;
        for (std::int32_t i = 0; i < pairs; ++i) {
            // Cosine and sine of the angle, in double: no library's fp32 functions show in a score.
            const float turn = f != nullptr ? f[i] : frequency(head_dim_qk, i);
            const double angle = t <= max_fp32_position
                                     ? static_cast<double>(static_cast<Real>(t) * static_cast<Real>(turn))
                                     : static_cast<double>(t) * static_cast<double>(turn);
            const auto c = static_cast<Real>(std::cos(angle));
            const auto s = static_cast<Real>(Sign * std::sin(angle));
            Real& a = key[std::ptrdiff_t{i} * step];
            Real& b = key[std::ptrdiff_t{i} * step + apart];
            const Real x = a * c - b * s;
            b = a * s + b * c;
            a = x;
        }
    }
};

}  // namespace kvpolicy
