// Checks that several host operations share. They run in every call, so they build no text unless they
// refuse: a step must not allocate.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/view.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace kvpolicy::checks {

/// Lengths and packed edges of a call, against the views' batch and length.
inline void check_sequences(const Sequences& sequences, std::int32_t batch, std::int32_t length) {
    if (sequences.batch != batch) {
        detail::refuse("sequences.batch", sequences.batch, detail::text("the views' batch, ", batch));
    }
    if (sequences.length < 0 || sequences.length > length) {
        detail::refuse("sequences.length", sequences.length,
                       detail::text("0 to the views' length, ", length,
                                    sequences.length == Sequences{}.length ? " (it was not set)" : ""));
    }
    if (sequences.lengths != nullptr) {
        for (std::int32_t b = 0; b < batch; ++b) {
            if (sequences.lengths[b] >= 0 && sequences.lengths[b] <= sequences.length) {
                continue;
            }
            detail::refuse(detail::text("sequences.lengths[", b, "]").c_str(), sequences.lengths[b],
                           detail::text("0 to sequences.length = ", sequences.length));
        }
    }
    if (sequences.cu_seqlens != nullptr) {
        detail::require(sequences.segments >= 1, "sequences.segments", sequences.segments,
                        "1 or more where cu_seqlens is given");
        detail::require(sequences.cu_seqlens[0] == 0, "sequences.cu_seqlens[0]", sequences.cu_seqlens[0],
                        "0");
        for (std::int32_t i = 0; i < sequences.segments; ++i) {
            if (sequences.cu_seqlens[i + 1] >= sequences.cu_seqlens[i]) {
                continue;
            }
            detail::refuse(detail::text("sequences.cu_seqlens[", i + 1, "]").c_str(),
                           sequences.cu_seqlens[i + 1], "no less than the edge before it");
        }
        if (sequences.cu_seqlens[sequences.segments] != sequences.length) {
            detail::refuse("sequences.cu_seqlens's last edge", sequences.cu_seqlens[sequences.segments],
                           detail::text("sequences.length = ", sequences.length));
        }
    }
}

/// The same of a call about whole sequences, which knows no chunk's start: looking past it would answer for
/// other positions. It reads no memory beyond the struct, so that it serves every backend.
inline void check_no_starts(const Sequences& sequences) {
    detail::require(sequences.starts == nullptr, "sequences.starts", "given",
                    "null, since the call is about whole sequences, from position 0 on");
}
inline void check_whole_sequences(const Sequences& sequences, std::int32_t batch, std::int32_t length) {
    check_no_starts(sequences);
    check_sequences(sequences, batch, length);
}

/// Whether a metric that counts a whole sequence's pairs, from its first token on, is asked
/// about packed samples.
inline void check_not_packed(const Sequences& sequences) {
    detail::require(sequences.cu_seqlens == nullptr, "sequences.cu_seqlens", "given",
                    "null (give each sample as a sequence of its own)");
}

/// The sequences of a call whose caller gives a status word per sequence, with what a device reports instead
/// of refusing: a length out of range counts as 0 and sets status_bad_length; edges that do not rise from 0
/// to the length leave no sequence any token, and set it for all. False, and empty, where there is no status
/// or nothing is wrong.
class repaired_sequences {
  public:
    repaired_sequences(const Sequences& given, std::uint32_t* status) {
        if (status == nullptr || given.batch <= 0 || given.length < 0) {
            return;
        }
        const auto is_bad = [&](std::int32_t b) {
            return given.lengths != nullptr && (given.lengths[b] < 0 || given.lengths[b] > given.length);
        };
        const bool bad_edges = given.cu_seqlens != nullptr && given.segments >= 1 && !edges_rise(given);
        for (std::int32_t b = 0; b < given.batch; ++b) {
            if (bad_edges || is_bad(b)) {
                std::atomic_ref(status[b]).fetch_or(status_bad_length);
                bad_ = true;
            }
        }
        if (bad_) {
            for (std::int32_t b = 0; b < given.batch; ++b) {
                lengths_.push_back(bad_edges || is_bad(b) ? 0 : given.length_of(b));
            }
            sequences = given;
            sequences.lengths = lengths_.data();
            if (bad_edges) {
                sequences.cu_seqlens = nullptr;
                sequences.segments = 0;
            }
        }
    }
    repaired_sequences(const repaired_sequences&) = delete;
    repaired_sequences& operator=(const repaired_sequences&) = delete;

    explicit operator bool() const { return bad_; }
    Sequences sequences;

