// Trains KVpop's scorers for a frozen model. docs/training.md leads through it; --help lists what can be set.
#include "interrupt.hpp"
#include "options.hpp"
#include "qkv.hpp"
#include "report.hpp"
#include "sequences.hpp"
#include "support/evaluation.hpp"
#include "support/fingerprint.hpp"
#include "support/program.hpp"
#include "support/progress.hpp"
#include "trainer.hpp"
#if KVPOLICY_TRAIN_ON_CUDA
#include "device_model.hpp"
#include "device_trainer.hpp"
#endif

#include <llama/error.hpp>
#include <llama/model.hpp>
#include <llama/tokenizer.hpp>

#include <chrono>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

namespace train {
namespace {

#if !KVPOLICY_TRAIN_ON_CUDA
constexpr const char* no_cuda =
    "--backend cuda: this train_scorer was built without CUDA; configure with -DKVPOLICY_ENABLE_CUDA=ON";
#endif

std::int32_t pairs_of(const Options& o, const llama::Tokenizer& tokenizer) {
    return o.pairs >= 0 ? o.pairs : tokenizer.size() == 256 ? std::min(32, o.length / 64) : 0;
}

/// What trains, what is only looked at, and what both stand on.
struct Data {
    std::optional<llama::Model> model;
    std::optional<llama::Tokenizer> tokenizer;
    std::optional<TrainingText> text, other_text;
    std::vector<std::vector<std::int32_t>> tokens;
    std::optional<examples::HeldOut> eval;
    Observer observe;
    std::unique_ptr<QkvSource> training, held_out;
};

void open_model(const Options& o, const std::string& folder, const kvpolicy::host& ctx, Data& data) {
    data.model = llama::load_model(folder);
    data.tokenizer = llama::read_tokenizer(folder, data.model->config.vocab_size);
    if (!o.on_device) {
        data.observe = host_observer(ctx, *data.model);
        return;
    }
#if KVPOLICY_TRAIN_ON_CUDA
    data.observe = device_observer(*data.model, o.bf16_model ? llama::DType::bf16 : llama::DType::f32);
#else
    llama::fail("{}", no_cuda);
#endif
}

/// The sequences of --text or --tokens, by number, and how many there are.
std::function<std::vector<std::int32_t>(std::size_t)> open_sequences(const Options& o, Data& data,
                                                                     std::size_t& count) {
    count = static_cast<std::size_t>(o.sequences);
    if (!o.tokens.empty()) {
        data.tokens = read_tokens(o.tokens, data.model->config.vocab_size);
        count = std::min(count, data.tokens.size());
        return [&data](std::size_t i) { return data.tokens[i]; };
    }
    data.text.emplace(o.text, *data.tokenizer, o.length, pairs_of(o, *data.tokenizer), o.seed);
    return [&data](std::size_t i) { return data.text->sequence(static_cast<std::uint64_t>(i)); };
}

/// The model's own held-out sequences, or the byte model's in its tokens, two of them as one; nothing
/// where there are none.
void open_held_out(const std::string& folder, Data& data) {
    if (std::filesystem::exists(std::filesystem::path(folder) / "eval.bin")) {
        data.eval = examples::read_held_out(folder);
    } else if (data.tokenizer->size() != 256 &&
               std::filesystem::exists(std::filesystem::path(KVPOLICY_BYTE_MODEL) / "eval.bin")) {
        data.eval = examples::tokenize(examples::read_held_out(KVPOLICY_BYTE_MODEL), *data.tokenizer, 2, 2);
    }
}

void open_sources(const Options& o, const std::string& folder, const kvpolicy::host& ctx, Data& data) {
    open_model(o, folder, ctx, data);
    const llama::Config& config = data.model->config;
    std::size_t count = 0;
    auto tokens = open_sequences(o, data, count);
    data.training = model_source(ctx, config, data.observe, count, std::move(tokens), o.target);
    const auto watched = static_cast<std::size_t>(o.held_out_sequences);
    if (watched == 0) {
        return;
    }
    if (!o.held_out.empty()) {
        data.other_text.emplace(o.held_out, *data.tokenizer, o.length, pairs_of(o, *data.tokenizer),
                                o.seed + 1);
        data.held_out = model_source(
            ctx, config, data.observe, watched, [&](std::size_t i) { return data.other_text->sequence(i); },
            o.target);
        return;
    }
    open_held_out(folder, data);
    if (data.eval) {
        data.held_out = model_source(
            ctx, config, data.observe, std::min(watched, data.eval->tokens.size()),
            [&](std::size_t i) { return data.eval->tokens[i]; }, o.target);
    }
}

template <class S>
std::unique_ptr<Trainer<S>> make_trainer(const kvpolicy::host& ctx, const Options& o, Data& data) {
    if (!o.on_device) {
        return std::make_unique<Trainer<S>>(ctx, o, *data.training, data.held_out.get());
    }
#if KVPOLICY_TRAIN_ON_CUDA
    return std::make_unique<DeviceTrainer<S>>(ctx, o, *data.training, data.held_out.get());
#else
    llama::fail("{}", no_cuda);
#endif
}

/// A step without any decision says that the sequences are too short, and all that follow will be like it.
void refuse_empty(const Options& o, Data& data, const LossSums& sums) {
    if (sums.first_empty > 0) {
        llama::fail(
            "step {}: no query has a decision to learn from, of a sequence of {} tokens and a budget "
            "of {}; longer sequences or smaller --budgets are needed",
            sums.first_empty, data.training->length(0), fmt::join(o.budgets, ", "));
    }
}

#if KVPOLICY_TRAIN_ON_CUDA
using Clock = std::chrono::steady_clock;
double milliseconds(Clock::time_point from) {
    return std::chrono::duration<double, std::milli>(Clock::now() - from).count();
}

/// Says how long sequences take to come, from a file for instance: that is no part of a step.
class TimedSource final : public QkvSource {
  public:
    explicit TimedSource(QkvSource& source) : source_(source) {}
    const QkvShape& shape() const override { return source_.shape(); }
    std::size_t count() const override { return source_.count(); }
    std::int32_t length(std::size_t index) override { return source_.length(index); }
    std::string verify() override { return source_.verify(); }
    const Example& get(std::size_t index) override {
        const auto start = Clock::now();
        const Example& example = source_.get(index);
        spent_ += milliseconds(start);
        return example;
    }
    /// Since the last call.
    double spent() { return std::exchange(spent_, 0.0); }

