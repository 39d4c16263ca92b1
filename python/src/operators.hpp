// The operators: arguments and declarations. Each function has two uses. Without a workspace it checks its
// arguments and returns the bytes of workspace that the call needs; with one it runs the call. Equations are
// those of the library's headers, shapes stand at the members.
#pragma once

#include <kvpolicy/core/view.hpp>

#include "instances.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvpolicy::python {

// masks.cpp

struct MaskArgs {
    PolicyNumbers policy;
    Tensor scores;  // [B, Hkv, S] fp32; None for a policy without ranks
    SequenceTensors sequences;
    Tensor expiry;  // [B, Hkv, S] int32
};
std::size_t build_mask(const Context& ctx, const MaskArgs& args, const workspace_view* workspace);

/// A training gate and its numbers; those that a gate lacks are not read.
struct GateNumbers {
    std::string kind;  // soft, soft_write, annealed, threshold_soft, bernoulli, dms
    float epsilon = 0.0f, alpha = 0.0f, tau = 0.0f, clip = 0.0f, temperature = 1.0f;
    bool noise = false;
    std::uint64_t seed = 0;
};
struct LogBiasArgs {
    PolicyNumbers policy;
    GateNumbers gate;
    Tensor scores;  // [B, Hkv, S], fp32 or fp64
    SequenceTensors sequences;
    Tensor expiry, log_bias;      // forward: [B, Hkv, S] int32 and fp32, written
    Tensor d_log_bias, d_scores;  // backward: [B, Hkv, S] of the scores' type; d_scores is written
};
std::size_t build_log_bias(const Context& ctx, const LogBiasArgs& args, const workspace_view* workspace);
std::size_t log_bias_backward(const Context& ctx, const LogBiasArgs& args, const workspace_view* workspace);

// attend.cpp

struct AttendArgs {
    Tensor q, k, v;                      // [B, Hq, S, Dk], [B, Hkv, Skv, Dk], [B, Hkv, Skv, Dv]
    Tensor expiry, log_bias, bias_from;  // [B, Hkv, Skv] int32 and fp32, [Hkv] int32; may be None
    SequenceTensors sequences;
    AttentionParams params;
    Tensor out, lse;                          // [B, Hq, S, Dv], [B, Hq, S] fp32
    Tensor d_out, d_q, d_k, d_v, d_log_bias;  // backward, the shapes of out, q, k, v and log_bias
    bool deterministic = false;
};
template <class T>
std::size_t attend(const Context& ctx, const AttendArgs& args, const workspace_view* workspace);
template <class T>
std::size_t attend_backward(const Context& ctx, const AttendArgs& args, const workspace_view* workspace);

// future_mass.cpp

struct FutureMassArgs {
    Tensor q, k;  // [B, Hq, S, Dk], [B, Hkv, S, Dk]
    SequenceTensors sequences;
    AttentionParams params;
    Tensor lse;     // [B, Hq, S] fp32: written by causal_lse, read by future_mass
    Tensor target;  // [B, Hkv, S] fp32
    std::vector<std::int32_t> windows;
    std::int32_t look_ahead = unlimited;
    bool normalize = true, mean = false;
    float epsilon = 1e-8f, beta = 1.0f;
};
template <class T>
std::size_t causal_lse(const Context& ctx, const FutureMassArgs& args, const workspace_view* workspace);
template <class T>
std::size_t future_mass(const Context& ctx, const FutureMassArgs& args, const workspace_view* workspace);

// scorers.cpp

struct ScoreArgs {
    std::string kind;  // linear, mlp, write_gate, conv, mlstm
    Tensor k, v;       // [B, Hkv, S, Dk], [B, Hkv, S, Dv]
    /// fp32, in the order of for_each_parameter; None for a parameter that is left out.
    std::vector<Tensor> parameters;
    std::int32_t hidden = 0, d_qk = 0, d_v = 0, delay = 0;
    float gate_softcap = 0.0f;
    std::int32_t norm = 0;  // mlstm: an mlstm_norm
    std::int32_t rope_layout = 0,
                 rope_dims = 0;  // how keys are rotated: a rope_layout, and of how many numbers
    float rope_base = 10000.0f;
    float dropout = 0.0f;  // of conv in training: the rate, and what its draws depend on
    std::uint64_t dropout_seed = 0;
    Tensor frequencies;  // [dims / 2] fp32, or None
    SequenceTensors sequences;
    Tensor scores;                     // [B, Hkv, S], fp32, fp64 for fp64 rows; backward: its gradient
    Tensor d_k, d_v_rows;              // backward, of the scores' type; both may be None
    std::vector<Tensor> d_parameters;  // backward, of the scores' type: added to
};
template <class T>
std::size_t score(const Context& ctx, const ScoreArgs& args, const workspace_view* workspace);
template <class T>
std::size_t score_backward(const Context& ctx, const ScoreArgs& args, const workspace_view* workspace);

// losses.cpp

struct BoundaryArgs {
    PolicyNumbers policy;   // top_k; its log_gammas are not read where log_gamma is given
    Tensor scores, target;  // [B, Hkv, S], fp32 or fp64, and fp32
    Tensor log_gamma;       // [Hkv] fp32, on the device of the scores; may be None
    SequenceTensors sequences;
    float temperature = 1.0f, omega_min = 0.0f, margin_temperature = 1.0f;
    bool balance = true;
    float balance_least = 0.25f, balance_most = 4.0f;
    std::int32_t count = unlimited;
    float late = 0.5f, scale = 1.0f;
    std::uint64_t seed = 0;
    Tensor d_scores;     // [B, Hkv, S], written
    Tensor d_log_gamma;  // [Hkv] fp64, added to; may be None
    Tensor value;        // [5] int64, written: the bits of BoundaryValue
};
template <class Real>
std::size_t boundary_loss(const Context& ctx, const BoundaryArgs& args, const workspace_view* workspace);

}  // namespace kvpolicy::python