  private:
    static bool edges_rise(const Sequences& given) {
        bool rise = given.cu_seqlens[0] == 0 && given.cu_seqlens[given.segments] == given.length;
        for (std::int32_t i = 0; i < given.segments; ++i) {
            rise = rise && given.cu_seqlens[i + 1] >= given.cu_seqlens[i];
        }
        return rise;
    }
    bool bad_ = false;
    std::vector<std::int32_t> lengths_;
};

/// Reports a fault of sequence b in the call's status, as a device does. False where the call has none: then
/// the caller of this refuses the fault.
inline bool reported(std::uint32_t* status, std::int64_t b, std::uint32_t bits) {
    if (status == nullptr) {
        return false;
    }
    std::atomic_ref(status[b]).fetch_or(bits);
    return true;
}

/// Whether the score at [b][h][t] of the array `name` is a number. A NaN sets status_nan_score; without a
/// status it is refused.
template <class Real>
bool is_number(const char* name, std::int64_t b, std::int64_t h, std::int64_t t, Real score,
               std::uint32_t* status) {
    if (!std::isnan(score)) [[likely]] {
        return true;
    }
    if (!reported(status, b, status_nan_score)) {
        detail::refuse(detail::text(name, "[", b, "][", h, "][", t, "]").c_str(), "NaN",
                       "a number (-inf and +inf are allowed)");
    }
    return false;
}

/// Shapes that a workspace can be asked for.
inline void check_shape(const Sequences& sequences, std::int32_t heads) {
    detail::require(sequences.batch >= 0, "sequences.batch", sequences.batch, "0 or more");
    detail::require(sequences.length >= 0, "sequences.length", sequences.length, "0 or more");
    detail::require(heads >= 0, "heads", heads, "0 or more");
}

/// The same of a view, where a workspace depends on nothing else.
template <class View>
void check_extents(const char* name, const View& view) {
    detail::require(
        view.batch >= 0 && view.heads >= 0 && view.length >= 0, name,
        [&] { return detail::text(view.batch, " x ", view.heads, " x ", view.length); },
        "a view of 0 or more of each");
}

/// The numbers of an attention call.
inline void check_attention(const AttentionParams& attention) {
    detail::require(std::isfinite(attention.sm_scale), "attention.sm_scale", attention.sm_scale,
                    "finite (0: 1 / sqrt(head_dim))");
    detail::require(attention.logits_soft_cap >= 0.0f && std::isfinite(attention.logits_soft_cap),
                    "attention.logits_soft_cap", attention.logits_soft_cap, "0 (none) or positive");
}

/// Where a metric is written.
template <class T>
void check_metric(const char* name, const T* out, std::int32_t batch, std::int32_t length) {
    detail::require(out != nullptr || batch == 0 || length == 0, name, "null", "a pointer to the results");
}

/// The workspace of a call.
inline void check_workspace(workspace_view workspace, std::size_t needed) {
    if (workspace.bytes < needed) {
        detail::refuse("workspace.bytes", workspace.bytes,
                       detail::text("at least ", needed, " (what the call's ..._workspace_bytes says)"));
    }
    detail::require(needed == 0 || workspace.data != nullptr, "workspace.data", "null",
                    "memory of workspace.bytes");
}

/// Results need memory of their own: a stride of 0, which gives inputs to many at no cost, would have threads
/// write to one place. What a call writes to is a view of a type that is not const.
template <class Name, class View>
void check_strides(const Name& name, const View& view) {
    if constexpr (!std::is_const_v<std::remove_pointer_t<decltype(view.data)>>) {
        if (view.data == nullptr || view.batch == 0 || view.heads == 0 || view.length == 0) {
            return;
        }
        const auto check = [&](const char* which, std::int64_t stride, std::int32_t count) {
            if (stride == 0 && count > 1) [[unlikely]] {
                detail::refuse(detail::text_of(name).c_str(), detail::text("a ", which, " stride of 0"),
                               "a view whose parts have memory of their own, since it is written to");
            }
        };
        check("batch", view.batch_stride, view.batch);
        check("head", view.head_stride, view.heads);
        if constexpr (requires { view.row_stride; }) {
            check("row", view.row_stride, view.length);
        }
    }
}

/// A tensor of a call: [batch, heads, at least length, dim].
template <class T>
void check_rows(const char* name, rows_view<T> view, std::int32_t batch, std::int32_t heads,
                std::int32_t length, std::int32_t dim) {
    const bool fits = view.batch == batch && view.heads == heads && view.length >= length && view.dim == dim;
    if (!fits) {
        detail::refuse(name, detail::text(view.batch, " x ", view.heads, " x ", view.length, " x ", view.dim),
                       detail::text(batch, " x ", heads, " x at least ", length, " x ", dim));
    }
    detail::require(view.data != nullptr || batch == 0 || length == 0, name, "null",
                    "a pointer to its elements");
    check_strides(name, view);
}

