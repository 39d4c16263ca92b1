// Keys, values and targets of whole sequences of a frozen model: what scorers are trained on. They come from
// a model that runs here, or from a file that anything may have written.
//
// The file (docs/training.md): safetensors, F32, F16 or BF16. For sequences i = 0, 1, ... and every layer l
//
//     sequences.{i}.layers.{l}.q          [S, Hq, Dk]    rotated, as attention uses them
//     sequences.{i}.layers.{l}.k          [S, Hkv, Dk]   rotated, as the cache stores them
//     sequences.{i}.layers.{l}.v          [S, Hkv, Dv]
//     sequences.{i}.layers.{l}.target.{B} [Hkv, S]       optional: the target with beta B ("1", "2", "inf"),
//         fp32
//
// q is needed only where a target is not there. Metadata of files with targets: "window", "aggregate" (max,
// mean) and "look_ahead" (a number, or all; a file without it means all).
#pragma once

#include <kvpolicy/attention/future_mass.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/view.hpp>

#include "sequences.hpp"

#include <llama/engine.hpp>
#include <llama/safetensors.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace examples {
class Oracle;
}

namespace train {

struct QkvShape {
    std::int32_t layers = 0, query_heads = 0, kv_heads = 0, head_dim_qk = 0, head_dim_vo = 0;
    bool operator==(const QkvShape&) const = default;
    std::string text() const;
};

/// What the target is made with; the same for a whole run.
struct TargetOptions {
    std::int32_t window = 64;
    float beta = 2.0f;
    kvpolicy::group_aggregate aggregate = kvpolicy::group_aggregate::max;
    std::int32_t look_ahead = kvpolicy::unlimited;  ///< queries after the window that count
    /// Where a target would have to be computed, examples have q instead: a device computes it.
    bool leave_out = false;
};

/// As the library's call takes them.
kvpolicy::FutureMassOptions mass_options(const TargetOptions& target);
const char* aggregate_name(kvpolicy::group_aggregate aggregate);
std::string look_ahead_name(std::int32_t look_ahead);

/// One sequence: k and v of each layer, and its targets; or, where TargetOptions::leave_out says so,
/// q and no targets.
struct Example {
    std::int32_t length = 0;
    std::vector<std::vector<float>> k, v;    // [layers][length, kv_heads, dim]
    std::vector<std::vector<float>> target;  // [layers][kv_heads, length], or empty
    std::vector<std::vector<float>> q;       // [layers][length, query_heads, head_dim_qk], or empty

    kvpolicy::rows_view<const float> keys(const QkvShape& shape, std::int32_t layer) const {
        return kvpolicy::view_bshd<const float>(k[static_cast<std::size_t>(layer)].data(), 1, length,
                                                shape.kv_heads, shape.head_dim_qk);
    }
    kvpolicy::rows_view<const float> values(const QkvShape& shape, std::int32_t layer) const {
        return kvpolicy::view_bshd<const float>(v[static_cast<std::size_t>(layer)].data(), 1, length,
                                                shape.kv_heads, shape.head_dim_vo);
    }
    kvpolicy::plane_view<const float> targets(const QkvShape& shape, std::int32_t layer) const {
        return kvpolicy::view_bhs<const float>(target[static_cast<std::size_t>(layer)].data(), 1,
                                               shape.kv_heads, length);
    }
};

/// Sequences by number. A reference is valid until the next call.
class QkvSource {
  public:
    virtual ~QkvSource() = default;
    virtual const QkvShape& shape() const = 0;
    virtual std::size_t count() const = 0;
    virtual const Example& get(std::size_t index) = 0;
    /// Tokens of a sequence, without its keys and values.
    virtual std::int32_t length(std::size_t index) = 0;
    /// Before the first step: reads all that the sequences are made of, and throws llama::Error for what
    /// get() would refuse of any of them (but not for what a model's pass alone shows). Returns the data's
    /// fingerprint.
    virtual std::string verify() = 0;
};

/// Throws llama::Error unless every sequence is longer than the largest budget: a shorter one has no decision
/// to learn from or to look at. `option` is where the sequences come from.
void check_lengths(QkvSource& source, std::span<const std::int32_t> budgets, std::string_view option);

/// Shows q, k and v of a dense pass over a sequence to an oracle.
using Observer = std::function<void(const std::vector<std::int32_t>& tokens, examples::Oracle& oracle)>;

/// Passes on the host, in fp32; device_model.hpp has those of a GPU.
Observer host_observer(const kvpolicy::host& ctx, const llama::Model& model);

/// Runs a model densely on the sequences that `tokens(index)` gives. What was run stays in memory, unless
/// TargetOptions::leave_out says that a device will keep it: then the last one does. Keys and values are
/// rounded to bf16, which is what a cache stores; get() throws llama::Error where one is not finite.
std::unique_ptr<QkvSource> model_source(const kvpolicy::host& ctx, const llama::Config& config,
                                        Observer observe, std::size_t count,
                                        std::function<std::vector<std::int32_t>(std::size_t)> tokens,
                                        const TargetOptions& target);

/// Reads at most `most` sequences of a file of the form above. Targets that it lacks are computed from q
/// once, and kept. Throws llama::Error for a file without sequences, and for a gap in the numbers of
/// sequences or layers. get() and verify() throw for tensors that are missing, of another shape than their
/// neighbors, or not finite (named with head and position), and for sequences with no q and no target.
std::unique_ptr<QkvSource> file_source(const kvpolicy::host& ctx, const std::filesystem::path& file,
                                       const TargetOptions& target,
                                       std::size_t most = std::numeric_limits<std::size_t>::max());

/// Writes `count` sequences of a model in that form: q, k, v in bf16; or, with betas, the targets instead of
/// q, which is much smaller. progress(index) is called before each.
void write_dump(const kvpolicy::host& ctx, const llama::Config& config, const Observer& observe,
                std::size_t count, const std::function<std::vector<std::int32_t>(std::size_t)>& tokens,
                std::int32_t length, const TargetOptions& target, std::span<const float> betas,
                const std::filesystem::path& file, const std::function<void(std::size_t)>& progress);

}  // namespace train
