// Scores of whole sequences and their gradients.
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/conv.hpp>
#include <kvpolicy/scorers/sequence.hpp>
#if defined(KVPOLICY_PYTHON_CUDA)
#include <kvpolicy/cuda_scorers.cuh>
#endif

#include "operators.hpp"
#include "shared_kernels.hpp"

namespace kvpolicy::python {

namespace {

/// Points the arrays of `into` at tensors, in the order of for_each_parameter.
template <class S, class Parameters>
void set_parameters(const S& scorer, Parameters& into, const std::vector<Tensor>& tensors) {
    std::size_t at = 0;
    for_each_parameter(scorer, into,
                       [&]<class Float>(const char* name, Float*& array, std::size_t count, bool optional) {
                           const Tensor missing;
                           const Tensor& tensor = at < tensors.size() ? tensors[at] : missing;
                           ++at;
                           if (!tensor.given) {
                               kvpolicy::detail::require(optional, name, "None", "a tensor");
                               return;
                           }
                           array = array_of<Float>(tensor, static_cast<std::int64_t>(count));
                       });
    kvpolicy::detail::require(tensors.size() == at, "number of parameters", tensors.size(),
                              kvpolicy::detail::text(at));
}

Rope rope_of(const ScoreArgs& args) {
    Rope rope{static_cast<rope_layout>(args.rope_layout), args.rope_base, args.rope_dims};
    rope.frequencies = array_of<const float>(args.frequencies, rope.rotated(args.k.size(3)) / 2);
    return rope;
}

/// Calls visit(scorer) with the scorer of args.kind, its sizes and its weights.
template <class Visit>
std::size_t with_scorer(const ScoreArgs& args, Visit&& visit) {
    const auto call = [&](auto scorer) {
        scorer.heads = args.k.size(1);
        scorer.head_dim_qk = args.k.size(3);
        scorer.head_dim_vo = args.v.size(3);
        set_parameters(scorer, scorer.weights, args.parameters);
        return visit(scorer);
    };
    if (args.kind == "linear") {
        return call(LinearScorer<>{});
    }
    if (args.kind == "mlp") {
        return call(MlpScorer<>{.hidden = args.hidden});
    }
    if (args.kind == "write_gate") {
        return call(WriteGateScorer<>{.hidden = args.hidden, .input = {.rope = rope_of(args)}});
    }
    if (args.kind == "conv") {
        return call(ConvScorer<>{.rope = rope_of(args)});
    }
    if (args.kind == "mlstm") {
        return call(mLSTMScorer<>{.d_qk = args.d_qk,
                                  .d_v = args.d_v,
                                  .gate_softcap = args.gate_softcap,
                                  .norm = static_cast<mlstm_norm>(args.norm)});
    }
    kvpolicy::detail::refuse("scorer", args.kind, "linear, mlp, write_gate, conv or mlstm");
}

}  // namespace

template <class T>
std::size_t score(const Context& ctx, const ScoreArgs& args, const workspace_view* workspace) {
    const auto k = rows_of<const T>(args.k), v = rows_of<const T>(args.v);
    const Sequences sequences = sequences_of(args.sequences, k.batch, k.length);
    BasicScoreOptions<compute_t<T>> options;
    options.dropout = {args.dropout, args.dropout_seed};
    return with_scorer(args, [&](const auto& scorer) -> std::size_t {
        if (workspace == nullptr) {
            return score_sequence_workspace_bytes(ctx, scorer, k, v, sequences, options);
        }
        score_sequence(ctx, scorer, k, v, sequences, args.delay, plane_of<compute_t<T>>(args.scores),
                       *workspace, options);
        return 0;
    });
}

template <class T>
std::size_t score_backward(const Context& ctx, const ScoreArgs& args, const workspace_view* workspace) {
    using Real = compute_t<T>;
    ScoreBackward<T> call{rows_of<const T>(args.k), rows_of<const T>(args.v)};
    call.sequences = sequences_of(args.sequences, call.k.batch, call.k.length);
    call.delay = args.delay;
    call.dropout = {args.dropout, args.dropout_seed};
    call.d_scores = plane_of<const Real>(args.scores);
    if (args.d_k.given) {
        call.d_k = rows_of<Real>(args.d_k);
        call.d_v = rows_of<Real>(args.d_v_rows);
    }
    return with_scorer(args, [&]<class S>(const S& scorer) -> std::size_t {
        if (workspace == nullptr) {
            return score_sequence_backward_workspace_bytes(ctx, scorer, call);
        }
        typename S::template parameters<Real> gradients{};
        set_parameters(scorer, gradients, args.d_parameters);
        score_sequence_backward(ctx, scorer, call, gradients, *workspace);
        return 0;
    });
}

#define KVPOLICY_PYTHON_INSTANCE(T)                                                         \
    template std::size_t score<T>(const Context&, const ScoreArgs&, const workspace_view*); \
    template std::size_t score_backward<T>(const Context&, const ScoreArgs&, const workspace_view*);
KVPOLICY_PYTHON_FOR_ROWS(KVPOLICY_PYTHON_INSTANCE)

}  // namespace kvpolicy::python

#if defined(KVPOLICY_PYTHON_CUDA)
namespace kvpolicy {
#define KVPOLICY_PYTHON_SHARED(T) KVPOLICY_PYTHON_CHUNK_KERNELS(template, T)
KVPOLICY_PYTHON_FOR_ROWS(KVPOLICY_PYTHON_SHARED)
}  // namespace kvpolicy
#endif
