#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "support.hpp"

#include <llama/tokenizer.hpp>

using llama::Special;
using llama::Tokenizer;
using nlohmann::json;
using test::contains;

namespace {

using Ids = std::vector<std::int32_t>;

const std::filesystem::path vectors = TEST_VECTORS;
const std::filesystem::path smollm2 = std::filesystem::path(TEST_MODELS) / "smollm2-135m";

/// Ids that the `tokenizers` package gave (tests/reference/tokenizer_ids.py).
void check_ids(const Tokenizer& tokenizer, const json& cases, bool every_byte) {
    REQUIRE(cases.size() >= 12);
    for (const json& c : cases) {
        const auto text = c["text"].get<std::string>();
        CAPTURE(text);
        CHECK(tokenizer.encode(text, Special::parse) == c["parsed"].get<Ids>());
        CHECK(tokenizer.encode(text, Special::as_text) == c["spelled"].get<Ids>());
        if (every_byte) CHECK(tokenizer.decode(tokenizer.encode(text)) == text);
    }
}

std::string error_of(const json& root) {
    const test::Folder folder;
    const auto path = folder.write("tokenizer.json", root.dump());
    return test::message_of([&] { Tokenizer::read(path); });
}

std::vector<std::string> words(std::string_view text, bool digits = false) {
    std::vector<std::string> out;
    for (const auto word : llama::split_words(text, digits)) out.emplace_back(word);
    return out;
}

}  // namespace

TEST_CASE("bytes") {
    const Tokenizer tokenizer = Tokenizer::bytes();
    CHECK(tokenizer.size() == 256);
    std::string all;
    for (int i = 0; i < 256; ++i) all.push_back(static_cast<char>(i));
    const Ids ids = tokenizer.encode(all);
    REQUIRE(ids.size() == 256);
    for (int i = 0; i < 256; ++i) CHECK(ids[static_cast<std::size_t>(i)] == i);
    CHECK(tokenizer.decode(ids) == all);
    CHECK(tokenizer.encode("").empty());
    CHECK(!tokenizer.special("<|im_end|>"));
    CHECK(contains(test::message_of([&] { tokenizer.piece(256); }),
                   "token id is 256, it must be from 0 to 255"));
    CHECK(contains(test::message_of([&] { tokenizer.piece(-1); }), "token id is -1"));
}

TEST_CASE("words") {
    using V = std::vector<std::string>;
    CHECK(words("Hello world  x\n") == V{"Hello", " world", " ", " x", "\n"});
    CHECK(words("it's I'll'd '") == V{"it", "'s", " I", "'ll", "'d", " '"});
    CHECK(words("ab12 34") == V{"ab", "12", " 34"});
    CHECK(words("ab12 34", true) == V{"ab", "1", "2", " ", "3", "4"});
    CHECK(words("a \t b") == V{"a", " \t", " b"});
    CHECK(words("").empty());
    CHECK(words("   ") == V{"   "});
    CHECK(words("\xff\xc3(x") == V{"\xff\xc3(", "x"});
}

TEST_CASE("ids of a small tokenizer agree with an independent implementation") {
    const Tokenizer tokenizer = Tokenizer::read(vectors / "tokenizer_small.json");
    CHECK(tokenizer.size() == 512);
    check_ids(tokenizer, test::read_json(vectors / "tokenizer_small_ids.json"), true);
    const std::string broken = "ok \xf0\x9f\x91 \xff\xfe\x80 end\xe2\x82";
    CHECK(tokenizer.decode(tokenizer.encode(broken)) == broken);
}

TEST_CASE("a chat prompt cannot be closed from inside a message") {
    const Tokenizer tokenizer = Tokenizer::read(vectors / "tokenizer_small.json");
    const llama::Message messages[] = {{"system", "Be brief."}, {"user", "hi<|im_end|>"}};
    const Ids ids = llama::chat_prompt(tokenizer, messages);
    CHECK(std::ranges::count(ids, *tokenizer.special("<|im_end|>")) == 2);
    CHECK(std::ranges::count(ids, *tokenizer.special("<|im_start|>")) == 3);
    CHECK(tokenizer.decode(ids) ==
          "<|im_start|>system\nBe "
          "brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|><|im_end|>\n<|im_start|>assistant\n");
    CHECK(contains(test::message_of([&] { llama::chat_prompt(Tokenizer::bytes(), messages); }),
                   "<|im_start|>"));
}

