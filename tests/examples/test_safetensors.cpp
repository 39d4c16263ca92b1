#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "support.hpp"

#include <llama/safetensors.hpp>
#include <sys/stat.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

using llama::DType;
using llama::Safetensors;
using test::contains;
using test::safetensors_bytes;

namespace {

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
    return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape, offsets);
}

std::string object(std::initializer_list<std::string> entries) {
    return fmt::format("{{{}}}", fmt::join(entries, ","));
}

/// Opens a file of these bytes and returns the error's sentence.
std::string error_of(const std::string& bytes) {
    const test::Folder folder;
    const auto path = folder.write("bad.safetensors", bytes);
    std::string message = test::message_of([&] { Safetensors file(path); });
    if (message.empty()) return message;
    CHECK(message.starts_with(path.string() + ": "));
    CHECK(message.size() < 600);
    CHECK(message.find('\n') == message.npos);
    return message.substr(path.string().size() + 2);
}

std::string error_of(const std::string& header, std::size_t data) {
    return error_of(safetensors_bytes(header, std::string(data, '\0')));
}

std::string error_of_entry(const std::string& dtype, const std::string& shape, const std::string& offsets,
                           std::size_t data) {
    return error_of(object({entry("a", dtype, shape, offsets)}), data);
}

}  // namespace

TEST_CASE("a good file: names, types, shapes and values, at any alignment") {
    const test::Folder folder;
    const float f32[] = {1.5f, -2.0f, 0.0f, 3e38f, 1e-40f, -0.0f};
    // 1, -2, largest half, smallest half, infinity, NaN
    const std::uint16_t f16[] = {0x3c00, 0xc000, 0x7bff, 0x0001, 0x7c00, 0x7e00};
    const std::uint16_t bf16[] = {0x3f80, 0xc040};
    std::string data(24 + 12 + 4, '\0');
    std::memcpy(data.data(), f16, 12);
    std::memcpy(data.data() + 12, bf16, 4);
    std::memcpy(data.data() + 16, f32, 24);
    for (const std::string padding : {"", " ", "  ", "   "}) {
        CAPTURE(padding.size());
        const std::string header =
            object({R"("__metadata__":{"format":"pt"})", entry("f", "F32", "[2,3]", "[16,40]"),
                    entry("h", "F16", "[6]", "[0,12]"), entry("b", "BF16", "[1,2,1]", "[12,16]"),
                    entry("none", "F32", "[0,7]", "[40,40]")}) +
            padding;
        const Safetensors file(folder.write("good", safetensors_bytes(header, data)));
        REQUIRE(file.tensors().size() == 4);
        CHECK(file.tensors()[0].name == "h");
        CHECK(file.find("missing") == nullptr);
        CHECK(file.find("none")->numel == 0);
        CHECK(file.find("f")->shape == std::vector<std::int64_t>{2, 3});
        CHECK(file.find("b")->dtype == DType::bf16);

        std::vector<float> out(6);
        llama::to_float(*file.find("f"), out);
        for (std::size_t i = 0; i < 6; ++i)  // bits, for the sign of -0
            CHECK(std::bit_cast<std::uint32_t>(out[i]) == std::bit_cast<std::uint32_t>(f32[i]));
        llama::to_float(*file.find("h"), out);
        CHECK(out[0] == 1.0f);
        CHECK(out[1] == -2.0f);
        CHECK(out[2] == 65504.0f);
        CHECK(out[3] == 0x1p-24f);
        CHECK(out[4] == std::numeric_limits<float>::infinity());
        CHECK(std::isnan(out[5]));
        out.resize(2);
        llama::to_float(*file.find("b"), out);
        CHECK(out[0] == 1.0f);
        CHECK(out[1] == -3.0f);
        CHECK(contains(test::message_of([&] { llama::to_float(*file.find("f"), out); }), "holds 2 elements"));
    }
}

TEST_CASE("every half is converted exactly") {
    const test::Folder folder;
    std::string data(131072, '\0');
    for (std::size_t i = 0; i < 65536; ++i) {
        data[2 * i] = static_cast<char>(i & 0xff);
        data[2 * i + 1] = static_cast<char>(i >> 8);
    }
    const Safetensors file(folder.write(
        "halves", safetensors_bytes(object({entry("h", "F16", "[65536]", "[0,131072]")}), data)));
    std::vector<float> out(65536);
    llama::to_float(*file.find("h"), out);
    int wrong = 0;
    for (int i = 0; i < 65536; ++i) {
        const int exponent = i >> 10 & 31, fraction = i & 1023;
        double expected = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
        if (exponent == 31) expected = fraction ? NAN : INFINITY;
        const auto got = static_cast<double>(out[static_cast<std::size_t>(i)]);
        const bool same = std::isnan(expected) ? std::isnan(got) : std::abs(got) == expected;
        wrong += !same || std::signbit(got) != (i >= 32768);
    }
    CHECK(wrong == 0);
}

