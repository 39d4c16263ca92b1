// Files of queries, keys and values of anyone: an error with a sentence, or sequences that can be trained on.
#include "train_scorer/qkv.hpp"

#include "files.hpp"

#include <cmath>
#include <string>

namespace {

/// Two sequences of three and two tokens, two layers, two query heads and one KV head of 8.
fuzz::Parts valid_file() {
    fuzz::Parts parts;
    parts.header = R"({"__metadata__":{"window":"1","aggregate":"max","look_ahead":"all"})";
    const auto add = [&](const std::string& name, const char* dtype, const std::string& shape,
                         std::size_t bytes) {
        const std::size_t at = parts.data.size();
        parts.data.resize(at + bytes, '\x3c');  // small numbers in each type
        parts.header += fmt::format(R"(,"{}":{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}})", name,
                                    dtype, shape, at, at + bytes);
    };
    for (const std::size_t i : {0, 1}) {
        const std::size_t length = 3 - i;
        for (const int l : {0, 1}) {
            const std::string prefix = fmt::format("sequences.{}.layers.{}.", i, l);
            add(prefix + "q", "F16", fmt::format("[{},2,8]", length), length * 32);
            add(prefix + "k", "BF16", fmt::format("[{},1,8]", length), length * 16);
            add(prefix + "v", "F32", fmt::format("[{},1,8]", length), length * 32);
            if (l == 1) {
                add(prefix + "target.2", "F32", fmt::format("[1,{}]", length), length * 4);
            }
        }
    }
    parts.header += "}";
    return parts;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const fuzz::Parts valid = valid_file();
    static const fuzz::File file("qkv");
    static const kvpolicy::host ctx(1);
    fuzz::Bytes in(data, size);
    train::TargetOptions target{.window = 1};
    target.leave_out = in.flag();
    file.write(fuzz::spliced_tensors(valid, in));
    const bool good = fuzz::reads([&] {
        const auto source = train::file_source(ctx, file.path(), target);
        static_cast<void>(source->verify());
        for (std::size_t i = 0; i < source->count(); ++i) {  // what verify() passes get() does not refuse
            train::Example example;
            fuzz::check(fuzz::reads([&] { example = source->get(i); }), "refused after verify()");
            fuzz::check(example.length == source->length(i), "another length");
            for (const auto& of_layer : example.target) {
                for (const float x : of_layer) {
                    fuzz::check(std::isfinite(x), "a target that is not finite");
                }
            }
        }
    });
    fuzz::check(good || size > 1, "the valid file is refused");
    return 0;
}
