// train_scorer's steps on a device beside the host's: losses, decisions, weights, held-out numbers,
// checkpoints.
#include "../../examples/training_case.hpp"
#include "device_model.hpp"
#include "device_trainer.hpp"
#include "support/evaluation.hpp"
#include "support/oracle.hpp"

#include <doctest/doctest.h>
#include <llama/model.hpp>

#include <cmath>
#include <string>
#include <vector>

using namespace training_test;

namespace {

constexpr std::int64_t steps = 24;

Options run_of(const std::string& kind, bool fp32_rows, const Sizes& s) {
    Options o = small(kind, s);
    o.steps = steps, o.warm_up = 4, o.batch = 2, o.rate = 3e-3;
    o.fp32_rows = fp32_rows;
    o.fp32 = true;  // round_weights() then only brings weights back
    return o;
}

double largest_difference(const std::vector<std::vector<float>>& a,
                          const std::vector<std::vector<float>>& b) {
    double most = 0.0;
    REQUIRE(a.size() == b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
        REQUIRE(a[i].size() == b[i].size());
        for (std::size_t j = 0; j < a[i].size(); ++j) {
            most = std::max(most, std::fabs(static_cast<double>(a[i][j]) - static_cast<double>(b[i][j])));
        }
    }
    return most;
}

/// Curves of both backends; `near` bounds the difference of losses and of weights. AdamW's step is rate x g /
/// |g| for a weight whose gradient is rounding noise, so weights may differ by a few steps' length where
/// losses do not.
template <class S>
void compare(const std::string& kind, bool fp32_rows, bool leave_out, double near, double near_weights) {
    CAPTURE(kind);
    CAPTURE(fp32_rows);
    CAPTURE(leave_out);
    const test::Folder folder;
    Sizes s;
    s.length = 160, s.dim = 16;
    const auto file = write_qkv(folder, "qkv", s, as_it_is);
    const Options options = run_of(kind, fp32_rows, s);
    TargetOptions on_gpu = options.target;
    on_gpu.leave_out = leave_out;
    const kvpolicy::host ctx{2};
    const auto source = file_source(ctx, file, options.target),
               held_out = file_source(ctx, file, options.target), gpu_source = file_source(ctx, file, on_gpu),
               gpu_held_out = file_source(ctx, file, on_gpu);
    Trainer<S> host(ctx, options, *source, held_out.get());
    DeviceTrainer<S> gpu(ctx, options, *gpu_source, gpu_held_out.get());
    // Targets from queries and keys of 16 bits rank some keys otherwise, and a key that meets itself is no
    // decision.
    const std::int64_t apart = leave_out && !fp32_rows ? 8 : 0;
    const auto same_count = [&](const LossSums& a, const LossSums& b) {
        CHECK(std::abs(a.count - b.count) <= apart);
    };
    const auto look = [&] {
        const auto a = host.evaluate(), b = gpu.evaluate();
        REQUIRE(a.size() == b.size());
        for (std::size_t i = 0; i < a.size(); ++i) {
            same_count(a[i].loss, b[i].loss);
            CHECK(b[i].loss.loss == doctest::Approx(a[i].loss.loss).epsilon(near));
            CHECK(b[i].loss.keep_share() == doctest::Approx(a[i].loss.keep_share()).epsilon(near));
            CHECK(std::fabs(b[i].mean_recall() - a[i].mean_recall()) <= 2.0 * near);
            CHECK(b[i].mean_chance() == doctest::Approx(a[i].mean_chance()).epsilon(1e-9));
        }
    };
    look();
    for (std::int64_t i = 0; i < steps; ++i) {
        CAPTURE(i);
        host.step();
        gpu.step();
        const LossSums a = host.take(), b = gpu.take();
        CHECK(a.steps == b.steps);
        same_count(a, b);
        CHECK(b.loss == doctest::Approx(a.loss).epsilon(near));
        CHECK(gpu.last_gradient_norm() == doctest::Approx(host.last_gradient_norm()).epsilon(10.0 * near));
    }
    look();
    gpu.round_weights();
    auto of_host = weights(host), of_gpu = weights(gpu);
    for (auto* all : {&of_host, &of_gpu}) {
        for (float& x : all->back()) {  // alpha, whose steps are so many times as long
            x /= static_cast<float>(options.decay_rate);
        }
    }
    CHECK(largest_difference(of_host, of_gpu) <= near_weights);
}

/// n steps and a resumed n, and a checkpoint that goes from one backend to the other.
template <class S>
void resumes(const std::string& kind) {
    CAPTURE(kind);
    const test::Folder folder;
    Sizes s;
    s.length = 120, s.dim = 16;
    const auto file = write_qkv(folder, "qkv", s, as_it_is);
    const Options options = run_of(kind, false, s);
    const kvpolicy::host ctx{1};
    const auto source = file_source(ctx, file, options.target);
    DeviceTrainer<S> whole(ctx, options, *source, nullptr), first(ctx, options, *source, nullptr),
        second(ctx, options, *source, nullptr);
    for (std::int64_t i = 0; i < steps; ++i) {
        whole.step();
    }
    for (std::int64_t i = 0; i < steps / 2; ++i) {
        first.step();
    }
    const std::string half = (folder.path() / "half").string();
    first.save_checkpoint(half);
    second.resume(half);
    CHECK(second.steps_done() == steps / 2);
    while (second.steps_done() < steps) {
        second.step();
    }
    CHECK(second.take().steps == steps / 2);
    whole.round_weights();
    second.round_weights();
    CHECK(weights(second) == weights(whole));

    Trainer<S> host(ctx, options, *source, nullptr);
    host.resume(half);
    first.round_weights();
    CHECK(weights(host) == weights(first));
    host.step();
    first.step();
    static_cast<void>(first.take());  // of the first half too
    CHECK(first.last_gradient_norm() == doctest::Approx(host.last_gradient_norm()).epsilon(0.1));
}

}  // namespace

