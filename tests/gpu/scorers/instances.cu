// The kernels of scorers for bf16 and head_dims 64 and 128, as an engine's own translation unit would
// instantiate them.
#include <kvpolicy/cuda_scorers.cuh>
#include <kvpolicy/scorers/cuda/mlp/kernel_hidden_scores.cuh>
#include <kvpolicy/scorers/cuda/mlp/kernel_predictor.cuh>

namespace kvpolicy {
using Rows = rows_view<const bf16>;
template std::size_t score_sequence_workspace_bytes(const cuda&, const LinearScorer<128>&, Rows, Rows,
                                                    const Sequences&, const ScoreOptions&);
template void score_sequence(const cuda&, const LinearScorer<128>&, Rows, Rows, const Sequences&,
                             std::int32_t, plane_view<float>, workspace_view, const ScoreOptions&);
template std::size_t score_sequence_backward_workspace_bytes(const cuda&, const LinearScorer<128>&,
                                                             const ScoreBackward<bf16>&);
template void score_sequence_backward(const cuda&, const LinearScorer<128>&, const ScoreBackward<bf16>&,
                                      LinearParameters<float>, workspace_view, const ScoreBackwardOptions&);
template std::size_t score_sequence_workspace_bytes(const cuda&, const MlpScorer<128>&, Rows, Rows,
                                                    const Sequences&, const ScoreOptions&);
template void score_sequence(const cuda&, const MlpScorer<128>&, Rows, Rows, const Sequences&, std::int32_t,
                             plane_view<float>, workspace_view, const ScoreOptions&);
template std::size_t score_sequence_backward_workspace_bytes(const cuda&, const MlpScorer<128>&,
                                                             const ScoreBackward<bf16>&);
template void score_sequence_backward(const cuda&, const MlpScorer<128>&, const ScoreBackward<bf16>&,
                                      MlpParameters<float>, workspace_view, const ScoreBackwardOptions&);

template std::size_t score_sequence_workspace_bytes<mlstm_widths<128, 64>>(const cuda&,
                                                                           const mLSTMScorer<128>&, Rows,
                                                                           Rows, const Sequences&,
                                                                           const ScoreOptions&);
template void score_sequence<mlstm_widths<128, 64>>(const cuda&, const mLSTMScorer<128>&, Rows, Rows,
                                                    const Sequences&, std::int32_t, plane_view<float>,
                                                    workspace_view, const ScoreOptions&);
template std::size_t score_sequence_backward_workspace_bytes<mlstm_widths<128, 64>>(
    const cuda&, const mLSTMScorer<128>&, const ScoreBackward<bf16>&);
template void score_sequence_backward<mlstm_widths<128, 64>>(const cuda&, const mLSTMScorer<128>&,
                                                             const ScoreBackward<bf16>&,
                                                             mLSTMParameters<float>, workspace_view,
                                                             const ScoreBackwardOptions&);
template void score_sequence<mlstm_widths<64, 64>>(const cuda&, const mLSTMScorer<64>&, Rows, Rows,
                                                   const Sequences&, std::int32_t, plane_view<float>,
                                                   workspace_view, const ScoreOptions&);

template void score_sequence(const cuda&, const ConvScorer<128>&, Rows, Rows, const Sequences&, std::int32_t,
                             plane_view<float>, workspace_view, const ScoreOptions&);
template void score_sequence_backward(const cuda&, const ConvScorer<128>&, const ScoreBackward<bf16>&,
                                      ConvParameters<float>, workspace_view, const ScoreBackwardOptions&);
}  // namespace kvpolicy

// Kernels that these do not call: of a user's scorer, of fp16 gradients, of hidden states. The last need
// cuBLASLt only where they are launched.
namespace kvpolicy::cuda_backend {
template __global__ void warp_scorer_kernel<LinearScorer<128>, bf16>(const scorer_streams,
                                                                     const scorer_source<bf16>,
                                                                     const LinearScorer<128>,
                                                                     const plane_view<float>);
template __global__ void scale_gradients_kernel<float>(const scorer_streams, const plane_view<const float>,
                                                       const plane_view<float>);
template __global__ void cast_weights_kernel<bf16>(const float*, std::int64_t, std::int64_t, bf16*);
template __global__ void predictor_scores_kernel<float>(const predictor_params, const float*, std::int64_t,
                                                        std::int32_t, const plane_view<float>);
template __global__ void predictor_factors_kernel<predictor_factors>(const std::uint32_t*,
                                                                     predictor_factors*);
template __global__ void predictor_backward_kernel<bf16>(const predictor_params, const float*, std::int64_t,
                                                         std::int32_t, const plane_view<const float>,
                                                         const predictor_factors*, bf16*, float*);
template __global__ void predictor_sums_kernel<float>(const float*, std::int32_t, std::int64_t, std::int64_t,
                                                      std::int64_t, float*);
template __global__ void read_hidden_kernel<bf16>(const predictor_params, const rows_view<const bf16>,
                                                  std::int64_t, std::int32_t, bf16*);
template __global__ void write_hidden_kernel<float>(const predictor_params, const float*, std::int64_t,
                                                    std::int32_t, const rows_view<float>);
template __global__ void hidden_layer_kernel<1, 2>(const __grid_constant__ hidden_layer_params);
template __global__ void hidden_readout_kernel<hidden_layer_params>(
    const __grid_constant__ hidden_layer_params, const plane_view<float>);
}  // namespace kvpolicy::cuda_backend
