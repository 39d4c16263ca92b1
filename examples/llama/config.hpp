#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace llama {

class Safetensors;

/// The part of a Hugging Face config.json that a Llama needs.
struct Config {
    int vocab_size = 0;
    int hidden_size = 0;
    int intermediate_size = 0;
    int layers = 0;
    int heads = 0;          ///< query heads
    int kv_heads = 0;       ///< key and value heads; heads is a multiple of it
    int head_dim = 0;       ///< even, for RoPE
    int max_positions = 0;  ///< what the model was trained for; nothing enforces it
    double rms_norm_eps = 0;
    double rope_theta = 0;
    bool tied_embeddings = false;   ///< the output matrix is the embedding
    std::vector<std::int32_t> eos;  ///< any of these ends a text; may be empty

    int group() const noexcept { return heads / kv_heads; }
};

/// Throws Error for what this engine does not do (rope scaling, biases, other architectures) instead of
/// computing something else; `file` is for the messages.
Config parse_config(std::string_view json_text, const std::string& file);
Config read_config(const std::filesystem::path& file);

struct TensorSpec {
    std::string name;
    std::vector<std::int64_t> shape;
};

/// Names and shapes of a model with this config, as Hugging Face names them; matrices are [out, in].
std::vector<TensorSpec> expected_tensors(const Config& config);

/// Throws Error unless the file holds exactly the expected tensors.
void check_tensors(const Config& config, const Safetensors& file);

}  // namespace llama