// fp32 rows: only sums in another order, which AdamW's first steps magnify. bf16 rows: weights and hidden
// numbers rounded to 16 bits.
TEST_CASE("an MLP learns the same") {
    compare<examples::Mlp>("mlp", true, false, 2e-3, 5e-3);
    compare<examples::Mlp>("mlp", true, true, 2e-3, 5e-3);
    compare<examples::Mlp>("mlp", false, false, 3e-2, 5e-2);
}

TEST_CASE("an mLSTM learns the same") {
    compare<examples::Mlstm>("mlstm", true, false, 2e-3, 2e-2);
    compare<examples::Mlstm>("mlstm", false, true, 3e-2, 6e-2);
}

TEST_CASE("2n steps are n steps and a resumed n bit for bit; checkpoints fit both backends") {
    resumes<examples::Mlp>("mlp");
    resumes<examples::Mlstm>("mlstm");
}

TEST_CASE("a file of scorers is the host's") {
    const test::Folder folder;
    Sizes s;
    s.length = 160, s.dim = 16;
    const auto file = write_qkv(folder, "qkv", s, as_it_is);
    Options options = run_of("mlp", false, s);
    options.out = (folder.path() / "scorers").string();
    const kvpolicy::host ctx{1};
    const auto source = file_source(ctx, file, options.target);
    DeviceTrainer<examples::Mlp> trainer(ctx, options, *source, nullptr);
    trainer.step();
    trainer.finish({});
    const examples::TrainedScorers read = examples::load_scorers(options.out);
    CHECK(read.alpha == trainer.alpha());
    CHECK(read.alpha.size() == 4);
    REQUIRE(read.quantiles.size() == 4 * 257);
    // Quantiles of the GPU's scores are those of the same weights on the host, to 16-bit rounding.
    Trainer<examples::Mlp> host(ctx, options, *source, nullptr);
    trainer.save_checkpoint((folder.path() / "one").string());
    host.resume((folder.path() / "one").string());
    host.finish({});
    const auto theirs = examples::load_scorers(options.out).quantiles;
    for (std::size_t i = 0; i < theirs.size(); ++i) {
        CHECK(std::fabs(theirs[i] - read.quantiles[i]) <= 0.03 * (1.0 + std::fabs(theirs[i])));
    }
}

