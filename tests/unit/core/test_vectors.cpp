// The reader of test vectors: the committed files, and files that lie.
#include "support/vectors.hpp"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

using kvpolicy_test::vectors;

namespace {

template <class T>
std::string raw(T value) {
    std::string bytes(sizeof value, '\0');
    std::memcpy(bytes.data(), &value, sizeof value);
    return bytes;
}

std::string header(std::uint32_t arrays) { return std::string("kvpv1\0\0\0", 8) + raw(arrays); }

std::string array(const std::string& name, std::uint32_t type, std::initializer_list<std::int64_t> shape,
                  const std::string& elements) {
    std::string bytes = raw(static_cast<std::uint32_t>(name.size())) + name + raw(type) +
                        raw(static_cast<std::uint32_t>(shape.size()));
    for (const std::int64_t extent : shape) {
        bytes += raw(extent);
    }
    return bytes + elements;
}

bool parses(const std::string& bytes) {
    vectors into;
    std::string error;
    const bool fine = vectors::parse(bytes, into, error);
    CHECK(fine == error.empty());
    return fine;
}

}  // namespace

TEST_CASE("arrays come back with their bits") {
    const std::string bytes =
        header(4) + array("a", 0, {2, 1}, raw(std::int32_t{-7}) + raw(std::int32_t{8})) +
        array("b", 1, {3}, raw(-0.0f) + raw(INFINITY) + raw(std::uint32_t{0x7fc12345u})) +
        array("c", 2, {}, raw(0.1)) + array("d", 2, {5, 0}, "");
    vectors file;
    std::string error;
    CHECK(vectors::parse(bytes, file, error));
    if (!error.empty()) {
        return;
    }
    CHECK(file.get<std::int32_t>("a")[1] == 8);
    CHECK(*file.get<std::int32_t>("a").row(1) == 8);
    CHECK(std::signbit(file.get<float>("b")[0]));
    CHECK(std::isinf(file.get<float>("b")[1]));
    CHECK(std::bit_cast<std::uint32_t>(file.get<float>("b")[2]) == 0x7fc12345u);
    CHECK(file.get<double>("c")[0] == 0.1);
    CHECK(file.get<double>("d").size() == 0);
    CHECK(file.has("d"));
    CHECK_FALSE(file.has("e"));

    for (std::size_t length = 0; length < bytes.size(); ++length) {
        CHECK_FALSE(parses(bytes.substr(0, length)));
    }
    CHECK_FALSE(parses(bytes + "x"));
}

TEST_CASE("files that lie are refused") {
    const std::string element = raw(std::int32_t{1});
    const std::int64_t large = std::int64_t{1} << 62;
    CHECK(parses(header(1) + array("a", 0, {1}, element)));
    CHECK(parses(header(0)));
    CHECK_FALSE(parses("kvpv2" + header(0).substr(5)));
    CHECK_FALSE(parses(header(0xffffffffu)));
    CHECK_FALSE(parses(header(1) + array("a", 3, {1}, element)));
    CHECK_FALSE(parses(header(1) + array("", 0, {1}, element)));
    CHECK_FALSE(parses(header(1) + array(std::string(256, 'n'), 0, {1}, element)));
    CHECK_FALSE(parses(header(1) + array("a", 0, {-1}, element)));
    CHECK_FALSE(parses(header(1) + array("a", 0, {large}, element)));
    CHECK_FALSE(parses(header(1) + array("a", 0, {large, large, 4, 4}, element)));
    CHECK_FALSE(parses(header(1) + array("a", 0, {1, 1, 1, 1, 1, 1, 1, 1, 1}, element)));
    CHECK_FALSE(parses(header(2) + array("a", 0, {1}, element) + array("a", 1, {1}, element)));
}

TEST_CASE("the committed files can be read") {
    for (const char* name : {"lifetimes.kvpv", "cutoff.kvpv", "metrics.kvpv", "cache.kvpv"}) {
        CAPTURE(name);
        vectors file;
        std::string error;
        CHECK(vectors::read(vectors::folder() + "/" + name, file, error));
        CHECK(error == "");
        CHECK(file.has("scores"));
    }
    vectors file;
    std::string error;
    CHECK_FALSE(vectors::read(vectors::folder() + "/absent.kvpv", file, error));
    CHECK(error.find("absent.kvpv") != std::string::npos);
}
