// The training program's parts: retrieval queries in text, files of q, k and v, steps that resume, and
// scorers that a cache takes.
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/core/random.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include "sequences.hpp"
#include "support.hpp"
#include "support/immediate.hpp"
#include "support/oracle.hpp"
#include "support/safetensors_writer.hpp"
#include "support/trained.hpp"
#include "trainer.hpp"
#include "training_case.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

using namespace train;
using namespace training_test;
using test::contains;
using test::message_of;

namespace {

template <class S>
void resumes(const std::string& kind) {
    const test::Folder folder;
    const auto file = write_qkv(folder, "qkv", {}, as_it_is);
    Options options = small(kind);
    const kvpolicy::host ctx{1}, two{2};
    const auto source = file_source(ctx, file, options.target);
    options.data = source->verify();
    Trainer<S> whole(ctx, options, *source, nullptr);
    const auto start = weights(whole);
    for (int i = 0; i < 8; ++i) {
        whole.step();
        CHECK(whole.take().count > 0);
    }
    CHECK(weights(whole) != start);

    Trainer<S> first(two, options, *source, nullptr);  // other threads
    for (int i = 0; i < 4; ++i) {
        first.step();
    }
    const std::string checkpoint = (folder.path() / "half").string();
    first.save_checkpoint(checkpoint);
    const auto again = file_source(ctx, file, options.target);  // as another process would
    Trainer<S> second(ctx, options, *again, nullptr);
    second.resume(checkpoint);
    CHECK(second.steps_done() == 4);
    for (int i = 0; i < 4; ++i) {
        second.step();
    }
    CHECK(weights(second) == weights(whole));

    Options other = options;
    other.seed = 2;
    Trainer<S> another(ctx, other, *source, nullptr);
    CHECK(contains(message_of([&] { another.resume(checkpoint); }), "run with seed 1; this run has 2"));
    other = options;
    other.decay_rate = 1.0;
    Trainer<S> slower(ctx, other, *source, nullptr);
    CHECK(contains(message_of([&] { slower.resume(checkpoint); }), "run with decay_rate 30; this run has 1"));
    other = options;
    other.spec.hidden = 17, other.spec.d_v = 5;
    Trainer<S> wider(ctx, other, *source, nullptr);
    CHECK(contains(message_of([&] { wider.resume(checkpoint); }), "checkpoint of another architecture"));
    // Other keys and values, as many of them.
    other = options;
    other.data = "0123456789abcdef";
    Trainer<S> elsewhere(ctx, other, *source, nullptr);
    CHECK(contains(message_of([&] { elsewhere.resume(checkpoint); }),
                   "run with data " + options.data + "; this run has 0123456789abcdef"));
}

/// Of a command line, without the program's name; words have single spaces between.
Options parsed(const std::string& line) {
    std::vector<std::string> words;
    for (std::size_t at = 0; at < line.size();) {
        const std::size_t space = std::min(line.find(' ', at), line.size());
        words.push_back(line.substr(at, space - at));
        at = space + 1;
    }
    std::vector<const char*> pointers{"train_scorer"};
    for (const std::string& word : words) {
        pointers.push_back(word == "''" ? "" : word.c_str());
    }
    return parse(static_cast<int>(pointers.size()), pointers.data());
}
std::string refusal_of(const std::string& line) {
    return message_of([&] { static_cast<void>(parsed(line)); });
}

/// Counts what is asked of another source.
class CountedSource final : public QkvSource {
  public:
    explicit CountedSource(QkvSource& source) : source_(source) {}
    const QkvShape& shape() const override { return source_.shape(); }
    std::size_t count() const override { return source_.count(); }
    const Example& get(std::size_t index) override {
        ++asked;
        return source_.get(index);
    }
    std::int32_t length(std::size_t index) override { return source_.length(index); }
    std::string verify() override { return source_.verify(); }
    int asked = 0;

  private:
    QkvSource& source_;
};

}  // namespace

