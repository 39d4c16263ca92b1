// Token sequences to run a frozen model on: cut from any text, with retrieval queries woven in, or read from
// a file.
#pragma once

#include <llama/tokenizer.hpp>

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace train {

/// A byte sequence with synthetic retrieval queries: lines "@AB:1234" (two letters, four digits) at random
/// places of the first 60%, and the same lines again, in random order, in the last quarter. tools/train_tiny
/// trains the byte model on such sequences; its digits can only be known by looking the key up.
struct RecallSequence {
    std::string bytes;
    std::vector<std::int32_t> answers;                         // first digits of the repeated lines, in order
    std::vector<std::pair<std::int32_t, std::int32_t>> lines;  // [begin, end)
};

inline constexpr std::int32_t recall_line_bytes = 9;  // "@AB:1234\n"

/// Weaves `pairs` retrieval queries into text[start ...], `length` bytes in all; the text must hold length -
/// 2 * pairs * 9 bytes from start on. The same seed, stream and arguments give the same bytes. Throws
/// llama::Error where the lines have no space.
RecallSequence weave_recall(const std::string& text, std::size_t start, std::int32_t length,
                            std::int32_t pairs, std::uint64_t seed, std::uint64_t stream);

/// Sequences of `length` tokens from a text file.
class TrainingText {
  public:
    /// Every sequence carries `pairs` retrieval queries. For models that read bytes (a vocabulary of 256),
    /// other bytes than printable ASCII and newlines are left out; for others the retrieval queries are woven
    /// in before the text is cut into tokens, and tokens that are too many are taken off the front. Throws
    /// llama::Error for a file that is missing, compressed or too short for one sequence.
    TrainingText(const std::filesystem::path& file, const llama::Tokenizer& tokenizer, std::int32_t length,
                 std::int32_t pairs, std::uint64_t seed);

    std::vector<std::int32_t> sequence(std::uint64_t index) const;

  private:
    std::vector<std::int32_t> woven_tokens(std::size_t start, std::size_t window, std::uint64_t index) const;

    std::filesystem::path file_;
    const llama::Tokenizer& tokenizer_;
    std::string text_;
    std::int32_t length_, pairs_;
    std::uint64_t seed_;
};

/// Sequences of token ids, one a line, with spaces between the ids: what any tokenizer can write. Throws
/// llama::Error for a file that is missing or empty, ids that are no numbers from 0 to vocab - 1 (named by
/// line), and lines of different lengths.
std::vector<std::vector<std::int32_t>> read_tokens(const std::filesystem::path& file, std::int32_t vocab);
/// The file has its name once it is whole.
void write_tokens(const std::filesystem::path& file, std::span<const std::vector<std::int32_t>> sequences);

}  // namespace train
