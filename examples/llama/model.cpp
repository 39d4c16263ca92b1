#include "model.hpp"

#include "error.hpp"
#include "safetensors.hpp"

namespace llama {
namespace {

std::vector<float> load(const Safetensors& file, const std::string& name) {
    const Tensor& tensor = *file.find(name);  // check_tensors has seen it
    std::vector<float> values(tensor.numel);
    to_float(tensor, values);
    return values;
}

Matrix load_matrix(const Safetensors& file, const std::string& name) {
    const Tensor& tensor = *file.find(name);
    return {static_cast<int>(tensor.shape[0]), static_cast<int>(tensor.shape[1]), load(file, name)};
}

}  // namespace

Model load_model(const std::filesystem::path& folder) {
    Model model;
    model.config = read_config(folder / "config.json");
    const Safetensors file(folder / "model.safetensors");
    check_tensors(model.config, file);

    model.embedding = load_matrix(file, "model.embed_tokens.weight");
    for (int i = 0; i < model.config.layers; ++i) {
        const std::string name = fmt::format("model.layers.{}.", i);
        Layer& layer = model.layers.emplace_back();
        layer.attention_norm = load(file, name + "input_layernorm.weight");
        layer.q = load_matrix(file, name + "self_attn.q_proj.weight");
        layer.k = load_matrix(file, name + "self_attn.k_proj.weight");
        layer.v = load_matrix(file, name + "self_attn.v_proj.weight");
        layer.o = load_matrix(file, name + "self_attn.o_proj.weight");
        layer.mlp_norm = load(file, name + "post_attention_layernorm.weight");
        layer.gate = load_matrix(file, name + "mlp.gate_proj.weight");
        layer.up = load_matrix(file, name + "mlp.up_proj.weight");
        layer.down = load_matrix(file, name + "mlp.down_proj.weight");
    }
    model.final_norm = load(file, "model.norm.weight");
    if (!model.config.tied_embeddings) model.lm_head = load_matrix(file, "lm_head.weight");
    return model;
}

std::size_t Model::bytes() const noexcept {
    std::size_t count = output().values.size() + final_norm.size();
    for (const Layer& l : layers)
        count += l.attention_norm.size() + l.q.values.size() + l.k.values.size() + l.v.values.size() +
                 l.o.values.size() + l.mlp_norm.size() + l.gate.values.size() + l.up.values.size() +
                 l.down.values.size();
    return count * sizeof(float);
}

}  // namespace llama
