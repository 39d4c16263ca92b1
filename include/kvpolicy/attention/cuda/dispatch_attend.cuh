// The dispatch of attention/cuda_attend.cuh's forward calls: checks, sizes, workspace, launches.
#pragma once

#include <kvpolicy/attention/cuda/forward/kernel_forward.cuh>
#include <kvpolicy/attention/cuda/kernel_plan.cuh>
#include <kvpolicy/attention/cuda/make_attention_params.cuh>
#include <kvpolicy/attention/cuda_attend.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/head_tiles.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/tensor_map.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

// What enqueues a forward kernel is a function template of its own, so that one translation unit of a program
// can instantiate it and others declare it extern.

/// Whether the GPU would run the kernel for Hopper of this tile of head_dims.
template <class T, int Dim, bool General>
bool forward_has_hopper_code(const device_scope& device) {
    return has_hopper_code(device, forward_hopper_kernel<forward_hopper_sizes<T, Dim, General>>);
}

/// Enqueues the tiles of a round, by the kernel for Hopper or the portable one; `next` counts tiles.
template <class T, int Dim, bool General>
void launch_forward(const cuda& ctx, const device_scope& device, bool hopper, const forward_params<T>& call,
                    const forward_boxes& boxes, std::uint32_t* next) {
    using Hopper = forward_hopper_sizes<T, Dim, General>;
    using Portable = forward_portable_sizes<T, Dim, General>;
    const std::int64_t count = call.count();
    if (hopper) {
        const std::int64_t processors = device.attribute(cudaDevAttrMultiProcessorCount);
        launch("forward_hopper_kernel", forward_hopper_kernel<Hopper>, std::min(count, processors),
               Hopper::threads, forward_hopper_shared_bytes<Hopper>(), ctx, call, boxes, next);
    } else {
        launch("forward_portable_kernel", forward_portable_kernel<Portable>, count, Portable::threads,
               forward_portable_shared_bytes<Portable>(), ctx, call);
    }
}

/// Enqueues what recomputes outputs that are not finite.
template <class T>
void launch_forward_fix(const cuda& ctx, const forward_params<T>& call, std::int64_t queries) {
    constexpr std::int64_t fix_blocks = 1024;
    launch("forward_fix_nonfinite_kernel", forward_fix_nonfinite_kernel<T>,
           std::min<std::int64_t>((queries + plain_warps - 1) / plain_warps, fix_blocks), 32 * plain_warps, 0,
           ctx, call);
}

/// Enqueues all queries of fp32 or double.
template <class T>
void launch_forward_plain(const cuda& ctx, const forward_params<T>& call, std::int64_t queries) {
    launch("forward_plain_kernel", forward_plain_kernel<T>, (queries + plain_warps - 1) / plain_warps,
           32 * plain_warps, 0, ctx, call, static_cast<double>(call.params.scale),
           static_cast<double>(call.params.logits_soft_cap));
}

/// A checked forward call.
template <class T, class Dims>
class attend_plan {
  public:
    attend_plan(const cuda& ctx, const AttentionParams& attention, const rows_view<const T>& q,
                const kv_view<T>& past, const kv_view<T>* self, const Sequences& sequences,
                const AttendOptions& options)
        : ctx_(ctx), device_(ctx), sequences_(sequences), options_(options) {
        check_attend(attention, q, past, self, sequences);
        check_portable(options.portable);
        check_aligned("q", q);
        check_key_rows(self != nullptr ? "past.k" : "keys.k", self != nullptr ? "past.v" : "keys.v", past);
        if (self != nullptr) {
            check_key_rows("self.k", "self.v", *self);
        }
        call_.params = params_of(attention, q, past, self, sequences);
        call_.frames = frames_of(past, self, sequences, nullptr);
        rows_ = std::int64_t{past.k.length} + (self != nullptr ? self->k.length : 0);
        detail::require(rows_ < 0x7fffffff, "rows of keys", rows_, "below 2^31");
        biased_ = past.mask.log_bias || (self != nullptr && self->mask.log_bias);
        const auto marked = [](const kv_view<T>& all) { return all.mask.expiry || all.position; };
        call_.causal_rows =
            !marked(past) && (self == nullptr || !marked(*self)) && sequences.cu_seqlens == nullptr;
        plain_frame_ = is_plain_frame(past, self, sequences);
        set_slope();
        if constexpr (is_half<T>) {
            dim_ = std::max(q.dim, past.v.dim);
            tile_ = fitting_tile(Dims{}, dim_);
            detail::require(tile_ != 0, "head_dim", dim_,
                            "at most the largest of the call's head_dims, and 256");
            call_.listed = options.path == attend_path::gather ||
                           (options.path == attend_path::automatic && !call_.causal_rows);
            with_tile(Dims{}, tile_, [this](auto dim) { choose<decltype(dim)::value>(); });
            const std::int64_t count =
                heads() * call_.parts * ((std::int64_t{sequences.length} + call_.tile_q - 1) / call_.tile_q);
            detail::require(count <= 0x7fffffff, "tiles of queries", count, "below 2^31: split the batch");
        }
        if (call_.listed) {
            const bool chunk = is_plain_chunk(self, sequences);
            const auto shape = [&](std::int32_t queries) {
                return shape_plan(rows_, queries, call_.tile_q, plain_frame_ || chunk,
                                  chunk ? past.k.length : 0, narrow_q_ / 2,
                                  queries <= plan_few_queries ? plan_queries_of_few : plan_queries);
            };
            call_.plan = shape(sequences.length);
            few_plan_ = shape(std::min(sequences.length, plan_few_queries));
        }
        if (narrow_q_ > 0) {
            choose_narrow_tiles();
        }
    }