TEST_CASE("a sequence without a decision leaves the weights as they are; a gradient that is not finite too") {
    const test::Folder folder;
    Sizes s;
    s.length = 24;  // not above the smaller budget
    const auto file = write_qkv(folder, "qkv", s, as_it_is);
    const kvpolicy::host ctx{1};
    Options options = run_of("mlp", false, s);
    const auto source = file_source(ctx, file, options.target);
    DeviceTrainer<examples::Mlp> trainer(ctx, options, *source, nullptr);
    const auto before = weights(trainer);
    trainer.step();
    trainer.step();
    const LossSums sums = trainer.take();
    CHECK(sums.count == 0);
    CHECK(sums.loss == 0.0);
    CHECK(sums.steps == 2);
    CHECK(sums.first_empty == 1);
    trainer.round_weights();
    CHECK(weights(trainer) == before);

    s.length = 96;
    const auto longer = write_qkv(folder, "longer", s, as_it_is);
    options.rate = 1e30;  // the second step's weights are not
    const auto other = file_source(ctx, longer, options.target);
    DeviceTrainer<examples::Mlp> lost(ctx, options, *other, nullptr);
    for (int i = 0; i < 5; ++i) {
        lost.step();
    }
    CHECK(test::contains(test::message_of([&] { static_cast<void>(lost.take()); }),
                         "the gradient is not finite"));
}

TEST_CASE("a model shows the host's queries, keys and values on a GPU") {
    const llama::Model model = llama::load_model(TEST_BYTE_MODEL);
    const std::vector<std::int32_t> text = examples::read_held_out(TEST_BYTE_MODEL).tokens.at(0);
    const kvpolicy::host ctx{2};
    const Observer host = host_observer(ctx, model), gpu = device_observer(model),
                   bf16 = device_observer(model, llama::DType::bf16);
    for (const std::ptrdiff_t length : {700, 90, 1030}) {  // chunks, a shorter sequence, a longer one
        CAPTURE(length);
        const std::vector<std::int32_t> tokens(text.begin(), text.begin() + length);
        examples::Oracle a(model.config), b(model.config), c(model.config);
        host(tokens, a);
        gpu(tokens, b);
        bf16(tokens, c);
        REQUIRE(b.length() == length);
        REQUIRE(c.length() == length);
        for (int layer = 0; layer < model.config.layers; ++layer) {
            CAPTURE(layer);
            const auto near = [](std::span<const float> one, std::span<const float> other) {
                REQUIRE(one.size() == other.size());
                double most = 0.0, squares = 0.0;
                for (std::size_t i = 0; i < one.size(); ++i) {
                    most = std::max(most,
                                    std::fabs(static_cast<double>(one[i]) - static_cast<double>(other[i])));
                    squares += static_cast<double>(one[i]) * static_cast<double>(one[i]);
                }
                CHECK(most <= 1e-3 * std::sqrt(squares / static_cast<double>(one.size())));
            };
            near(a.queries(layer), b.queries(layer));
            near(a.keys(layer), b.keys(layer));
            near(a.values(layer), b.values(layer));
            const auto about = [](std::span<const float> one, std::span<const float> other) {
                REQUIRE(one.size() == other.size());
                double apart = 0.0, squares = 0.0;
                for (std::size_t i = 0; i < one.size(); ++i) {
                    const double d = static_cast<double>(one[i]) - static_cast<double>(other[i]);
                    apart += d * d;
                    squares += static_cast<double>(one[i]) * static_cast<double>(one[i]);
                }
                CHECK(apart <= 9e-4 * squares);  // bf16 rounds by 2e-3, layer after layer
            };
            about(a.queries(layer), c.queries(layer));
            about(a.keys(layer), c.keys(layer));
            about(a.values(layer), c.values(layer));
        }
    }
}
