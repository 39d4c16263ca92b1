// Writes safetensors files: names, types and shapes first, then the tensors one after another, so that a file
// may be larger than memory.
#pragma once

#include "whole_file.hpp"

#include <llama/safetensors.hpp>

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace examples {

struct TensorPlan {
    std::string name;
    llama::DType dtype = llama::DType::f32;  ///< f32 or bf16
    std::vector<std::int64_t> shape;

    std::size_t numel() const;
};

/// Tensors are written in the order of the plan. finish() gives the file its name: a WholeFile.
class SafetensorsWriter {
  public:
    SafetensorsWriter(std::filesystem::path path, std::vector<TensorPlan> plan,
                      const std::map<std::string, std::string>& metadata);

    /// The next tensor's numbers; bf16 is rounded to nearest even.
    void write(std::span<const float> values);
    void finish();

  private:
    std::filesystem::path path_;
    std::vector<TensorPlan> plan_;
    std::size_t next_ = 0;
    WholeFile file_;
    std::vector<std::uint16_t> halves_;
};

/// Where a value lands when it is stored as bf16.
float rounded_to_bf16(float x);

}  // namespace examples
