// fmt formatters for policies, shapes and reports. Opt-in: no other header includes this one, it needs fmt (9
// or newer), and it is for host code, not for nvcc.
//
//     fmt::print("{}\n", kvpolicy::KVpop<4, 256, 3836>{});    // Sink 4 + Window 256 + TopKBudget 3836 +
//         Decay 1 (log gamma 0)
//     fmt::print("{}\n", cache.usage(0, 0, 0));           // 1024 rows (4 sinks, 256 window, 764 long-range)
//         of 5000 tokens
//
// A format spec is that of a string: {:>40}. A part of one's own is named by its kind, or by `const char*
// name() const` or `std::string name() const` where it has one.
#pragma once

#include <kvpolicy/caches/cache.hpp>
#include <kvpolicy/caches/page_pool.hpp>
#include <kvpolicy/losses/concept.hpp>
#include <kvpolicy/metrics/recall.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/eviction.hpp>
#include <kvpolicy/policies/eviction_gate.hpp>
#include <kvpolicy/policies/keep_all.hpp>
#include <kvpolicy/policies/selection.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/conv.hpp>
#include <kvpolicy/scorers/linear.hpp>
#include <kvpolicy/scorers/mlp.hpp>
#include <kvpolicy/scorers/mlstm.hpp>
#include <kvpolicy/scorers/observed.hpp>
#include <kvpolicy/scorers/random.hpp>

#include <fmt/format.h>

#include <cstdint>
#include <string>