    /// Says where the rows of the first segment begin, by head: key_rows::first_row.
    void past_begins(const std::int64_t* first_row) { call_.params.rows.first_row = first_row; }
    /// Says in which pages they lie.
    void past_pages(const key_pages<T>& pages) { call_.params.rows.pages = pages; }
    /// Says how many rows of the first segment count, by head: segment_frame::head_rows.
    void past_counts(const std::int32_t* head_rows) { call_.frames.past.head_rows = head_rows; }

    /// Says how the entries of q, of the second segment and of the results are packed: their views have a
    /// batch stride of 0.
    void entries_packed(const packed_entries& entries) {
        call_.params.rows.packed = entries.rows;
        packed_ = entries;
    }

    /// Takes the parts of the workspace; with null only measures.
    std::size_t lay_out(void* memory) {
        workspace_parts parts(memory);
        edges_ = parts.take<std::int32_t>(edges_needed(sequences_));
        call_.frames.edges = sequences_.cu_seqlens != nullptr ? edges_ : nullptr;
        if (call_.listed) {
            take_plan(parts, call_.plan, few_plan_, heads(), biased_);
        }
        counters_ = parts.take<std::uint32_t>(is_half<T> ? counters() : 0);
        return parts.bytes();
    }

    void run(const rows_view<T>& out, const plane_view<float>& lse, workspace_view workspace) {
        if (call_.params.rows.packed.edges == nullptr) {  // a batch stride of 0 is no fault of packed results
            checks::check_results(call_.params.q, call_.params.rows.v.dim, out, lse);
        }
        check_aligned("out", out);
        check_workspace(workspace, lay_out(nullptr));
        lay_out(workspace.data);
        call_.out = out;
        call_.lse = lse;
        if (heads() * sequences_.length == 0) {
            return;
        }
        launch_edges(ctx_, sequences_, edges_, options_.status);
        launch("forward_begin_kernel", forward_begin_kernel<key_frames>, 1, 256, 0, ctx_, call_.frames,
               sequences_.batch, options_.status, counters_, is_half<T> ? counters() : 0);
        if constexpr (is_half<T>) {
            call_.not_finite = counters_ + (counters() - 1);
            with_tile(Dims{}, tile_, [this](auto dim) {
                if (general_) {
                    run_rounds<decltype(dim)::value, true>();
                } else {
                    run_rounds<decltype(dim)::value, false>();
                }
            });
            launch_forward_fix<T>(ctx_, call_, queries());
        } else {
            launch_forward_plain<T>(ctx_, call_, queries());
        }
    }

  private:
    static constexpr std::int64_t narrow_max_rounds = 4;  // wide tiles per processor
    static constexpr double narrow_cost = 0.88;           // a narrow tile's time over a wide one's

    /// One for each round's tiles, and one that says whether outputs were finite.
    [[nodiscard]] std::int32_t counters() const {
        return std::max({call_.plan.supers, few_plan_.supers, 1}) + 1;
    }
    [[nodiscard]] std::int64_t heads() const {
        return std::int64_t{call_.params.batch} * call_.params.kv_heads;
    }

