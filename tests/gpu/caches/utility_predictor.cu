// SP-KV's predictor inside both caches: scores from the hidden states that come with the tokens.
#define KVPOLICY_TEST_HIDDEN_TOKENS 24  // so that chunks have several parts

#include <kvpolicy/spkv.hpp>

#include "arriving_case.hpp"

#include <limits>

using namespace kvpolicy;
using namespace test;

namespace {

using Predictor = UtilityPredictor;

template <class S = Predictor>
S predictor_of(std::int32_t width, std::int32_t hidden, std::int32_t heads = 2) {
    S scorer{};
    scorer.heads = heads;
    scorer.hidden = hidden;
    scorer.input.width = width;
    return scorer;
}

/// Scores of hidden states of T alone, beside those in double. Rows of no token are NaN.
template <class T, class S = Predictor>
void check_scores(std::int32_t width, std::int32_t hidden, std::int32_t heads,
                  const std::vector<std::int32_t>& lengths, std::int32_t length, bool optional) {
    CAPTURE(width);
    CAPTURE(hidden);
    const auto batch = static_cast<std::int32_t>(lengths.size());
    std::mt19937 generator(5);
    const TwoScorers<S> scorers(predictor_of<S>(width, hidden, heads), optional, generator,
                                1.0f / std::sqrt(static_cast<float>(width)));
    const std::int32_t row = width + 3, rows = length + 1;  // gaps between rows and sequences
    std::vector<T> states(static_cast<std::size_t>(batch) * static_cast<std::size_t>(rows * row),
                          T(std::numeric_limits<float>::quiet_NaN()));
    std::normal_distribution<float> normal(0.0f, 1.0f);
    const auto at = [&](std::int32_t b, std::int32_t t) {
        return states.data() + (std::int64_t{b} * rows + t) * row;
    };
    for (std::int32_t b = 0; b < batch; ++b) {
        for (std::int32_t t = 0; t < lengths[static_cast<std::size_t>(b)]; ++t) {
            for (std::int32_t i = 0; i < width; ++i) {
                at(b, t)[i] = T(normal(generator));
            }
        }
    }
    const Device<T> of_device(states);
    const Device<std::int32_t> device_lengths(lengths);
    const Device<float> scores(static_cast<std::size_t>(batch * heads * length));
    score_hidden_params call;
    call.hidden =
        rows_view<const T>{of_device.data(), batch, 1, rows, width, std::int64_t{rows} * row, 0, row};
    call.lengths = device_lengths.data();
    call.scores = view_bhs(scores.data(), batch, heads, length);
    const kvpolicy::cuda ctx{};
    cuda_backend::workspace_parts measured(nullptr);
    device_scorer<S>::score_hidden(ctx, scorers.of_device, call, measured, true);
    const Device<unsigned char> memory(measured.bytes());
    cuda_backend::workspace_parts parts(memory.data());
    device_scorer<S>::score_hidden(ctx, scorers.of_device, call, parts, false);
    const std::vector<float> found = scores.read();
    double worst = 0.0;
    for (std::int32_t b = 0; b < batch; ++b) {
        for (std::int32_t h = 0; h < heads; ++h) {
            for (std::int32_t t = 0; t < length; ++t) {
                const auto got =
                    static_cast<double>(found[static_cast<std::size_t>((b * heads + h) * length + t)]);
                double wanted = 0.0;
                if (t < lengths[static_cast<std::size_t>(b)]) {
                    using Act = std::conditional_t<std::is_same_v<S, Predictor>, Silu, GeluErf>;
                    wanted =
                        exact_mlp<Act>(scorers.of_host.weights, hidden, 0, h, in_double(at(b, t), width));
                }
                const double off = std::abs(got - wanted) / (1.0 + std::abs(wanted));
                worst = off <= worst ? worst : std::isnan(off) ? 1e30 : off;
            }
        }
    }
    MESSAGE("the furthest from double: ", worst);
    CHECK(worst <= static_cast<double>(score_tolerance));
}

}  // namespace

