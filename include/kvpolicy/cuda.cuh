// The bodies of all CUDA operations. Umbrella headers (kvpop.hpp) declare the operations under nvcc; include
// this one where they are instantiated. It reaches CUB, so one or two translation units of a project are
// enough: instantiate there what the others call (docs/cuda.md has the recipe).
#pragma once

#if defined(__cplusplus) && !defined(__CUDACC__)
#error "kvpolicy: kvpolicy/cuda.cuh needs nvcc: give it a .cu file, or -x cu"
#endif

#include <kvpolicy/attention/cuda/dispatch_attend.cuh>
#include <kvpolicy/attention/cuda/dispatch_attend_backward.cuh>
#include <kvpolicy/attention/cuda/dispatch_future_mass.cuh>
#include <kvpolicy/attention/cuda/dispatch_observed_mask.cuh>
#include <kvpolicy/attention/cuda/dispatch_received_mass.cuh>
#include <kvpolicy/caches/cuda/contiguous/dispatch_contiguous.cuh>
#include <kvpolicy/caches/cuda/decode/dispatch_append.cuh>
#include <kvpolicy/caches/cuda/decode/dispatch_decode.cuh>
#include <kvpolicy/caches/cuda/dispatch_export_heads.cuh>
#include <kvpolicy/caches/cuda/dispatch_transfer.cuh>
#include <kvpolicy/caches/cuda/observed/dispatch_observe.cuh>
#include <kvpolicy/caches/cuda/paged/dispatch_paged.cuh>
#include <kvpolicy/caches/cuda/prefill/dispatch_prefill.cuh>
#include <kvpolicy/cuda/buffer.cuh>
#include <kvpolicy/cuda_scorers.cuh>
#include <kvpolicy/losses/cuda/dispatch_boundary.cuh>
#include <kvpolicy/losses/cuda/dispatch_distill.cuh>
#include <kvpolicy/losses/cuda/dispatch_gates.cuh>
#include <kvpolicy/masks/cuda/dispatch_build_mask.cuh>
#include <kvpolicy/masks/cuda/dispatch_log_bias.cuh>
#include <kvpolicy/metrics/cuda/dispatch_metrics.cuh>
