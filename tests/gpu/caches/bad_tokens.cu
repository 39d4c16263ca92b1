// Tokens whose key or value is NaN, in caches with an mLSTM: a device drops them
// (bad_token::drop), as the host does where it does not refuse them. By steps, chunks long and short, drafts
// and appends, the kernels of an mLSTM for few and for many sequences, and those for sizes that these do not
// take.
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda.cuh>

#include "scorers_case.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

using Dims = head_dims<64>;

enum class Way { step, append, prefill, draft };

/// A cache on a device and one on the host that are given the same tokens, some of them bad. Without `Chunks`
/// one at a time: the others take long to compile.
template <class T, class S, bool Chunks>
class BadTokens {
    using P = Scored<S>;

  public:
    BadTokens(const S& sizes, bool optional, std::int32_t sequences)
        : shape_(scored_shape(sizes, sequences, 6)),
          scorers_(sizes, optional, generator_),
          oracle_(ctx_, shape_, P{{}, {}, {}, scorers_.of_host}, &scorers_.of_host),
          cache_(shape_, P{{}, {}, {}, scorers_.of_host}, &scorers_.of_device),
          memory_(cache_.bytes().total()) {
        cache_.bind(device_, memory_.data(), memory_.size());
    }

    /// `most` tokens of all sequences; in every `every`-th token of a sequence a number of a head is bad.
    void call(Way way, std::int32_t most, unsigned every) {
        const std::int32_t count = shape_.max_sequences;
        CallTensors<T> in(shape_, count, most, Scores::random, generator_);
        const auto spoil = [&](Tensor<T>& rows, std::int32_t b, std::int32_t h, std::int32_t t, float with) {
            rows.view().row(b, h, t)[generator_() % 8] = static_cast<T>(with);
        };
        for (std::int32_t b = 0; b < count; ++b) {
            for (std::int32_t t = 0; t < most; ++t) {
                if (generator_() % every == 0) {
                    const auto h = static_cast<std::int32_t>(generator_() % 2);
                    spoil(generator_() % 2 == 0 ? in.k : in.v, b, h, t, std::nanf(""));
                }
            }
        }
        const Device<T> q(in.q.data), k(in.k.data), v(in.v.data), out(in.q.data.size() * 2);
        const auto ref = cache_.layer(0);
        const auto host_ref = oracle_.cache.layer(0);
        const CallSize size{.batch = count, .tokens = most};
        std::size_t needed = step_workspace_bytes<Dims>(device_, ref, count) +
                             append_workspace_bytes<Dims>(device_, ref, {.batch = count});
        if constexpr (Chunks) {
            needed += workspace_bytes<Dims>(device_, ref, size);
        }
        const Device<unsigned char> workspace(needed);
        Workspace host_workspace(workspace_bytes(ctx_, host_ref, size) +
                                 append_workspace_bytes(ctx_, host_ref, size));
        const Device<std::uint32_t> status(std::vector<std::uint32_t>(static_cast<std::size_t>(count), 0));
        std::vector<std::uint32_t> wanted(static_cast<std::size_t>(count), 0);
        const StepOptions on_device{.status = status.data()}, on_host{.status = wanted.data()};
        const Batch batch{.count = count, .length = most};
        Tensor<T> host_out(count, shape_.query_heads, most, shape_.head_dim_vo);
        const StepIO<T> io{.q = view_bhsd<const T>(q.data(), count, 4, most, shape_.head_dim_qk),
                           .k = view_bhsd<const T>(k.data(), count, 2, most, shape_.head_dim_qk),
                           .v = view_bhsd<const T>(v.data(), count, 2, most, shape_.head_dim_vo),
                           .out = view_bhsd(out.data(), count, 4, most, shape_.head_dim_vo),
                           .batch = batch},
            host_io{.q = std::as_const(in.q).view(),
                    .k = std::as_const(in.k).view(),
                    .v = std::as_const(in.v).view(),
                    .out = host_out.view(),
                    .batch = batch};
        if (way == Way::step) {
            step<Dims>(device_, ref, io, workspace, on_device);
            step(ctx_, host_ref, host_io, host_workspace, on_host);
        } else if (way == Way::append) {
            append<Dims>(device_, ref, io, workspace, on_device);
            append(ctx_, host_ref, host_io, host_workspace, on_host);
        } else if constexpr (!Chunks) {
            FAIL("a chunk in a test of steps");
        } else if (way == Way::prefill) {
            prefill<Dims>(device_, ref, io, workspace, on_device);
            prefill(ctx_, host_ref, host_io, host_workspace, on_host);
        } else {
            append_draft<Dims>(device_, ref, io, workspace, on_device);
            accept<Dims>(device_, ref, batch, workspace, on_device);
            append_draft(ctx_, host_ref, host_io, host_workspace, on_host);
            accept(ctx_, host_ref, batch, host_workspace, on_host);
        }
        cache_.advance(device_, batch);
        oracle_.cache.advance(ctx_, batch);
        CHECK(status.read() == wanted);
        compare();
    }

