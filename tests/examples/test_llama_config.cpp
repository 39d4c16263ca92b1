#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "support.hpp"

#include <llama/config.hpp>
#include <llama/safetensors.hpp>

using nlohmann::json;
using test::contains;

namespace {

json good() {
    return {{"model_type", "llama"},    {"hidden_act", "silu"},        {"vocab_size", 10},
            {"hidden_size", 8},         {"intermediate_size", 12},     {"num_hidden_layers", 1},
            {"num_attention_heads", 4}, {"num_key_value_heads", 2},    {"max_position_embeddings", 64},
            {"rms_norm_eps", 1e-5},     {"rope_theta", 10000.0},       {"rope_scaling", nullptr},
            {"attention_bias", false},  {"tie_word_embeddings", true}, {"eos_token_id", 2}};
}

std::string error_with(const char* key, const json& value) {
    json object = good();
    object[key] = value;
    return test::message_of([&] { llama::parse_config(object.dump(), "config.json"); });
}

std::string error_without(const char* key) {
    json object = good();
    object.erase(key);
    return test::message_of([&] { llama::parse_config(object.dump(), "config.json"); });
}

/// A file with these tensors, all zero.
std::string file_with(const std::vector<llama::TensorSpec>& specs) {
    json header = json::object();
    std::size_t at = 0;
    for (const auto& spec : specs) {
        std::size_t bytes = 4;
        for (const auto n : spec.shape) bytes *= static_cast<std::size_t>(n);
        header[spec.name] = {{"dtype", "F32"}, {"shape", spec.shape}, {"data_offsets", {at, at + bytes}}};
        at += bytes;
    }
    return test::safetensors_bytes(header.dump(), std::string(at, '\0'));
}

std::string mismatch(const std::vector<llama::TensorSpec>& specs) {
    const test::Folder folder;
    const llama::Safetensors file(folder.write("model.safetensors", file_with(specs)));
    const auto config = llama::parse_config(good().dump(), "config.json");
    return test::message_of([&] { llama::check_tensors(config, file); });
}

}  // namespace

TEST_CASE("a good config") {
    auto config = llama::parse_config(good().dump(), "config.json");
    CHECK(config.head_dim == 2);
    CHECK(config.group() == 2);
    CHECK(config.tied_embeddings);
    CHECK(config.eos == std::vector<std::int32_t>{2});
    json object = good();
    object["head_dim"] = 16;
    object["eos_token_id"] = {1, 3};
    object["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5e5}};
    object.erase("num_key_value_heads");
    config = llama::parse_config(object.dump(), "config.json");
    CHECK(config.head_dim == 16);
    CHECK(config.kv_heads == 4);
    CHECK(config.rope_theta == 5e5);
    CHECK(config.eos == std::vector<std::int32_t>{1, 3});
}

TEST_CASE("what the engine does not do is refused") {
    CHECK(contains(error_with("model_type", "mistral"),
                   "model_type is \"mistral\", this engine supports only"));
    CHECK(contains(error_without("model_type"), "model_type is missing"));
    CHECK(contains(error_with("rope_scaling", {{"type", "linear"}, {"factor", 2}}), "rope_scaling is set"));
    CHECK(contains(error_with("rope_parameters", {{"rope_type", "yarn"}}), "rope_type is"));
    CHECK(contains(error_with("attention_bias", true),
                   "attention_bias is true, this engine supports only false"));
    CHECK(contains(error_with("mlp_bias", true), "mlp_bias"));
    CHECK(contains(error_with("hidden_act", "gelu"), "hidden_act"));
    CHECK(contains(error_with("partial_rotary_factor", 0.5), "partial_rotary_factor"));
    CHECK(contains(error_with("quantization_config", json::object()), "quantization_config is set"));
}

TEST_CASE("values out of range") {
    for (const char* key :
         {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "max_position_embeddings"}) {
        for (const json& value : {json(0), json(-1), json(1.5), json("8"), json(1ull << 40), json(true)}) {
            CAPTURE(value.dump());
            CHECK(contains(error_with(key, value), std::string(key) + " is "));
        }
    }
    CHECK(contains(error_without("hidden_size"), "hidden_size is missing"));
    CHECK(contains(error_with("num_key_value_heads", 3), "num_attention_heads is 4, it must be a multiple"));
    CHECK(contains(error_with("head_dim", 3), "head_dim is 3, it must be even"));
    CHECK(contains(error_with("hidden_size", 9), "hidden_size is 9"));
    CHECK(contains(error_with("hidden_size", 2), "hidden_size is 2, without head_dim"));
    CHECK(contains(error_with("rms_norm_eps", -1e-5), "rms_norm_eps"));
    CHECK(contains(error_with("rope_theta", "big"), "rope_theta"));
    CHECK(contains(error_with("tie_word_embeddings", 1), "tie_word_embeddings"));
    CHECK(contains(error_with("eos_token_id", 10),
                   "eos_token_id holds 10, it must be from 0 to vocab_size - 1 = 9"));
    CHECK(contains(test::message_of([] { llama::parse_config(std::string(100000, '['), "c.json"); }),
                   "c.json: nests deeper than 16 levels"));
    CHECK(contains(test::message_of([] { llama::parse_config("{", "c.json"); }),
                   "c.json: is not a JSON object"));
    CHECK(contains(test::message_of([] { llama::parse_config("[]", "c.json"); }), "is not a JSON object"));
    CHECK(
        contains(test::message_of([] { llama::read_config("/nonexistent/config.json"); }), "cannot be read"));
}

TEST_CASE("tensors that do not match the config") {
    const auto config = llama::parse_config(good().dump(), "config.json");
    const auto specs = llama::expected_tensors(config);
    CHECK(mismatch(specs) == "");

    auto missing = specs;
    missing.erase(missing.begin() + 3);
    CHECK(contains(mismatch(missing),
                   "tensor \"model.layers.0.self_attn.k_proj.weight\" is missing, config.json asks for "
                   "it with shape [4, 8]"));
    auto wrong = specs;
    wrong[2].shape = {8, 9};
    CHECK(contains(mismatch(wrong), "q_proj.weight\" has shape [8, 9], config.json asks for [8, 8]"));
    auto flat = specs;
    flat[2].shape = {64};
    CHECK(contains(mismatch(flat), "has shape [64], config.json asks for [8, 8]"));
    auto extra = specs;
    extra.push_back({"model.layers.0.self_attn.q_proj.bias", {8}});
    CHECK(contains(mismatch(extra), "q_proj.bias\" is none of the 11 that config.json asks for"));
    auto leftovers = specs;
    leftovers.push_back({"lm_head.weight", {10, 8}});
    leftovers.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", {1}});
    CHECK(mismatch(leftovers) == "");
}
