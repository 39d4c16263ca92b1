# shellcheck shell=bash disable=SC2034,SC2154
# The table of the runs of tools/gpu, which sources it. An operation is a folder of tests/gpu, and by its name
# alone has
#
#   tests/gpu/<operation>/**.cu            its tests: target kvpolicy_tests_gpu_<operation>, ctest names
#                                          gpu.<operation>.*
#   benchmarks/<operation>.cu              its benchmark, if it has one
#   benchmarks/baselines/<operation>.py    the PyTorch or Triton baseline, timed beside it: takes --quick and
#                                          --out FILE, writes {"rows": [{"name": ..., "median_ms": ..., ...},
#                                          ...]}. Where the benchmark is a library (`libraries`), this program
#                                          loads it and times both
#
# and here, all optional:
#
#   profiled[<operation>]   a regular expression: the benchmarks whose kernels are profiled. With
#                           KVPOLICY_BENCH_PROFILE in its environment a benchmark makes each call once and
#                           times none.
#   sanitized[<operation>]  a line per run of a program: PROGRAM | TOOLS | test cases, as doctest takes them.
#                           All cases together reach every kernel of the operation, at sizes for tools that
#                           slow a kernel down a hundred times. The report names the library's kernels that
#                           the run's selection did not reach.
#   baselines[<operation>]  a line per run of the baseline: arguments | its seconds. Without any, one run of
#                           110 s.
#   compiled[<operation>]   arguments with which the baseline compiles, beside the build, the kernels that its
#                           runs time later
#   targets[<operation>]    a line per target: a shell pattern of benchmark names | pass | stretch | baseline
#                           rows, separated by commas. A target is milliseconds, or a multiple of the first
#                           baseline's speed (3.4x) or of the fastest one's (0.77x fastest), or a share of
#                           another benchmark's rate in tflops (0.7 of forward/16k); an asterisk at the end
#                           of that name stands for what the pattern's last one matched.

all_checks="memcheck synccheck initcheck racecheck"

# Operations of whose kernels some have one lane arrive at a barrier for its warp, which racecheck does not
# follow: it runs a build of its own of their programs (KVPOLICY_RACECHECK,
# include/kvpolicy/cuda/primitives/async.cuh).
one_lane_arrives="attention caches scorers"

# Operations with a benchmark and no folder of tests: other operations' tests have their calls.
timed_only="prefill first_token"

# Operations whose benchmark is a library (benchmarks/<operation>.so of the build). Rows of the baseline that
# a target names are then reported as rows of the benchmark.
libraries="first_token"

# ---- masks ---------------------------------------------------------------------------------------

profiled[masks]='mask/.*/(random|random, decay|jump)/'
sanitized[masks]="
gpu.masks.small    | $all_checks | *
gpu.masks.log_bias | $all_checks | soft gates of*
gpu.masks.extremes | memcheck | scores*
"
targets[masks]="
mask/16k x 8/random*    | 0.2 | 0.12 | 16k x 8
mask/16k x 1024/random* | 1.3 | 0.8  | 16k x 1024
mask/1M x 8/random*     | 1.3 | 0.9  | 1M x 8
"

# ---- metrics -------------------------------------------------------------------------------------

sanitized[metrics]="
gpu.metrics.metrics | $all_checks | *
"

# ---- attention -----------------------------------------------------------------------------------

profiled[attention]='(forward|forward . backward|future mass|causal lse)/16k/'
sanitized[attention]="
gpu.attention.future_mass | $all_checks | small future masses*
gpu.attention.future_mass | memcheck synccheck | normalizers of long*
gpu.attention.received_mass | $all_checks | masses of small*
gpu.attention.observed_mask | $all_checks | every choice of small*
gpu.attention.plan        | $all_checks | lengths*
gpu.attention.small       | $all_checks | hopper forward*
gpu.attention.small       | $all_checks | portable forward*,plain forward*
gpu.attention.small       | $all_checks | hopper backward*
gpu.attention.small       | $all_checks | portable backward*,plain backward*
"
# cuDNN needs no compiler; FlexAttention needs about ten kernels, those of its backward pass
# half a minute each.
compiled[attention]='--compile --only flex mass'
baselines[attention]="
--only flex  | 150
--only mass  | 60
--only dense | 90
"
targets[attention]="
forward/16k              | 2.2  | 1.65 | FlexAttention forward 16k, cuDNN dense forward 16k
forward/32k              | 4.8  | 3.5  | FlexAttention forward 32k, cuDNN dense forward 32k
forward/64k              | 10   | 7.2  | FlexAttention forward 64k, cuDNN dense forward 64k
forward/128k             | 21   | 14.8 | FlexAttention forward 128k, cuDNN dense forward 128k
forward/200k, gates 25%  | 3.4x | 3.9x | cuDNN dense forward 200k
forward + backward/16k   | 9    | 6.5  |
    FlexAttention forward + backward 16k, cuDNN dense forward + backward 16k
