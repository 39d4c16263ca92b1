// Scores of trained scorers: the files of examples/apps/dump_scores.cpp, as far as benchmarks read them.
#pragma once

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace bench {

/// One text of texts and numbers: nvcc does not take all of fmt's checked formats.
template <class... Parts>
std::string text_of(const Parts&... parts) {
    std::ostringstream out;
    static_cast<void>((out << ... << parts));
    return out.str();
}
/// "[4, 2]"
inline std::string shape_text(const std::vector<std::int64_t>& shape) {
    std::string text = "[";
    for (const std::int64_t n : shape) {
        text += text_of(text.size() == 1 ? "" : ", ", n);
    }
    return text + "]";
}

/// Scores of the first heads of a file, and the numbers of these heads' policy.
struct Scores {
    std::int32_t heads = 0;
    std::int64_t tokens = 0;
    std::vector<float> scores;      ///< [heads, tokens]
    std::vector<float> log_gamma;   ///< [heads]
    std::vector<float> thresholds;  ///< [heads]; empty where the file has none
};

/// A safetensors file of fp32 tensors: 8 bytes of header length, a JSON header, numbers. Benchmarks need no
/// JSON library for it: a tensor's entry is looked up by its quoted name, which no text of the metadata can
/// spell, since quotes in a text are escaped.
class ScoreFile {
  public:
    explicit ScoreFile(const std::string& path) : path_(path) {
        std::ifstream file(path, std::ios::binary);
        if (!file) {
            fail("is not there; benchmarks/data/README.md has the command that makes it");
        }
        bytes_.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
        std::uint64_t size = 0;
        if (bytes_.size() >= sizeof size) {
            std::memcpy(&size, bytes_.data(), sizeof size);
        }
        if (bytes_.size() < sizeof size || size > bytes_.size() - sizeof size) {
            fail("is no safetensors file");
        }
        begin_ = sizeof size + static_cast<std::size_t>(size);
        header_ = std::string_view(bytes_).substr(sizeof size, static_cast<std::size_t>(size));
    }

    /// The numbers and shape of a tensor; no numbers where the file has none of this name.
    [[nodiscard]] std::vector<float> tensor(std::string_view name, std::vector<std::int64_t>& shape) const {
        const std::string key = text_of('"', name, "\":{");
        const std::size_t at = header_.find(key);
        if (at == std::string_view::npos) {
            return {};
        }
        const std::string_view entry = header_.substr(at, header_.find('}', at) - at);
        shape = numbers(entry, "shape");
        const std::vector<std::int64_t> offsets = numbers(entry, "data_offsets");
        std::int64_t count = 1;
        for (const std::int64_t n : shape) {
            count *= n > 0 && n <= (std::int64_t{1} << 32) / count ? n : 0;
            if (count == 0) {
                break;
            }
        }
        const auto room = static_cast<std::int64_t>(bytes_.size() - begin_);
        if (entry.find("\"F32\"") == std::string_view::npos || count == 0 || offsets.size() != 2 ||
            offsets[0] < 0 || offsets[1] > room || offsets[1] - offsets[0] != count * 4) {
            fail(text_of("tensor ", name, " is not allowed; it must be fp32 and inside the file"));
        }
        std::vector<float> values(static_cast<std::size_t>(count));
        std::memcpy(values.data(), bytes_.data() + begin_ + offsets[0], values.size() * sizeof(float));
        for (const float x : values) {
            if (!std::isfinite(x)) {
                fail(text_of("tensor ", name, " holds ", x, "; numbers must be finite"));
            }
        }
        return values;
    }

    [[noreturn]] void fail(std::string_view what) const {
        throw std::runtime_error(text_of(path_, ": ", what));
    }

  private:
    /// [1, 2] of "key":[1,2]; empty where there is none.
    [[nodiscard]] static std::vector<std::int64_t> numbers(std::string_view entry, std::string_view key) {
        std::vector<std::int64_t> all;
        std::size_t at = entry.find(text_of('"', key, "\":["));
        for (at = entry.find('[', at); at < entry.size() && entry[at] != ']';) {
            ++at;
            std::int64_t value = 0;
            const auto [end, error] = std::from_chars(entry.data() + at, entry.data() + entry.size(), value);
            if (error != std::errc{}) {
                return {};
            }
            all.push_back(value);
            at = static_cast<std::size_t>(end - entry.data());
        }
        return all;
    }

    std::string path_, bytes_;
    std::string_view header_;
    std::size_t begin_ = 0;
};

/// The first `heads` heads and `tokens` tokens of a file. Throws std::runtime_error, with one sentence, for a
/// file that is missing, is no such file, has fewer, or has no thresholds for a policy that is `gated`.
inline Scores read_scores(const std::string& path, std::int32_t heads, std::int64_t tokens,
                          bool gated = false) {
    const ScoreFile file(path);
    std::vector<std::int64_t> shape, by_head;
    const std::vector<float> all = file.tensor("scores", shape);
    if (shape.size() != 3 || shape[0] * shape[1] < heads || shape[2] < tokens) {
        file.fail(text_of("scores ", shape_text(shape),
                          " are not allowed; they must be [layers, KV heads, tokens], of ", heads,
                          " heads and ", tokens, " tokens or more"));
    }
    Scores out{heads, tokens, {}, {}, {}};
    for (std::int64_t h = 0; h < heads; ++h) {
        const auto first = all.begin() + h * shape[2];
        out.scores.insert(out.scores.end(), first, first + tokens);
    }
    const auto one_per_head = [&](std::string_view name) {
        std::vector<float> values = file.tensor(name, by_head);
        if (!values.empty()) {
            if (by_head != std::vector<std::int64_t>{shape[0], shape[1]}) {
                file.fail(text_of(name, " ", shape_text(by_head), " is not allowed; it must be ",
                                  shape_text({shape[0], shape[1]})));
            }
            values.resize(static_cast<std::size_t>(heads));
        }
        return values;
    };
    out.log_gamma = one_per_head("log_gamma");
    if (out.log_gamma.empty()) {
        file.fail("has no tensor log_gamma");
    }
    out.thresholds = one_per_head("thresholds");
    if (gated && out.thresholds.empty()) {
        file.fail("has no tensor thresholds, which a gate needs");
    }
    return out;
}

}  // namespace bench
