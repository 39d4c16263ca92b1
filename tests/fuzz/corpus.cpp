// Texts, token ids and held-out sequences of anyone: an error with a sentence, or sequences of the length
// that was asked for.
#include "files.hpp"
#include "support/held_out.hpp"
#include "train_scorer/sequences.hpp"

#include <filesystem>
#include <string>

namespace {

const std::string description =
    R"({"sequences":2,"length":40,"digits":4,"answers":[[20],[21,30]],"lines":[[[4,13],[16,25]],[[0,9]]]})";

/// A folder of links to two files in memory.
std::string folder_of(const fuzz::File& bin, const fuzz::File& json) {
    std::string name = (std::filesystem::temp_directory_path() / "kvpolicy-fuzz-XXXXXX").string();
    fuzz::check(mkdtemp(name.data()) != nullptr, "no folder for the test");
    std::filesystem::create_symlink(bin.path(), name + "/eval.bin");
    std::filesystem::create_symlink(json.path(), name + "/eval.json");
    static std::string made = name;
    std::atexit([] { std::filesystem::remove_all(made); });
    return name;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const fuzz::File file("tokens"), bin("eval.bin"), json("eval.json");
    static const std::string folder = folder_of(bin, json);
    static const llama::Tokenizer bytes = llama::Tokenizer::bytes();
    fuzz::Bytes in(data, size);
    switch (in.below(3)) {
        case 0: {
            file.write(in.flag() ? fuzz::spliced("1 2 3\n4 5 255\n0 0 7\n", in) : fuzz::rest(in));
            fuzz::reads([&] {
                for (const auto& tokens : train::read_tokens(file.path(), 256)) {
                    fuzz::check(tokens.size() >= 2, "a sequence of less than two tokens");
                    for (const std::int32_t id : tokens) {
                        fuzz::check(id >= 0 && id < 256, "an id that is none of the vocabulary's");
                    }
                }
            });
            break;
        }
        case 1: {
            const std::int32_t length = 2 + in.below(200), pairs = in.below(5);
            const std::uint64_t seed = in.byte();
            file.write(fuzz::rest(in));
            fuzz::reads([&] {
                const train::TrainingText text(file.path(), bytes, length, pairs, seed);
                for (std::uint64_t i = 0; i < 4; ++i) {
                    fuzz::check(text.sequence(i).size() == static_cast<std::size_t>(length),
                                "another length");
                }
            });
            break;
        }
        default: {
            json.write(fuzz::spliced(description, in));
            std::string text = fuzz::rest(in);
            text.resize(std::max<std::size_t>(text.size(), 80), 'x');
            bin.write(text);
            fuzz::reads([&] {
                const examples::HeldOut read = examples::read_held_out(folder);
                for (std::size_t i = 0; i < read.tokens.size(); ++i) {
                    const examples::SequenceScorer scorer(read, i);
                    examples::Score score;
                    scorer.add_to(score);
                }
                static_cast<void>(examples::tokenize(read, bytes, 1, 2));
            });
            break;
        }
    }
    return 0;
}