TEST_CASE("options that a run would not look at are refused") {
    const std::pair<const char*, const char*> refused[] = {
        {"--qkv q --stop-after 3", "--stop-after: needs --checkpoint, or what was trained would be lost"},
        {"--qkv q --checkpoint-every 3", "--checkpoint-every: needs --checkpoint"},
        {"--qkv q --rows bf16", "--rows: needs --backend cuda; the host computes in fp32"},
        {"--text t --model-rows bf16", "--model-rows: needs --backend cuda; the host computes in fp32"},
        {"--qkv q --backend cuda --model-rows bf16", "--model-rows: needs --text or --tokens"},
        {"--qkv q --norm", "--norm: needs --scorer mlstm"},
        {"--qkv q --skip --scorer mlp", "--skip: needs --scorer mlstm"},
        {"--qkv q --d-qk 8", "--d-qk: needs --scorer mlstm"},
        {"--qkv q --d-v 8", "--d-v: needs --scorer mlstm"},
        {"--qkv q --softcap 0", "--softcap: needs --scorer mlstm"},
        {"--qkv q --immediate", "--immediate: is for --scorer mlstm; an mlp always scores on arrival"},
        {"--qkv q --scorer mlstm --hidden 8", "--hidden: needs --scorer mlp"},
        {"--qkv q --no-decay --gamma-max 0.9", "--gamma-max: does not go with --no-decay"},
        {"--qkv q --no-decay --decay-rate 2", "--decay-rate: does not go with --no-decay"},
        {"--qkv q --layer-norm", "--layer-norm: needs --scorer mlstm"},
        {"--qkv q --scorer mlstm --norm --layer-norm", "--norm: does not go with --layer-norm"},
        {"--qkv q --positions 0 --late 1", "--late: does not go with --positions 0, which takes all queries"},
        {"--qkv q --model m", "--model: needs --text or --tokens; beside q, k, v of a file no model runs"},
        {"--qkv q --held-out h --length 64", "--length: needs --text, whose sequences are cut so"},
        {"--tokens t --pairs 4", "--pairs: needs --text, whose sequences are cut so"},
        {"--qkv q --held-out-sequences 2", "--held-out-sequences: needs --held-out"},
        {"--qkv q --compare 3", "--compare: goes with --backend cuda"},
        {"--qkv q --backend cuda --compare 301", "--compare: 301 is not allowed; it must be at most --steps"},
        {"--text t --dump d --steps 3", "--steps: does not go with --dump, which trains nothing"},
        {"--text t --dump d --backend cuda --compare 3", "--compare: does not go with --dump"},
        {"--text t --dump d --backend cuda --rows fp32", "--rows: does not go with --dump"},
        {"--text t --dump d --window 8", "--window: with --dump needs --dump-targets"},
        {"--tokens t --dump d --seed 2", "--seed: with --dump needs --text, whose sequences are drawn by it"},
        {"--dump-eval --dump d --length 64", "--length: needs --text, whose sequences are cut so"},
        {"--text t --dump-targets 1,2", "--dump-targets: needs --dump"},
        {"--text t --dump-tokens d --backend cuda", "--backend: does not go with --dump-tokens"},
        {"--text t --dump-tokens d --compare 3", "--compare: does not go with --dump-tokens"},
        {"--qkv q --checkpoint ''", "--checkpoint: needs a value"},
        {"--qkv q --out --fp32", "--out: needs a value"},
        {"--qkv q --out", "--out: needs a value"},
    };
    for (const auto& [options, sentence] : refused) {
        const auto line = options;  // clang++ 14 takes no structured binding into CAPTURE's lambda
        CAPTURE(line);
        CHECK(refusal_of(line).starts_with(sentence));
    }
    for (const char* name : {"--held-out h", "--held-out-sequences 1", "--out o", "--fp32", "--metrics m",
                             "--evaluate-every 2", "--checkpoint c", "--resume r"}) {
        const std::string line = std::string("--text t --backend cuda --compare 3 ") + name;
        CAPTURE(line);
        CHECK(contains(refusal_of(line), ": does not go with --compare, which writes nothing"));
    }
    // What the tools and the pages say.
    for (const char* line :
         {"--text t --model m --sequences 4 --seed 2 --dump d --dump-targets 1,inf --threads 1",
          "--text t --model m --pairs 96 --sequences 40 --seed 2 --dump-tokens d",
          "--dump-eval --model m --sequences 4 --backend cuda --model-rows bf16 --threads 1 --dump d",
          "--tokens t --sequences 4 --model m --backend cuda --threads 1 --dump d",
          "--tokens t --look-ahead 9 --aggregate mean --window 512 --dump d --dump-targets 2",
          "--text t --held-out h --held-out-sequences 1 --scorer mlstm --immediate --stop-after 2 "
          "--checkpoint c",
          "--tokens t --held-out h --length 512 --pairs 2 --sequences 9 --seed 3 --metrics m --out o",
          "--qkv q --held-out h --held-out-sequences 0 --sequences 16 --seed 3 --metrics m --out o --threads "
          "1",
          "--qkv q --backend cuda --rows fp32 --scorer mlstm --norm --skip --softcap 5 --compare 200 "
          "--warm-up 0",
          "--qkv q --resume half --checkpoint half --checkpoint-every 2 --no-decay --positions 0"}) {
        CAPTURE(line);
        CHECK(refusal_of(line) == "");
    }
    CHECK(parsed("--text t").sequences == 48);
    CHECK(parsed("--text t").held_out_sequences == 2);
    const Options of_file = parsed("--qkv q --held-out h");
    CHECK(of_file.sequences > 1000);
    CHECK(of_file.held_out_sequences > 1000);
    CHECK(parsed("--qkv q --held-out h --held-out-sequences 3").held_out_sequences == 3);
}

