#pragma once
#include "config.hpp"

#include <cstdint>
#include <filesystem>
#include <vector>

namespace llama {

/// Row-major [rows, cols]; as a weight it is [out, in], so that one output is one contiguous row.
struct Matrix {
    int rows = 0;
    int cols = 0;
    std::vector<float> values;
};

struct Layer {
    std::vector<float> attention_norm;  ///< [hidden]
    Matrix q, k, v;                     ///< [heads * head_dim, hidden], [kv_heads * head_dim, hidden] twice
    Matrix o;                           ///< [hidden, heads * head_dim]
    std::vector<float> mlp_norm;        ///< [hidden]
    Matrix gate, up;                    ///< [intermediate, hidden]
    Matrix down;                        ///< [hidden, intermediate]
};

/// A Llama's weights in fp32. Constant after loading, so any number of engines can share one.
struct Model {
    Config config;
    Matrix embedding;  ///< [vocab, hidden]
    std::vector<Layer> layers;
    std::vector<float> final_norm;  ///< [hidden]
    Matrix lm_head;                 ///< [vocab, hidden]; empty if the embeddings are tied

    const Matrix& output() const noexcept { return config.tied_embeddings ? embedding : lm_head; }
    /// Bytes that one decode step reads: all the weights, the embedding only as the output matrix.
    std::size_t bytes() const noexcept;
};

/// Reads config.json and model.safetensors from a folder.
Model load_model(const std::filesystem::path& folder);

}  // namespace llama
