#include "tokenizer.hpp"

#include "bounded_json.hpp"
#include "error.hpp"
#include "unicode_ranges.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>

namespace llama {
namespace {

using json = nlohmann::json;

constexpr char32_t invalid = 0xfffd;

struct Character {
    char32_t code = invalid;
    std::size_t bytes = 1;
    bool cut = false;  // valid so far, but the text ends inside it
};

/// The character at the start of a text that is not empty; invalid bytes come one at a time.
Character first_character(std::string_view text) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned char lead = byte(0);
    if (lead < 0x80) return {lead, 1};
    const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (lead < 0xc2 || lead > 0xf4) return {};
    char32_t code = lead & (0xffu >> (length + 1));
    for (std::size_t i = 1; i < length; ++i) {
        if (i == text.size()) return {invalid, 1, true};
        // The second byte's range also rules out overlong forms, surrogates and codes past U+10FFFF.
        const unsigned low = i > 1 ? 0x80 : lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
        const unsigned high = i > 1 ? 0xbf : lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
        if (byte(i) < low || byte(i) > high) return {};
        code = code << 6 | (byte(i) & 0x3fu);
    }
    return {code, length};
}

void append_utf8(char32_t code, std::string& out) {
    const auto put = [&](char32_t byte) { out.push_back(static_cast<char>(byte)); };
    const auto tail = [&](int shift) { put(0x80 | (code >> shift & 0x3f)); };
    if (code < 0x80) return put(code);
    if (code < 0x800) return put(0xc0 | code >> 6), tail(0);
    if (code < 0x10000) return put(0xe0 | code >> 12), tail(6), tail(0);
    put(0xf0 | code >> 18), tail(12), tail(6), tail(0);
}

enum class Kind { letter, number, space, other };

bool inside(std::span<const CodeRange> ranges, char32_t code) {
    const auto after = std::ranges::upper_bound(ranges, code, {}, &CodeRange::first);
    return after != ranges.begin() && code <= (after - 1)->last;
}

Kind kind_of(char32_t c) {
    if ((c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xa0 || c == 0x1680 ||
        (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
        c == 0x3000)
        return Kind::space;
    if (inside(letter_ranges, c)) return Kind::letter;
    return inside(number_ranges, c) ? Kind::number : Kind::other;
}

struct Placed {
    std::size_t at;  // byte offset
    char32_t code;
    Kind kind;
};

/// GPT-2 stores bytes in its vocabulary as printable characters: those that are printable in Latin-1 as
/// themselves, the others as U+0100 and on, in order.
std::array<char32_t, 256> byte_alphabet() {
    std::array<char32_t, 256> alphabet{};
    char32_t next = 256;
    for (char32_t b = 0; b < 256; ++b) {
        const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        alphabet[b] = printable ? b : next++;
    }
    return alphabet;
}

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
    return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

/// Whether a pre-tokenizer splits digits; throws for any that is not [Digits,] ByteLevel.
bool splits_digits(const json& pre, const std::string& file) {
    const json steps =
        pre.value("type", "") == "Sequence" ? pre.value("pretokenizers", json::array()) : json::array({pre});
    bool digits = false, byte_level = false;
    for (const json& step : steps) {
        const std::string type = step.value("type", "");
        if (type == "Digits" && step.value("individual_digits", false) && !byte_level) {
            digits = true;
        } else if (type == "ByteLevel" && !step.value("add_prefix_space", true) &&
                   step.value("use_regex", true)) {
            byte_level = true;
        } else {
            fail(
                "{}: pre_tokenizer has the step {}, allowed are Digits (individual_digits true), then "
                "ByteLevel "
                "(add_prefix_space false, use_regex true)",
                file, clipped(step.dump()));
        }
    }
    if (!byte_level)
        fail("{}: pre_tokenizer has no ByteLevel step, this tokenizer knows only byte-level BPE", file);
    return digits;
}

std::pair<std::string, std::string> merge_pair(const json& merge) {
    if (merge.is_array()) return merge.get<std::pair<std::string, std::string>>();
    const std::string text = merge.get<std::string>();  // "left right"; neither side holds a space
    const auto space = text.find(' ');
    return {text.substr(0, space), space == text.npos ? "" : text.substr(space + 1)};
}

/// The JSON library would convert a fraction or a number of 64 bits to some other id.
std::int32_t id_of(const json& id, const std::string& file) {
    if (!id.is_number_unsigned() || id.get<std::uint64_t>() > std::numeric_limits<std::int32_t>::max())
        fail("{}: a token has id {}, it must be an integer from 0 to 2^31 - 1", file, clipped(id.dump()));
    return id.get<std::int32_t>();
}

}  // namespace

std::vector<std::string_view> split_words(std::string_view text, bool split_digits) {
    std::vector<Placed> chars;
    for (std::size_t at = 0; at < text.size();) {
        const Character c = first_character(text.substr(at));
        chars.push_back({at, c.code, kind_of(c.code)});
        at += c.bytes;
    }
    std::vector<std::string_view> words;
    const auto emit = [&](std::size_t from, std::size_t to) {
        const std::size_t end = to < chars.size() ? chars[to].at : text.size();
        words.push_back(text.substr(chars[from].at, end - chars[from].at));
    };
    // GPT-2's rule inside [i, end), which the splitting of digits has made a text of its own
    const auto split = [&](std::size_t i, std::size_t end) {
        const auto run = [&](std::size_t from) {
            std::size_t to = from;
            while (to < end && chars[to].kind == chars[from].kind) ++to;
            return to;
        };
        while (i < end) {
            std::size_t next = i + 1;
            if (chars[i].code == '\'') {
                const std::size_t left = end - i - 1;
                const char32_t a = left > 0 ? chars[i + 1].code : 0, b = left > 1 ? chars[i + 2].code : 0;
                if (a == 's' || a == 't' || a == 'm' || a == 'd') next = i + 2;
                if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) next = i + 3;
            }
            if (next == i + 1) {
                const bool joins = chars[i].code == ' ' && i + 1 < end && chars[i + 1].kind != Kind::space;
                next = run(joins ? i + 1 : i);
                // Of a run of spaces the last one is left to the word that follows.
                if (!joins && chars[i].kind == Kind::space && next < end && next > i + 1) --next;
            }
            emit(i, next);
            i = next;
        }
    };
    std::size_t from = 0;
    for (std::size_t i = 0; split_digits && i < chars.size(); ++i) {
        if (chars[i].kind != Kind::number) continue;
        split(from, i);
        emit(i, i + 1);
        from = i + 1;
    }
    split(from, chars.size());
    return words;
}

Tokenizer Tokenizer::bytes() {
    Tokenizer tokenizer;
    for (int b = 0; b < 256; ++b) {
        tokenizer.pieces_.emplace_back(1, static_cast<char>(b));
        tokenizer.byte_ids_[b] = b;
    }
    return tokenizer;
}

Tokenizer Tokenizer::read(const std::filesystem::path& path) try {
    const std::string file = path.string();
    std::ifstream in(path, std::ios::binary);
    if (!in) fail("{}: cannot be read", file);
    const json root = json::parse(in, depth_limit(file, 32));
    const json& model = root.at("model");
    if (model.value("type", "BPE") != "BPE")
        fail("{}: model.type is {}, only \"BPE\" is supported", file, printable(model.value("type", "")));
    if (root.contains("normalizer") && !root["normalizer"].is_null())
        fail("{}: normalizer is set, only tokenizers without one are supported", file);

    Tokenizer tokenizer;
    tokenizer.split_digits_ = splits_digits(root.at("pre_tokenizer"), file);

    std::unordered_map<std::string, std::int32_t> ids;
    for (const auto& [text, id] : model.at("vocab").items()) ids.emplace(text, id_of(id, file));
    for (const json& token : root.value("added_tokens", json::array())) {
        const auto id = id_of(token.at("id"), file);
        ids.emplace(token.at("content").get<std::string>(), id);
        tokenizer.specials_.emplace_back(token.at("content").get<std::string>(), id);
    }
    std::ranges::sort(tokenizer.specials_, [](const auto& a, const auto& b) {
        return a.first.size() != b.first.size() ? a.first.size() > b.first.size() : a.first < b.first;
    });

    std::unordered_map<char32_t, char> byte_of;
    const auto alphabet = byte_alphabet();
    for (std::size_t b = 0; b < 256; ++b) byte_of[alphabet[b]] = static_cast<char>(b);
    tokenizer.pieces_.resize(ids.size());
    std::vector<bool> taken(ids.size());
    std::ranges::fill(tokenizer.byte_ids_, -1);
    for (const auto& [text, id] : ids) {
        if (id < 0 || static_cast<std::size_t>(id) >= ids.size() || taken[static_cast<std::size_t>(id)])
            fail("{}: token {} has id {}, ids must be unique and from 0 to {}", file, printable(text), id,
                 ids.size() - 1);
        taken[static_cast<std::size_t>(id)] = true;
        std::string& piece = tokenizer.pieces_[static_cast<std::size_t>(id)];
        if (std::ranges::find(tokenizer.specials_, text, &std::pair<std::string, std::int32_t>::first) !=
            tokenizer.specials_.end()) {
            piece = text;
            continue;
        }
        for (std::string_view rest = text; !rest.empty();) {
            const Character c = first_character(rest);
            const auto byte = byte_of.find(c.code);
            if (byte == byte_of.end())
                fail("{}: token {} is not spelled in the byte-level alphabet", file, printable(text));
            piece.push_back(byte->second);
            rest.remove_prefix(c.bytes);
        }
        if (piece.size() == 1) tokenizer.byte_ids_[static_cast<unsigned char>(piece[0])] = id;
    }

    std::int32_t rank = 0;
    for (const json& merge : model.at("merges")) {
        const auto [left, right] = merge_pair(merge);
        const auto a = ids.find(left), b = ids.find(right), ab = ids.find(left + right);
        if (a == ids.end() || b == ids.end() || ab == ids.end())
            fail("{}: merge {} ({} + {}) names a token that the vocabulary lacks", file, rank,
                 printable(left), printable(right));
        tokenizer.merges_.emplace(pair_key(a->second, b->second), Merge{rank++, ab->second});
    }
    return tokenizer;
} catch (const json::exception& error) {
    fail("{}: is not a tokenizer.json as Hugging Face writes it: {}", path.string(), printable(error.what()));
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, Special special) const {
    std::vector<std::int32_t> ids;
    std::size_t plain = 0;  // start of the text not yet encoded
    for (std::size_t at = 0; special == Special::parse && at < text.size();) {
        const auto hit = std::ranges::find_if(
            specials_, [&](const auto& token) { return text.substr(at).starts_with(token.first); });
        if (hit == specials_.end()) {
            ++at;
            continue;
        }
        encode_plain(text.substr(plain, at - plain), ids);
        ids.push_back(hit->second);
        at += hit->first.size();
        plain = at;
    }
    encode_plain(text.substr(plain), ids);
    return ids;
}

void Tokenizer::encode_plain(std::string_view text, std::vector<std::int32_t>& ids) const {
    if (merges_.empty()) return encode_word(text, ids);
    for (const std::string_view word : split_words(text, split_digits_)) encode_word(word, ids);
}

void Tokenizer::encode_word(std::string_view word, std::vector<std::int32_t>& ids) const {
    std::vector<std::int32_t> parts;
    for (const char c : word)
        if (const std::int32_t id = byte_ids_[static_cast<unsigned char>(c)]; id >= 0) parts.push_back(id);

    // Merge the pair of the best rank wherever it occurs, until no pair has one.
    while (!merges_.empty()) {
        Merge best{std::numeric_limits<std::int32_t>::max(), 0};
        for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
            const auto merge = merges_.find(pair_key(parts[i], parts[i + 1]));
            if (merge != merges_.end() && merge->second.rank < best.rank) best = merge->second;
        }
        if (best.rank == std::numeric_limits<std::int32_t>::max()) break;
        std::size_t kept = 0;
        for (std::size_t i = 0; i < parts.size(); ++i, ++kept) {
            parts[kept] = parts[i];
            if (i + 1 == parts.size()) continue;
            const auto merge = merges_.find(pair_key(parts[i], parts[i + 1]));
            if (merge != merges_.end() && merge->second.rank == best.rank) {
                parts[kept] = best.result;
                ++i;
            }
        }
        parts.resize(kept);
    }
    ids.insert(ids.end(), parts.begin(), parts.end());
}

