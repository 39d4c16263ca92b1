// Distillation losses and the logits that they store.
#include <kvpolicy/losses/distill.hpp>
#if defined(KVPOLICY_PYTHON_CUDA)
#include <kvpolicy/losses/cuda/dispatch_distill.cuh>
#endif

#include "distill.hpp"

namespace kvpolicy::python {

namespace {

LossValue* value_of(const Tensor& tensor) {
    return reinterpret_cast<LossValue*>(array_of<std::int64_t>(tensor, 2));
}

}  // namespace

template <class T>
std::size_t top_logits(const Context& ctx, const TopLogitsArgs& args, const workspace_view* workspace) {
    const auto logits = rows_of<const T>(args.logits);
    if (workspace == nullptr) {
        return top_logits_workspace_bytes(ctx, logits.dim);
    }
    top_logits<T>(ctx, logits, sequences_of(args.sequences, logits.batch, logits.length),
                  rows_of<T>(args.values), rows_of<std::int32_t>(args.indices), *workspace);
    return 0;
}

template <class T>
std::size_t distill(const Context& ctx, const DistillArgs& args, const workspace_view* workspace) {
    const auto teacher = rows_of<const T>(args.teacher), student = rows_of<const T>(args.student);
    const Sequences sequences = sequences_of(args.sequences, student.batch, student.length);
    const auto call = [&](const auto& loss, const auto&... indices) -> std::size_t {
        if (workspace == nullptr) {
            return loss.workspace_bytes(ctx, teacher, indices..., sequences);
        }
        loss(ctx, teacher, indices..., student, sequences, rows_of<T>(args.d_student), value_of(args.value),
             *workspace);
        return 0;
    };
    if (args.kind == "l2") {
        return call(L2Distillation{.scale = args.scale});
    }
    if (args.kind == "top") {
        const TopDistillation loss{args.top, args.temperature, args.reverse, args.scale,
                                   args.over_all ? student_softmax::all : student_softmax::top};
        return args.indices.given ? call(loss, rows_of<const std::int32_t>(args.indices)) : call(loss);
    }
    kvpolicy::detail::refuse("distillation", args.kind, "top or l2");
}

#define KVPOLICY_PYTHON_INSTANCE(T)                                                                  \
    template std::size_t top_logits<T>(const Context&, const TopLogitsArgs&, const workspace_view*); \
    template std::size_t distill<T>(const Context&, const DistillArgs&, const workspace_view*);
#if defined(KVPOLICY_PYTHON_CUDA)
KVPOLICY_PYTHON_FOR_ROWS(KVPOLICY_PYTHON_INSTANCE)
#else
KVPOLICY_PYTHON_FOR_SCORES(KVPOLICY_PYTHON_INSTANCE)
#endif

}  // namespace kvpolicy::python