TEST_CASE("a file that could not be written is refused before anything is done") {
    const test::Folder folder;
    const std::string here = folder.path().string() + "/";
    const auto refusal = [&](const std::string& line) {
        return message_of([&] { lock_files(parsed(line)); });
    };
    CHECK(contains(refusal("--qkv q --out " + here + "no/o"),
                   "--out: " + here + "no/o cannot be written; its folder must be there"));
    CHECK(contains(refusal("--qkv q --out " + here), "cannot be written; it is a folder or a device"));
    CHECK(contains(refusal("--qkv q --out " + here + "o --checkpoint " + here + "no/c"), "--checkpoint: "));
    CHECK(contains(refusal("--text t --dump " + here + "no/d"), "--dump: "));
    CHECK(contains(refusal("--text t --dump-tokens " + here + "no/d"), "--dump-tokens: "));
    // One file for two things.
    CHECK(contains(refusal("--qkv " + here + "q --out " + here + "./q"), "is the file of --qkv, too"));
    CHECK(
        contains(refusal("--qkv q --out " + here + "o --checkpoint " + here + "o"), "of --checkpoint, too"));
    CHECK(contains(refusal("--qkv q --out " + here + "o --metrics " + here + "o"), "of --metrics, too"));
    CHECK(contains(refusal("--qkv " + here + "q --out " + here + "o --metrics " + here + "q"),
                   "--metrics: " + here + "q is the file of --qkv, too"));
    CHECK(contains(refusal("--text " + here + "t --dump " + here + "t"), "is the file of --text, too"));
    CHECK(contains(refusal("--qkv q --out " + here + "c --resume " + here + "c"), "of --resume, too"));
    // A run may go on in its checkpoint; and one that leaves off before the end writes no scorers.
    CHECK(refusal("--qkv q --out " + here + "o --checkpoint " + here + "c --resume " + here + "c") == "");
    CHECK(refusal("--qkv q --out " + here + "no/o --stop-after 3 --checkpoint " + here + "c") == "");
    CHECK(refusal("--qkv q --backend cuda --compare 3") == "");
    CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("a file's sequences, as many as are wanted") {
    const test::Folder folder;
    const auto file = write_qkv(folder, "qkv", {}, as_it_is);
    const kvpolicy::host ctx{1};
    const TargetOptions target{.window = 8};
    CHECK(file_source(ctx, file, target)->count() == 3);
    CHECK(file_source(ctx, file, target, 2)->count() == 2);
    CHECK(file_source(ctx, file, target, 9)->count() == 3);
}

TEST_CASE("all data are looked at before the first step") {
    const test::Folder folder;
    const kvpolicy::host ctx{2};
    const TargetOptions target{.window = 8};
    const auto file = write_qkv(folder, "qkv", {}, as_it_is);
    const auto refusal = [&](const std::filesystem::path& of) {
        return message_of([&] { file_source(ctx, of, target)->verify(); });
    };
    CHECK(refusal(file) == "");
    // In the last sequence and layer.
    for (const char* what : {"q", "k", "v"}) {
        const std::string spoiled = std::string("sequences.2.layers.1.") + what;
        const auto edit = [&](const std::string& name, std::vector<float>& values) {
            if (name == spoiled) {
                values.back() = std::numeric_limits<float>::infinity();
            }
        };
        CHECK(contains(refusal(write_qkv(folder, "bad", {}, edit)), spoiled + " holds inf at head "));
    }
    const auto large =
        write_qkv(folder, "large", {}, [](const std::string& name, std::vector<float>& values) {
            if (name.ends_with("layers.1.q") || name.ends_with("layers.1.k")) {
                values[9] = -1e19f;
            }
        });
    CHECK(
        contains(refusal(large), "products of sequences.0.layers.1.q and its k reach 8.0e+38; they must be"));
    // Gaps in the numbers, and other names and shapes than the neighbors'.
    const auto without = [&](const std::string& prefix, const std::string& renamed = "",
                             std::int32_t heads = 2) {
        std::vector<examples::TensorPlan> plan;
        for (int i = 0; i < 3; ++i) {
            for (int l = 0; l < 3; ++l) {
                for (const char* what : {"q", "k", "v"}) {
                    std::string name = fmt::format("sequences.{}.layers.{}.{}", i, l, what);
                    if (name.starts_with(prefix)) {
                        if (renamed.empty()) {
                            continue;
                        }
                        name = renamed + what;
                    }
                    plan.push_back({name, llama::DType::f32, {40, i == 2 && *what == 'k' ? heads : 2, 8}});
                }
            }
        }
        examples::SafetensorsWriter writer(folder.path() / "gaps", plan, {});
        for (const auto& tensor : plan) {
            writer.write(std::vector<float>(tensor.numel(), 0.5f));
        }
        writer.finish();
        return folder.path() / "gaps";
    };
    CHECK(refusal(without("none")) == "");
    CHECK(
        contains(refusal(without("sequences.1.")),
                 "has \"sequences.2.layers.0.q\" but no sequences.1.layers.0.k; sequences must be numbered"));
    CHECK(file_source(ctx, without("sequences.1."), target, 1)->count() == 1);  // one is all that is wanted
    CHECK(
        contains(refusal(without("sequences.0.layers.1.")), "but no sequences.0.layers.1.k; layers must be"));
    CHECK(contains(refusal(without("sequences.2.layers.1.")), "has no tensor sequences.2.layers.1.k"));
    CHECK(contains(refusal(without("sequences.2.layers.2.", "sequences.2.layer.2.")),
                   "its name must be sequences.{i}.layers.{l}.NAME"));
    CHECK(contains(refusal(without("sequences.2.layers.2.", "sequences.2.layers.02.")), "its name must be"));
    CHECK(contains(refusal(without("none", "", 1)), "has shape [40, 1, 8]; beside its neighbors it must be"));

    // A fingerprint is of the data, on either backend and any number of threads.
    const kvpolicy::host one{1};
    TargetOptions device = target;
    device.leave_out = true;
    const std::string mark = file_source(ctx, file, target)->verify();
    CHECK(file_source(one, file, target)->verify() == mark);
    CHECK(file_source(one, file, device)->verify() == mark);
    CHECK(file_source(one, file, target, 2)->verify() != mark);
    const auto other =
        write_qkv(folder, "other", {}, [](const std::string& name, std::vector<float>& values) {
            if (name == "sequences.2.layers.1.v") {
                values[17] += 1.0f;
            }
        });
    CHECK(file_source(one, other, target)->verify() != mark);
}

TEST_CASE("sequences that are no longer than a budget are refused before the first step") {
    const test::Folder folder;
    const kvpolicy::host ctx{1};
    const auto source = file_source(ctx, write_qkv(folder, "qkv", {}, as_it_is), {.window = 8});
    CHECK(source->length(2) == 96);
    const std::int32_t below[] = {40, 95}, equal[] = {96, 40};
    CHECK(message_of([&] { check_lengths(*source, below, "--qkv"); }) == "");
    CHECK(message_of([&] { check_lengths(*source, equal, "--held-out"); }) ==
          "--held-out: sequence 0 has 96 tokens; it must have more than 96, the largest of --budgets, to "
          "have a "
          "decision to learn from");
}

TEST_CASE("sequences of a model are looked at before one runs") {
    const kvpolicy::host ctx{1};
    llama::Config config;
    config.layers = 1, config.heads = config.kv_heads = 1, config.head_dim = 2;
    int runs = 0;
    const Observer observe = [&](const std::vector<std::int32_t>&, examples::Oracle&) { ++runs; };
    const auto source_of = [&](std::int32_t last) {
        return model_source(ctx, config, observe, 3,
                            [last](std::size_t i) {
                                if (i == 2 && last < 0) {
                                    llama::fail("the text is too short");
                                }
                                return std::vector<std::int32_t>{1, 2, i == 2 ? last : 3};
                            },
                            {});
    };
    const std::string mark = source_of(5)->verify();
    CHECK(source_of(5)->verify() == mark);
    CHECK(source_of(6)->verify() != mark);
    CHECK(source_of(6)->length(1) == 3);
    CHECK(contains(message_of([&] { source_of(-1)->verify(); }), "the text is too short"));
    CHECK(runs == 0);
}

TEST_CASE("training that diverges ends, with the step, the layer and the head") {
    const test::Folder folder;
    const auto file = write_qkv(folder, "qkv", {}, as_it_is);
    const kvpolicy::host ctx{1};
    for (const char* kind : {"mlp", "mlstm"}) {
        CAPTURE(kind);
        Options options = small(kind);
        options.steps = 200;
        const auto source = file_source(ctx, file, options.target);
        const auto train = [&]<class S>(std::unique_ptr<Trainer<S>> trainer) {
            try {
                for (int i = 0; i < options.steps; ++i) {
                    trainer->step();
                    trainer->check_converges(trainer->take());
                }
            } catch (const Diverged& error) {
                return std::string(error.what());
            }
            return std::string();
        };
        const auto run = [&] {
            return std::string_view(kind) == "mlp"
                       ? train(std::make_unique<Trainer<examples::Mlp>>(ctx, options, *source, nullptr))
                       : train(std::make_unique<Trainer<examples::Mlstm>>(ctx, options, *source, nullptr));
        };
        for (const double rate : {1e3, 1e30}) {
            options.rate = options.last_rate = rate;
            const std::string sentence = run();
            CAPTURE(sentence);
            CHECK(sentence.starts_with("step "));
            CHECK(contains(sentence, "diverged"));
            CHECK(contains(sentence, "layer "));
            CHECK(contains(sentence, ", head "));
        }
        options.rate = 1e-2, options.last_rate = 1e-3;
        CHECK(run() == "");
    }
    // A temperature scales the loss, not the margins.
    Options options = small("mlp");
    options.temperature = 1e-4f;
    const auto source = file_source(ctx, file, options.target);
    Trainer<examples::Mlp> trainer(ctx, options, *source, nullptr);
    trainer.step();
    trainer.check_converges(trainer.take());
    LossSums sums;
    sums.steps = 2, sums.loss = 2 * 1.1e7;
    CHECK(contains(message_of([&] { trainer.check_converges(sums); }),
                   "step 1: the loss is 1.1e+07; training has"));
    sums.loss = std::numeric_limits<double>::quiet_NaN();
    CHECK(contains(message_of([&] { trainer.check_converges(sums); }), "the loss is nan"));
}

TEST_CASE("rounding can be taken back, for a checkpoint after the last step") {
    const test::Folder folder;
    const kvpolicy::host ctx{1};
    const Options options = small("mlp");
    const auto source = file_source(ctx, write_qkv(folder, "qkv", {}, as_it_is), options.target);
    Trainer<examples::Mlp> trainer(ctx, options, *source, nullptr);
    trainer.step();
    const auto before = weights(trainer);
    trainer.round_weights();
    CHECK(weights(trainer) != before);
    trainer.restore_weights();
    CHECK(weights(trainer) == before);
}

TEST_CASE("a damaged checkpoint is refused, and changes nothing") {
    const test::Folder folder;
    const kvpolicy::host ctx{1};
    const Options options = small("mlp");
    const auto source = file_source(ctx, write_qkv(folder, "qkv", {}, as_it_is), options.target);
    Trainer<examples::Mlp> trainer(ctx, options, *source, nullptr);
    trainer.step();
    const auto file = folder.path() / "checkpoint";
    trainer.save_checkpoint(file.string());
    const llama::Safetensors saved(file);
    const auto spoil = [&](const std::string& name, float value, const std::string& key = "",
                           const std::string& text = "") {
        std::vector<examples::TensorPlan> plan;
        for (const llama::Tensor& tensor : saved.tensors()) {
            plan.push_back({tensor.name, tensor.dtype, tensor.shape});
        }
        std::map<std::string, std::string> metadata(saved.metadata().begin(), saved.metadata().end());
        if (!key.empty()) {
            metadata[key] = text;
        }
        examples::SafetensorsWriter writer(folder.path() / "spoiled", plan, metadata);
        for (const llama::Tensor& tensor : saved.tensors()) {
            std::vector<float> values(tensor.numel);
            llama::to_float(tensor, values);
            if (tensor.name == name) {
                values[1] = value;
            }
            writer.write(values);
        }
        writer.finish();
        Trainer<examples::Mlp> other(ctx, options, *source, nullptr);
        const auto before = weights(other);
        const std::string sentence = message_of([&] { other.resume((folder.path() / "spoiled").string()); });
        CHECK((weights(other) == before) == !sentence.empty());
        return sentence;
    };
    CHECK(spoil("none", 0.0f) == "");
    CHECK(contains(spoil("layers.1.w2", std::numeric_limits<float>::quiet_NaN()),
                   "tensor layers.1.w2 holds nan at 1; numbers must be finite"));
    CHECK(contains(spoil("alpha.second", -1.0f),
                   "alpha.second holds -1 at 1; numbers must be finite, and 0 or more"));
    CHECK(contains(spoil("none", 0.0f, "checkpoint", "1x"), "\"checkpoint\" is missing or not 0 to 8"));
    CHECK(contains(spoil("none", 0.0f, "steps_taken", "2"), "\"steps_taken\" is missing or not 0 to 1"));
}

TEST_CASE("a checkpoint asks for no sequence") {
    const test::Folder folder;
    const auto file = write_qkv(folder, "qkv", {}, as_it_is);
    const kvpolicy::host ctx{1};
    const Options options = small("mlp");
    const auto read = file_source(ctx, file, options.target);
    CountedSource source(*read);
    Trainer<examples::Mlp> trainer(ctx, options, source, nullptr);
    trainer.step();
    const int before = source.asked;
    trainer.save_checkpoint((folder.path() / "c").string());
    trainer.resume((folder.path() / "c").string());
    CHECK(source.asked == before);
}

TEST_CASE("retrieval queries are woven into a text, and can be answered from it") {
    std::string text;
    for (int i = 0; i < 400; ++i) {
        text += fmt::format("line {} of a text\n", i);
    }
    const RecallSequence a = weave_recall(text, 100, 2048, 20, 3, 5);
    CHECK(a.bytes.size() == 2048);
    CHECK(a.lines.size() == 40);
    CHECK(a.answers.size() == 20);
    CHECK(a.bytes == weave_recall(text, 100, 2048, 20, 3, 5).bytes);
    CHECK(a.bytes != weave_recall(text, 100, 2048, 20, 3, 6).bytes);
    CHECK(a.bytes != weave_recall(text, 100, 2048, 20, 4, 5).bytes);
    std::set<std::string> early, late;
    for (std::size_t i = 0; i < 40; ++i) {
        const auto [begin, end] = a.lines[i];
        const std::string line = a.bytes.substr(static_cast<std::size_t>(begin), 9);
        CHECK(end - begin == 9);
        CHECK(line[0] == '@');
        CHECK(line[3] == ':');
        CHECK(line[8] == '\n');
        (i < 20 ? early : late).insert(line);
        CHECK((i < 20 ? end <= 2048 * 3 / 5 : begin >= 2048 * 3 / 4));
        if (i >= 20) {
            CHECK(a.answers[i - 20] == begin + 4);
        }
    }
    CHECK(early.size() == 20);
    CHECK(early == late);
    std::string rest;  // without the lines it is the text
    std::int32_t at = 0;
    for (const auto& [begin, end] : a.lines) {
        rest += a.bytes.substr(static_cast<std::size_t>(at), static_cast<std::size_t>(begin - at));
        at = end;
    }
    rest += a.bytes.substr(static_cast<std::size_t>(at));
    CHECK(rest == text.substr(100, 2048 - 40 * 9));
    CHECK(weave_recall(text, 0, 64, 0, 1, 1).bytes == text.substr(0, 64));
    CHECK(contains(message_of([&] { weave_recall(text, 0, 100, 20, 1, 1); }),
                   "100 bytes have space for 0 to 2"));
    CHECK(contains(message_of([&] { weave_recall(text, text.size() - 10, 2048, 0, 1, 1); }),
                   "2048 are needed"));
}

TEST_CASE("training text") {
    const test::Folder folder;
    const llama::Tokenizer bytes = llama::Tokenizer::bytes();
    const auto file = folder.write("t", std::string(1000, 'x') + "\xC3\xA9\n" + std::string(200, 'y'));
    const TrainingText text(file, bytes, 256, 2, 1);
    for (std::uint64_t i = 0; i < 20; ++i) {
        CHECK(text.sequence(i).size() == 256);
        CHECK(text.sequence(i) == text.sequence(i));
    }
    CHECK(contains(message_of([&] { TrainingText(file, bytes, 5000, 0, 1); }),
                   "1201 bytes of text are too short"));
    CHECK(contains(message_of([&] { TrainingText(folder.path() / "no", bytes, 8, 0, 1); }),
                   "tools/make_corpus"));
    const auto packed = folder.write("p", std::string("\xFD") + "7zXZ and more");
    CHECK(contains(message_of([&] { TrainingText(packed, bytes, 8, 0, 1); }), "unpack it"));
}

TEST_CASE("token ids in a file") {
    const test::Folder folder;
    const std::vector<std::vector<std::int32_t>> sequences{{0, 7, 255}, {3, 3, 3}};
    const auto file = folder.path() / "tokens";
    write_tokens(file, sequences);
    CHECK(read_tokens(file, 256) == sequences);
    CHECK(contains(message_of([&] { read_tokens(file, 255); }),
                   "line 1 has 255 as number 3; ids must be 0 to 254"));
    const auto of = [&](const char* text) {
        return message_of([&] { read_tokens(folder.write("t", text), 256); });
    };
    CHECK(contains(of("1 2\n3  4\n"), "line 2 has  4 as number 2"));
    CHECK(contains(of("1 -2\n"), "has -2 as number 2"));
    CHECK(contains(of("1 x\n"), "has x as number 2"));
    CHECK(contains(of("1 2\n3 4 5\n"), "line 2 has 3 ids; every line must have as many as the first, 2"));
    CHECK(contains(of("7\n"), "line 1 has 1 ids"));
    CHECK(contains(of(""), "is empty"));
    CHECK(contains(message_of([&] { read_tokens(folder.path() / "no", 256); }), "cannot be opened"));
}

TEST_CASE("retrieval queries in the tokens of another model") {
    const test::Folder folder;
    const std::filesystem::path vectors = TEST_VECTORS;
    const llama::Tokenizer tokenizer = llama::Tokenizer::read(vectors / "tokenizer_small.json");
    std::string text;
    for (int i = 0; i < 600; ++i) {
        text += fmt::format("line {} of an ordinary text\n", i);
    }
    const TrainingText training(folder.write("t", text), tokenizer, 512, 6, 1);
    for (std::uint64_t i = 0; i < 5; ++i) {
        const auto tokens = training.sequence(i);
        CHECK(tokens.size() == 512);
        const std::string read = tokenizer.decode(tokens);
        std::multiset<std::string> lines;
        for (std::size_t at = read.find('@'); at != std::string::npos; at = read.find('@', at + 1)) {
            lines.insert(read.substr(at, 9));
        }
        std::size_t twice = 0;
        for (const std::string& line : lines) {
            twice += lines.count(line) == 2 ? 1 : 0;
        }
        CHECK(lines.size() >= 9);  // all that is asked for, and most of what it was
        CHECK(twice >= 6);
    }
}

TEST_CASE("2n steps are n steps and a resumed n, bit for bit, on any number of threads") {
    resumes<examples::Mlp>("mlp");
    resumes<examples::Mlstm>("mlstm");
}

TEST_CASE("scorers learn here too, and held-out numbers say so") {
    const test::Folder folder;
    Sizes s;
    s.length = 160;
    const auto file = write_qkv(folder, "qkv", s, as_it_is);
    const kvpolicy::host ctx{1};
    Options options = small("mlp", s);
    options.steps = 200, options.positions = 0, options.warm_up = 5;
    const auto source = file_source(ctx, file, options.target),
               held_out = file_source(ctx, file, options.target);
    Trainer<examples::Mlp> trainer(ctx, options, *source, held_out.get());
    const auto before = trainer.evaluate();
    for (int i = 0; i < 200; ++i) {
        trainer.step();
    }
    const auto after = trainer.evaluate();
    REQUIRE(before.size() == 2);
    for (std::size_t b = 0; b < 2; ++b) {
        CHECK(after[b].loss.loss < 0.8 * before[b].loss.loss);
        CHECK(after[b].mean_recall() > before[b].mean_recall() + 0.05);
        CHECK(after[b].mean_chance() == doctest::Approx(before[b].mean_chance()).epsilon(0.02));
    }

    // The file, and what reads it.
    options.out = (folder.path() / "scorers").string();
    options.fp32 = true;
    trainer.finish({{"note", "a test"}});
    const examples::TrainedScorers read = examples::load_scorers(options.out);
    CHECK(read.system() == "KVpop-mlp");
    CHECK(read.spec.training.at("note") == "a test");
    CHECK(read.alpha == trainer.alpha());
    const auto& stack = std::get<examples::ScorerStack<examples::Mlp>>(read.stack);
    for (std::size_t i = 0; i < stack.arrays.size(); ++i) {
        CHECK(stack.arrays[i].data == trainer.stack().arrays[i].data);
    }
    CHECK(read.quantiles.size() == 4 * 257);
    const auto all = read.thresholds(1.0), half = read.thresholds(0.5), none = read.thresholds(0.0);
    for (std::size_t h = 0; h < 4; ++h) {
        CHECK(all[h] < half[h]);
        CHECK(half[h] < none[h]);
    }
    llama::Config other;
    other.layers = 3, other.kv_heads = 2, other.head_dim = 8;
    CHECK(contains(message_of([&] { examples::check_fits(read, other, "f"); }), "the model has 3 layers"));
}

// A target that old keys win: teacher and student share the decay.
TEST_CASE("a decay has a rate of its own, by which it goes where the loss wants it") {
    const test::Folder folder;
    Sizes s;
    s.length = 160;
    const auto file = write_qkv(folder, "qkv", s, as_it_is);
    const kvpolicy::host ctx{1};
    const auto moved = [&](double decay_rate) {
        Options options = small("mlp", s);
        options.steps = 100, options.positions = 0, options.rate = 1e-3, options.decay_rate = decay_rate;
        const auto source = file_source(ctx, file, options.target);
        Trainer<examples::Mlp> trainer(ctx, options, *source, nullptr);
        const std::vector<float> before = trainer.alpha();
        for (int i = 0; i < 100; ++i) {
            trainer.step();
        }
        double most = 0.0;
        for (std::size_t i = 0; i < before.size(); ++i) {
            most = std::max(most, std::fabs(static_cast<double>(trainer.alpha()[i] - before[i])));
        }
        return most;
    };
    // AdamW's step is at most the rate in the mean, and 100 of 1e-3 with a cosine come to 0.06.
    CHECK(moved(1.0) < 0.07);
    CHECK(moved(30.0) > 0.5);
}

TEST_CASE("a file says which norm its mLSTMs have") {
    const test::Folder folder;
    examples::ScorerSpec spec = small("mlstm").spec;
    for (const bool layer : {false, true}) {
        spec.norm = !layer, spec.layer_norm = layer;
        examples::ScorerStack<examples::Mlstm> stack(spec);
        stack.initialize(1);
        const auto file = folder.path() / "scorers";
        examples::save_scorers(file, spec, stack, {}, {}, false);
        const examples::TrainedScorers read = examples::load_scorers(file);
        CHECK(read.spec.architecture() == spec.architecture());
        const auto& scorer = std::get<examples::ScorerStack<examples::Mlstm>>(read.stack).scorers[0];
        CHECK(scorer.weights.norm_gain != nullptr);
        CHECK((scorer.norm == kvpolicy::mlstm_norm::layer) == layer);
    }
    auto metadata = examples::to_metadata(spec);
    metadata["norm"] = "batch";
    CHECK(contains(message_of([&] {
                       examples::spec_of({metadata.begin(), metadata.end()}, "f");
                   }),
                   "f: \"norm\" is \"batch\"; it must be 0, 1 (an RMS norm) or layer"));
}

TEST_CASE("targets of a file are those of the library, and stored ones are taken") {
    const test::Folder folder;
    const Sizes s;
    const auto file = write_qkv(folder, "qkv", s, as_it_is);
    const kvpolicy::host ctx{1};
    const TargetOptions target{.window = 8, .beta = 2.0f};
    const auto source = file_source(ctx, file, target);
    CHECK(source->count() == 3);
    const QkvShape shape = source->shape();
    CHECK(shape.query_heads == 4);
    const Example example = source->get(1);
    // By the definition, in double.
    for (std::int32_t t : {0, 17, 80, 95}) {
        double best = -1e30;
        for (std::int32_t g = 0; g < 2; ++g) {
            double sum = 0.0;
            std::vector<double> logits;
            std::vector<float> q(static_cast<std::size_t>(s.length * s.query_heads * s.dim));
            for (std::size_t i = 0; i < q.size(); ++i) {
                q[i] = 2.0f * noise(9, i);  // sequence 1, layer 1: the tenth tensor
            }
            for (std::int32_t d = t + 8; d < s.length; ++d) {
                double total = 0.0, mine = 0.0;
                for (std::int32_t u = 0; u <= d; ++u) {
                    double dot = 0.0;
                    for (std::int32_t i = 0; i < s.dim; ++i) {
                        dot += double(q[static_cast<std::size_t>(
                                   (std::int64_t{d} * s.query_heads + 2 + g) * s.dim + i)]) *
                               double(example.keys(shape, 1).row(0, 1, u)[i]);
                    }
                    const double e = std::exp(dot / std::sqrt(8.0));
                    total += e;
                    mine = u == t ? e : mine;
                }
                sum += mine / total * (mine / total);
            }
            const double n = std::max(1, s.length - (t + 8));
            best = std::max(best, std::log(1e-8 + std::sqrt(sum / n)));
        }
        CHECK(double(example.targets(shape, 1).head(0, 1)[t]) == doctest::Approx(best).epsilon(1e-4));
    }
}

TEST_CASE("bad files are refused in a sentence that names the tensor") {
    const test::Folder folder;
    const kvpolicy::host ctx{1};
    const TargetOptions target{.window = 8};
    const auto refusal = [&](const std::filesystem::path& file) {
        return message_of([&] {
            const auto source = file_source(ctx, file, target);
            source->get(0), source->get(1);
        });
    };
    for (const std::string& what : {std::string("q"), std::string("k"), std::string("v")}) {
        const std::string spoiled = "sequences.1.layers.1." + what;
        const auto file =
            write_qkv(folder, what, {}, [&](const std::string& name, std::vector<float>& values) {
                if (name == spoiled) {
                    const std::size_t row = what == "q" ? 32 : 16;
                    values[5 * row + 8 + 3] = std::numeric_limits<float>::quiet_NaN();
                }
            });
        CHECK(contains(refusal(file), spoiled + " holds nan at head 1, position 5"));
    }
    CHECK(contains(refusal(write_qkv(folder, "noq", {}, as_it_is, false)),
                   "has neither sequences.0.layers.0.target.2"));
    Sizes narrow;
    narrow.dim = 4;
    CHECK(contains(
        refusal(write_qkv(folder, "narrow", narrow, as_it_is)),
        "have shapes [96, 2, 4] and [96, 2, 4]; at most 65536 heads are allowed, and head dimensions"));
    Sizes odd;
    odd.query_heads = 3;
    CHECK(contains(refusal(write_qkv(folder, "odd", odd, as_it_is)), "a multiple of the 2 heads of k"));
    examples::SafetensorsWriter empty(folder.path() / "none", {{"x", llama::DType::f32, {1}}}, {});
    empty.write(std::vector<float>(1));
    empty.finish();
    CHECK(contains(refusal(folder.path() / "none"), "holds no sequences.0.layers.0.k"));
    CHECK(contains(message_of([&] { examples::load_scorers(folder.path() / "none"); }), "is no scorer file"));

    // Shapes of teacher and student.
    const auto file = write_qkv(folder, "qkv", {}, as_it_is);
    Sizes wide;
    wide.dim = 16;
    const auto other = write_qkv(folder, "wide", wide, as_it_is);
    const Options options = small("mlp");
    const auto a = file_source(ctx, file, target), b = file_source(ctx, other, target);
    CHECK(contains(message_of([&] { Trainer<examples::Mlp>(ctx, options, *a, b.get()); }),
                   "the training sequences have 2 layers"));
}

TEST_CASE("a sequence without a decision leaves the weights as they are") {
    const test::Folder folder;
    Sizes s;
    s.length = 24;  // not above the smaller budget
    const auto file = write_qkv(folder, "qkv", s, as_it_is);
    const kvpolicy::host ctx{1};
    const Options options = small("mlp", s);
    const auto source = file_source(ctx, file, options.target);
    Trainer<examples::Mlp> trainer(ctx, options, *source, nullptr);
    const auto before = weights(trainer);
    trainer.step();
    const LossSums sums = trainer.take();
    CHECK(sums.count == 0);
    CHECK(sums.steps == 1);
    CHECK(sums.first_empty == 1);
    CHECK(sums.loss == 0.0);
    CHECK(weights(trainer) == before);
}

TEST_CASE("a scorer that reads on arrival, in a cache") {
    const std::int32_t length = 70, dim = 8, window = 9;
    examples::ScorerSpec spec;
    spec.kind = "mlstm";
    spec.layers = 1, spec.heads = 2, spec.head_dim_qk = spec.head_dim_vo = dim, spec.d_qk = 8, spec.d_v = 4;
    examples::ScorerStack<examples::Mlstm> stack(spec);
    stack.initialize(3);
    for (auto& array : stack.arrays) {
        for (std::size_t i = 0; i < array.data.size(); ++i) {
            array.data[i] += 0.3f * noise(array.shape.size(), i);  // the read-out starts at 0
        }
    }
    const kvpolicy::host ctx{1};
    std::vector<float> k(static_cast<std::size_t>(2 * length * dim)), v(k.size()),
        now(static_cast<std::size_t>(2 * length)), later(now.size());
    for (std::size_t i = 0; i < k.size(); ++i) {
        k[i] = noise(1, i), v[i] = noise(2, i);
    }
    const auto keys = kvpolicy::view_bhsd<const float>(k.data(), 1, 2, length, dim);
    const auto values = kvpolicy::view_bhsd<const float>(v.data(), 1, 2, length, dim);
    const kvpolicy::Sequences sequences{.batch = 1, .length = length};
    std::vector<unsigned char> memory(1 << 22);
    const kvpolicy::workspace_view workspace{memory.data(), memory.size()};
    const examples::ImmediateScorer<examples::Mlstm> immediate{stack.scorers[0], window};
    kvpolicy::score_sequence(ctx, stack.scorers[0], keys, values, sequences, 0,
                             kvpolicy::view_bhs(now.data(), 1, 2, length), workspace,
                             {.how = kvpolicy::form::recurrent});
    kvpolicy::score_sequence(ctx, immediate, keys, values, sequences, window,
                             kvpolicy::view_bhs(later.data(), 1, 2, length), workspace);
    for (std::int32_t h = 0; h < 2; ++h) {
        for (std::int32_t t = 0; t + window < length; ++t) {
            const auto at = static_cast<std::size_t>(std::int64_t{h} * length + t);
            CHECK(now[at] == later[at]);
        }
        CHECK(now[static_cast<std::size_t>(h * length)] != now[static_cast<std::size_t>(h * length + 20)]);
    }
}