  private:
    /// Whether both hold the same keys in the same rows, and the device no state that is not finite.
    void compare() const {
        const auto ref = cache_.layer(0), host_ref = oracle_.cache.layer(0);
        const auto position = fetch_from(ref.position, ref.max_sequences * ref.rows);
        const auto score = fetch_from(ref.score, ref.max_sequences * ref.rows);
        const std::int64_t states = std::int64_t{ref.max_sequences} * ref.kv_heads * ref.state_size;
        const auto state = fetch_from(ref.state, states);
        bool same = true, near = true;
        for (std::int32_t seq = 0; seq < shape_.max_sequences; ++seq) {
            for (std::int32_t h = 0; h < shape_.kv_heads; ++h) {
                const auto first = static_cast<std::size_t>(host_ref.first_row(seq, h));
                for (std::size_t r = first; r < first + static_cast<std::size_t>(host_ref.used(seq, h));
                     ++r) {
                    same = same && position[r] == host_ref.position[r];
                    const float a = score[r], b = host_ref.score[r];
                    near = near &&
                           (std::isnan(b) ? std::isnan(a) : std::abs(a - b) <= bound * (1.0f + std::abs(b)));
                }
            }
        }
        for (std::int64_t i = 0; i < states; ++i) {
            const float a = state[static_cast<std::size_t>(i)], b = host_ref.state[i];
            near = near && (a == b || std::abs(a - b) <= bound * (1.0f + std::abs(b)));
        }
        CHECK(same);
        CHECK(near);
    }
    // Long chunks of 16-bit rows have features and states in bf16 (caches/cuda/scoring/README.md).
    static constexpr float bound = sizeof(T) == 2 ? 0x1p-4f : 1e-3f;

    std::mt19937 generator_{7};
    CacheShape shape_;
    host ctx_{2};
    kvpolicy::cuda device_{};
    TwoScorers<S> scorers_;
    BoundCache<P, T> oracle_;
    FixedBudgetCache<P, T> cache_;
    Device<unsigned char> memory_;
};

template <class T, bool Chunks, class S>
void check(const S& sizes, std::int32_t sequences) {
    CAPTURE(sequences);
    BadTokens<T, S, Chunks> caches(sizes, true, sequences);
    for (int turn = 0; turn < 12; ++turn) {
        CAPTURE(turn);
        caches.call(Way::step, 1, 4);
        caches.call(Way::append, 1, 4);
        if (Chunks && turn % 4 == 3) {
            caches.call(Way::prefill, 20, 8);
            caches.call(Way::draft, 5, 4);
        }
    }
}

/// Long chunks, for which an mLSTM has kernels of its own: one whose first tokens are bad, and one that is
/// nothing else for a while.
template <class T, class S>
void check_chunks(const S& sizes) {
    for (const unsigned every : {1u, 2u, 40u}) {
        CAPTURE(every);
        BadTokens<T, S, true> caches(sizes, true, 2);
        caches.call(Way::prefill, 100, 1000000);
        caches.call(Way::prefill, 70, every);
        caches.call(Way::prefill, 150, 30);
        caches.call(Way::step, 1, 2);
    }
}

}  // namespace

TEST_CASE("an mLSTM, few sequences: clusters") { check<float, true>(sized<mLSTMScorer<>>(), 3); }
TEST_CASE("an mLSTM, many sequences: batches") { check<float, true>(sized<mLSTMScorer<>>(), 40); }
TEST_CASE("an mLSTM, values as they are") {
    check<float, false>(sized<mLSTMScorer<dynamic, Softmax, DirectValues>>(), 3);
    check<float, false>(sized<mLSTMScorer<dynamic, Softmax, DirectValues>>(), 20);
}
TEST_CASE("an mLSTM of odd sizes: blocks") {
    auto odd = sized<mLSTMScorer<dynamic, Softmax, DirectValues>>();
    odd.d_qk = 17;
    check<float, false>(odd, 3);
}
TEST_CASE("long chunks of an mLSTM") { check_chunks<float>(sized<mLSTMScorer<>>()); }