TEST_CASE("few calls") {
    contiguous_life<float, true>(predictor_of(100, 37), arriving_shape(3, 16, 24), true, 100, 10, 1);
    paged_life<SPKV<7, Predictor>, float, true>(predictor_of(100, 37), arriving_shape(3, 16, 24), 0, true,
                                                100, 10, 1);
    check_scores<bf16>(100, 37, 2, {1}, 1, true);
}

TEST_CASE("scores of every storage type, width and number of tokens") {
    const std::vector<std::int32_t> one{1}, steps{1, 0, 1, 1, 1, 0, 1, 1, 1, 1}, chunks{9, 0, 33, 20};
    for (const auto& [width, hidden] : std::vector<std::pair<std::int32_t, std::int32_t>>{
             {5, 3}, {100, 37}, {128, 8}, {1100, 129}, {2050, 16}, {70, 600}}) {
        check_scores<bf16>(width, hidden, 2, one, 1, true);
        check_scores<bf16>(width, hidden, 9, steps, 1, true);
        check_scores<bf16>(width, hidden, 1, chunks, 33, false);
    }
    check_scores<bf16>(9000, 5, 2, one, 1, true);
    check_scores<fp16>(300, 20, 3, chunks, 40, true);
    check_scores<float>(300, 20, 3, chunks, 40, true);
    check_scores<double>(300, 20, 3, chunks, 40, true);
    check_scores<bf16, BasicMlpScorer<HiddenInput, GeluErf>>(300, 20, 3, chunks, 40, true);
}

TEST_CASE("a token has the same bits alone and among others") {
    constexpr std::int32_t width = 1300, heads = 2, count = 21;
    std::mt19937 generator(6);
    for (const std::int32_t hidden : {50, 600}) {
        CAPTURE(hidden);
        const TwoScorers<Predictor> scorers(predictor_of(width, hidden, heads), true, generator, 0.05f);
        Tensor<bf16> states(count, 1, 1, width);
        states.fill_normal(generator);
        const Device<bf16> of_device(states.data);
        const kvpolicy::cuda ctx{};
        const auto scored = [&](std::int32_t first, std::int32_t tokens) {
            const Device<float> scores(static_cast<std::size_t>(tokens * heads));
            score_hidden_params call;
            call.hidden =
                view_bhsd<const bf16>(of_device.data() + std::int64_t{first} * width, tokens, 1, 1, width);
            call.scores = view_bhs(scores.data(), tokens, heads, 1);
            cuda_backend::workspace_parts measured(nullptr);
            device_scorer<Predictor>::score_hidden(ctx, scorers.of_device, call, measured, true);
            const Device<unsigned char> memory(measured.bytes());
            cuda_backend::workspace_parts parts(memory.data());
            device_scorer<Predictor>::score_hidden(ctx, scorers.of_device, call, parts, false);
            return scores.read();
        };
        const std::vector<float> all = scored(0, count);
        for (std::int32_t i = 0; i < count; ++i) {
            const std::vector<float> alone = scored(i, 1);
            CHECK(alone[0] == all[static_cast<std::size_t>(i * heads)]);
            CHECK(alone[1] == all[static_cast<std::size_t>(i * heads + 1)]);
        }
    }
}