namespace kvpolicy {

namespace detail {

template <class Number>
std::string number_text(Number x) {
    if constexpr (std::is_same_v<Number, std::int32_t>) {
        if (x == unlimited) {
            return "unlimited";
        }
    }
    return fmt::format("{}", x);
}

template <class Number>
std::string values_text(const PerHead<Number>& values) {
    return values.array == nullptr ? number_text(values.value)
                                   : fmt::format("[{} layers x {} heads]", values.layers, values.heads);
}

inline const char* kind_text(part_kind kind) {
    constexpr const char* texts[] = {
        // in the order of part_kind
        "sinks of one's own",    "a window of one's own",    "a keep part of one's own",
        "a gate of one's own",   "a budget of one's own",    "a decay of one's own",
        "a scorer of one's own", "an eviction of one's own", "a selection of one's own",
    };
    return texts[static_cast<std::size_t>(kind)];
}

inline std::string prefill_text(ObservedPrefill prefill) {
    switch (prefill.chunk) {
        case Observation::whole_call:
            return "dense then prune";
        case 1:
            return "stepwise";
        default:
            return fmt::format("chunks of {}", prefill.chunk);
    }
}

inline const char* aggregate_text(group_aggregate aggregate) {
    return aggregate == group_aggregate::max ? "max" : "mean";
}

/// The name of a part in a policy's text. A part of the user's own takes the first overload.
template <class Part>
std::string part_text(const Part& part) {
    if constexpr (requires { std::string(part.name()); }) {
        return part.name();
    } else {
        return kind_text(Part::kind);
    }
}
template <part_kind Kind, std::int32_t HeadParams::*Member, std::int32_t Number>
std::string head_number_text(const char* name, const head_number<Kind, Member, Number>& part) {
    if constexpr (Number == dynamic) {
        return fmt::format("{} {}", name, values_text(part.number));
    } else {
        return fmt::format("{} {}", name, number_text(Number));
    }
}
template <std::int32_t Count>
std::string part_text(const Sink<Count>& part) {
    return head_number_text("Sink", part);
}
template <std::int32_t Width>
std::string part_text(const Window<Width>& part) {
    return head_number_text("Window", part);
}
template <std::int32_t Keys>
std::string part_text(const TopKBudget<Keys>& part) {
    return head_number_text("TopKBudget", part);
}
template <std::int32_t Keys>
std::string part_text(const SharedBudget<Keys>& part) {
    return fmt::format("SharedBudget {} (floor {}, cap {}, score offset {})", values_text(part.number),
                       values_text(part.limits.floor), values_text(part.limits.cap),
                       values_text(part.limits.score_offset));
}
template <std::int32_t Step>
std::string part_text(const Stride<Step>& part) {
    if constexpr (Step == dynamic) {
        return fmt::format("Stride {}", part.step);
    } else {
        return fmt::format("Stride {}", Step);
    }
}
template <std::int32_t Step>
std::string part_text(const Decay<Step>& part) {
    if constexpr (Step == dynamic) {
        return fmt::format("Decay {} (log gamma {})", values_text(part.step), values_text(part.log_gamma));
    } else {
        return fmt::format("Decay {} (log gamma {})", Step, values_text(part.log_gamma));
    }
}
template <class Comparison>
std::string part_text(const ThresholdGate<Comparison>& part) {
    return fmt::format("ThresholdGate (open {} {})", std::is_same_v<Comparison, above> ? "above" : "from",
                       values_text(part.threshold));
}
inline std::string part_text(const KeepAll&) { return "KeepAll"; }
inline std::string part_text(const EvictionGate& part) {
    return fmt::format("EvictionGate (closed above {})", values_text(part.threshold));
}
inline std::string part_text(const SnapKVEviction& part) {
    return fmt::format("SnapKVEviction ({} entries per head, {} of them a round)", number_text(part.average),
                       part.share);
}
template <std::int32_t Rows>
std::string part_text(const QuestPages<Rows>& part) {
    return fmt::format("QuestPages ({} pages of {} rows)", values_text(part.pages), part.page_size());
}
inline std::string part_text(const GivenScores&) { return "GivenScores"; }
template <std::int32_t D>
std::string part_text(const LinearScorer<D>& part) {
    return fmt::format("LinearScorer ({} + {})", part.head_dim_qk, part.head_dim_vo);
}
template <class Input, class Act, std::int32_t D>
std::string part_text(const BasicMlpScorer<Input, Act, D>& part) {
    if constexpr (takes_hidden_state<Input>) {
        return fmt::format("{} (hidden {})", part.name, part.hidden);
    } else {
        return fmt::format("{} ({} + {}, hidden {})", part.name, part.head_dim_qk, part.head_dim_vo,
                           part.hidden);
    }
}
template <std::int32_t D>
std::string part_text(const ConvScorer<D>& part) {
    return fmt::format("ConvScorer ({} + {})", part.head_dim_qk, part.head_dim_vo);
}
template <std::int32_t D, class Feature, class Values>
std::string part_text(const mLSTMScorer<D, Feature, Values>& part) {
    return fmt::format("mLSTMScorer ({} + {}, {} features, {} values)", part.head_dim_qk, part.head_dim_vo,
                       part.features(), part.value_width());
}
inline std::string part_text(const AccumulatedMass& part) {
    return fmt::format("AccumulatedMass ({}, {} over the group)", prefill_text(part.prefill),
                       aggregate_text(part.aggregate));
}
inline std::string part_text(const LastMass& part) {
    return fmt::format("LastMass ({}, {} over the group{})", prefill_text(part.prefill),
                       aggregate_text(part.aggregate), part.whole_layer ? ", mean over the layer" : "");
}
inline std::string part_text(const WindowMass& part) {
    return fmt::format("WindowMass ({}, {} over the group, {} over {} keys)", prefill_text(part.prefill),
                       aggregate_text(part.aggregate), part.pooling.largest ? "max" : "mean",
                       part.pooling.width);
}
inline std::string part_text(const RandomScorer& part) {
    return fmt::format("RandomScorer (seed {}, layer {})", part.seed, part.layer);
}

/// The parts of a policy, "a + b + c".
template <class... Parts>
std::string text_of_object(const Policy<Parts...>& policy) {
    std::string text;
    policy.for_each_part([&](const auto& part) {
        text += text.empty() ? "" : " + ";
        text += part_text(part);
    });
    return text.empty() ? "Policy without parts" : text;
}
inline std::string text_of_object(const HeadParams& head_params) {
    return fmt::format("sinks {}, window {}, budget {}, decay step {}, log gamma {}, threshold {}",
                       head_params.sinks, head_params.window, number_text(head_params.budget),
                       head_params.decay_step, head_params.log_gamma, head_params.threshold);
}
template <class T>
std::string text_of_object(const PerHead<T>& values) {
    return values_text(values);
}
template <class T>
std::string text_of_object(const rows_view<T>& view) {
    return fmt::format("[{}, {}, {}, {}]", view.batch, view.heads, view.length, view.dim);
}
template <class T>
std::string text_of_object(const plane_view<T>& view) {
    return fmt::format("[{}, {}, {}]", view.batch, view.heads, view.length);
}
inline std::string text_of_object(const CacheShape& shape) {
    return fmt::format("{} layers, {} sequences, {} query heads on {} KV heads, {} + {} wide, pages of {}",
                       shape.layers, shape.max_sequences, shape.query_heads, shape.kv_heads,
                       shape.head_dim_qk, shape.head_dim_vo, shape.page_size);
}
inline std::string text_of_object(const PoolShape& pool) {
    return fmt::format("up to {} slabs of {} pages, sequences of up to {} tokens", pool.max_slabs,
                       pool.slab_pages, pool.max_seq_len);
}
inline std::string bytes_text(std::size_t bytes) {
    constexpr double kib = 1024.0, mib = kib * kib;
    const auto b = static_cast<double>(bytes);
    return b >= mib   ? fmt::format("{:.2f} MiB", b / mib)
           : b >= kib ? fmt::format("{:.2f} KiB", b / kib)
                      : fmt::format("{} B", bytes);
}
inline std::string text_of_object(const CacheBytes& bytes) {
    return fmt::format("{} (keys and values {}, scorer state {}, bookkeeping {})", bytes_text(bytes.total()),
                       bytes_text(bytes.keys_and_values), bytes_text(bytes.scorer_state),
                       bytes_text(bytes.bookkeeping));
}
inline std::string text_of_object(const HeadUsage& held) {
    return fmt::format("{} rows ({} sinks, {} window, {} long-range) of {} tokens", held.size(), held.sinks,
                       held.window, held.long_range, held.length);
}
inline std::string text_of_object(const LossValue& loss) {
    return fmt::format("{:.6g} over {}", loss.value, loss.count);
}
inline std::string text_of_object(const Recall& recall) {
    return fmt::format("recall {:.4f} (chance {:.4f}) over {} queries, at the end {:.4f} (chance {:.4f})",
                       recall.mean, recall.chance_mean, recall.queries, recall.last, recall.chance_last);
}

/// Types that have a text here.
template <class T>
concept Formatted = requires(const T& object) {
    { text_of_object(object) } -> std::same_as<std::string>;
};

}  // namespace detail

}  // namespace kvpolicy

/// Formats the types that kvpolicy has a text for, with the format spec of a string.
template <kvpolicy::detail::Formatted T>
struct fmt::formatter<T> : fmt::formatter<fmt::string_view> {
    template <class Context>
    auto format(const T& object, Context& context) const {
        const std::string text = kvpolicy::detail::text_of_object(object);
        return fmt::formatter<fmt::string_view>::format(fmt::string_view(text), context);
    }
};

/// bf16 and fp16 are formatted as the floats that they are.
template <>
struct fmt::formatter<kvpolicy::bf16> : fmt::formatter<float> {
    template <class Context>
    auto format(kvpolicy::bf16 x, Context& context) const {
        return fmt::formatter<float>::format(static_cast<float>(x), context);
    }
};
template <>
struct fmt::formatter<kvpolicy::fp16> : fmt::formatter<float> {
    template <class Context>
    auto format(kvpolicy::fp16 x, Context& context) const {
        return fmt::formatter<float>::format(static_cast<float>(x), context);
    }
};