/// A plane of a call: [batch, heads, at least length].
template <class T>
void check_plane(const char* name, plane_view<T> view, std::int32_t batch, std::int32_t heads,
                 std::int32_t length) {
    const bool fits = view.batch == batch && view.heads == heads && view.length >= length;
    if (!fits) {
        detail::refuse(name, detail::text(view.batch, " x ", view.heads, " x ", view.length),
                       detail::text(batch, " x ", heads, " x at least ", length));
    }
    detail::require(view.data != nullptr || batch == 0 || heads == 0 || length == 0, name, "null",
                    "a pointer to its numbers");
    check_strides(name, view);
}

/// The first entry whose sequence an entry before it names too, or `count`. All sequences are in [0,
/// max_sequences). One pass over the entries for every 4096 sequences, and no memory but the stack's.
inline std::int32_t first_named_twice(const std::int32_t* named, std::int32_t count,
                                      std::int32_t max_sequences) {
    constexpr std::int32_t range = 4096, word_bits = 64;
    std::int32_t first = count;
    for (std::int32_t begin = 0; begin < max_sequences; begin += std::min(range, max_sequences - begin)) {
        std::uint64_t seen[range / word_bits];
        std::fill_n(seen, (std::min(range, max_sequences - begin) + word_bits - 1) / word_bits,
                    std::uint64_t{0});
        for (std::int32_t i = 0; i < first; ++i) {
            const std::int32_t seq = named[i] - begin;
            if (seq < 0 || seq >= range) {
                continue;
            }
            const std::uint64_t bit = std::uint64_t{1} << (seq % word_bits);
            if ((seen[seq / word_bits] & bit) != 0) {
                first = i;
            }
            seen[seq / word_bits] |= bit;
        }
    }
    return first;
}

/// A number of sequences, by the name of its argument.
inline void check_count(const char* name, std::int32_t count, std::int32_t max_sequences) {
    detail::require(count >= 0 && count <= max_sequences, name, count,
                    [&] { return detail::text("0 to the cache's max_sequences, ", max_sequences); });
}

/// Sequences and token counts of a batch. Returns the largest token count.
inline std::int32_t check_batch(const Batch& batch, std::int32_t max_sequences, std::int32_t most,
                                const char* max_name) {
    check_count("batch.count", batch.count, max_sequences);
    const auto refuse = [](std::int32_t i, const char* what, std::int32_t value, const std::string& allowed) {
        detail::refuse(detail::text(what, "[", i, "]").c_str(), value, allowed);
    };
    std::int32_t longest = 0;
    for (std::int32_t i = 0; i < batch.count; ++i) {
        if (batch.seq(i) < 0 || batch.seq(i) >= max_sequences) {
            refuse(i, "batch.seq_ids", batch.seq(i), detail::text("0 to ", max_sequences - 1));
        }
        if (batch.tokens(i) < 0 || batch.tokens(i) > most) {
            refuse(i, "batch tokens", batch.tokens(i), detail::text("0 to ", most, " (", max_name, ")"));
        }
        longest = std::max(longest, batch.tokens(i));
    }
    if (batch.seq_ids != nullptr && batch.count > 1) {
        const std::int32_t twice = first_named_twice(batch.seq_ids, batch.count, max_sequences);
        if (twice < batch.count) {
            refuse(twice, "batch.seq_ids", batch.seq_ids[twice], "a sequence that no other entry names");
        }
    }
    return longest;
}

/// The plane for log-sum-exps, where one is given.
inline void check_lse(plane_view<float> lse, std::int32_t batch, std::int32_t query_heads,
                      std::int32_t length) {
    if (lse) {
        check_plane("lse", lse, batch, query_heads, length);
    }
}

/// Looks at many numbers with all threads: good(i, false) for every i in [0, count). The first i that is not
/// good is asked again on the caller's thread, as good(i, true), which refuses: without exceptions the
/// handler of a refusal may longjmp.
template <class Good>
void check_in_parallel(const host& ctx, std::int64_t count, Good&& good) {
    std::atomic<std::int64_t> first{count};
    ctx.parallel_for(count, [&](std::int64_t i) {
        if (i >= first.load(std::memory_order_relaxed) || good(i, false)) {
            return;
        }
        std::int64_t found = first.load();
        while (i < found && !first.compare_exchange_weak(found, i)) {
        }
    });
    if (first.load() < count) {
        static_cast<void>(good(first.load(), true));
    }
}

}  // namespace kvpolicy::checks