// The states of padding would be far behind the memory that there is.
TEST_CASE("hidden states of padding are not read") {
    constexpr std::int32_t width = 100, tokens = 3;
    constexpr std::int64_t far = std::int64_t{1} << 44;
    std::mt19937 generator(8);
    const TwoScorers<Predictor> scorers(predictor_of(width, 37), true, generator, 0.1f);
    const CacheShape shape = arriving_shape(2, 16, 24);
    using P = GatedBudget<Predictor>;
    using Dims = head_dims<64>;
    const kvpolicy::cuda ctx{};
    const CallTensors<float> in(shape, 2, tokens, Scores::random, generator, width);
    const Device<float> q(in.q.data), k(in.k.data), v(in.v.data);
    const Device<bf16> hidden(in.hidden.data);
    const Device<std::int32_t> padded(std::vector<std::int32_t>{1, Batch::no_seq}),
        lengths(std::vector<std::int32_t>{tokens, tokens}), ones(std::vector<std::int32_t>{1, 1});
    // Keys, positions, scores of sequence 1 after a chunk and a step, with padding behind it or alone.
    const auto content = [&](std::int32_t count, bool says_lengths) {
        FixedBudgetCache<P, float> cache(shape, P{{}, {}, {}, {}, scorers.of_device}, &scorers.of_device);
        const Device<unsigned char> memory(cache.bytes().total());
        cache.bind(ctx, memory.data(), memory.size());
        const Device<float> out(in.q.data.size() * 2);
        const Device<std::uint32_t> status(std::vector<std::uint32_t>(2, 0));
        const auto ref = cache.layer(0);
        const Device<unsigned char> workspace(
            workspace_bytes<Dims>(ctx, ref, {.batch = count, .tokens = tokens}));
        for (const std::int32_t n : {tokens, 1}) {
            Batch batch{.count = count, .seq_ids = padded.data(), .length = n};
            if (says_lengths) {
                batch.q_len = n == 1 ? ones.data() : lengths.data();
            }
            Extras extras;
            extras.hidden = rows_view<const bf16>{hidden.data(), count, 1, tokens, width, far, width, width};
            const auto rows = [&](const float* data, std::int32_t heads, std::int32_t dim) {
                auto view = view_bhsd<const float>(data, 2, heads, tokens, dim);
                view.batch = count;
                view.length = n;
                return view;
            };
            auto to = view_bhsd(out.data(), 2, 4, tokens, 24);
            to.batch = count;
            to.length = n;
            const auto io = test::step_io<float>(batch, rows(q.data(), 4, 16), rows(k.data(), 2, 16),
                                                 rows(v.data(), 2, 24), to, extras);
            if (n == 1) {
                step<Dims>(ctx, ref, io, workspace, {.status = status.data()});
            } else {
                prefill<Dims>(ctx, ref, io, workspace, {.status = status.data()});
            }
            cache.advance(ctx, batch, {.status = status.data()});
        }
        CHECK(status.read() == std::vector<std::uint32_t>(2, 0));
        CHECK(cache.length(ctx, 0) == 0);
        CHECK(cache.length(ctx, 1) == tokens + 1);
        std::vector<unsigned char> blob(cache.snapshot_bytes(ctx, 1));
        cache.snapshot(ctx, 1, blob.data(), blob.size());
        return blob;
    };
    const auto alone = content(1, false);
    CHECK(content(2, false) == alone);
    CHECK(content(2, true) == alone);
}

TEST_CASE("a FixedBudgetCache of a gate and a budget") {
    contiguous_life<float, true>(predictor_of(100, 37), arriving_shape(3, 16, 24), true, 100, 80, 2);
    contiguous_life<float, true>(predictor_of(9, 6), arriving_shape(3, 16, 24), false, 9, 80, 3);
}

TEST_CASE("a DualCache of the composition that spkv.hpp names") {
    paged_life<SPKV<7, Predictor>, float, true>(predictor_of(100, 37), arriving_shape(3, 16, 24), 0, true,
                                                100, 80, 2);
    paged_life<SPKV<7, Predictor>, float, true>(predictor_of(9, 6), arriving_shape(3, 16, 24), 0, false, 9,
                                                80, 3);
}

TEST_CASE("16-bit steps") {
    for (const std::int32_t max_sequences : {1, 3, 40}) {
        CAPTURE(max_sequences);
        const auto shape = arriving_shape(max_sequences, 64, 64);
        contiguous_life<bf16, false>(predictor_of(256, 64), shape, true, 256, 40, 4);
        paged_life<SPKV<7, Predictor>, bf16, false>(predictor_of(256, 64), shape, 0, true, 256, 40, 4);
    }
}

TEST_CASE("hidden states that are NaN are reported") {
    std::mt19937 generator(3);
    const TwoScorers<Predictor> scorers(predictor_of(12, 5), true, generator);
    const CacheShape shape = arriving_shape(2, 16, 24);
    const auto spoil = [](CallTensors<float>& in, std::int32_t t) {
        in.hidden.view().row(1, 0, t)[3] = bf16(std::numeric_limits<float>::quiet_NaN());
    };
    for (const bool chunk : {false, true}) {
        CAPTURE(chunk);
        using P = GatedBudget<Predictor>;
        BothCaches<P, float, head_dims<64>> contiguous(shape, P{{}, {}, {}, {}, scorers.of_host},
                                                       &scorers.of_host, &scorers.of_device);
        check_nan_scores<float>(contiguous, 12, chunk, spoil);
        using Named = SPKV<7, Predictor, 2>;
        BothDuals<Named, float, head_dims<64>, true> paged(
            shape, {.slab_pages = 40, .max_slabs = 1, .max_seq_len = 200}, Named{{}, {}, {}, scorers.of_host},
            &scorers.of_host, &scorers.of_device);
        REQUIRE(paged.add_slab());
        check_nan_scores<float>(paged, 12, chunk, spoil);
    }
}

