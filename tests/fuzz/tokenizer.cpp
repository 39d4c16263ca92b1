// tokenizer.json of anyone: an error with a sentence, or a tokenizer that takes any text.
#include "files.hpp"

#include <llama/tokenizer.hpp>

#include <string>
#include <vector>

namespace {

const std::string valid =
    R"({"normalizer":null,"added_tokens":[{"id":6,"content":"<|e|>"}],"pre_tokenizer":{"type":"Sequence",)"
    R"("pretokenizers":[{"type":"Digits","individual_digits":true},{"type":"ByteLevel",)"
    R"("add_prefix_space":false,"use_regex":true}]},"model":{"type":"BPE","vocab":{"a":0,"b":1,"\u0120":2,)"
    R"("ab":3,"\u0120a":4,"c":5},"merges":["a b",["\u0120","a"]]}})";

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const fuzz::File file("tokenizer");
    fuzz::Bytes in(data, size);
    file.write(in.below(4) == 0 ? fuzz::rest(in) : fuzz::spliced(valid, in));
    const std::string text = "ab 12 <|e|>\n" + fuzz::rest(in);
    fuzz::reads([&] {
        const llama::Tokenizer tokenizer = llama::Tokenizer::read(file.path());
        for (const auto special : {llama::Special::as_text, llama::Special::parse}) {
            for (const std::int32_t id : tokenizer.encode(text, special)) {
                fuzz::check(id >= 0 && id < tokenizer.size(), "an id that is none of the vocabulary's");
                static_cast<void>(tokenizer.piece(id));
            }
        }
        llama::Utf8Stream stream;
        static_cast<void>(stream.push(text) + stream.flush());
    });
    return 0;
}
