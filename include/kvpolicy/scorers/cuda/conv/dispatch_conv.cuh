// The stages of a ConvScorer's calls.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/conv.hpp>
#include <kvpolicy/scorers/cuda/common/scorer_plan.cuh>
#include <kvpolicy/scorers/cuda/conv/kernel_conv.cuh>
#include <kvpolicy/scorers/cuda/conv/kernel_conv_backward.cuh>
#include <kvpolicy/scorers/cuda/conv/kernel_conv_backward_hopper.cuh>
#include <kvpolicy/scorers/cuda/conv/kernel_conv_hopper.cuh>
#include <kvpolicy/scorers/cuda/conv/kernel_conv_input_gradients_hopper.cuh>
#include <kvpolicy/scorers/cuda/conv/kernel_conv_weight_gradients_hopper.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Chunks of up to `each` tokens that a plane has at most.
inline std::int32_t conv_tiles(const Sequences& sequences, std::int32_t each) {
    return sequences.cu_seqlens == nullptr ? (sequences.length + each - 1) / each
                                           : sequences.length / each + sequences.segments;
}

/// What a block of the portable kernels has at once: tiles of 16 rows, columns of a slab.
struct conv_size {
    int tiles;
    std::int32_t columns;
};
/// Calls body(std::integral_constant Tiles).
template <class T, class Body>
void with_conv_tiles(int tiles, Body body) {
    if (tiles == conv_max_tiles) {
        body(std::integral_constant<int, conv_max_tiles>{});
    } else {
        body(std::integral_constant<int, conv_few_tiles<T>>{});
    }
}
template <bool Backward, class T>
std::size_t conv_shared_bytes(const conv_params<T>& params, const conv_size& size) {
    std::size_t bytes = 0;
    with_conv_tiles<T>(size.tiles, [&](auto tiles) {
        bytes = conv_memory<T, tiles, Backward>(nullptr, params, size.columns).bytes;
    });
    return bytes;
}
/// The largest that fits into `capacity` bytes of shared memory, with slabs of up to `columns` columns: sums
/// of products have one order in all of them. Refuses a scorer too wide for the smallest.
template <bool Backward, class T>
conv_size fitting_conv_size(const conv_params<T>& params, std::size_t capacity, std::int32_t columns) {
    const conv_size smallest{conv_few_tiles<T>, 64};
    for (const conv_size& size : {conv_size{conv_max_tiles, columns}, conv_size{conv_max_tiles, 64}}) {
        if (conv_shared_bytes<Backward>(params, size) <= capacity) {
            return size;
        }
    }
    require_shared("ConvScorer.head_dim_qk + head_dim_vo", params.layer[0].inputs,
                   conv_shared_bytes<Backward>(params, smallest), capacity);
    return smallest;
}

template <class T>
struct conv_plan {
    scorer_plan<T> call;
    conv_params<T> params{};
    T* stack[3] = {};
    T* packed = nullptr;  // the same weights for conv_hopper_kernel, in the same place
    const float* weights[3] = {};