    [[nodiscard]] std::int64_t queries() const { return heads() * call_.params.group * call_.params.length; }

    void set_slope() {
        constexpr float log2_e = 1.44269504088896340736f;
        const float scale = call_.params.scale;
        const float logits_soft_cap = call_.params.logits_soft_cap;
        call_.slope = scale * log2_e;
        if (logits_soft_cap > 0.0f) {
            call_.slope = 2.0f * log2_e * (scale / logits_soft_cap);
            call_.cap = logits_soft_cap * log2_e;
        }
        general_ = logits_soft_cap > 0.0f || biased_ || call_.slope <= 0.0f;
    }

    /// Which kernel the GPU gets, and so how many rows a tile has.
    template <int Dim>
    void choose() {
        if (general_) {
            choose<Dim, true>();
        } else {
            choose<Dim, false>();
        }
    }
    template <int Dim, bool General>
    void choose() {
        using Hopper = forward_hopper_sizes<T, Dim, General>;
        using Portable = forward_portable_sizes<T, Dim, General>;
        hopper_ = !options_.portable && forward_has_hopper_code<T, Dim, General>(device_);
        const std::int32_t rows = hopper_ ? Hopper::rows : Portable::rows;
        const std::int32_t group = call_.params.group;
        call_.parts = (group + rows - 1) / rows;
        call_.heads = (group + call_.parts - 1) / call_.parts;
        call_.tile_q = rows / call_.heads;
        if (hopper_ && Hopper::consumers == 3 && call_.tile_q % 3 == 0) {
            narrow_q_ = call_.tile_q / 3 * 2;
        }
    }

    /// Cuts the tiles of some heads narrow, where all processors are done sooner by that: one launch of few
    /// tiles that take about as long as each other.
    void choose_narrow_tiles() {
        const std::int64_t all = heads() * call_.parts;
        const std::int32_t length = call_.params.length;
        const std::int64_t tiles = (std::int64_t{length} + call_.tile_q - 1) / call_.tile_q;
        const std::int64_t processors = device_.attribute(cudaDevAttrMultiProcessorCount);
        const attend_tiles asked = options_.tiles;
        if (all * tiles == 0 || asked == attend_tiles::wide ||
            (asked == attend_tiles::automatic && all * tiles > narrow_max_rounds * processors) ||
            (call_.listed && plan_round(call_.plan, heads(), 0).supers < call_.plan.supers)) {
            return;
        }
        call_.narrow_q = narrow_q_;
        call_.narrow_tiles = (length + narrow_q_ - 1) / narrow_q_;
        if (call_.listed) {
            const std::int32_t super_q = call_.plan.super_q;
            call_.narrow_tiles =
                length / super_q * call_.narrow_per_super() + (length % super_q + narrow_q_ - 1) / narrow_q_;
        }
        if (asked != attend_tiles::automatic) {
            call_.narrow_heads =
                static_cast<std::int32_t>(asked == attend_tiles::narrow ? all : (all + 1) / 2);
            return;
        }
        double best = 0.97 * tiles_end(all * tiles, 0, processors);
        for (std::int64_t narrow = all; narrow > 0; narrow -= std::max<std::int64_t>(1, all / 16)) {
            const double end = tiles_end((all - narrow) * tiles, narrow * call_.narrow_tiles, processors);
            if (end < best) {
                best = end;
                call_.narrow_heads = static_cast<std::int32_t>(narrow);
            }
        }
    }

    /// When the last tile ends, in times that a wide tile takes: processors take wide tiles first, then
    /// narrow ones.
    static double tiles_end(std::int64_t wide, std::int64_t narrow, std::int64_t processors) {
        // So many processors are free after `round` wide tiles, the others one later.
        const auto round = static_cast<double>(wide / processors);
        const std::int64_t late = wide % processors;
        double end = late > 0 ? round + 1 : round;
        double early_end = round + narrow_cost;
        double late_end = round + 1 + narrow_cost;
        while (narrow > 0) {
            double& next = late == 0 || early_end <= late_end ? early_end : late_end;
            narrow -= &next == &early_end ? processors - late : late;
            end = std::max(end, next);
            next += narrow_cost;
        }
        return end;
    }

