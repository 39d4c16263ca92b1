#include "sequences.hpp"

#include <kvpolicy/core/random.hpp>

#include "support/whole_file.hpp"

#include <llama/error.hpp>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <numeric>

namespace train {
namespace {

// Streams of random numbers, beside the caller's own: one purpose each.
constexpr std::uint64_t place_stream = 0x7465787400000000u;

/// Numbers one after another, by their place.
class Draw {
  public:
    Draw(std::uint64_t seed, std::uint64_t stream) : seed_(seed), stream_(stream) {}
    std::int32_t below(std::int32_t count) {
        return static_cast<std::int32_t>(
            kvpolicy::random_below(static_cast<std::uint32_t>(count), seed_, stream_, index_++));
    }
    /// The first `count` of a shuffled 0 ... size - 1.
    std::vector<std::int32_t> sample(std::int32_t size, std::int32_t count) {
        std::vector<std::int32_t> all(static_cast<std::size_t>(size));
        std::iota(all.begin(), all.end(), 0);
        for (std::int32_t i = 0; i < count; ++i) {
            std::swap(all[static_cast<std::size_t>(i)],
                      all[static_cast<std::size_t>(std::int64_t{i} + below(size - i))]);
        }
        all.resize(static_cast<std::size_t>(count));
        return all;
    }

  private:
    std::uint64_t seed_, stream_, index_ = 0;
};

std::string read_text(const std::filesystem::path& file) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) {
        llama::fail(
            "{}: cannot be opened; any text file will do, and the byte model's own training text comes from\n"
            "  tools/make_corpus && tar -xJf build/corpus/corpus.tar.xz -C build/corpus train.txt",
            file.string());
    }
    std::string text{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
    if (text.starts_with("\xFD"
                         "7zXZ") ||
        text.starts_with("\x1F\x8B")) {
        llama::fail("{}: is compressed; unpack it, as in\n  tar -xJf {} -C build/corpus train.txt",
                    file.string(), file.string());
    }
    return text;
}

}  // namespace

RecallSequence weave_recall(const std::string& text, std::size_t start, std::int32_t length,
                            std::int32_t pairs, std::uint64_t seed, std::uint64_t stream) {
    const std::int32_t line = recall_line_bytes, body = length - 2 * pairs * line;
    const std::int32_t early_end = length * 3 / 5 - pairs * line;
    const std::int32_t late_begin = length * 3 / 4 - pairs * line;
    if (pairs < 0 || pairs > 26 * 26 || early_end < 0 || late_begin > body) {
        llama::fail("pairs: {} is not allowed; {} bytes have space for 0 to {} retrieval queries", pairs,
                    length, std::min(26 * 26, length / (4 * line)));
    }
    if (start + static_cast<std::size_t>(body) > text.size()) {
        llama::fail("text: {} bytes from {} on are too few for a sequence; {} are needed",
                    text.size() - std::min(start, text.size()), start, body);
    }
    Draw draw(seed, stream);
    std::vector<std::int32_t> places;
    const auto choose = [&](std::int32_t low, std::int32_t high) {
        std::vector<std::int32_t> some;
        for (std::int32_t i = 0; i < pairs; ++i) {
            const std::int32_t place = low + draw.below(high - low + 1);
            // Move on to the start of a line, where there is one.
            const std::size_t from = start + static_cast<std::size_t>(place);
            const std::size_t newline = text.find('\n', from == 0 ? 0 : from - 1);
            const std::size_t after = newline + 1 - start;
            const bool found = newline != std::string::npos && after <= static_cast<std::size_t>(high);
            some.push_back(found ? static_cast<std::int32_t>(after) : place);
        }
        std::ranges::sort(some);
        places.insert(places.end(), some.begin(), some.end());
    };
    choose(0, early_end);
    choose(late_begin, body);
    std::vector<std::string> lines;
    for (const std::int32_t key : draw.sample(26 * 26, pairs)) {
        lines.push_back(fmt::format("@{}{}:{:04}\n", static_cast<char>('A' + key / 26),
                                    static_cast<char>('A' + key % 26), draw.below(10000)));
    }
    const std::vector<std::int32_t> again = draw.sample(pairs, pairs);

    RecallSequence result;
    std::int32_t used = 0;
    const auto copy_to = [&](std::int32_t place) {
        result.bytes.append(text, start + static_cast<std::size_t>(used),
                            static_cast<std::size_t>(place - used));
        used = place;
    };
    for (std::size_t i = 0; i < places.size(); ++i) {
        copy_to(places[i]);
        const auto begin = static_cast<std::int32_t>(result.bytes.size());
        if (i >= lines.size()) {
            result.answers.push_back(begin + 4);
        }
        result.lines.emplace_back(begin, begin + line);
        result.bytes +=
            i < lines.size() ? lines[i] : lines[static_cast<std::size_t>(again[i - lines.size()])];
    }
    copy_to(body);
    return result;
}