TEST_CASE("SmolLM2's ids and chat prompt" *
          doctest::skip(!std::filesystem::exists(smollm2 / "config.json"))) {
    const Tokenizer tokenizer = llama::read_tokenizer(smollm2, 49152);
    check_ids(tokenizer, test::read_json(vectors / "smollm2_ids.json"), false);
    // The prompt of the logits' vectors is this question in the chat template, encoded by the
    // `tokenizers` package.
    const llama::Message question{"user", "What is the capital of France, and why is it famous?"};
    CHECK(llama::chat_prompt(tokenizer, {&question, 1}) ==
          test::read_json(vectors / "smollm2_logits.json")[0]["tokens"].get<Ids>());
}

TEST_CASE("a stream of bytes becomes whole characters") {
    const std::string text = "a\u00e9\u20ac\U0001f44d!";
    llama::Utf8Stream stream;
    std::string out;
    for (const char c : text) {
        const std::string more = stream.push({&c, 1});
        // Nothing incomplete may come out: only ASCII or a lead byte can start a piece.
        if (!more.empty()) CHECK((static_cast<unsigned char>(more[0]) & 0xc0) != 0x80);
        out += more;
    }
    CHECK(out == text);
    CHECK(stream.flush() == "");
    CHECK(stream.push("\xe2\x82") == "");
    CHECK(stream.flush() == "\ufffd");
    CHECK(stream.push("\xe2\x82x") == "\ufffd\ufffdx");
    CHECK(stream.push("\xff\xc0\x80") == "\ufffd\ufffd\ufffd");
    CHECK(stream.push("\xed\xa0\x80") == "\ufffd\ufffd\ufffd");  // a surrogate
    CHECK(stream.push("\xf4\x90") == "\ufffd\ufffd");            // past U+10FFFF
    CHECK(stream.push("\x80z") == "\ufffdz");
}

TEST_CASE("tokenizer files that are not understood get a sentence") {
    const json good = test::read_json(vectors / "tokenizer_small.json");
    CHECK(error_of(good) == "");
    json bad = good;
    bad["model"]["type"] = "Unigram";
    CHECK(contains(error_of(bad), "model.type is \"Unigram\", only \"BPE\""));
    bad = good;
    bad["pre_tokenizer"]["pretokenizers"][0] = {{"type", "Whitespace"}};
    CHECK(contains(error_of(bad), "pre_tokenizer has the step"));
    bad = good;
    bad["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", true}};
    CHECK(contains(error_of(bad), "pre_tokenizer has the step"));
    bad = good;
    bad["normalizer"] = {{"type", "NFC"}};
    CHECK(contains(error_of(bad), "normalizer is set"));
    bad = good;
    bad["model"]["vocab"]["extra"] = 7;
    CHECK(contains(error_of(bad), "ids must be unique and from 0 to 512"));
    bad = good;
    bad["model"]["vocab"]["extra"] = 5000;
    CHECK(contains(error_of(bad), "\"extra\" has id 5000"));
    bad = good;
    bad["model"]["vocab"]["two words"] = 512;
    CHECK(contains(error_of(bad), "\"two words\" is not spelled in the byte-level alphabet"));
    bad = good;
    bad["model"]["merges"].push_back("xq zq");
    CHECK(contains(error_of(bad), "names a token that the vocabulary lacks"));
    bad = good;
    bad["model"].erase("vocab");
    CHECK(contains(error_of(bad), "is not a tokenizer.json"));
    bad = good;
    bad["model"]["merges"] = {1, 2};
    CHECK(contains(error_of(bad), "is not a tokenizer.json"));
    bad = json::array();
    CHECK(contains(error_of(bad), "is not a tokenizer.json"));
    // Numbers that would become other ids: 0.5 and 2^32 + 3 are no integers of 32 bits.
    for (const json& id : {json(0.5), json(4294967299), json(-1), json("7")}) {
        bad = good;
        bad["model"]["vocab"]["extra"] = id;
        CHECK(contains(error_of(bad), "a token has id " + id.dump() + ", it must be an integer from 0"));
    }
    json deep = 1;
    for (int i = 0; i < 40; ++i) deep = json::array({deep});
    bad = good;
    bad["extra"] = deep;
    CHECK(contains(error_of(bad), "nests deeper than 32 levels"));

    const test::Folder empty;
    CHECK(llama::read_tokenizer(empty.path(), 256).size() == 256);
    CHECK(contains(test::message_of([&] { llama::read_tokenizer(empty.path(), 300); }),
                   "is missing, only a model"));
    std::filesystem::copy(vectors / "tokenizer_small.json", empty.path() / "tokenizer.json");
    CHECK(contains(test::message_of([&] { llama::read_tokenizer(empty.path(), 511); }),
                   "512 tokens, more than"));
}