    /// Maps of the last segment, where a call may use them and TMA can read it.
    [[nodiscard]] forward_boxes boxes() const {
        forward_boxes maps;
        const key_rows<T>& rows = call_.params.rows;
        const bool two = rows.self_k.length != 0;
        const rows_view<const T> k = packed_.whole(two ? rows.self_k : rows.k),
                                 v = packed_.whole(two ? rows.self_v : rows.v);
        maps.always = options_.copies == attend_copies::boxes;
        maps.first_row = two ? rows.k.length : 0;
        maps.there = !general_ && tile_ <= 128 && options_.copies != attend_copies::rows &&
                     (two || rows.first_row == nullptr) &&
                     make_tensor_map(k, forward_boxes::box_rows, maps.k) &&
                     make_tensor_map(v, forward_boxes::box_rows, maps.v);
        return maps;
    }

    template <int Dim, bool General>
    void run_rounds() {
        const std::int32_t tiles = (call_.params.length + call_.tile_q - 1) / call_.tile_q;
        if (!call_.listed) {
            call_.first_tile = 0;
            call_.tiles = tiles;
            run_tiles<Dim, General>(0);
            return;
        }
        const attention_plan whole = call_.plan;
        const std::int32_t tiles_a_super = whole.super_q / call_.tile_q;
        for (std::int32_t first = 0, i = 0; first < whole.supers; ++i) {
            call_.plan = plan_round(whole, heads(), first);
            launch_plan(ctx_, call_.frames, call_.plan, call_.params.batch, call_.params.kv_heads);
            call_.first_tile = first * tiles_a_super;
            call_.tiles = std::min(call_.plan.supers * tiles_a_super, tiles - call_.first_tile);
            run_tiles<Dim, General>(i);
            first += call_.plan.supers;
        }
    }

    template <int Dim, bool General>
    void run_tiles(std::int32_t round) {
        launch_forward<T, Dim, General>(ctx_, device_, hopper_, call_, hopper_ ? boxes() : forward_boxes{},
                                        counters_ + round);
    }

    const cuda& ctx_;
    device_scope device_;
    Sequences sequences_;
    AttendOptions options_;
    forward_params<T> call_;
    attention_plan few_plan_;  // of a call with fewer queries, whose lists may take more memory
    std::int64_t rows_ = 0;
    packed_entries packed_;
    std::int32_t dim_ = 0;
    int tile_ = 0;
    bool biased_ = false;
    bool plain_frame_ = false;
    bool general_ = false;
    bool hopper_ = false;
    std::int32_t narrow_q_ = 0;  // queries of a narrow tile; 0: there are none
    std::int32_t* edges_ = nullptr;
    std::uint32_t* counters_ = nullptr;
};

}  // namespace cuda_backend

template <Storage T, class Dims>
std::size_t attend_workspace_bytes(const cuda& ctx, const AttentionParams& attention, input_rows<T> q,
                                   const kv_view<T>& all, const Sequences& sequences,
                                   const AttendOptions& options) {
    return cuda_backend::attend_plan<T, Dims>(ctx, attention, q, all, nullptr, sequences, options)
        .lay_out(nullptr);
}

template <Storage T, class Dims>
std::size_t attend_workspace_bytes(const cuda& ctx, const AttentionParams& attention, input_rows<T> q,
                                   const kv_view<T>& past, const kv_view<T>& self, const Sequences& sequences,
                                   const AttendOptions& options) {
    return cuda_backend::attend_plan<T, Dims>(ctx, attention, q, past, &self, sequences, options)
        .lay_out(nullptr);
}

template <Storage T, class Dims>
void attend(const cuda& ctx, const AttentionParams& attention, input_rows<T> q, const kv_view<T>& all,
            const Sequences& sequences, output_rows<T> out, plane_view<float> lse, workspace_view workspace,
            const AttendOptions& options) {
    cuda_backend::attend_plan<T, Dims>(ctx, attention, q, all, nullptr, sequences, options)
        .run(out, lse, workspace);
}

template <Storage T, class Dims>
void attend(const cuda& ctx, const AttentionParams& attention, input_rows<T> q, const kv_view<T>& past,
            const kv_view<T>& self, const Sequences& sequences, output_rows<T> out, plane_view<float> lse,
            workspace_view workspace, const AttendOptions& options) {
    cuda_backend::attend_plan<T, Dims>(ctx, attention, q, past, &self, sequences, options)
        .run(out, lse, workspace);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