forward + backward/32k   | 20   | 14.5 |
    FlexAttention forward + backward 32k, cuDNN dense forward + backward 32k
forward/16k, d 64        | 0.7 of forward/16k  | 0.7 of forward/16k  |
forward/8 x 4k           | 0.85 of forward/16k | 0.85 of forward/16k | cuDNN dense forward 8 x 4k
forward/32 x 2k          | 0.85 of forward/16k | 0.85 of forward/16k | cuDNN dense forward 32 x 2k
forward + backward/16k, d 64 | 0.7 of forward + backward/16k  | 0.7 of forward + backward/16k  |
forward + backward/8 x 4k    | 0.85 of forward + backward/16k | 0.85 of forward + backward/16k |
    cuDNN dense forward + backward 8 x 4k
forward + backward/32 x 2k   | 0.85 of forward + backward/16k | 0.85 of forward + backward/16k |
    cuDNN dense forward + backward 32 x 2k
soft gates/16k           | 0.741x | 0.87x | cuDNN dense forward + backward 16k
future mass/16k          | 2.1  | 1.7  | FlexAttention future mass 16k
future mass/32k          | 8.2  | 6.8  | FlexAttention future mass 32k
future mass/16k, d 64    | 0.7 of future mass/16k  | 0.7 of future mass/16k  |
future mass/8 x 4k       | 0.85 of future mass/16k | 0.85 of future mass/16k |
future mass/32 x 2k      | 0.85 of future mass/16k | 0.85 of future mass/16k |
observed mask/16k, H2O    | 0.455 of forward/16k, dense | 0.8 of forward/16k, dense |
observed mask/16k, SnapKV | 0.87 of forward/16k, dense  | 4 of forward/16k, dense   |
"

# ---- caches --------------------------------------------------------------------------------------

# Steps ask for the rows that may stay before they know which, so initcheck reports rows that nobody wrote.
# racecheck does not follow who writes and who reads an mLSTM's gates (docs/testing.md).
profiled[caches]='step(, mLSTM)?/4096 x (1|8)/'
sanitized[caches]="
gpu.caches.policies | $all_checks | few calls
gpu.caches.half     | $all_checks | few calls
gpu.caches.steps    | memcheck synccheck racecheck | few*,attention over*
gpu.caches.scorers  | $all_checks | few calls
gpu.caches.conv     | memcheck synccheck | *bf16*
gpu.caches.observed_steps    | memcheck synccheck racecheck | a layer*,TOVA*
gpu.caches.observed_paged_steps | memcheck synccheck racecheck | H2O*
gpu.caches.observed_append | memcheck synccheck racecheck | what is no mass*,decoded*
gpu.caches.write_gate        | $all_checks | few calls
gpu.caches.utility_predictor | $all_checks | few calls
gpu.caches.packed            | memcheck synccheck | *
gpu.caches.packed_observed   | memcheck synccheck | SnapKV*
gpu.caches.scorers_mlstm | memcheck synccheck initcheck | few calls
gpu.caches.observed_prefill | memcheck synccheck racecheck | prompts of budgets*,prompts of several*
gpu.caches.mlstm_prefill       | memcheck synccheck initcheck | few calls
gpu.caches.mlstm_prefill_types | memcheck synccheck initcheck | few calls
gpu.caches.layer_order         | memcheck synccheck racecheck | a FixedBudgetCache,a DualCache
gpu.caches.snapshots    | memcheck synccheck | *
gpu.caches.stress       | $all_checks | few operations
gpu.caches.stress_evict | $all_checks | few operations
gpu.caches.extremes     | memcheck | calls*,keys and*
gpu.caches.pools        | memcheck synccheck racecheck | steps of*
gpu.caches.paged_steps  | $all_checks | few*,pages of*
gpu.caches.paged_half   | $all_checks | few calls
gpu.caches.paged_scorers | $all_checks | few calls
gpu.caches.select       | $all_checks | few calls
gpu.caches.page_choice  | $all_checks | *
gpu.caches.paged_select | $all_checks | few calls
gpu.caches.paged_evict  | $all_checks | few calls
gpu.caches.paged_keep   | $all_checks | few calls
gpu.caches.paged_rounds | $all_checks | few calls
gpu.caches.prefill_orders       | $all_checks | few calls
gpu.caches.prefill_paged_orders | $all_checks | few calls
gpu.caches.reserve      | $all_checks | a layer*
"
targets[caches]="
step/4096 x 1   | 1.136x | 1.333x | cuDNN attention alone 4096 x 1
step/4096 x 8   | 0.952x | 1.0x   | cuDNN attention alone 4096 x 8
step/4096 x 32  | 0.943x | 0.98x  | cuDNN attention alone 4096 x 32
step/4096 x 64  | 0.952x | 0.98x  | cuDNN attention alone 4096 x 64
step/4096 x 128 | 0.952x | 0.98x  | cuDNN attention alone 4096 x 128
step among products/4096 x 1   | 1.0x | 1.1x | cuDNN attention among products 4096 x 1
step among products/4096 x 8   | 1.0x | 1.1x | cuDNN attention among products 4096 x 8
step among products/4096 x 32  | 1.0x | 1.1x | cuDNN attention among products 4096 x 32
step among products/4096 x 64  | 1.0x | 1.1x | cuDNN attention among products 4096 x 64
step among products/4096 x 128 | 1.0x | 1.1x | cuDNN attention among products 4096 x 128
dense decode, 128k x 16        | 0.97x | 1.0x | cuDNN attention alone 131072 x 16
ragged DualCache, 25% of 128k x 16, pages of 64 | 3.7x | 3.9x |
    cuDNN attention alone 131072 x 16
