// config.json of anyone: an error with a sentence, or numbers of a model whose tensors have sizes.
#include "files.hpp"

#include <llama/config.hpp>

#include <string>

namespace {

const std::string valid =
    R"({"model_type":"llama","hidden_act":"silu","vocab_size":256,"hidden_size":64,"intermediate_size":96,)"
    R"("num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"max_position_embeddings":128,)"
    R"("rms_norm_eps":1e-5,"rope_theta":1e4,"rope_parameters":{"rope_type":"default","rope_theta":5e5},)"
    R"("head_dim":16,"eos_token_id":[1,2],"tie_word_embeddings":true,"attention_bias":false})";

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Bytes in(data, size);
    const std::string text = in.below(4) == 0 ? fuzz::rest(in) : fuzz::spliced(valid, in);
    fuzz::reads([&] {
        llama::Config config = llama::parse_config(text, "config.json");
        fuzz::check(config.heads % config.kv_heads == 0 && config.head_dim % 2 == 0, "heads that do not fit");
        config.layers = std::min(config.layers, 2);
        for (const llama::TensorSpec& one : llama::expected_tensors(config)) {
            for (const std::int64_t dim : one.shape) {
                fuzz::check(dim > 0, "a tensor without numbers");
            }
        }
    });
    return 0;
}
