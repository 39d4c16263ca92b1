// The smallest learned scorer: one weighted sum of a key and its value (KVpop, E.2).
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// The weights of a LinearScorer. Float is const float in a scorer, float where they are filled or trained.
template <class Float>
struct LinearParameters {
    Float* weight = nullptr;  // [heads, head_dim_qk + head_dim_vo]: a
    Float* bias = nullptr;    // [heads]: b; null stands for 0
};

/// r = a . [k; v] + b, with k and v as they are cached (keys after RoPE).
///
/// D is the width of both, fixed at compile time; LinearScorer<> takes head_dim_qk and head_dim_vo at run
/// time. One object serves one layer; the weights are fp32, the caller's, and must outlive it. score() may be
/// called from several threads at once.
template <std::int32_t D = dynamic>
struct LinearScorer {
    static_assert(D == dynamic || D >= 1, "kvpolicy: LinearScorer<D> needs D >= 1");
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::on_arrival;
    template <class Float>
    using parameters = LinearParameters<Float>;

    std::int32_t heads = 0;
    std::int32_t head_dim_qk = D == dynamic ? 0 : D;
    std::int32_t head_dim_vo = D == dynamic ? 0 : D;
    LinearParameters<const float> weights{};

    /// Real is float, or double for checks. `scratch` is not used and may be null. The instruction
    /// set changes no bit.
    template <class Real>
    Real score(std::int32_t head, const Real* key, const Real* value, Real* scratch,
               isa set = detected_isa()) const;
    [[nodiscard]] std::size_t scratch_size() const { return 0; }

    /// score() of `count` <= scorer_block tokens; see BlockScorer.
    template <class Real>
    void score_block(std::int32_t head, std::int32_t count, const Real* keys, const Real* values,
                     Real* scores, Real* scratch, isa set = detected_isa()) const;
    [[nodiscard]] std::size_t block_scratch_size() const { return scorer_block; }

    /// Refuses missing weights, and sizes that do not fit a layer of `kv_heads` heads with keys and
    /// values this wide.
    void check(std::int32_t kv_heads, std::int32_t key_dim, std::int32_t value_dim) const;
};

static_assert(StatelessScorer<LinearScorer<>> && BlockScorer<LinearScorer<64>> &&
              CheckedScorer<LinearScorer<64>>);
static_assert(Scorer<LinearScorer<>> && std::is_trivially_copyable_v<LinearScorer<>>);

/// Calls visit(name, pointer, count) for each array of the parameters, in the order in which they are
/// declared: for allocating, saving and updating them. Arrays that the scorer can do without come with
/// optional = true as a fourth argument.
template <std::int32_t D, class Float, class Visit>
void for_each_parameter(const LinearScorer<D>& scorer, LinearParameters<Float>& parameters, Visit&& visit) {
    const auto heads = static_cast<std::size_t>(scorer.heads);
    visit("weight", parameters.weight,
          heads * static_cast<std::size_t>(scorer.head_dim_qk + scorer.head_dim_vo), false);
    visit("bias", parameters.bias, heads, true);
}

}  // namespace kvpolicy

#include <kvpolicy/scorers/host/host_linear.hpp>