    template <class S>
    conv_plan(const S& scorer, rows_view<const T> k, rows_view<const T> v, const Sequences& sequences,
              std::int32_t delay, const Dropout& dropout, workspace_parts& parts)
        : call(k, v, sequences, delay, parts) {
        call.source.input = scorer_input::turned;
        call.set_rope(scorer.rope, parts);
        const float* const biases[3] = {scorer.weights.b1, scorer.weights.b2, scorer.weights.b3};
        weights[0] = scorer.weights.w1;
        weights[1] = scorer.weights.w2;
        weights[2] = scorer.weights.w3;
        const auto padded = [](std::int32_t width) { return (width + 63) / 64 * 64; };
        std::int64_t each = 0;  // a head's weights
        for (int l = 0; l < 3; ++l) {
            conv_layer_params<T>& layer = params.layer[l];
            layer.width = scorer.channels(l + 1);
            layer.padded = padded(layer.width);
            layer.inputs = scorer.channels(l);
            layer.padded_inputs = padded(layer.inputs);
            layer.bias = biases[l];
            each += std::int64_t{3} * layer.padded * layer.padded_inputs;
        }
        each = std::max<std::int64_t>(each, hopper_inputs() == 0 ? 0
                                            : hopper_inputs() == 128
                                                ? conv_hopper_shape<128>::weights_before(4)
                                                : conv_hopper_shape<256>::weights_before(4));
        packed = parts.take<T>(k.heads * each);
        std::int64_t at = 0;
        for (int l = 0; l < 3; ++l) {
            conv_layer_params<T>& layer = params.layer[l];
            stack[l] = packed + at;
            layer.weights = stack[l];
            at += std::int64_t{3} * k.heads * layer.padded * layer.padded_inputs;
        }
        params.readout = scorer.weights.readout;
        params.readout_bias = scorer.weights.readout_bias;
        params.rate = dropout.rate;
        params.seed = dropout.seed;
    }

    /// Numbers a token that a Hopper kernel of this scorer is compiled for; 0: there is none.
    [[nodiscard]] std::int32_t hopper_inputs() const {
        const std::int32_t inputs = params.layer[0].inputs;
        return !is_half<T> || inputs > 256 ? 0 : inputs <= 128 ? 128 : 256;
    }

    /// `packs`: pack_weights follows, which makes the frequencies too.
    void begin(const cuda& ctx, std::uint32_t* status, bool packs) {
        float* const frequencies = call.frequencies;
        call.frequencies = packs ? nullptr : frequencies;
        call.begin(ctx, status);
        call.frequencies = frequencies;
        params.streams = call.streams;
        params.source = call.source;
    }
    void stack_weights(const cuda& ctx) const {
        for (int l = 0; l < 3; ++l) {
            const conv_layer_params<T>& layer = params.layer[l];
            const std::int64_t count =
                std::int64_t{call.streams.heads} * layer.padded * 3 * layer.padded_inputs;
            launch("stack_conv_kernel", stack_conv_kernel<T>,
                   std::min<std::int64_t>((count + 255) / 256, 1024), 256, 0, ctx, weights[l],
                   call.streams.heads, layer, stack[l]);
        }
    }
    /// What a Hopper kernel's weights are made of.
    [[nodiscard]] conv_weights to_pack() const {
        conv_weights from{};
        for (int l = 0; l < 3; ++l) {
            from.layer[l] = weights[l];
            from.width[l] = params.layer[l].width;
            from.inputs[l] = params.layer[l].inputs;
        }
        from.heads = call.streams.heads;
        return from;
    }
    template <int Inputs>
    void pack_weights(const cuda& ctx) const {
        const std::int64_t eights =
            std::int64_t{call.streams.heads} * conv_hopper_shape<Inputs>::weights_before(4) / 8;
        launch("pack_conv_kernel", pack_conv_kernel<T, Inputs>,
               std::min<std::int64_t>((eights + 255) / 256, 4096), 256, 0, ctx, to_pack(), packed, call.base,
               call.source.rotated, call.frequencies);
    }
    /// The whole forward pass.
    void run(const cuda& ctx, const device_scope& device, std::uint32_t* status) {
        if constexpr (is_half<T>) {
            if (params.rate == 0.0f && (hopper_inputs() == 128   ? hopper<128>(ctx, device, status)
                                        : hopper_inputs() == 256 ? hopper<256>(ctx, device, status)
                                                                 : false)) {
                return;
            }
        }
        const conv_size size = fitting_conv_size<false>(
            params,
            shared_capacity(device, "conv_kernel",
                            reinterpret_cast<const void*>(conv_kernel<T, conv_max_tiles>)),
            conv_columns<T>);
        begin(ctx, status, false);
        stack_weights(ctx);
        params.columns = size.columns;
        with_conv_tiles<T>(size.tiles, [&](auto tiles) {
            params.streams.chunks = conv_tiles(call.sequences, conv_tiling<tiles>::tokens);
            launch("conv_kernel", conv_kernel<T, tiles>,
                   std::int64_t{call.streams.batch} * call.streams.heads * params.streams.chunks, 128,
                   conv_shared_bytes<false>(params, size), ctx, params);
        });
    }