std::string_view Tokenizer::piece(std::int32_t id) const {
    if (id < 0 || id >= size()) fail("token id is {}, it must be from 0 to {}", id, size() - 1);
    return pieces_[static_cast<std::size_t>(id)];
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids) const {
    std::string text;
    for (const std::int32_t id : ids) text += piece(id);
    return text;
}

std::optional<std::int32_t> Tokenizer::special(std::string_view text) const {
    for (const auto& [content, id] : specials_)
        if (content == text) return id;
    return std::nullopt;
}

Tokenizer read_tokenizer(const std::filesystem::path& folder, int vocab_size) {
    const auto file = folder / "tokenizer.json";
    if (std::filesystem::exists(file)) {
        Tokenizer tokenizer = Tokenizer::read(file);
        if (tokenizer.size() > vocab_size)
            fail("{}: has {} tokens, more than the model's vocab_size, {}", file.string(), tokenizer.size(),
                 vocab_size);
        return tokenizer;
    }
    if (vocab_size != 256)
        fail("{}: is missing, only a model with vocab_size 256 (bytes) does without; this one's is {}",
             file.string(), vocab_size);
    return Tokenizer::bytes();
}

std::string Utf8Stream::push(std::string_view bytes) {
    rest_ += bytes;
    std::string out;
    std::string_view left = rest_;
    while (!left.empty()) {
        const Character c = first_character(left);
        if (c.cut) break;
        append_utf8(c.code, out);
        left.remove_prefix(c.bytes);
    }
    rest_ = std::string(left);
    return out;
}

std::string Utf8Stream::flush() {
    const bool incomplete = !rest_.empty();
    rest_.clear();
    return incomplete ? "\xef\xbf\xbd" : "";
}

std::vector<std::int32_t> chat_prompt(const Tokenizer& tokenizer, std::span<const Message> messages) {
    const auto start = tokenizer.special("<|im_start|>"), end = tokenizer.special("<|im_end|>");
    if (!start || !end)
        fail("the tokenizer has no <|im_start|> and <|im_end|>, its model is no chat model of this kind");

    std::vector<std::int32_t> ids;
    const auto append = [&](std::string_view text) {
        const auto more = tokenizer.encode(text);
        ids.insert(ids.end(), more.begin(), more.end());
    };
    const auto turn = [&](const std::string& role, const std::string& content) {
        ids.push_back(*start);
        append(role + "\n" + content);
        ids.push_back(*end);
        append("\n");
    };
    if (messages.empty() || messages.front().role != "system")
        turn("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face");
    for (const Message& message : messages) turn(message.role, message.content);
    ids.push_back(*start);
    append("assistant\n");
    return ids;
}

}  // namespace llama
