// Losses of learned gates, and what LTE trains with: arguments and declarations, as in operators.hpp.
#pragma once

#include <kvpolicy/losses/gates.hpp>

#include "operators.hpp"

namespace kvpolicy::python {

/// Which keys a call is about.
inline gate_scope scope_of(const auto& args) { return args.decided ? gate_scope::decided : gate_scope::all; }

/// A loss that adds up a term per key; numbers that a loss lacks are not read.
struct GateLossArgs {
    std::string kind;  // sparsity, density, retention, compression
    PolicyNumbers policy;
    Tensor scores;  // [B, Hkv, S] fp32 or fp64
    SequenceTensors sequences;
    float scale = 1.0f;
    bool decided = false;  // gate_scope
    Tensor lambda;         // retention: [Hkv] fp32
    GateNumbers gate;      // compression: dms
    float target = 0.0f;
    bool straight_through = false;
    Tensor total;     // compression: [2] int64, the bits of EvictionSums, or None
    Tensor d_scores;  // [B, Hkv, S] of the scores' type, written
    Tensor value;     // [2] int64, written: the bits of LossValue
};
template <class Real>
std::size_t gate_loss(const Context& ctx, const GateLossArgs& args, const workspace_view* workspace);
/// The sums of a compression loss, added to `value`: the bits of EvictionSums.
template <class Real>
std::size_t eviction_sums(const Context& ctx, const GateLossArgs& args, const workspace_view* workspace);

struct RetentionArgs {
    PolicyNumbers policy;
    Tensor scores;  // [B, Hkv, S] fp32 or fp64
    SequenceTensors sequences;
    bool decided = false;  // gate_scope
    Tensor counts;         // [Hkv] fp64, written
};
template <class Real>
std::size_t retention_counts(const Context& ctx, const RetentionArgs& args, const workspace_view* workspace);

struct StraightThroughArgs {
    PolicyNumbers policy;
    Tensor scores;  // [B, Hkv, S] fp32, fp64 for fp64 rows
    Tensor v, d_v;  // [B, Hkv, S, Dv]
    SequenceTensors sequences;
    bool decided = false;  // gate_scope
    Tensor d_scores;       // [B, Hkv, S] of the scores' type, written
};
template <class T>
std::size_t straight_through_values(const Context& ctx, const StraightThroughArgs& args,
                                    const workspace_view* workspace);

}  // namespace kvpolicy::python
