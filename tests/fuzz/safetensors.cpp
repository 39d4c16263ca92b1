// Files that anyone may have written: an error with a sentence, or tensors that can be read to the last byte.
#include "bytes.hpp"

#include <llama/error.hpp>
#include <llama/safetensors.hpp>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <vector>

namespace {

void open(const std::string& path, const std::vector<std::uint8_t>& bytes, int file) {
    fuzz::check(ftruncate(file, 0) == 0 &&
                    pwrite(file, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()),
                "the file cannot be written");
    try {
        const llama::Safetensors tensors(path);
        float sum = 0.0f;
        for (const llama::Tensor& one : tensors.tensors()) {
            fuzz::check(tensors.find(one.name) == &one, "a tensor is not found by its name");
            fuzz::check(one.numel <= bytes.size(), "more numbers than bytes");
            std::vector<float> values(one.numel);
            llama::to_float(one, values);
            for (const float x : values) {
                sum += x;
            }
        }
        volatile float keep = sum;
        static_cast<void>(keep);
    } catch (const llama::Error& error) {
        fuzz::check(std::strlen(error.what()) > 0, "an error without a text");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const int file = memfd_create("fuzz", 0);
    static const std::string path = "/proc/self/fd/" + std::to_string(file);
    std::vector<std::uint8_t> bytes(data, data + size);
    open(path, bytes, file);
    // The same with a header length that is right for the first '}' that closes the text, so that more
    // inputs get past it.
    std::int32_t depth = 0;
    for (std::size_t i = 8; i < bytes.size(); ++i) {
        depth += bytes[i] == '{' ? 1 : bytes[i] == '}' ? -1 : 0;
        if (depth == 0 && bytes[i] == '}') {
            const std::uint64_t header = i - 7;
            std::memcpy(bytes.data(), &header, sizeof header);
            open(path, bytes, file);
            break;
        }
    }
    return 0;
}
