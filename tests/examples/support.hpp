#pragma once
#include <doctest/doctest.h>
#include <llama/error.hpp>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace test {

/// A folder that goes away with the test.
class Folder {
  public:
    Folder() {
        std::string name = (std::filesystem::temp_directory_path() / "kvpolicy-XXXXXX").string();
        if (!mkdtemp(name.data())) throw std::runtime_error("cannot make a folder for the test");
        path_ = name;
    }
    ~Folder() { std::filesystem::remove_all(path_); }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;

    std::filesystem::path write(const std::string& name, std::string_view bytes) const {
        std::ofstream(path_ / name, std::ios::binary) << bytes;
        return path_ / name;
    }
    const std::filesystem::path& path() const { return path_; }

  private:
    std::filesystem::path path_;
};

inline nlohmann::json read_json(const std::filesystem::path& file) {
    std::ifstream in(file);
    REQUIRE_MESSAGE(in, file.string());
    return nlohmann::json::parse(in);
}

/// The message of the llama::Error that f throws; "" if it throws none.
template <class F>
std::string message_of(F&& f) {
    try {
        f();
    } catch (const llama::Error& error) {
        return error.what();
    }
    return "";
}

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != text.npos;
}

/// A safetensors file: header length, header, data.
inline std::string safetensors_bytes(const std::string& header, const std::string& data) {
    std::string bytes(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
    return bytes + header + data;
}

}  // namespace test
