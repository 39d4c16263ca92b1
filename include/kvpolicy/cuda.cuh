// The bodies of all CUDA operations. Umbrella headers (kvpop.hpp) declare the operations under nvcc; include this one where
// they are instantiated. It reaches CUB, so one or two translation units of a project are enough: instantiate there what
// the others call (docs/cuda.md has the recipe).
#pragma once

#if defined(__cplusplus) && !defined(__CUDACC__)
#error "kvpolicy: kvpolicy/cuda.cuh needs nvcc: give it a .cu file, or -x cu"
#endif

#include <kvpolicy/cuda/attend.cuh>
#include <kvpolicy/cuda/attend_backward.cuh>
#include <kvpolicy/cuda/boundary_loss.cuh>
#include <kvpolicy/cuda/build_mask.cuh>
#include <kvpolicy/cuda/cache_chunk.cuh>
#include <kvpolicy/cuda/cache_owner.cuh>
#include <kvpolicy/cuda/cache_step.cuh>
#include <kvpolicy/cuda/distill_losses.cuh>
#include <kvpolicy/cuda/dual_owner.cuh>
#include <kvpolicy/cuda/dual_step.cuh>
#include <kvpolicy/cuda/future_mass.cuh>
#include <kvpolicy/cuda/gate_losses.cuh>
#include <kvpolicy/cuda/log_bias.cuh>
#include <kvpolicy/cuda/metrics.cuh>
#include <kvpolicy/cuda/score_backward.cuh>
#include <kvpolicy/cuda/score_sequence.cuh>
