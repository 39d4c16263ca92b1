// Losses between a teacher's and a student's rows: arguments and declarations, as in operators.hpp.
#pragma once

#include "operators.hpp"

namespace kvpolicy::python {

struct TopLogitsArgs {
    Tensor logits;  // [B, 1, S, V]
    SequenceTensors sequences;
    Tensor values, indices;  // [B, 1, S, K] of the logits' type and int32, written
};
template <class T>
std::size_t top_logits(const Context& ctx, const TopLogitsArgs& args, const workspace_view* workspace);

struct DistillArgs {
    std::string kind;         // top, l2
    Tensor teacher, student;  // [B, 1, S, V]; or the teacher's top logits [B, 1, S, K]
    Tensor indices;           // [B, 1, S, K] int32: of top logits; None for whole rows
    SequenceTensors sequences;
    std::int32_t top = 256;
    float temperature = 1.0f;
    bool reverse = false;
    float scale = 1.0f;
    bool over_all = false;  // the student's softmax is over all logits
    Tensor d_student;       // of the student's shape and type, written
    Tensor value;           // [2] int64, written: the bits of LossValue
};
template <class T>
std::size_t distill(const Context& ctx, const DistillArgs& args, const workspace_view* workspace);

}  // namespace kvpolicy::python