  private:
    /// False where the GPU cannot run the kernel.
    template <int Inputs>
    bool hopper(const cuda& ctx, const device_scope& device, std::uint32_t* status) {
        constexpr auto kernel = conv_hopper_kernel<T, Inputs>;
        if (!has_hopper_code(device, kernel)) {
            return false;
        }
        begin(ctx, status, true);
        pack_weights<Inputs>(ctx);
        // As many ranges as blocks run at once, or for many planes several rounds of them, but none shorter
        // than a tile.
        const std::int64_t planes = std::int64_t{call.streams.batch} * call.streams.heads,
                           capacity = 2 * std::int64_t{device.attribute(cudaDevAttrMultiProcessorCount)};
        const std::int64_t wanted =
            planes == 0
                ? 1
                : std::max<std::int64_t>(planes <= capacity ? capacity / planes : 4 * capacity / planes, 1);
        const auto tokens = static_cast<std::int32_t>(
            std::max<std::int64_t>((call.sequences.length + wanted - 1) / wanted, conv_tile));
        conv_params<T> ranges = params;
        ranges.streams.chunks = conv_tiles(call.sequences, tokens);
        share_sms<kernel>(device);
        launch_early<kernel>("conv_hopper_kernel", planes * ranges.streams.chunks, conv_consumers,
                             conv_forward_shape<Inputs>::shared_bytes, device, ctx, 1, ranges, tokens,
                             call.frequencies != nullptr ? call.base : 0.0f, static_cast<const T*>(packed));
        return true;
    }
};

/// Blocks of a gradient of weights on Hopper. Parts of its sums depend on shapes alone, so that bits do not
/// depend on the GPU: these are the 132 SMs of an H100.
inline constexpr std::int64_t conv_gradient_blocks = 132;

/// The backward pass, with its part of the workspace.
template <class T>
struct conv_backward_plan {
    conv_plan<T> conv;
    conv_backward_params<T> params{};
    conv_backward_hopper_params<T> tiles{};  // on Hopper, in place of it
    T *back = nullptr, *back_inputs = nullptr;
    std::int32_t hopper = 0;  // numbers a token that its kernels are compiled for
    conv_size size{};         // of the portable kernels
    std::int32_t splits[3] = {};
    float* partial = nullptr;  // of one layer after the other
    score_gradients<T> d_scores;