TEST_CASE("hidden states that are missing or of another width, and a predictor that does not fit") {
    using Named = SPKV<7, Predictor>;
    using Cache = DualCache<Named, float>;
    std::mt19937 generator(3);
    const TwoScorers<Predictor> scorers(predictor_of(12, 5), true, generator);
    const CacheShape shape = arriving_shape(2, 16, 24);
    constexpr PoolShape pool{.slab_pages = 40, .max_slabs = 1, .max_seq_len = 200};
    const kvpolicy::cuda ctx{};
    Cache cache(shape, pool, Named{{}, {}, {}, scorers.of_device}, &scorers.of_device);
    const Device<unsigned char> memory(cache.bytes().total()), slab(cache.slab_bytes());
    cache.bind(ctx, memory.data(), memory.size());
    cache.add_slab(ctx, slab.data(), slab.size());
    const CallTensors<float> in(shape, 2, 3, Scores::random, generator, 12);
    const Device<float> q(in.q.data), k(in.k.data), v(in.v.data), out(in.q.data.size() * 2);
    const Device<bf16> hidden(in.hidden.data);
    using Dims = head_dims<64>;
    const auto ref = cache.layer(0);
    const Device<unsigned char> workspace(workspace_bytes<Dims>(ctx, ref, {.batch = 2, .tokens = 3}));
    const auto call = [&](int which, const HiddenRows& states) {
        Extras extras;
        extras.hidden = states;
        const std::int32_t tokens = which == 0 ? 1 : 3;
        const auto io = test::step_io<float>(
            Batch{.count = 2, .length = tokens}, view_bhsd<const float>(q.data(), 2, 4, 3, 16),
            view_bhsd<const float>(k.data(), 2, 2, 3, 16), view_bhsd<const float>(v.data(), 2, 2, 3, 24),
            view_bhsd(out.data(), 2, 4, 3, 24), extras);
        if (which == 0) {
            step<Dims>(ctx, ref, io, workspace);
        } else if (which == 1) {
            prefill<Dims>(ctx, ref, io, workspace);
        } else {
            append_draft<Dims>(ctx, ref, io, workspace);
        }
        ok(cudaDeviceSynchronize());
    };
    const auto states = [&](std::int32_t batch, std::int32_t length, std::int32_t width) {
        return HiddenRows(view_bhsd<const bf16>(hidden.data(), batch, 1, length, width));
    };
    for (const int which : {0, 1, 2}) {
        CAPTURE(which);
        const std::string size = which == 0 ? "1" : "3";
        CHECK_REFUSED(call(which, {}),
                      "io.hidden: null is not allowed; it must be the tokens' hidden states, "
                      "2 x 1 x at least " +
                          size + " x 12");
        CHECK_REFUSED(call(which, states(2, 3, 8)),
                      "io.hidden: 2 x 1 x 3 x 8 is not allowed; it must be 2 x 1 "
                      "x at least " +
                          size + " x 12, the width that the scorer reads");
        CHECK_REFUSED(call(which, states(1, 3, 12)), "io.hidden: 1 x 1 x 3 x 12");
    }
    CHECK(cache.length(ctx, 0) == 0);
    call(0, states(2, 3, 12));
    cache.advance(ctx, {.count = 2, .length = 1});
    call(1, states(2, 3, 12));
    Predictor other = scorers.of_device;
    other.heads = 3;
    CHECK_REFUSED(Cache(shape, pool, Named{{}, {}, {}, other}, &other),
                  "UtilityPredictor.heads: 3 is not allowed; it must be the layer's KV heads, 2");
}