TEST_CASE("an empty model is a file too") {
    const test::Folder folder;
    const Safetensors file(folder.write("empty", safetensors_bytes("{}", "")));
    CHECK(file.tensors().empty());
}

TEST_CASE("files that cannot be opened") {
    const test::Folder folder;
    CHECK(
        contains(test::message_of([&] { Safetensors file(folder.path() / "absent"); }), "cannot be opened"));
    CHECK(contains(test::message_of([&] { Safetensors file(folder.path()); }), "is not a regular file"));
}

TEST_CASE("truncated anywhere: an error, never a read past the end") {
    const std::string whole =
        safetensors_bytes(object({entry("a", "F32", "[4]", "[0,16]")}), std::string(16, 'x'));
    CHECK(error_of(whole) == "");
    for (std::size_t length = 0; length < whole.size(); ++length)
        CHECK(error_of(whole.substr(0, length)) != "");
    CHECK(contains(error_of(whole.substr(0, 5)), "5 bytes long"));
    CHECK(contains(error_of(whole.substr(0, whole.size() - 1)),
                   "tensor \"a\": data_offsets end at byte 16, but only 15 bytes follow the header"));
}

TEST_CASE("header length past the end, or huge") {
    std::string bytes = safetensors_bytes("{}", "");
    bytes[0] = 3;
    CHECK(contains(error_of(bytes), "length is 3, but only 2 bytes follow"));
    for (std::size_t i = 0; i < 8; ++i) bytes[i] = '\xff';
    CHECK(contains(error_of(bytes), "length is 18446744073709551615, at most 100000000 is allowed"));
    bytes = safetensors_bytes("{}", "");
    bytes[3] = 0x7f;
    CHECK(contains(error_of(bytes), "at most 100000000 is allowed"));
}

TEST_CASE("bad JSON") {
    for (const char* header : {"", " ", "{", "{\"a\":}", "{}x", "{\"a\":1,}", "\xff\xfe", "{\"\xc3\":{}}",
                               "{'a':1}", "{\"a\": 1e999}", "nul"})
        CHECK_MESSAGE(contains(error_of(header, 0), "not valid JSON"), header);
    CHECK(contains(error_of("[]", 0), "JSON array, it must be an object"));
    CHECK(contains(error_of("null", 0), "JSON null, it must be an object"));
    CHECK(contains(error_of("{\"a\":" + std::string(100000, '[') + std::string(100000, ']') + "}", 0),
                   "nests deeper"));
    CHECK(contains(error_of("{\"a\":{\"shape\":{\"x\":[1]}}}", 0), "nests deeper"));
}

TEST_CASE("entries that are no entries") {
    CHECK(contains(error_of("{\"a\":3}", 0), "tensor \"a\": its entry is a JSON number"));
    CHECK(contains(error_of("{\"a\":{}}", 0), "has no \"dtype\""));
    CHECK(contains(error_of("{\"a\":{\"dtype\":\"F32\"}}", 0), "has no \"shape\""));
    CHECK(contains(error_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[]}}", 0), "has no \"data_offsets\""));
    CHECK(contains(error_of_entry("F32", "4", "[0,16]", 16), "shape is a JSON number"));
    CHECK(contains(error_of_entry("F32", "[-4]", "[0,16]", 16), "a dimension of its shape is -4,"));
    CHECK(contains(error_of_entry("F32", "[4.0]", "[0,16]", 16), "a dimension of its shape is 4.0,"));
    CHECK(contains(error_of_entry("F32", "[\"4\"]", "[0,16]", 16), "must be an integer"));
    CHECK(contains(error_of_entry("F32", "[4]", "[0]", 16), "data_offsets must be an array of two"));
    CHECK(contains(error_of_entry("F32", "[4]", "[0,16,32]", 16), "data_offsets must be an array of two"));
    CHECK(contains(error_of_entry("F32", "[4]", "[-1,16]", 16), "data_offsets[0] is -1,"));
    CHECK(contains(error_of_entry("F32", "[4]", "[0,99999999999999999999999]", 16), "data_offsets[1] is"));
}

TEST_CASE("dtypes that are not read") {
    for (const char* dtype : {"I64", "F64", "F8_E4M3", "f32", ""})
        CHECK(contains(error_of_entry(dtype, "[2]", "[0,16]", 16),
                       fmt::format("dtype is \"{}\", allowed are F32, F16 and BF16", dtype)));
}