  private:
    QkvSource& source_;
    double spent_ = 0.0;
};
#endif

/// --compare: losses of both backends at every step, and what a step takes. The GPU's time is that of steps
/// that follow, since reading a loss is not part of one.
template <class S>
void compare(const kvpolicy::host& ctx, const Options& o, Data& data) {
#if KVPOLICY_TRAIN_ON_CUDA
    TimedSource source(*data.training);
    Trainer<S> host(ctx, o, source, nullptr);
    DeviceTrainer<S> gpu(ctx, o, source, nullptr);
    gpu.hold_all();
    double of_host = 0.0, most = 0.0;
    fmt::print("{}\n step  loss: host      cuda  agreement: host   cuda\n", o.spec.architecture());
    for (std::int64_t i = 0; i < o.compare; ++i) {
        source.spent();
        const auto start = Clock::now();
        host.step();
        of_host += milliseconds(start) - source.spent();
        gpu.step();
        const LossSums a = host.take(), b = gpu.take();
        refuse_empty(o, data, a);
        most = std::max(most, std::abs(a.loss - b.loss));
        fmt::print("{:>5}  {:>10.6f}  {:>8.6f}  {:>14.4f}  {:.4f}\n", i + 1, a.loss, b.loss, a.agreement(),
                   b.agreement());
    }
    source.spent();
    const auto start = Clock::now();
    for (std::int64_t i = 0; i < o.compare; ++i) {
        gpu.step();
    }
    const double read = source.spent();  // what the GPU did not hold
    const double enqueued = (milliseconds(start) - read) / static_cast<double>(o.compare);
    static_cast<void>(gpu.take());
    const double of_gpu = (milliseconds(start) - read) / static_cast<double>(o.compare);
    of_host /= static_cast<double>(o.compare);
    fmt::print(
        "largest difference of losses: {:.2e}\nhost: {:.1f} ms a step on {} threads; cuda: {:.3f} ms a step, "
        "{:.3f} of it to enqueue; {:.0f} times as fast\n",
        most, of_host, ctx.threads(), of_gpu, enqueued, of_host / of_gpu);
#else
    static_cast<void>(make_trainer<S>(ctx, o, data));  // refuses
#endif
}

/// Trains up to step `end`, or to an interrupt: the sums since the last report.
template <class S>
LossSums train_steps(const Options& o, Data& data, Trainer<S>& trainer, Report& report, std::int64_t end) {
    examples::Progress progress;
    if (trainer.steps_done() == 0) {
        report.add(0, {}, 0.0, 0.0, trainer.evaluate());
    }
    LossSums since;
    while (trainer.steps_done() < end && Interrupts::signal() == 0) {
        const double rate = trainer.next_rate();
        trainer.step();
        const std::int64_t at = trainer.steps_done();
        const bool look = at % o.evaluate_every == 0 && at < o.steps;
        const bool save = !o.checkpoint.empty() && o.checkpoint_every > 0 && at % o.checkpoint_every == 0;
        progress.show(fmt::format("step {} of {}", at, o.steps));
        if (trainer.done() || look || save || at == end) {  // a GPU goes on meanwhile
            const LossSums sums = trainer.take();
            trainer.check_converges(sums);
            since.add(sums);
            refuse_empty(o, data, since);
        }
        if (look) {
            progress.done();
            report.add(at, since, rate, trainer.last_gradient_norm(), trainer.evaluate());
            since = {};
        }
        if (save) {
            trainer.save_checkpoint(o.checkpoint);
        }
    }
    progress.done();
    trainer.check_converges(trainer.take());  // of a GPU, after an interrupt
    return since;
}

/// An error of the disk or the log, say, must not cost what was learned: saves it, and throws the error again
/// with the place.
template <class S>
[[noreturn]] void rescue(const Options& o, Trainer<S>& trainer, const std::exception& error) {
    if (trainer.steps_done() == 0) {
        throw llama::Error(error.what());
    }
    try {
        trainer.save_checkpoint(o.rescue());
    } catch (const std::exception&) {
        llama::fail("{}; step {} could not be saved in {}", error.what(), trainer.steps_done(), o.rescue());
    }
    llama::fail("{}; step {} is saved in {}, where --resume goes on", error.what(), trainer.steps_done(),
                o.rescue());
}

/// After an interrupt: the status of the program.
template <class S>
int leave_off(const Options& o, Trainer<S>& trainer) {
    const int signal = Interrupts::signal();
    trainer.save_checkpoint(o.rescue());
    fmt::print(stderr, "train_scorer: {} after step {} of {}; --resume {} goes on\n",
               signal == SIGINT ? "interrupted" : "ended by a signal", trainer.steps_done(), o.steps,
               o.rescue());
    return 128 + signal;
}

/// Steps, the last look and the file; the status of the program.
template <class S>
int train_to_end(const Options& o, Data& data, Trainer<S>& trainer) {
    const auto start = std::chrono::steady_clock::now();
    Report report(o);
    LossSums since;
    std::vector<HeldOutNumbers> last;
    try {
        since = train_steps(o, data, trainer, report,
                            o.stop_after > 0 ? std::min(o.stop_after, o.steps) : o.steps);
        if (Interrupts::signal() != 0) {
            return leave_off(o, trainer);
        }
        if (!o.checkpoint.empty()) {
            trainer.save_checkpoint(o.checkpoint);
        }
        if (trainer.steps_done() < o.steps) {
            fmt::print("left off after step {}; --resume {} goes on\n", trainer.steps_done(), o.checkpoint);
            return 0;
        }
    } catch (const Diverged&) {
        throw;
    } catch (const std::exception& error) {
        rescue(o, trainer, error);
    }
    trainer.round_weights();
    try {
        last = trainer.evaluate();
        if (Interrupts::signal() != 0) {
            trainer.restore_weights();
            return leave_off(o, trainer);
        }
        report.add(o.steps, since, o.last_rate, trainer.last_gradient_norm(), last);
        std::map<std::string, std::string> notes;
        for (const HeldOutNumbers& h : last) {
            notes[fmt::format("held_out.{}", h.budget)] =
                fmt::format("loss {:.4f}, oracle recall {:.4f}, chance {:.4f}, agreement {:.4f}", h.loss.loss,
                            h.mean_recall(), h.mean_chance(), h.loss.agreement());
        }
        trainer.finish(notes);
    } catch (const std::exception& error) {
        trainer.restore_weights();
        rescue(o, trainer, error);
    }
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    fmt::print("{} written after {:.0f} s\n", o.out, time.count());
    return 0;
}

template <class S>
int run_training(const kvpolicy::host& ctx, const Options& o, Data& data) {
    if (o.compare > 0) {
        compare<S>(ctx, o, data);
        return 0;
    }
    examples::Progress progress;
    progress.show("the first sequence");
    const std::unique_ptr<Trainer<S>> trainer = make_trainer<S>(ctx, o, data);
    if (!o.resume.empty()) {
        trainer->resume(o.resume);
        if (o.stop_after > 0 && o.stop_after <= trainer->steps_done()) {
            llama::fail("--stop-after: {} is not allowed; {} is of step {}, and it must be more",
                        o.stop_after, o.resume, trainer->steps_done());
        }
    }
    std::size_t parameters = 0;
    for (const auto& array : trainer->stack().arrays) {
        parameters += array.data.size();
    }
    progress.done();
    const Interrupts interrupts;
    fmt::print("{}; {} parameters; beta {}, budgets {}, {} steps of {} of {} sequences; from step {}\n",
               o.spec.architecture(), parameters, examples::beta_name(o.target.beta),
               fmt::join(o.budgets, ", "), o.steps, o.batch, data.training->count(), trainer->steps_done());
    if (data.held_out) {
        fmt::print("(held-out: loss, then oracle recall with chance in brackets, at each budget)\n");
    }
    return train_to_end(o, data, *trainer);
}

void dump(const kvpolicy::host& ctx, const Options& o, const std::string& folder, Data& data) {
    open_model(o, folder, ctx, data);
    std::function<std::vector<std::int32_t>(std::size_t)> tokens;
    auto count = static_cast<std::size_t>(o.sequences);
    if (o.dump_eval) {
        open_held_out(folder, data);
        if (!data.eval) {
            llama::fail("--dump-eval: {} has no eval.bin", folder);
        }
        count = std::min(count, data.eval->tokens.size());
        tokens = [&](std::size_t i) { return data.eval->tokens[i]; };
    } else {
        tokens = open_sequences(o, data, count);
    }
    const auto length = static_cast<std::int32_t>(tokens(0).size());
    examples::Progress progress;
    write_dump(ctx, data.model->config, data.observe, count, tokens, length, o.target, o.dump_targets, o.dump,
               [&](std::size_t i) { progress.show(fmt::format("sequence {} of {}", i + 1, count)); });
    progress.done();
    fmt::print("{}: {} sequences of {} tokens, {:.0f} MiB\n", o.dump, count, length,
               static_cast<double>(std::filesystem::file_size(o.dump)) / (1 << 20));
}

void dump_tokens(const Options& o, const std::string& folder, Data& data) {
    data.model = llama::load_model(folder);
    data.tokenizer = llama::read_tokenizer(folder, data.model->config.vocab_size);
    std::size_t count = 0;
    const auto tokens = open_sequences(o, data, count);
    std::vector<std::vector<std::int32_t>> all;
    for (std::size_t i = 0; i < count; ++i) {
        all.push_back(tokens(i));
    }
    write_tokens(o.dump_tokens, all);
    fmt::print("{}: {} sequences of {} tokens\n", o.dump_tokens, count, all.front().size());
}

void add_to(examples::Fingerprint& sum, const llama::Model& model) {
    const auto add = [&](const std::vector<float>& values) { sum.add(values.data(), values.size() * 4); };
    const llama::Config& c = model.config;
    sum.add(fmt::format("{} {} {} {} {}", c.heads, c.kv_heads, c.head_dim, c.rope_theta, c.rms_norm_eps));
    add(model.embedding.values);
    for (const llama::Layer& layer : model.layers) {
        for (const llama::Matrix* matrix :
             {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
            add(matrix->values);
        }
        add(layer.attention_norm);
        add(layer.mlp_norm);
    }
}

/// All data, before the first step; o.data says later which it was.
void verify(Options& o, Data& data) {
    check_lengths(*data.training, o.budgets,
                  !o.qkv.empty()      ? "--qkv"
                  : !o.tokens.empty() ? "--tokens"
                                      : "--text");
    examples::Fingerprint sum;
    if (data.model) {
        add_to(sum, *data.model);
    }
    sum.add(data.training->verify());
    o.data = sum.text();
    if (data.held_out) {
        check_lengths(*data.held_out, o.budgets,
                      o.held_out.empty() ? "eval.bin, without --held-out-sequences 0" : "--held-out");
        static_cast<void>(data.held_out->verify());
    }
}

int run(int argc, char** argv) {
    Options o = parse(argc, argv);
    const std::vector<examples::OutputLock> locks = lock_files(o);
    const kvpolicy::host ctx(o.threads);
    Data data;
    const std::string folder = o.model.empty() ? KVPOLICY_BYTE_MODEL : o.model;
    if (!o.dump.empty()) {
        dump(ctx, o, folder, data);
        return 0;
    }
    if (!o.dump_tokens.empty()) {
        dump_tokens(o, folder, data);
        return 0;
    }
    if (o.qkv.empty()) {
        open_sources(o, folder, ctx, data);
    } else {
        data.training = file_source(ctx, o.qkv, o.target, static_cast<std::size_t>(o.sequences));
        if (!o.held_out.empty() && o.held_out_sequences > 0) {
            data.held_out =
                file_source(ctx, o.held_out, o.target, static_cast<std::size_t>(o.held_out_sequences));
        }
    }
    verify(o, data);
    const QkvShape& shape = data.training->shape();
    o.spec.layers = shape.layers;
    o.spec.heads = shape.kv_heads;
    o.spec.head_dim_qk = shape.head_dim_qk;
    o.spec.head_dim_vo = shape.head_dim_vo;
    if (o.spec.kind == "mlp") {
        return run_training<examples::Mlp>(ctx, o, data);
    }
    return run_training<examples::Mlstm>(ctx, o, data);
}

}  // namespace
}  // namespace train

int main(int argc, char** argv) { return examples::run_program("train_scorer", train::run, argc, argv); }
