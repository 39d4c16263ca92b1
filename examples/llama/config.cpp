#include "config.hpp"

#include "bounded_json.hpp"
#include "error.hpp"
#include "safetensors.hpp"

#include <nlohmann/json.hpp>

#include <cmath>
#include <fstream>
#include <iterator>
#include <unordered_set>

namespace llama {
namespace {

using json = nlohmann::json;

struct Reader {
    const std::string& file;
    const json& object;

    /// nullptr if absent or null: Hugging Face writes null for "not used".
    const json* find(const char* key) const {
        const auto it = object.find(key);
        return it == object.end() || it->is_null() ? nullptr : &*it;
    }

    int integer(const char* key, int largest, const int* fallback = nullptr) const {
        const json* value = find(key);
        if (!value && fallback) return *fallback;
        if (!value) fail("{}: {} is missing, it must be an integer from 1 to {}", file, key, largest);
        if (!value->is_number_unsigned() || value->get<std::uint64_t>() < 1 ||
            value->get<std::uint64_t>() > static_cast<std::uint64_t>(largest))
            fail("{}: {} is {}, it must be an integer from 1 to {}", file, key, clipped(value->dump()),
                 largest);
        return value->get<int>();
    }

    double positive(const char* key, double fallback) const {
        const json* value = find(key);
        if (!value) return fallback;
        if (!value->is_number() || !(value->get<double>() > 0) || !std::isfinite(value->get<double>()))
            fail("{}: {} is {}, it must be a finite number above 0", file, key, clipped(value->dump()));
        return value->get<double>();
    }

    bool flag(const char* key, bool fallback) const {
        const json* value = find(key);
        if (!value) return fallback;
        if (!value->is_boolean())
            fail("{}: {} is {}, it must be true or false", file, key, clipped(value->dump()));
        return value->get<bool>();
    }

