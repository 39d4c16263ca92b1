// Trains KVpop's scorers for a frozen model. docs/training.md leads through it; --help lists what can be set.
#include "options.hpp"
#include "qkv.hpp"
#include "sequences.hpp"
#include "support/evaluation.hpp"
#include "support/progress.hpp"
#include "trainer.hpp"
#if KVPOLICY_TRAIN_ON_CUDA
#include "device_model.hpp"
#include "device_trainer.hpp"
#endif

#include <llama/error.hpp>
#include <llama/model.hpp>
#include <llama/tokenizer.hpp>
#include <nlohmann/json.hpp>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
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

class Report {
  public:
    Report(const Options& o) : options_(o) {
        if (!o.metrics.empty()) {
            file_.open(o.metrics, o.resume.empty() ? std::ios::trunc : std::ios::app);
            if (!file_) {
                llama::fail("{}: cannot be written", o.metrics);
            }
        }
    }

    void look(std::int64_t step, const LossSums& since, double rate, double norm,
              const std::vector<HeldOutNumbers>& held_out) {
        const double n = static_cast<double>(std::max<std::int64_t>(since.steps, 1));
        nlohmann::json line{{"step", step}};
        std::string text = fmt::format("step {:>5}:", step);
        if (since.steps > 0) {
            line["loss"] = since.loss / n;
            line["keep_share"] = since.keep_share();
            line["agreement"] = since.agreement();
            line["rate"] = rate;
            line["gradient_norm"] = norm;
            text += fmt::format(" loss {:.4f}, {:.1f}% keeps, {:.1f}% agree;", since.loss / n,
                                100 * since.keep_share(), 100 * since.agreement());
        }
        for (const HeldOutNumbers& h : held_out) {
            nlohmann::json by_layer = nlohmann::json::array();
            const std::size_t heads = h.recall.size() / static_cast<std::size_t>(options_.spec.layers);
            for (std::size_t l = 0; l < h.recall.size(); l += heads) {
                nlohmann::json by_head = nlohmann::json::array();
                for (std::size_t i = l; i < l + heads; ++i) {
                    by_head.push_back(h.recall[i].mean);
                }
                by_layer.push_back(by_head);
            }
            line["held_out"].push_back({{"budget", h.budget},
                                        {"loss", h.loss.loss},
                                        {"keep_share", h.loss.keep_share()},
                                        {"agreement", h.loss.agreement()},
                                        {"examples", h.loss.count},
                                        {"recall", h.mean_recall()},
                                        {"chance", h.mean_chance()},
                                        {"recall_by_head", by_layer}});
        }
        if (!held_out.empty()) {
            text += " held-out loss";
            for (const HeldOutNumbers& h : held_out) {
                text += fmt::format(" {:.4f}", h.loss.loss);
            }
            text += ", oracle recall";
            for (const HeldOutNumbers& h : held_out) {
                text += fmt::format(" {:.3f} ({:.3f})", h.mean_recall(), h.mean_chance());
            }
        }
        fmt::print("{}\n", text);
        std::fflush(stdout);
        if (file_.is_open()) {
            file_ << line.dump() << std::endl;
        }
    }

  private:
    const Options& options_;
    std::ofstream file_;
};

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
            "step {}: no query has a decision to learn from: a sequence of {} tokens must be longer than a "
            "budget's {} rows; nothing was trained",
            sums.first_empty, data.training->get(0).length, fmt::join(o.budgets, ", "));
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

template <class S>
void run_training(const kvpolicy::host& ctx, const Options& o, Data& data) {
    if (o.compare > 0) {
        compare<S>(ctx, o, data);
        return;
    }
    examples::Progress progress;
    progress.show("the first sequence");
    const std::unique_ptr<Trainer<S>> made = make_trainer<S>(ctx, o, data);
    Trainer<S>& trainer = *made;
    if (!o.resume.empty()) {
        trainer.resume(o.resume);
        if (o.stop_after > 0 && o.stop_after <= trainer.steps_done()) {
            llama::fail("--stop-after: {} is not allowed; {} is of step {}, and it must be more",
                        o.stop_after, o.resume, trainer.steps_done());
        }
    }
    std::size_t parameters = 0;
    for (const auto& array : trainer.stack().arrays) {
        parameters += array.data.size();
    }
    progress.done();
    fmt::print("{}; {} parameters; beta {}, budgets {}, {} steps of {} of {} sequences; from step {}\n",
               o.spec.architecture(), parameters, examples::beta_name(o.target.beta),
               fmt::join(o.budgets, ", "), o.steps, o.batch, data.training->count(), trainer.steps_done());
    if (data.held_out) {
        fmt::print("(held-out: loss, then oracle recall with chance in brackets, at each budget)\n");
    }
    Report report(o);
    const auto start = std::chrono::steady_clock::now();
    if (trainer.steps_done() == 0) {
        report.look(0, {}, 0.0, 0.0, trainer.evaluate());
    }
    const std::int64_t end = o.stop_after > 0 ? std::min(o.stop_after, o.steps) : o.steps;
    LossSums since;
    while (trainer.steps_done() < end) {
        const double rate = trainer.next_rate();
        trainer.step();
        const std::int64_t at = trainer.steps_done();
        const bool look = at % o.evaluate_every == 0 && at < o.steps;
        const bool save =
            !o.checkpoint.empty() && (at == end || (o.checkpoint_every > 0 && at % o.checkpoint_every == 0));
        progress.show(fmt::format("step {} of {}", at, o.steps));
        if (trainer.done() || look || save || at == end) {  // a GPU goes on meanwhile
            since.add(trainer.take());
            refuse_empty(o, data, since);
        }
        if (look) {
            progress.done();
            report.look(at, since, rate, trainer.last_gradient_norm(), trainer.evaluate());
            since = {};
        }
        if (save) {
            trainer.save_checkpoint(o.checkpoint);
        }
    }
    progress.done();
    if (trainer.steps_done() < o.steps) {
        fmt::print("left off after step {}; --resume {} goes on\n", trainer.steps_done(), o.checkpoint);
        return;
    }
    trainer.round_weights();
    const std::vector<HeldOutNumbers> last = trainer.evaluate();
    report.look(o.steps, since, o.last_rate, trainer.last_gradient_norm(), last);
    std::map<std::string, std::string> notes;
    for (const HeldOutNumbers& h : last) {
        notes[fmt::format("held_out.{}", h.budget)] =
            fmt::format("loss {:.4f}, oracle recall {:.4f}, chance {:.4f}, agreement {:.4f}", h.loss.loss,
                        h.mean_recall(), h.mean_chance(), h.loss.agreement());
    }
    trainer.finish(notes);
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    fmt::print("{} written after {:.0f} s\n", o.out, time.count());
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

int run(int argc, char** argv) {
    Options o = parse(argc, argv);
    check_files(o);
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
    const QkvShape& shape = data.training->shape();
    o.spec.layers = shape.layers;
    o.spec.heads = shape.kv_heads;
    o.spec.head_dim_qk = shape.head_dim_qk;
    o.spec.head_dim_vo = shape.head_dim_vo;
    if (o.spec.kind == "mlp") {
        run_training<examples::Mlp>(ctx, o, data);
    } else {
        run_training<examples::Mlstm>(ctx, o, data);
    }
    return 0;
}

}  // namespace
}  // namespace train

int main(int argc, char** argv) try { return train::run(argc, argv); } catch (const std::exception& error) {
    fmt::print(stderr, "train_scorer: {}\n", error.what());
    return 1;
}