TrainingText::TrainingText(const std::filesystem::path& file, const llama::Tokenizer& tokenizer,
                           std::int32_t length, std::int32_t pairs, std::uint64_t seed)
    : file_(file),
      tokenizer_(tokenizer),
      text_(read_text(file)),
      length_(length),
      pairs_(pairs),
      seed_(seed) {
    if (tokenizer.size() == 256) {
        std::erase_if(text_, [](char c) { return c != '\n' && (c < ' ' || c > '~'); });
    }
    if (text_.size() < static_cast<std::size_t>(length)) {
        llama::fail("{}: {} bytes of text are too short; a sequence takes {} tokens", file.string(),
                    text_.size(), length);
    }
}

std::vector<std::int32_t> TrainingText::sequence(std::uint64_t index) const {
    const bool bytes = tokenizer_.size() == 256;
    const auto length = static_cast<std::size_t>(length_);
    // A token of a larger vocabulary is some three bytes of English; twice that is nearly always enough.
    const std::size_t window = std::min(text_.size(), bytes ? length : 6 * length);
    const double where = kvpolicy::random_unit(seed_, place_stream, index);
    auto start = static_cast<std::size_t>(where * static_cast<double>(text_.size() - window + 1));
    const std::size_t newline = text_.find('\n', start);
    if (newline != std::string::npos && newline + 1 + window <= text_.size()) {
        start = newline + 1;
    }
    if (bytes) {
        return tokenizer_.encode(weave_recall(text_, start, length_, pairs_, seed_, index).bytes);
    }
    if (pairs_ > 0) {
        return woven_tokens(start, window, index);
    }
    std::vector<std::int32_t> tokens = tokenizer_.encode(std::string_view(text_).substr(start, window));
    if (tokens.size() < length) {
        llama::fail("{}: {} bytes from {} on are {} tokens; a sequence takes {}", file_.string(), window,
                    start, tokens.size(), length);
    }
    tokens.resize(length);
    return tokens;
}

/// Bytes with retrieval queries, as few as give enough tokens, in steps of a sixteenth. What is asked for
/// stands at the end, so tokens that are too many are taken off the front.
std::vector<std::int32_t> TrainingText::woven_tokens(std::size_t start, std::size_t window,
                                                     std::uint64_t index) const {
    const auto length = static_cast<std::size_t>(length_),
               least = static_cast<std::size_t>(std::int64_t{4} * recall_line_bytes * pairs_);
    const auto woven = [&](std::size_t bytes) {
        return tokenizer_.encode(
            weave_recall(text_, start, static_cast<std::int32_t>(bytes), pairs_, seed_, index).bytes);
    };
    std::size_t size = std::clamp(2 * length, std::min(least, window), window);
    std::vector<std::int32_t> tokens = woven(size);
    while (tokens.size() < length && size + size / 16 <= window) {
        size += size / 16;
        tokens = woven(size);
    }
    if (tokens.size() < length) {
        llama::fail("{}: {} bytes from {} on are {} tokens; a sequence takes {}", file_.string(), size, start,
                    tokens.size(), length);
    }
    for (size -= size / 16; size >= least; size -= size / 16) {
        std::vector<std::int32_t> fewer = woven(size);
        if (fewer.size() < length) {
            break;
        }
        tokens = std::move(fewer);
    }
    tokens.erase(tokens.begin(), tokens.end() - static_cast<std::ptrdiff_t>(length));
    return tokens;
}

std::vector<std::vector<std::int32_t>> read_tokens(const std::filesystem::path& file, std::int32_t vocab) {
    std::ifstream stream(file);
    if (!stream) {
        llama::fail("{}: cannot be opened; a file of token ids is needed, one sequence a line",
                    file.string());
    }
    std::vector<std::vector<std::int32_t>> sequences;
    for (std::string line; std::getline(stream, line);) {
        std::vector<std::int32_t>& tokens = sequences.emplace_back();
        const char* at = line.data();
        const char* const end = at + line.size();
        while (at != end) {
            std::int32_t id = -1;
            const auto [after, error] = std::from_chars(at, end, id);
            if (error != std::errc{} || id < 0 || id >= vocab || (after != end && *after != ' ')) {
                llama::fail(
                    "{}: line {} has {} as number {}; ids must be 0 to {}, with single spaces between",
                    file.string(), sequences.size(),
                    llama::clipped(std::string_view(at, static_cast<std::size_t>(end - at)).substr(0, 16)),
                    tokens.size() + 1, vocab - 1);
            }
            tokens.push_back(id);
            at = after == end ? end : after + 1;
        }
        if (tokens.size() < 2 || tokens.size() != sequences.front().size()) {
            llama::fail(
                "{}: line {} has {} ids; every line must have as many as the first, {}, and 2 or more",
                file.string(), sequences.size(), tokens.size(), sequences.front().size());
        }
    }
    if (sequences.empty()) {
        llama::fail("{}: is empty; a line of token ids is a sequence", file.string());
    }
    return sequences;
}

void write_tokens(const std::filesystem::path& file, std::span<const std::vector<std::int32_t>> sequences) {
    std::string text;
    for (const std::vector<std::int32_t>& tokens : sequences) {
        fmt::format_to(std::back_inserter(text), "{}\n", fmt::join(tokens, " "));
    }
    examples::write_whole(file, text);
}

}  // namespace train