    /// For settings that are fine if absent or at their one supported value.
    void only(const char* key, const json& supported) const {
        const json* value = find(key);
        if (value && *value != supported)
            fail("{}: {} is {}, this engine supports only {}", file, key, clipped(value->dump()),
                 supported.dump());
    }
};

}  // namespace

Config parse_config(std::string_view json_text, const std::string& file) {
    const json object = json::parse(json_text.begin(), json_text.end(), depth_limit(file, 16),
                                    /*allow_exceptions=*/false);
    if (!object.is_object()) fail("{}: is not a JSON object", file);
    const Reader read{file, object};

    if (!read.find("model_type"))
        fail("{}: model_type is missing, this engine supports only \"llama\"", file);
    read.only("model_type", "llama");
    read.only("hidden_act", "silu");
    read.only("attention_bias", false);
    read.only("mlp_bias", false);
    read.only("partial_rotary_factor", 1.0);
    for (const char* key : {"rope_scaling", "quantization_config"})
        if (read.find(key)) fail("{}: {} is set, this engine supports only models without it", file, key);

    constexpr int large = 1 << 24;  // products of two stay far inside 64 bits
    Config config;
    config.vocab_size = read.integer("vocab_size", large);
    config.hidden_size = read.integer("hidden_size", large);
    config.intermediate_size = read.integer("intermediate_size", large);
    config.layers = read.integer("num_hidden_layers", 10'000);
    config.heads = read.integer("num_attention_heads", 1 << 16);
    config.kv_heads = read.integer("num_key_value_heads", 1 << 16, &config.heads);
    config.max_positions = read.integer("max_position_embeddings", 1 << 30);
    config.rms_norm_eps = read.positive("rms_norm_eps", 1e-6);
    config.rope_theta = read.positive("rope_theta", 10000.0);
    config.tied_embeddings = read.flag("tie_word_embeddings", false);

    // Newer files keep theta and scaling together.
    if (const json* rope = read.find("rope_parameters")) {
        if (!rope->is_object())
            fail("{}: rope_parameters is {}, it must be an object", file, clipped(rope->dump()));
        const Reader inner{file, *rope};
        inner.only("rope_type", "default");
        config.rope_theta = inner.positive("rope_theta", config.rope_theta);
    }

    if (config.heads % config.kv_heads != 0)
        fail("{}: num_attention_heads is {}, it must be a multiple of num_key_value_heads, {}", file,
             config.heads, config.kv_heads);
    if (!read.find("head_dim") && config.hidden_size % config.heads != 0)
        fail("{}: hidden_size is {}, without head_dim it must be a multiple of num_attention_heads, {}", file,
             config.hidden_size, config.heads);
    const int usual = config.hidden_size / config.heads;
    config.head_dim = read.integer("head_dim", 1 << 12, &usual);
    if (config.head_dim % 2 != 0) fail("{}: head_dim is {}, it must be even for RoPE", file, config.head_dim);

    if (const json* eos = read.find("eos_token_id")) {
        for (const json& id : eos->is_array() ? *eos : json::array({*eos})) {
            if (!id.is_number_unsigned() ||
                id.get<std::uint64_t>() >= static_cast<std::uint64_t>(config.vocab_size))
                fail("{}: eos_token_id holds {}, it must be from 0 to vocab_size - 1 = {}", file,
                     clipped(id.dump()), config.vocab_size - 1);
            config.eos.push_back(id.get<std::int32_t>());
        }
    }
    return config;
}

Config read_config(const std::filesystem::path& file) {
    std::ifstream in(file, std::ios::binary);
    const std::string text(std::istreambuf_iterator<char>(in), {});
    if (!in && text.empty()) fail("{}: cannot be read", file.string());
    return parse_config(text, file.string());
}

std::vector<TensorSpec> expected_tensors(const Config& c) {
    const std::int64_t hidden = c.hidden_size, inner = c.intermediate_size, vocab = c.vocab_size;
    const std::int64_t q = std::int64_t{c.heads} * c.head_dim, kv = std::int64_t{c.kv_heads} * c.head_dim;
    std::vector<TensorSpec> specs{{"model.embed_tokens.weight", {vocab, hidden}}};
    for (int i = 0; i < c.layers; ++i) {
        const std::string layer = fmt::format("model.layers.{}.", i);
        specs.push_back({layer + "input_layernorm.weight", {hidden}});
        specs.push_back({layer + "self_attn.q_proj.weight", {q, hidden}});
        specs.push_back({layer + "self_attn.k_proj.weight", {kv, hidden}});
        specs.push_back({layer + "self_attn.v_proj.weight", {kv, hidden}});
        specs.push_back({layer + "self_attn.o_proj.weight", {hidden, q}});
        specs.push_back({layer + "post_attention_layernorm.weight", {hidden}});
        specs.push_back({layer + "mlp.gate_proj.weight", {inner, hidden}});
        specs.push_back({layer + "mlp.up_proj.weight", {inner, hidden}});
        specs.push_back({layer + "mlp.down_proj.weight", {hidden, inner}});
    }
    specs.push_back({"model.norm.weight", {hidden}});
    if (!c.tied_embeddings) specs.push_back({"lm_head.weight", {vocab, hidden}});
    return specs;
}

void check_tensors(const Config& config, const Safetensors& file) {
    std::unordered_set<std::string> known;
    for (const TensorSpec& spec : expected_tensors(config)) {
        const Tensor* tensor = file.find(spec.name);
        if (!tensor)
            fail("{}: tensor {} is missing, config.json asks for it with shape {}", file.path(),
                 printable(spec.name), shape_text(spec.shape));
        if (tensor->shape != spec.shape)
            fail("{}: tensor {} has shape {}, config.json asks for {}", file.path(), printable(spec.name),
                 shape_text(tensor->shape), shape_text(spec.shape));
        known.insert(spec.name);
    }
    for (const Tensor& tensor : file.tensors()) {
        // Harmless leftovers: a stored copy of a tied matrix, and RoPE's frequencies, which
        // theta already says.
        const bool leftover = tensor.name == "lm_head.weight" || tensor.name.ends_with("rotary_emb.inv_freq");
        if (!leftover && !known.contains(tensor.name))
            fail("{}: tensor {} is none of the {} that config.json asks for", file.path(),
                 printable(tensor.name), known.size());
    }
}

}  // namespace llama
