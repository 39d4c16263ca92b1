#include "safetensors_writer.hpp"

#include <kvpolicy/core/types.hpp>

#include <llama/error.hpp>
#include <nlohmann/json.hpp>

#include <utility>

namespace examples {

std::size_t TensorPlan::numel() const {
    std::size_t count = 1;
    for (const std::int64_t n : shape) {
        count *= static_cast<std::size_t>(n);
    }
    return count;
}

float rounded_to_bf16(float x) { return static_cast<float>(kvpolicy::bf16(x)); }

SafetensorsWriter::SafetensorsWriter(std::filesystem::path path, std::vector<TensorPlan> plan,
                                     const std::map<std::string, std::string>& metadata)
    : path_(std::move(path)), plan_(std::move(plan)), file_(path_) {
    nlohmann::json header = nlohmann::json::object();
    if (!metadata.empty()) {
        header["__metadata__"] = metadata;
    }
    std::size_t at = 0;
    for (const TensorPlan& tensor : plan_) {
        if (tensor.dtype == llama::DType::f16) {
            llama::fail("{}: {} cannot be written as F16; F32 and BF16 can", path_.string(), tensor.name);
        }
        const std::size_t end = at + tensor.numel() * llama::bytes_of(tensor.dtype);
        header[tensor.name] = {
            {"dtype", llama::name_of(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {at, end}}};
        at = end;
    }
    std::string text = header.dump();
    text.append((8 - text.size() % 8) % 8, ' ');  // so that the data is aligned
    const std::uint64_t bytes = text.size();
    file_.write(&bytes, 8);
    file_.write(text.data(), text.size());
}

void SafetensorsWriter::write(std::span<const float> values) {
    if (next_ == plan_.size() || values.size() != plan_[next_].numel()) {
        llama::fail("{}: {} numbers do not fit tensor {} of {}", path_.string(), values.size(), next_,
                    plan_.size());
    }
    if (plan_[next_].dtype == llama::DType::f32) {
        file_.write(values.data(), values.size_bytes());
    } else {
        halves_.resize(values.size());
        for (std::size_t i = 0; i < values.size(); ++i) {
            halves_[i] = kvpolicy::bf16(values[i]).bits;
        }
        file_.write(halves_.data(), halves_.size() * 2);
    }
    ++next_;
}

void SafetensorsWriter::finish() {
    if (next_ != plan_.size()) {
        llama::fail("{}: only {} of {} tensors were written", path_.string(), next_, plan_.size());
    }
    file_.commit();
}

}  // namespace examples
