// The kernels of scorers for bf16 and head_dims 64 and 128, as an engine's own translation unit would
// instantiate them.
#include <kvpolicy/cuda_scorers.cuh>

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
