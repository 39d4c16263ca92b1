// attend and its gradient.
#include <kvpolicy/attention/attend.hpp>
#if defined(KVPOLICY_PYTHON_CUDA)
#include <kvpolicy/attention/cuda/dispatch_attend.cuh>
#include <kvpolicy/attention/cuda/dispatch_attend_backward.cuh>
#endif

#include "operators.hpp"
#include "shared_kernels.hpp"

#if defined(KVPOLICY_PYTHON_CUDA)
namespace kvpolicy {
KVPOLICY_PYTHON_PLAN_KERNELS(extern template)
}  // namespace kvpolicy
#endif

namespace kvpolicy::python {

namespace {

/// The views of a call.
template <class T>
struct attend_views {
    rows_view<const T> q;
    kv_view<T> all;
    Sequences sequences;

    explicit attend_views(const AttendArgs& args)
        : q(rows_of<const T>(args.q)),
          all{rows_of<const T>(args.k), rows_of<const T>(args.v)},
          sequences(sequences_of(args.sequences, q.batch, q.length)) {
        all.mask.expiry = plane_of<const expiry_t>(args.expiry);
        all.mask.log_bias = plane_of<const float>(args.log_bias);
        all.mask.bias_from = array_of<const std::int32_t>(args.bias_from, all.k.heads);
    }
};

}  // namespace

template <class T>
std::size_t attend(const Context& ctx, const AttendArgs& args, const workspace_view* workspace) {
    const attend_views<T> views(args);
    if (workspace == nullptr) {
        return attend_workspace_bytes<T>(ctx, args.params, views.q, views.all, views.sequences);
    }
    attend<T>(ctx, args.params, views.q, views.all, views.sequences, rows_of<T>(args.out),
              plane_of<float>(args.lse), *workspace);
    return 0;
}

template <class T>
std::size_t attend_backward(const Context& ctx, const AttendArgs& args, const workspace_view* workspace) {
    const attend_views<T> views(args);
    BackwardOptions options;
    options.deterministic = args.deterministic;
    if (workspace == nullptr) {
        return attend_backward_workspace_bytes<T>(ctx, args.params, views.q, views.all, views.sequences,
                                                  options);
    }
    const SavedForward<T> saved{rows_of<const T>(args.out), plane_of<const float>(args.lse),
                                rows_of<const T>(args.d_out)};
    const AttentionGrads<T> grads{rows_of<T>(args.d_q), rows_of<T>(args.d_k), rows_of<T>(args.d_v),
                                  plane_of<compute_t<T>>(args.d_log_bias)};
    attend_backward<T>(ctx, args.params, views.q, views.all, views.sequences, saved, grads, *workspace,
                       options);
    return 0;
}

#define KVPOLICY_PYTHON_INSTANCE(T)                                                           \
    template std::size_t attend<T>(const Context&, const AttendArgs&, const workspace_view*); \
    template std::size_t attend_backward<T>(const Context&, const AttendArgs&, const workspace_view*);
KVPOLICY_PYTHON_FOR_ROWS(KVPOLICY_PYTHON_INSTANCE)

}  // namespace kvpolicy::python

#if defined(KVPOLICY_PYTHON_CUDA)
namespace kvpolicy {
#define KVPOLICY_PYTHON_SHARED(T) KVPOLICY_PYTHON_FORWARD_KERNELS(template, T)
KVPOLICY_PYTHON_FOR_ROWS(KVPOLICY_PYTHON_SHARED)
}  // namespace kvpolicy
#endif
