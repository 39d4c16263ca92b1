#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace llama {

enum class DType { f32, f16, bf16 };

std::string_view name_of(DType type) noexcept;
std::size_t bytes_of(DType type) noexcept;

/// A tensor inside an open Safetensors file. `data` need not be aligned: the format allows a
/// header of any length.
struct Tensor {
    std::string name;
    DType dtype = DType::f32;
    std::vector<std::int64_t> shape;
    std::size_t numel = 0;
    const std::byte* data = nullptr;
};

/// A safetensors file, mapped read-only: 8 bytes of header length, a JSON header, then the tensors' bytes.
///
/// Files come from strangers, so the constructor believes nothing: every number is checked against the file's
/// size before any pointer is made, and what it rejects throws Error. Once constructed, reading numel
/// elements at any tensor's data is safe, for as long as nobody shortens the file.
class Safetensors {
  public:
    explicit Safetensors(const std::filesystem::path& path);
    ~Safetensors();
    Safetensors(const Safetensors&) = delete;
    Safetensors& operator=(const Safetensors&) = delete;

    const std::string& path() const noexcept { return path_; }
    /// In the order of their bytes in the file.
    std::span<const Tensor> tensors() const noexcept { return tensors_; }
    /// nullptr if there is none of this name.
    const Tensor* find(std::string_view name) const noexcept;
    /// The header's __metadata__: texts by name, empty if there are none.
    const std::map<std::string, std::string, std::less<>>& metadata() const noexcept { return metadata_; }

  private:
    std::string path_;
    void* mapped_ = nullptr;
    std::size_t mapped_bytes_ = 0;
    std::vector<Tensor> tensors_;
    std::unordered_map<std::string_view, std::size_t> by_name_;  // places in tensors_
    std::map<std::string, std::string, std::less<>> metadata_;
};

/// Converts to fp32 (exact for all three types); `out` must hold tensor.numel elements.
void to_float(const Tensor& tensor, std::span<float> out);

}  // namespace llama
