// Small files of q, k, v and small runs, for the tests of train_scorer on both backends.
#pragma once

#include <kvpolicy/core/random.hpp>

#include "support.hpp"
#include "support/safetensors_writer.hpp"
#include "trainer.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace training_test {

using namespace train;

struct Sizes {
    std::int32_t layers = 2, query_heads = 4, kv_heads = 2, dim = 8, length = 96;
    std::size_t sequences = 3;
};

inline float noise(std::uint64_t stream, std::size_t i) {
    return static_cast<float>(2.0 * kvpolicy::random_unit(7, stream, i) - 1.0);
}

/// A file of q, k, v with numbers that depend on their place alone. `edit` may spoil a
/// tensor: (name, values).
template <class Edit>
std::filesystem::path write_qkv(const test::Folder& folder, const std::string& name, const Sizes& s,
                                Edit&& edit, bool with_q = true) {
    std::vector<examples::TensorPlan> plan;
    for (std::size_t i = 0; i < s.sequences; ++i) {
        for (std::int32_t l = 0; l < s.layers; ++l) {
            const std::string prefix = fmt::format("sequences.{}.layers.{}.", i, l);
            if (with_q) {
                plan.push_back({prefix + "q", llama::DType::f32, {s.length, s.query_heads, s.dim}});
            }
            plan.push_back({prefix + "k", llama::DType::f32, {s.length, s.kv_heads, s.dim}});
            plan.push_back({prefix + "v", llama::DType::f32, {s.length, s.kv_heads, s.dim}});
        }
    }
    examples::SafetensorsWriter writer(folder.path() / name, plan, {});
    std::uint64_t stream = 0;
    for (const auto& tensor : plan) {
        std::vector<float> values(tensor.numel());
        for (std::size_t i = 0; i < values.size(); ++i) {
            values[i] = 2.0f * noise(stream, i);
        }
        ++stream;
        edit(tensor.name, values);
        writer.write(values);
    }
    writer.finish();
    return folder.path() / name;
}
inline void as_it_is(const std::string&, const std::vector<float>&) {}

inline Options small(const std::string& kind, const Sizes& s = {}) {
    Options o;
    o.spec.kind = kind;
    o.spec.layers = s.layers, o.spec.heads = s.kv_heads, o.spec.head_dim_qk = o.spec.head_dim_vo = s.dim;
    o.spec.hidden = 16, o.spec.d_qk = 8, o.spec.d_v = 4;
    o.spec.sinks = 2, o.spec.window = 8, o.spec.norm = true;
    o.spec.delay = kind == "mlstm" ? 8 : 0;
    o.target.window = 8;
    o.budgets = {40, 24};
    o.steps = 8, o.warm_up = 2, o.positions = 16, o.rate = 1e-2;
    return o;
}

template <class S>
std::vector<std::vector<float>> weights(const Trainer<S>& trainer) {
    std::vector<std::vector<float>> all;
    for (const auto& array : trainer.stack().arrays) {
        all.push_back(array.data);
    }
    all.push_back(trainer.alpha());
    return all;
}

}  // namespace training_test