ragged DualCache, 25% of 128k x 16, pages of 16 | 3.6x | 3.85x |
    cuDNN attention alone 131072 x 16
"

# ---- prefill -------------------------------------------------------------------------------------

# Rates of the same visible pairs: 0.8 of the rate is 1.25 of the time. Its tests are those of caches.
profiled[prefill]='prefill(, DualCache)?/(16k/(random|rising)|2k over 4096/random)/'
targets[prefill]="
prefill/8k/random    | 0.8 of mask + attend/8k/random   | 0.909 of mask + attend/8k/random   |
    cuDNN dense forward 8k
prefill/16k/random   | 0.8 of mask + attend/16k/random  | 0.909 of mask + attend/16k/random  |
    cuDNN dense forward 16k
prefill/32k/random   | 0.8 of mask + attend/32k/random  | 0.909 of mask + attend/32k/random  |
    cuDNN dense forward 32k
prefill/128k/random  | 0.8 of mask + attend/128k/random | 0.909 of mask + attend/128k/random |
    cuDNN dense forward 128k
prefill/8k/*         | 0.714 of mask + attend/8k/*   | 0.87 of mask + attend/8k/*   | cuDNN dense forward 8k
prefill/16k/*        | 0.714 of mask + attend/16k/*  | 0.87 of mask + attend/16k/*  | cuDNN dense forward 16k
prefill/32k/*        | 0.714 of mask + attend/32k/*  | 0.87 of mask + attend/32k/*  | cuDNN dense forward 32k
prefill/128k/*       | 0.714 of mask + attend/128k/* | 0.87 of mask + attend/128k/* | cuDNN dense forward 128k
prefill/8 x 4k/*     | 0.8 of mask + attend/8 x 4k/* | 0.909 of mask + attend/8 x 4k/* |
    cuDNN dense forward 8 x 4k
prefill/8 x 100 to 8000/* | 0.8 of mask + attend/8 x 100 to 8000/* |
    0.909 of mask + attend/8 x 100 to 8000/* |
prefill/16k, decay/* | 0.714 of mask + attend/16k, decay/* | 0.87 of mask + attend/16k, decay/* |
prefill/16k, decay step 3/* | 0.714 of mask + attend/16k, decay step 3/* |
    0.87 of mask + attend/16k, decay step 3/* |
prefill/16k, decay step 64/* | 0.714 of mask + attend/16k, decay step 64/* |
    0.87 of mask + attend/16k, decay step 64/* |
prefill/2k over 4096/*    | 0.769x fastest | 0.909x fastest |
    FlashAttention dense 2k over 4096, cuDNN all pairs 2k over 4096, cuDNN masked 2k over 4096
prefill, DualCache/16k, gates 25%/* | 0.8 of mask + attend/16k, gates 25%/* |
    0.909 of mask + attend/16k, gates 25%/* |
prefill, DualCache/16k, gates/* | 0.8 of mask + attend/16k, gates/* |
    0.909 of mask + attend/16k, gates/* |
prefill, DualCache/* | 0.87 of prefill/* | 0.909 of prefill/* |
attend/16k/trained  | 0.9 of attend/16k/random  | 1 of attend/16k/random  |
attend/32k/trained  | 0.9 of attend/32k/random  | 1 of attend/32k/random  |
attend/128k/trained | 0.9 of attend/128k/random | 1 of attend/128k/random |
"

# ---- first_token ---------------------------------------------------------------------------------

# Time to first token as a share of dense: 0.92, 0.78 and 0.38 are 1.087, 1.282 and 2.632 times its speed. Its
# tests are those of caches. Peaks of memory stand in the rows: peak_of_dense, at most 0.3 in chunks of 4k.
baselines[first_token]="
| 150
"
targets[first_token]="
first token/16k  | 1.087x | 1.087x | dense 16k
first token/32k  | 1.282x | 1.282x | dense 32k
first token/128k | 2.632x | 2.632x | dense 128k
first token, chunks of 4k/16k  | 1.087x | 1.087x | dense 16k
first token, chunks of 4k/32k  | 1.282x | 1.282x | dense 32k
first token, chunks of 4k/128k | 2.632x | 2.632x | dense 128k
"

# ---- scorers -------------------------------------------------------------------------------------

# initcheck does not see all that cuBLASLt's kernels write.
profiled[scorers]='(mlstm|mlstm without projections|mlp|convolution)/16k x 8/'
sanitized[scorers]="
gpu.scorers.mlp         | $all_checks | linear*,write gates,a captured step*
gpu.scorers.conv        | $all_checks | dropout*,tiles of the Hopper kernel: ragged*,a small GPU*
gpu.scorers.predictor   | memcheck synccheck racecheck | ragged*
gpu.scorers.mlstm_bf16  | $all_checks | odd*,states*
"
targets[scorers]="
mlstm without projections/16k x 8/forward                                  | 0.25 | 0.18 |
    mlstm_kernels 16k x 8 forward
mlstm without projections/16k x 8/forward + backward                       | 0.8  | 0.6  |
    mlstm_kernels 16k x 8 forward + backward
mlstm without projections/16k x 8/forward + backward, states kept          | 0.8  | 0.6  |
    mlstm_kernels 16k x 8 forward + backward
mlstm without projections/batch 8, 16k x 8/forward                         | 0.9  | 0.7  |
    mlstm_kernels batch 8/16k x 8 forward
mlstm without projections/batch 8, 16k x 8/forward + backward              | 2.8  | 2.2  |
    mlstm_kernels batch 8/16k x 8 forward + backward
mlstm without projections/batch 8, 16k x 8/forward + backward, states kept | 2.8  | 2.2  |
    mlstm_kernels batch 8/16k x 8 forward + backward
"
# Triton compiles for most of a minute, beside the build.
compiled[scorers]='--compile'
baselines[scorers]="
| 100
"

# ---- losses --------------------------------------------------------------------------------------

profiled[losses]='(boundary/16k x 8, all queries|step/16k x 8, mlp)/'
sanitized[losses]="
gpu.losses.boundary | $all_checks | lengths*
gpu.losses.gates    | $all_checks | packed*,the controller*
gpu.losses.distill  | $all_checks | infinite*,L2*
gpu.losses.lte      | $all_checks | straight-through*
"
targets[losses]="
step/16k x 8, mlp                       | 4.5 | 4 |
step/16k x 8, mlstm                     | 4.5 | 4 |
step/16k x 8, mlstm, scores beside ranks | 4.5 | 4 |
"

# ---- train ---------------------------------------------------------------------------------------

# AdamW of the examples. train_scorer's own test needs the examples, which are not built here.
sanitized[train]="
gpu.train.adamw | $all_checks | a gradient*,too many*
"
