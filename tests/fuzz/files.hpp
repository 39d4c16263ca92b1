// What the fuzz targets of files share: a file in memory, valid files with some bytes replaced, and a check
// that a reader's only errors are sentences.
#pragma once

#include "bytes.hpp"

#include <llama/error.hpp>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

namespace fuzz {

/// A file in memory that has a path.
class File {
  public:
    explicit File(const char* name)
        : number_(memfd_create(name, 0)), path_("/proc/self/fd/" + std::to_string(number_)) {}
    [[nodiscard]] const std::string& path() const { return path_; }
    void write(std::string_view bytes) const {
        check(ftruncate(number_, 0) == 0 &&
                  pwrite(number_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()),
              "the file cannot be written");
    }

  private:
    int number_;
    std::string path_;
};

/// A valid text in which up to four ranges are replaced by the fuzzer's bytes.
inline std::string spliced(std::string text, Bytes& in) {
    for (std::int32_t edits = in.below(5); edits > 0 && !in.empty(); --edits) {
        const auto at = static_cast<std::size_t>(in.raw<std::uint16_t>()) % (text.size() + 1);
        const auto removed = std::min(static_cast<std::size_t>(in.below(24)), text.size() - at);
        std::string put;
        for (std::int32_t count = in.below(24); count > 0; --count) {
            put += static_cast<char>(in.byte());
        }
        text.replace(at, removed, put);
    }
    return text;
}

/// All that is left of the fuzzer's bytes, as a text.
inline std::string rest(Bytes& in) {
    std::string text;
    while (!in.empty()) {
        text += static_cast<char>(in.byte());
    }
    return text;
}

/// Calls read(); an error must be one sentence for the user.
template <class Read>
bool reads(Read&& read) {
    try {
        read();
        return true;
    } catch (const llama::Error& error) {
        check(std::strlen(error.what()) > 0, "an error without a text");
        return false;
    }
}

/// A safetensors file in two parts: its header's JSON, and the data behind it.
struct Parts {
    std::string header, data;

    static Parts of(std::string_view file) {
        std::uint64_t size = 0;
        std::memcpy(&size, file.data(), sizeof size);
        return {std::string(file.substr(8, size)), std::string(file.substr(8 + size))};
    }
    /// Of the file that write(path) makes, in a folder of its own that is removed.
    template <class Write>
    static Parts written_by(Write&& write) {
        std::string folder = (std::filesystem::temp_directory_path() / "kvpolicy-fuzz-XXXXXX").string();
        check(mkdtemp(folder.data()) != nullptr, "no folder for the test");
        const std::string path = folder + "/valid";
        write(path);
        std::ifstream in(path, std::ios::binary);
        const std::string bytes(std::istreambuf_iterator<char>(in), {});
        std::filesystem::remove_all(folder);
        check(bytes.size() > 8, "the valid file cannot be read");
        return of(bytes);
    }
    [[nodiscard]] std::string file() const {
        const std::uint64_t size = header.size();
        std::string bytes(8, '\0');
        std::memcpy(bytes.data(), &size, sizeof size);
        return bytes + header + data;
    }
};

/// A valid file with edits of its header, whose length stays right, and bytes of its data replaced.
inline std::string spliced_tensors(const Parts& valid, Bytes& in) {
    Parts parts = valid;
    for (std::int32_t edits = in.below(4); edits > 0 && !parts.data.empty(); --edits) {
        const auto at = static_cast<std::size_t>(in.raw<std::uint16_t>()) % parts.data.size();
        const auto bytes = in.raw<std::uint32_t>();
        std::memcpy(parts.data.data() + at, &bytes, std::min(sizeof bytes, parts.data.size() - at));
    }
    parts.header = spliced(std::move(parts.header), in);
    return parts.file();
}

}  // namespace fuzz
