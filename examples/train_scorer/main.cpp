// Trains KVpop's scorers for a frozen model. docs/training.md leads through it; --help lists what can be set.
#include "options.hpp"
#include "qkv.hpp"
#include "sequences.hpp"
#include "support/evaluation.hpp"
#include "support/progress.hpp"
#include "trainer.hpp"

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

namespace train {
namespace {

/// What trains, what is only looked at, and what both stand on.
struct Data {
    std::optional<llama::Model> model;
    std::optional<llama::Tokenizer> tokenizer;
    std::optional<TrainingText> text, other_text;
    std::optional<examples::HeldOut> eval;
    std::unique_ptr<QkvSource> training, held_out;
};

void open_model(const Options& o, const std::string& folder, const kvpolicy::host& on, Data& data) {
    data.model = llama::load_model(folder);
    data.tokenizer = llama::read_tokenizer(folder, data.model->config.vocab_size);
    const bool bytes = data.tokenizer->size() == 256;
    const std::int32_t pairs = o.pairs >= 0 ? o.pairs : bytes ? std::min(32, o.length / 64) : 0;
    data.text.emplace(o.text, *data.tokenizer, o.length, pairs, o.seed);
    const auto count = static_cast<std::size_t>(o.sequences);
    data.training = model_source(
        on, *data.model, count, [&](std::size_t i) { return data.text->sequence(i); }, o.target);
    auto watched = static_cast<std::size_t>(o.held_out_sequences);
    if (watched == 0) {
        return;
    }
    if (!o.held_out.empty()) {
        data.other_text.emplace(o.held_out, *data.tokenizer, o.length, pairs, o.seed + 1);
        data.held_out = model_source(
            on, *data.model, watched, [&](std::size_t i) { return data.other_text->sequence(i); }, o.target);
    } else if (std::filesystem::exists(std::filesystem::path(folder) / "eval.bin")) {
        data.eval = examples::read_held_out(folder);
        watched = std::min(watched, data.eval->tokens.size());
        data.held_out = model_source(
            on, *data.model, watched, [&](std::size_t i) { return data.eval->tokens[i]; }, o.target);
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

    void look(std::int64_t step, const LossSums& since, std::int64_t steps, double rate, double norm,
              const std::vector<HeldOutNumbers>& held_out) {
        const double n = static_cast<double>(std::max<std::int64_t>(steps, 1));
        nlohmann::json line{{"step", step}};
        std::string text = fmt::format("step {:>5}:", step);
        if (steps > 0) {
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
void run_training(const kvpolicy::host& on, const Options& o, Data& data) {
    examples::Progress progress;
    progress.show("the first sequence");
    Trainer<S> trainer(on, o, *data.training, data.held_out.get());
    if (!o.resume.empty()) {
        trainer.resume(o.resume);
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
        report.look(0, {}, 0, 0.0, 0.0, trainer.evaluate());
    }
    const std::int64_t end = o.stop_after > 0 ? std::min(o.stop_after, o.steps) : o.steps;
    LossSums since;
    std::int64_t steps_since = 0;
    while (trainer.steps_done() < end) {
        const double rate = trainer.next_rate();
        const LossSums step = trainer.step();
        if (step.count == 0) {
            llama::fail(
                "step {}: no query has a decision to learn from: a sequence of {} tokens must be longer than "
                "a "
                "budget's {} rows; nothing was trained",
                trainer.steps_done(), data.training->get(0).length, fmt::join(o.budgets, ", "));
        }
        since.loss += step.loss;
        since.count += step.count, since.kept += step.kept, since.agreed += step.agreed;
        ++steps_since;
        const std::int64_t at = trainer.steps_done();
        progress.show(fmt::format("step {} of {}: loss {:.4f}", at, o.steps, step.loss));
        if (at % o.evaluate_every == 0 && at < o.steps) {
            progress.done();
            report.look(at, since, steps_since, rate, trainer.last_gradient_norm(), trainer.evaluate());
            since = {};
            steps_since = 0;
        }
        if (!o.checkpoint.empty() &&
            (at == end || (o.checkpoint_every > 0 && at % o.checkpoint_every == 0))) {
            trainer.save_checkpoint(o.checkpoint);
        }
    }
    progress.done();
    if (trainer.steps_done() < o.steps) {
        fmt::print("left off after step {}{}\n", trainer.steps_done(),
                   o.checkpoint.empty() ? "" : "; --resume " + o.checkpoint + " goes on");
        return;
    }
    trainer.round_weights();
    const std::vector<HeldOutNumbers> last = trainer.evaluate();
    report.look(o.steps, since, steps_since, o.last_rate, trainer.last_gradient_norm(), last);
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

void dump(const kvpolicy::host& on, const Options& o, const std::string& folder, Data& data) {
    std::function<std::vector<std::int32_t>(std::size_t)> tokens;
    auto count = static_cast<std::size_t>(o.sequences);
    std::int32_t length = o.length;
    if (o.dump_eval) {
        data.model = llama::load_model(folder);
        data.eval = examples::read_held_out(folder);
        count = std::min(count, data.eval->tokens.size());
        length = data.eval->length;
        tokens = [&](std::size_t i) { return data.eval->tokens[i]; };
    } else {
        open_model(o, folder, on, data);
        tokens = [&](std::size_t i) { return data.text->sequence(i); };
    }
    examples::Progress progress;
    write_dump(on, *data.model, count, tokens, length, o.target, o.dump_targets, o.dump,
               [&](std::size_t i) { progress.show(fmt::format("sequence {} of {}", i + 1, count)); });
    progress.done();
    fmt::print("{}: {} sequences of {} tokens, {:.0f} MiB\n", o.dump, count, length,
               static_cast<double>(std::filesystem::file_size(o.dump)) / (1 << 20));
}

int run(int argc, char** argv) {
    Options o = parse(argc, argv);
    const kvpolicy::host on(o.threads);
    Data data;
    const std::string folder = o.model.empty() ? KVPOLICY_BYTE_MODEL : o.model;
    if (!o.dump.empty()) {
        dump(on, o, folder, data);
        return 0;
    }
    if (o.qkv.empty()) {
        open_model(o, folder, on, data);
    } else {
        data.training = file_source(on, o.qkv, o.target);
        if (!o.held_out.empty()) {
            data.held_out = file_source(on, o.held_out, o.target);
        }
    }
    const QkvShape& shape = data.training->shape();
    o.spec.layers = shape.layers;
    o.spec.heads = shape.kv_heads;
    o.spec.dim_k = shape.dim_k;
    o.spec.dim_v = shape.dim_v;
    if (o.spec.kind == "mlp") {
        run_training<examples::Mlp>(on, o, data);
    } else {
        run_training<examples::Mlstm>(on, o, data);
    }
    return 0;
}

}  // namespace
}  // namespace train

int main(int argc, char** argv) try { return train::run(argc, argv); } catch (const std::exception& error) {
    fmt::print(stderr, "train_scorer: {}\n", error.what());
    return 1;
}
