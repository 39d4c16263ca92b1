// Reads the committed test vectors: named arrays in a "kvpv1" file, whose layout tests/reference/vectors.py
// documents. Standard library only, no exceptions: a file that cannot be read gives a sentence; load()
// prints it and aborts.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvpolicy_test {

static_assert(std::endian::native == std::endian::little,
              "kvpv1 files are read on little-endian machines only");

/// One array of a file: its shape, outermost dimension first, and its elements in row-major order.
template <class T>
struct vector_array {
    std::vector<std::int64_t> shape;
    std::vector<T> values;

    [[nodiscard]] const T* data() const { return values.data(); }
    [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(values.size()); }
    /// The elements under one index of the outermost dimension.
    [[nodiscard]] const T* row(std::int64_t index) const {
        std::int64_t inner = 1;
        for (std::size_t axis = 1; axis < shape.size(); ++axis) {
            inner *= shape[axis];
        }
        return values.data() + index * inner;
    }
    const T& operator[](std::int64_t index) const { return values[static_cast<std::size_t>(index)]; }
};

/// All arrays of one file.
class vectors {
  public:
    /// The arrays in `bytes`; false and one sentence in `error` for anything malformed.
    static bool parse(const std::string& bytes, vectors& into, std::string& error) {
        vectors result;
        reader from{bytes.data(), bytes.size()};
        if (!result.parse_all(from, error)) {
            return false;
        }
        into = std::move(result);
        return true;
    }

    /// The arrays of the file at `path`; false and one sentence in `error` where it cannot be read.
    static bool read(const std::string& path, vectors& into, std::string& error) {
        std::FILE* file = std::fopen(path.c_str(), "rb");
        if (file == nullptr) {
            error = path + ": cannot be opened";
            return false;
        }
        std::string bytes;
        char block[65536];
        std::size_t got = 0;
        while ((got = std::fread(block, 1, sizeof block, file)) > 0) {
            bytes.append(block, got);
        }
        const bool failed = std::ferror(file) != 0;
        std::fclose(file);
        if (failed) {
            error = path + ": cannot be read";
            return false;
        }
        if (!parse(bytes, into, error)) {
            error = path + ": " + error;
            return false;
        }
        return true;
    }

    /// The arrays of tests/vectors/<name>, or the end of the program.
    static vectors load(const std::string& name) {
        vectors result;
        std::string error;
        if (!read(folder() + "/" + name, result, error)) {
            stop(error);
        }
        return result;
    }

    /// Where the committed files lie: KVPOLICY_TEST_VECTORS where the build defines it, else beside this
    /// header's folder.
    static std::string folder() {
#ifdef KVPOLICY_TEST_VECTORS
        return KVPOLICY_TEST_VECTORS;
#else
        const std::string here = __FILE__;
        const std::size_t slash = here.find_last_of("/\\");
        return (slash == std::string::npos ? std::string(".") : here.substr(0, slash)) + "/../vectors";
#endif
    }

    [[nodiscard]] bool has(const std::string& name) const {
        return int32_.count(name) + float32_.count(name) + float64_.count(name) > 0;
    }

    /// The array of this name and element type (std::int32_t, float, double), or the end of the program.
    template <class T>
    [[nodiscard]] const vector_array<T>& get(const std::string& name) const {
        const auto& all = arrays<T>(*this);
        const auto found = all.find(name);
        if (found == all.end()) {
            stop("no array \"" + name + "\" of this element type");
        }
        return found->second;
    }

  private:
    template <class T>
    using named = std::map<std::string, vector_array<T>>;

    struct reader {
        const char* data;
        std::size_t left;

        bool take(void* into, std::size_t bytes) {
            if (bytes > left) {
                return false;
            }
            if (bytes > 0) {
                std::memcpy(into, data, bytes);
            }
            data += bytes;
            left -= bytes;
            return true;
        }
    };

    template <class T, class Self>
    static auto& arrays(Self& self) {
        static_assert(
            std::is_same_v<T, std::int32_t> || std::is_same_v<T, float> || std::is_same_v<T, double>,
            "a kvpv1 file holds std::int32_t, float and double");
        if constexpr (std::is_same_v<T, std::int32_t>) {
            return self.int32_;
        } else if constexpr (std::is_same_v<T, float>) {
            return self.float32_;
        } else {
            return self.float64_;
        }
    }

    bool parse_all(reader& from, std::string& error) {
        const char magic[8] = {'k', 'v', 'p', 'v', '1', '\0', '\0', '\0'};
        char found[8];
        if (!from.take(found, sizeof found) || std::memcmp(found, magic, sizeof magic) != 0) {
            error = "not a kvpv1 file";
            return false;
        }
        std::uint32_t count = 0;
        if (!from.take(&count, sizeof count)) {
            return truncated(error);
        }
        for (std::uint32_t i = 0; i < count; ++i) {
            if (!parse_one(from, error)) {
                return false;
            }
        }
        if (from.left != 0) {
            error = "bytes follow the last array";
            return false;
        }
        return true;
    }

    bool parse_one(reader& from, std::string& error) {
        std::uint32_t length = 0;
        if (!from.take(&length, sizeof length)) {
            return truncated(error);
        }
        if (length == 0 || length > 255) {
            error = "a name has " + std::to_string(length) + " bytes";
            return false;
        }
        std::string name(length, '\0');
        if (!from.take(name.data(), length)) {
            return truncated(error);
        }
        std::uint32_t type = 0;
        std::uint32_t rank = 0;
        if (!from.take(&type, sizeof type) || !from.take(&rank, sizeof rank)) {
            return truncated(error);
        }
        if (type > 2 || rank > 8 || has(name)) {
            error = "bad header of array \"" + name + "\"";
            return false;
        }
        std::vector<std::int64_t> shape(rank);
        for (std::int64_t& extent : shape) {
            if (!from.take(&extent, sizeof extent)) {
                return truncated(error);
            }
        }
        switch (type) {
            case 0:
                return parse_elements<std::int32_t>(from, name, std::move(shape), error);
            case 1:
                return parse_elements<float>(from, name, std::move(shape), error);
            default:
                return parse_elements<double>(from, name, std::move(shape), error);
        }
    }

    template <class T>
    bool parse_elements(reader& from, const std::string& name, std::vector<std::int64_t>&& shape,
                        std::string& error) {
        bool empty = false;
        for (const std::int64_t extent : shape) {
            if (extent < 0) {
                error = "array \"" + name + "\" has a negative dimension";
                return false;
            }
            empty = empty || extent == 0;
        }
        std::uint64_t count = empty ? 0 : 1;
        if (!empty) {
            // No product overflows: each factor is checked against what the rest of the file could hold.
            const std::uint64_t most = from.left / sizeof(T);
            for (const std::int64_t extent : shape) {
                if (static_cast<std::uint64_t>(extent) > most / count) {
                    return truncated(error);
                }
                count *= static_cast<std::uint64_t>(extent);
            }
        }
        vector_array<T> array;
        array.shape = std::move(shape);
        array.values.resize(static_cast<std::size_t>(count));
        if (!from.take(array.values.data(), static_cast<std::size_t>(count) * sizeof(T))) {
            return truncated(error);
        }
        arrays<T>(*this).emplace(name, std::move(array));
        return true;
    }

    static bool truncated(std::string& error) {
        error = "the file ends too early";
        return false;
    }

    [[noreturn]] static void stop(const std::string& message) {
        std::fprintf(stderr, "test vectors: %s\n", message.c_str());
        std::abort();
    }

    named<std::int32_t> int32_;
    named<float> float32_;
    named<double> float64_;
};

}  // namespace kvpolicy_test