    template <class S>
    conv_backward_plan(const device_scope& device, const S& scorer, const ScoreBackward<T>& from,
                       workspace_parts& parts)
        : conv(scorer, from.k, from.v, from.sequences, from.delay, from.dropout, parts) {
        detail::require(scorer.channels(3) <= 64, "ConvScorer.head_dim_qk + head_dim_vo", scorer.channels(0),
                        "below 520 for gradients on CUDA");
        d_scores.take(conv.call, parts);
        if constexpr (is_half<T>) {
            // The kernels for Hopper have no dropout.
            if ((from.d_k.data == nullptr || from.k.dim <= conv_input_width) && from.dropout.rate == 0.0f) {
                if (conv.hopper_inputs() == 128) {
                    take_tiles<128>(device, from, parts);
                } else if (conv.hopper_inputs() == 256) {
                    take_tiles<256>(device, from, parts);
                }
                if (hopper != 0) {
                    return;
                }
            }
        }
        size = fitting_conv_size<true>(
            conv.params,
            shared_capacity(device, "conv_backward_kernel",
                            reinterpret_cast<const void*>(conv_backward_kernel<T, conv_max_tiles>)),
            64);
        std::int64_t rows = 0;  // of a chunk
        with_conv_tiles<T>(size.tiles, [&](auto tiles) {
            rows = conv_tiling<tiles>::rows;
            conv.call.streams.chunks = conv_tiles(from.sequences, conv_tiling<tiles>::tokens);
        });
        const std::int64_t chunks = conv.call.chunks();
        std::int64_t most = 0;
        params.sums_width = 1;
        for (int l = 0; l < 3; ++l) {
            const conv_layer_params<T>& layer = conv.params.layer[l];
            const std::int64_t tiles =
                std::int64_t{conv.call.streams.heads} * (layer.padded / 64) * (layer.padded_inputs / 64);
            splits[l] = static_cast<std::int32_t>(std::clamp<std::int64_t>(
                512 / std::max<std::int64_t>(tiles, 1), 1,
                std::max<std::int64_t>(std::int64_t{conv.call.streams.batch} * conv.call.streams.chunks, 1)));
            most = std::max(most, splits[l] * tiles * 64 * 64 * 3);
            params.in[l] = parts.take<T>(chunks * rows * layer.padded_inputs);
            params.d[l] = parts.take<T>(chunks * rows * layer.padded);
            if (l < 2) {
                params.slope[l] = parts.take<T>(chunks * rows * layer.padded);
            }
            params.sums_width += l < 2 ? layer.width : 2 * layer.width;
        }
        params.sums = parts.take<float>(chunks * params.sums_width);
        partial = parts.take<float>(most);
        if (from.d_k.data != nullptr) {
            params.d_x = parts.take<float>(chunks * rows * conv.call.source.padded);
        }
    }

    void run(const cuda& ctx, const ConvParameters<float>& to, const ScoreBackward<T>& call,
             std::uint32_t* status) {
        conv.begin(ctx, status, hopper != 0);
        params.d_scores = tiles.d_scores = d_scores.of(ctx, conv.call, call.d_scores);
        if constexpr (is_half<T>) {
            if (hopper == 128) {
                return run_tiles<128>(ctx, to, call);
            }
            if (hopper == 256) {
                return run_tiles<256>(ctx, to, call);
            }
        }
        with_conv_tiles<T>(size.tiles, [&](auto tiles) { run_chunks<tiles>(ctx, to, call); });
    }

  private:
    template <int Tiles>
    void run_chunks(const cuda& ctx, const ConvParameters<float>& to, const ScoreBackward<T>& call) {
        using tiling = conv_tiling<Tiles>;
        conv.stack_weights(ctx);
        params.forward = conv.params;
        const scorer_streams& streams = conv.call.streams;
        launch("conv_backward_kernel", conv_backward_kernel<T, Tiles>, conv.call.chunks(), 128,
               conv_shared_bytes<true>(conv.params, size), ctx, params);
        float* const into[3] = {to.w1, to.w2, to.w3};
        float* const biases[3] = {to.b1, to.b2, to.b3};
        chunk_sums sums;
        std::int32_t at = 0;
        for (int l = 0; l < 3; ++l) {
            const conv_layer_params<T>& layer = conv.params.layer[l];
            if (into[l] != nullptr) {
                shared_parts shared(nullptr);
                shared.tile<T>(tiling::rows, 64);
                shared.tile<T>(tiling::rows + 8, 64);
                launch("conv_weight_gradient_kernel", conv_weight_gradient_kernel<T, Tiles>,
                       std::int64_t{splits[l]} * streams.heads * (layer.padded / 64) *
                           (layer.padded_inputs / 64),
                       128, shared.bytes(), ctx, streams, static_cast<const T*>(params.d[l]), layer.padded,
                       static_cast<const T*>(params.in[l]), layer.padded_inputs, splits[l], partial);
                const std::int64_t count = std::int64_t{streams.heads} * layer.width * 3 * layer.inputs;
                launch("add_conv_gradients_kernel", add_conv_gradients_kernel<float>,
                       std::min<std::int64_t>((count + 255) / 256, 4096), 256, 0, ctx, streams,
                       static_cast<const float*>(partial), splits[l], layer.width, layer.padded, layer.inputs,
                       layer.padded_inputs, into[l]);
            }
            sums.add(params.sums, params.sums_width, at, layer.width, biases[l]);
            at += layer.width;
        }
        const std::int32_t last = conv.params.layer[2].width;
        sums.add(params.sums, params.sums_width, at, last, to.readout);
        sums.add(params.sums, params.sums_width, at + last, 1, to.readout_bias);
        add_sums(ctx, streams, sums);
        if (params.d_x != nullptr) {
            launch("conv_input_gradient_kernel", conv_input_gradient_kernel<T, Tiles>, conv.call.chunks(),
                   128, 0, ctx, params, call.d_k, call.d_v);
        }
    }

