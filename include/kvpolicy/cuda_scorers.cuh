// The bodies of score_sequence and score_sequence_backward on CUDA, and the library's own scorers: a
// line per folder.
#pragma once

#include <kvpolicy/scorers/cuda/conv/device_conv.cuh>
#include <kvpolicy/scorers/cuda/dispatch_score_backward.cuh>
#include <kvpolicy/scorers/cuda/dispatch_score_sequence.cuh>
#include <kvpolicy/scorers/cuda/mlp/device_linear.cuh>
#include <kvpolicy/scorers/cuda/mlp/device_mlp.cuh>
#include <kvpolicy/scorers/cuda/mlp/device_predictor.cuh>
#include <kvpolicy/scorers/cuda/mlstm/device_mlstm.cuh>
