#include "held_out.hpp"

#include <llama/bounded_json.hpp>
#include <llama/error.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string>
#include <system_error>

namespace examples {
namespace {

/// Refuses numbers that are no 32-bit integers: the JSON library would convert them to some.
void check_integers(const nlohmann::json& value, const std::filesystem::path& file) {
    if (value.is_structured()) {
        for (const auto& one : value) {
            check_integers(one, file);
        }
    } else if (value.is_number() &&
               !(value.is_number_unsigned() && value.get<std::uint64_t>() <= 0x7fffffffu)) {
        llama::fail("{}: has a number {}; integers from 0 to 2^31 - 1 are needed", file.string(),
                    llama::clipped(value.dump()));
    }
}

}  // namespace

HeldOut read_held_out(const std::filesystem::path& folder) {
    const std::filesystem::path bin = folder / "eval.bin", json_file = folder / "eval.json";
    const std::string name = json_file.string();
    std::ifstream json_stream(json_file);
    if (!json_stream) {
        llama::fail("{}: cannot be opened; a folder with eval.bin and eval.json is needed",
                    json_file.string());
    }
    const auto json =
        nlohmann::json::parse(json_stream, llama::depth_limit(name, 16), /*allow_exceptions=*/false);
    if (json.is_discarded()) {
        llama::fail("{}: is not JSON", json_file.string());
    }

    HeldOut data;
    std::size_t sequences = 0;
    try {
        for (const char* key : {"sequences", "length", "digits", "answers", "lines"}) {
            check_integers(json.at(key), json_file);
        }
        sequences = json.at("sequences").get<std::size_t>();
        data.length = json.at("length").get<std::int32_t>();
        data.digits = json.at("digits").get<std::int32_t>();
        data.answers = json.at("answers").get<std::vector<std::vector<std::int32_t>>>();
        data.lines = json.at("lines").get<std::vector<std::vector<std::pair<std::int32_t, std::int32_t>>>>();
    } catch (const nlohmann::json::exception& error) {
        llama::fail("{}: {}", json_file.string(), error.what());
    }
    constexpr std::int32_t max_length = 1 << 30;
    if (data.answers.size() != sequences || data.lines.size() != sequences || data.length < 2 ||
        data.length > max_length || data.digits < 1 || data.digits > data.length) {
        llama::fail("{}: has answers of {} digits for {} and lines for {} of {} sequences of {} bytes",
                    json_file.string(), data.digits, data.answers.size(), data.lines.size(), sequences,
                    data.length);
    }
    for (const auto& answers : data.answers) {
        for (const std::int32_t at : answers) {
            if (at < 1 || at > data.length - data.digits) {
                llama::fail("{}: has an answer at {}, which is not inside a sequence", json_file.string(),
                            at);
            }
        }
    }
    for (const auto& lines : data.lines) {
        for (const auto& [begin, end] : lines) {
            if (begin < 0 || begin > end || end > data.length) {
                llama::fail("{}: has a line from {} to {}, which is not inside a sequence",
                            json_file.string(), begin, end);
            }
        }
    }

    std::ifstream stream(bin, std::ios::binary);
    std::error_code error;
    const std::uintmax_t there = std::filesystem::file_size(bin, error);
    if (!stream || error || there / static_cast<std::uintmax_t>(data.length) < sequences) {
        llama::fail("{}: has {} bytes; {} sequences of {} bytes are needed", bin.string(), error ? 0 : there,
                    sequences, data.length);
    }
    std::vector<char> bytes(static_cast<std::size_t>(data.length));
    for (std::size_t i = 0; i < sequences; ++i) {
        if (!stream.read(bytes.data(), data.length)) {
            llama::fail("{}: ends inside sequence {}; {} sequences of {} bytes are needed", bin.string(), i,
                        sequences, data.length);
        }
        data.tokens.emplace_back(bytes.size());
        std::transform(bytes.begin(), bytes.end(), data.tokens.back().begin(),
                       [](char c) { return static_cast<std::int32_t>(static_cast<unsigned char>(c)); });
    }
    return data;
}

HeldOut tokenize(const HeldOut& bytes, const llama::Tokenizer& tokenizer, std::size_t joined,
                 std::int32_t least) {
    HeldOut data;
    data.digits = bytes.digits;
    for (std::size_t first = 0; first + joined <= bytes.tokens.size(); first += joined) {
        std::string text;
        std::vector<std::int32_t> digits;  // first digits of answers, in bytes
        std::vector<bool> in_line;
        for (std::size_t i = first; i < first + joined; ++i) {
            const auto at = static_cast<std::int32_t>(text.size());
            for (const std::int32_t byte : bytes.tokens[i]) {
                text += static_cast<char>(byte);
            }
            in_line.resize(text.size(), false);
            for (const auto& [begin, end] : bytes.lines[i]) {
                std::fill(in_line.begin() + at + begin, in_line.begin() + at + end, true);
            }
            for (const std::int32_t answer : bytes.answers[i]) {
                digits.push_back(at + answer);
            }
        }
        const std::vector<std::int32_t> tokens = tokenizer.encode(text);
        std::vector<std::int32_t> sizes, token_at(text.size(), -1);
        std::vector<std::pair<std::int32_t, std::int32_t>> lines;
        std::size_t at = 0;
        for (std::size_t t = 0; t < tokens.size(); ++t) {
            const std::size_t size = tokenizer.piece(tokens[t]).size();
            if (at + size > text.size()) {
                llama::fail("tokenize: the tokens are longer than the text");
            }
            sizes.push_back(static_cast<std::int32_t>(size));
            if (size == 1) {
                token_at[at] = static_cast<std::int32_t>(t);
            }
            if (std::find(in_line.begin() + static_cast<std::ptrdiff_t>(at),
                          in_line.begin() + static_cast<std::ptrdiff_t>(at + size),
                          true) != in_line.begin() + static_cast<std::ptrdiff_t>(at + size)) {
                lines.emplace_back(static_cast<std::int32_t>(t), static_cast<std::int32_t>(t) + 1);
            }
            at += size;
        }
        std::vector<std::int32_t> answers;
        for (const std::int32_t digit : digits) {
            const std::int32_t t = token_at[static_cast<std::size_t>(digit)];
            bool whole = t >= 1;
            for (std::int32_t d = 0; d < bytes.digits; ++d) {
                whole = whole && token_at[static_cast<std::size_t>(std::int64_t{digit} + d)] == t + d;
            }
            if (whole) {
                answers.push_back(t);
            }
        }
        data.tokens.push_back(tokens);
        data.bytes.push_back(std::move(sizes));
        data.lines.push_back(std::move(lines));
        data.answers.push_back(std::move(answers));
    }
    data.length = std::numeric_limits<std::int32_t>::max();
    for (const auto& tokens : data.tokens) {
        data.length = std::min(data.length, static_cast<std::int32_t>(tokens.size()));
    }
    if (data.tokens.empty() || data.length < least) {
        llama::fail("tokenize: {} of the {} held-out sequences give {} tokens; {} or more are needed", joined,
                    bytes.tokens.size(), data.tokens.empty() ? 0 : data.length, least);
    }
    for (std::size_t i = 0; i < data.tokens.size(); ++i) {
        data.tokens[i].resize(static_cast<std::size_t>(data.length));
        data.bytes[i].resize(static_cast<std::size_t>(data.length));
        std::erase_if(data.answers[i], [&](std::int32_t t) { return t + data.digits > data.length; });
        std::erase_if(data.lines[i], [&](const auto& line) { return line.second > data.length; });
    }
    return data;
}

SequenceScorer::SequenceScorer(const HeldOut& data, std::size_t sequence)
    : data_(data),
      sequence_(sequence),
      text_(static_cast<std::size_t>(data.length), true),
      right_(static_cast<std::size_t>(data.length), false) {
    for (const auto& [begin, end] : data.lines[sequence]) {
        std::fill(text_.begin() + begin, text_.begin() + end, false);
    }
}

void SequenceScorer::take(std::span<const float> logits, std::int32_t begin, std::int32_t count,
                          std::int32_t vocab) {
    for (std::int32_t i = 0; i < count && begin + i + 1 < data_.length; ++i) {
        const auto row = logits.subspan(static_cast<std::size_t>(i) * static_cast<std::size_t>(vocab),
                                        static_cast<std::size_t>(vocab));
        const auto next = static_cast<std::size_t>(std::int64_t{begin} + i + 1);
        const std::int32_t token = data_.tokens[sequence_][next];
        const auto largest = std::max_element(row.begin(), row.end());
        right_[next] = largest - row.begin() == token;
        if (text_[next]) {
            double sum = 0.0;
            for (const float x : row) {
                sum += std::exp(static_cast<double>(x - *largest));
            }
            bits_ += (std::log(sum) - static_cast<double>(row[static_cast<std::size_t>(token)] - *largest)) /
                     std::log(2.0);
            bytes_ += data_.bytes.empty() ? 1 : data_.bytes[sequence_][next];
            ++count_;
        }
    }
}

void SequenceScorer::add_to(Score& score) const {
    score.text_bits += bits_;
    score.text_bytes += bytes_;
    score.text_tokens += count_;
    for (const std::int32_t answer : data_.answers[sequence_]) {
        std::int64_t right = 0;
        for (std::int32_t d = 0; d < data_.digits; ++d) {
            right += right_[static_cast<std::size_t>(std::int64_t{answer} + d)] ? 1 : 0;
        }
        score.digits_right += right;
        score.digits += data_.digits;
        score.first_right += right_[static_cast<std::size_t>(answer)] ? 1 : 0;
        score.answers_right += right == data_.digits ? 1 : 0;
        ++score.answers;
    }
    ++score.sequences;
}

}  // namespace examples