    [[nodiscard]] std::int64_t tile_count() const {
        return std::int64_t{tiles.forward.streams.batch} * tiles.forward.streams.heads *
               tiles.forward.streams.chunks;
    }
    template <int Inputs>
    void take_tiles(const device_scope& device, const ScoreBackward<T>& from, workspace_parts& parts) {
        using shape = conv_backward_hopper_shape<Inputs>;
        if (!has_hopper_code(device, conv_backward_hopper_kernel<T, Inputs>)) {
            return;
        }
        hopper = Inputs;
        const scorer_streams& streams = conv.call.streams;
        tiles.forward.streams = streams;
        tiles.forward.streams.chunks = conv_tiles(from.sequences, conv_backward_tile_rows);
        const std::int64_t count = tile_count();
        back = parts.take<T>(std::int64_t{streams.heads} * shape::weights);
        if (from.d_k.data != nullptr) {
            back_inputs = parts.take<T>(std::int64_t{streams.heads} * conv_input_shape<Inputs>::weights);
        }
        tiles.sums_width = 1;
        std::int64_t most = 0;
        for (int l = 0; l < 3; ++l) {
            const conv_layer_params<T>& layer = conv.params.layer[l];
            tiles.in[l] = parts.take<T>(count * shape::channels(l) * conv_back_inputs);
            tiles.d[l] = parts.take<T>(count * shape::channels(l + 1) * conv_back_rows);
            tiles.sums_width += l < 2 ? layer.width : 2 * layer.width;
            const std::int64_t blocks = std::int64_t{streams.heads} * ((shape::channels(l) + 63) / 64);
            splits[l] = static_cast<std::int32_t>(std::clamp<std::int64_t>(
                conv_gradient_blocks / std::max<std::int64_t>(blocks, 1), 1,
                std::max<std::int64_t>(std::int64_t{streams.batch} * tiles.forward.streams.chunks, 1)));
            most = std::max(most,
                            std::int64_t{splits[l]} * streams.heads * layer.padded * 3 * layer.padded_inputs);
        }
        tiles.sums = parts.take<float>(count * tiles.sums_width);
        partial = parts.take<float>(most);
    }
    template <int Inputs>
    void run_tiles(const cuda& ctx, const ConvParameters<float>& to, const ScoreBackward<T>& call) {
        using shape = conv_backward_hopper_shape<Inputs>;
        const std::int32_t chunks = tiles.forward.streams.chunks;
        tiles.forward = conv.params;
        tiles.forward.streams.chunks = chunks;
        const scorer_streams& streams = tiles.forward.streams;
        conv.template pack_weights<Inputs>(ctx);
        const std::int64_t eights = std::int64_t{streams.heads} * shape::weights / 8;
        launch("pack_conv_backward_kernel", pack_conv_backward_kernel<T, Inputs>,
               std::min<std::int64_t>((eights + 255) / 256, 4096), 256, 0, ctx, conv.to_pack(), back);
        launch("conv_backward_hopper_kernel", conv_backward_hopper_kernel<T, Inputs>, tile_count(),
               conv_consumers, shape::shared_bytes, ctx, tiles, static_cast<const T*>(conv.packed),
               static_cast<const T*>(back));
        if (streams.delay > conv_reach) {
            launch("conv_unread_kernel", conv_unread_kernel<T>, tile_count(), 128, 0, ctx, tiles.forward);
        }
        if (call.d_k.data != nullptr) {
            add_inputs<Inputs>(ctx, call);
        }
        add_gradient<shape::channels(1)>(ctx, 0, shape::channels(0), 0, to.w1);
        add_gradient<shape::channels(2)>(ctx, 1, shape::channels(1), 4, to.w2);
        add_gradient<shape::channels(3)>(ctx, 2, shape::channels(2), 0, to.w3);
        float* const biases[3] = {to.b1, to.b2, to.b3};
        chunk_sums sums{};
        std::int32_t at = 0;
        for (int l = 0; l < 3; ++l) {
            sums.add(tiles.sums, tiles.sums_width, at, conv.params.layer[l].width, biases[l]);
            at += conv.params.layer[l].width;
        }
        const std::int32_t last = conv.params.layer[2].width;
        sums.add(tiles.sums, tiles.sums_width, at, last, to.readout);
        sums.add(tiles.sums, tiles.sums_width, at + last, 1, to.readout_bias);
        add_sums(ctx, streams, sums);
    }
    template <int Inputs>
    void add_inputs(const cuda& ctx, const ScoreBackward<T>& call) {
        using shape = conv_input_shape<Inputs>;
        scorer_streams parts = tiles.forward.streams;
        parts.chunks = conv_tiles(call.sequences, conv_tile_rows);
        const std::int64_t eights = std::int64_t{parts.heads} * shape::weights / 8;
        launch("pack_conv_inputs_kernel", pack_conv_inputs_kernel<T, Inputs>,
               std::min<std::int64_t>((eights + 255) / 256, 4096), 256, 0, ctx, conv.to_pack(), back_inputs);
        launch("conv_input_gradients_hopper_kernel", conv_input_gradients_hopper_kernel<T, Inputs>,
               std::int64_t{parts.batch} * parts.heads * parts.chunks, conv_consumers, shape::shared_bytes,
               ctx, parts, tiles.forward.streams, tiles.forward.source, static_cast<const T*>(tiles.d[0]),
               static_cast<const T*>(back_inputs), call.d_k, call.d_v);
    }
    /// into += d W of layer l + 1, whose inputs stand `shift` rows after its gradients.
    template <int Width>
    void add_gradient(const cuda& ctx, int l, std::int32_t inputs, std::int32_t shift, float* into) {
        if (into == nullptr) {
            return;
        }
        const conv_layer_params<T>& layer = conv.params.layer[l];
        const scorer_streams& streams = tiles.forward.streams;
        launch("conv_weight_gradients_hopper_kernel", conv_weight_gradients_hopper_kernel<T, Width>,
               std::int64_t{splits[l]} * streams.heads * ((inputs + 63) / 64), 3 * 128 + 32,
               conv_gradient_shared<Width>, ctx, streams, static_cast<const T*>(tiles.d[l]),
               static_cast<const T*>(tiles.in[l]), inputs, shift, splits[l], layer.padded,
               layer.padded_inputs, partial);
        const std::int64_t count = std::int64_t{streams.heads} * layer.width * 3 * layer.inputs;
        launch("add_conv_gradients_kernel", add_conv_gradients_kernel<float>,
               std::min<std::int64_t>((count + 255) / 256, 4096), 256, 0, ctx, streams,
               static_cast<const float*>(partial), splits[l], layer.width, layer.padded, layer.inputs,
               layer.padded_inputs, into);
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
