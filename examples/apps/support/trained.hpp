// Caches that trained scorers decide for.
#pragma once

#include "policies.hpp"
#include "scorers.hpp"

#include <llama/cache_attention.hpp>
#include <llama/safetensors.hpp>

#include <memory>

namespace examples {

/// Refuses a window other than that of the scorers, where it is part of them (a delayed read).
void check_window(const TrainedScorers& trained, std::int32_t window);

/// KVpop's rule on trained scorers, rows of type `rows` (BF16 or F32). Refuses what check_fits and
/// check_window refuse. `trained` must outlive the attention.
///
/// `match_state` takes as many rows off the budget as the scorer's state is worth, so that caches of stateful
/// and stateless scorers take the same memory (the paper compares so).
std::unique_ptr<llama::KvAttention> make_trained(const kvpolicy::host& ctx, const llama::Config& config,
                                                 const TrainedScorers& trained, const PolicyChoice& choice,
                                                 bool match_state = false,
                                                 llama::DType rows = llama::DType::bf16);

/// The same with a budget that the heads of a layer share, choice.budget entries per head on average, in a
/// DualCache for at most `max_seq_len` tokens.
std::unique_ptr<llama::KvAttention> make_trained_shared(const kvpolicy::host& ctx,
                                                        const llama::Config& config,
                                                        const TrainedScorers& trained,
                                                        const PolicyChoice& choice, std::int32_t max_seq_len,
                                                        llama::DType rows = llama::DType::bf16);

/// A file of gates (SP-KV, WG-KV, LTE, DMS) in a DualCache, or of StreamLLM+ in a FixedBudgetCache, with the
/// file's sinks, window, threshold and cap, and rows of type `rows` (BF16 or F32). `trained` must outlive the
/// attention; `max_seq_len` is the most tokens. Refuses what check_fits refuses.
std::unique_ptr<llama::KvAttention> make_gates(const kvpolicy::host& ctx, const llama::Config& config,
                                               const TrainedScorers& trained, std::int32_t max_seq_len,
                                               llama::DType rows = llama::DType::bf16);

/// WG-KV's rule on a trained MLP's scores, in a DualCache: a key that leaves the window stays where its score
/// passes a threshold. The thresholds, one a head, are such that `choice.budget` rows would be held after
/// `length` tokens of the training text; what is held here depends on the text. Refuses other scorers, and
/// files without quantiles.
std::unique_ptr<llama::KvAttention> make_gated(const kvpolicy::host& ctx, const llama::Config& config,
                                               const TrainedScorers& trained, const PolicyChoice& choice,
                                               std::int32_t length, std::int32_t max_seq_len);

}  // namespace examples
