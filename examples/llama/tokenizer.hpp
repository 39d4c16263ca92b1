#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace llama {

/// Whether encode() turns text like "<|im_end|>" into the special token or spells it out. What a user typed
/// is spelled out: it must not be able to end its own turn.
enum class Special { as_text, parse };

/// Byte-level BPE as GPT-2 does it, or plain bytes, which is the same thing with 256 tokens and no merges.
class Tokenizer {
  public:
    /// Token id = byte.
    static Tokenizer bytes();
    /// Reads a Hugging Face tokenizer.json whose model is byte-level BPE.
    static Tokenizer read(const std::filesystem::path& path);

    int size() const noexcept { return static_cast<int>(pieces_.size()); }

    /// Any bytes may be encoded, valid UTF-8 or not. A byte that the vocabulary has no token for is left out,
    /// as Hugging Face's tokenizers do (SmolLM2 has none for 21 bytes, all rare).
    std::vector<std::int32_t> encode(std::string_view text, Special special = Special::as_text) const;

    /// The bytes of one token; they need not be whole characters, so a stream goes through Utf8Stream.
    std::string_view piece(std::int32_t id) const;
    std::string decode(std::span<const std::int32_t> ids) const;

    std::optional<std::int32_t> special(std::string_view text) const;

  private:
    struct Merge {
        std::int32_t rank, result;
    };

    void encode_plain(std::string_view text, std::vector<std::int32_t>& ids) const;
    void encode_word(std::string_view word, std::vector<std::int32_t>& ids) const;

    std::vector<std::string> pieces_;                             // id -> bytes
    std::int32_t byte_ids_[256] = {};                             // -1: no token
    std::unordered_map<std::uint64_t, Merge> merges_;             // left id << 32 | right id
    std::vector<std::pair<std::string, std::int32_t>> specials_;  // longest first
    bool split_digits_ = false;                                   // every digit is a word of its own
};

/// tokenizer.json of a model's folder if it has one; bytes for a vocabulary of 256.
Tokenizer read_tokenizer(const std::filesystem::path& folder, int vocab_size);

/// Splits text into the words that merges never cross: the digits first, if asked, then GPT-2's rule
///     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
std::vector<std::string_view> split_words(std::string_view text, bool split_digits);

/// Passes bytes on in whole characters, for a terminal: what is incomplete waits, what can never become UTF-8
/// turns into U+FFFD.
class Utf8Stream {
  public:
    std::string push(std::string_view bytes);
    /// At the end of the text: an incomplete rest becomes U+FFFD.
    std::string flush();

  private:
    std::string rest_;
};

struct Message {
    std::string role;  ///< "system", "user" or "assistant"
    std::string content;
};

/// SmolLM2-Instruct's chat template, up to the point where the assistant's answer begins. Without a system
/// message first, the one that the model was trained with is added.
std::vector<std::int32_t> chat_prompt(const Tokenizer& tokenizer, std::span<const Message> messages);

}  // namespace llama