TEST_CASE("offsets past the end, reversed, of the wrong size") {
    CHECK(contains(error_of_entry("F32", "[4]", "[8,24]", 16), "end at byte 24, but only 16 bytes"));
    CHECK(contains(error_of_entry("F32", "[4]", "[9223372036854775800,9223372036854775807]", 16),
                   "only 16 bytes"));
    CHECK(contains(error_of_entry("F32", "[4]", "[0,18446744073709551615]", 16), "data_offsets[1] is"));
    CHECK(contains(error_of_entry("F32", "[4]", "[16,0]", 16),
                   "[16, 0], the first must not exceed the second"));
    CHECK(
        contains(error_of_entry("F32", "[5]", "[0,16]", 16), "hold 16 bytes, but F32 of shape [5] needs 20"));
    CHECK(contains(error_of_entry("BF16", "[4]", "[0,16]", 16),
                   "hold 16 bytes, but BF16 of shape [4] needs 8"));
    CHECK(contains(error_of_entry("F32", "[0]", "[0,16]", 16), "needs 0"));
    CHECK(error_of_entry("F32", "[]", "[0,4]", 4) == "");  // a scalar
}

TEST_CASE("shapes whose product overflows") {
    CHECK(contains(error_of_entry("F32", "[4294967296,4294967296]", "[0,0]", 0), "more bytes than 64 bits"));
    CHECK(contains(error_of_entry("F32", "[4611686018427387905]", "[0,4]", 4),
                   "more bytes than 64 bits"));  // wraps to 4
    CHECK(contains(error_of_entry("BF16", "[9223372036854775808]", "[0,0]", 0), "from 0 to 2^63 - 1"));
    CHECK(contains(error_of_entry("F16", "[0,4294967296,4294967296,8]", "[0,0]", 0),
                   "more bytes than 64 bits"));
}

TEST_CASE("overlaps, gaps and trailing bytes") {
    const auto two = [](const std::string& a, const std::string& b, std::size_t data) {
        return error_of(object({entry("a", "F32", "[2]", a), entry("b", "F32", "[2]", b)}), data);
    };
    CHECK(two("[8,16]", "[0,8]", 16) == "");
    CHECK(contains(two("[0,8]", "[4,12]", 12),
                   "tensor \"b\" begins at byte 4, inside tensor \"a\", which ends at byte 8"));
    CHECK(contains(two("[0,8]", "[0,8]", 8), "begins at byte 0, inside"));
    CHECK(contains(two("[0,8]", "[12,20]", 20), "bytes 8 to 12 of the data belong to no tensor"));
    CHECK(contains(two("[4,12]", "[12,20]", 20), "bytes 0 to 4"));
    CHECK(contains(two("[0,8]", "[8,16]", 17), "bytes 16 to 17"));
}

TEST_CASE("duplicate names") {
    const std::string a = entry("a", "F32", "[1]", "[0,4]");
    CHECK(contains(error_of(object({a, a}), 4), "\"a\" appears twice"));
    CHECK(contains(error_of(object({a, entry("\\u0061", "F32", "[1]", "[0,4]")}), 4), "\"a\" appears twice"));
    CHECK(contains(
        error_of("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4),
        "\"dtype\" appears twice"));
}

TEST_CASE("a hostile name cannot spoil the message") {
    const std::string message =
        error_of(object({entry("\\u001b[2J\\n" + std::string(5000, 'x'), "I8", "[1]", "[0,1]")}), 1);
    CHECK(contains(message, "\\x1b[2J\\x0a"));
    CHECK(contains(message, "..."));
}

TEST_CASE("random damage to a good file never crashes") {
    const std::string good = safetensors_bytes(
        object({entry("a", "F32", "[2,2]", "[0,16]"), entry("b", "BF16", "[3]", "[16,22]")}),
        std::string(22, 'x'));
    const test::Folder folder;
    std::uint32_t state = 1;
    const auto random = [&](std::size_t below) {
        state = state * 1664525u + 1013904223u;
        return (state >> 8) % below;
    };
    for (int round = 0; round < 3000; ++round) {
        std::string bytes = good;
        for (std::size_t n = 1 + random(4); n > 0; --n)
            bytes[random(bytes.size())] = static_cast<char>(random(256));
        const auto path = folder.write("damaged", bytes);
        try {
            const Safetensors file(path);
            for (const auto& tensor : file.tensors()) {
                std::vector<float> out(tensor.numel);
                llama::to_float(tensor, out);
            }
        } catch (const llama::Error&) {
        }
    }
}
