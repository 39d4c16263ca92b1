// What H2O, TOVA and SnapKV observe and keep: arguments and declarations, as in operators.hpp.
#pragma once

#include "operators.hpp"

namespace kvpolicy::python {

struct ReceivedMassArgs {
    Tensor q, k;    // [B, Hq, S, Dk], [B, Hkv, S, Dk]
    Tensor expiry;  // [B, Hkv, S] int32, or None
    SequenceTensors sequences;
    AttentionParams params;
    std::int32_t queries = unlimited;
    bool largest = false;  // group_aggregate::max
    Tensor mass;           // [B, Hkv, S] fp32, written
};
template <class T>
std::size_t received_mass(const Context& ctx, const ReceivedMassArgs& args, const workspace_view* workspace);

/// The scorer of an observed policy; numbers that a scorer lacks are not read.
struct ObservedMaskArgs {
    PolicyNumbers policy;    // its instance: h2o, tova, snapkv
    std::int32_t chunk = 0;  // ObservedPrefill
    bool largest = false;    // group_aggregate::max
    bool whole_layer = true;
    std::int32_t pool = 1;
    bool pool_largest = false;
    std::int32_t prompt = unlimited;
    Tensor q, k;
    SequenceTensors sequences;
    AttentionParams params;
    Tensor expiry;  // [B, Hkv, S] int32, written
};
template <class T>
std::size_t observed_mask(const Context& ctx, const ObservedMaskArgs& args, const workspace_view* workspace);

}  // namespace kvpolicy::python
