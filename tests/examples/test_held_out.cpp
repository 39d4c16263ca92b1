// eval.bin and eval.json: what files of others may not say.
#include "support.hpp"
#include "support/held_out.hpp"

#include <doctest/doctest.h>

#include <string>

using test::contains;

TEST_CASE("held-out sequences are read, or refused in a sentence") {
    const test::Folder folder;
    const nlohmann::json good{{"sequences", 2},
                              {"length", 30},
                              {"digits", 4},
                              {"answers", {{20}, {21, 26}}},
                              {"lines", {{{4, 13}, {16, 25}}, {{0, 30}}}}};
    folder.write("eval.bin", std::string(60, 'x'));
    const auto refusal = [&](const char* key, const nlohmann::json& value) {
        nlohmann::json bad = good;
        bad[key] = value;
        folder.write("eval.json", bad.dump());
        return test::message_of([&] { examples::read_held_out(folder.path()); });
    };
    CHECK(refusal("other", 0.5) == "");
    const examples::HeldOut read = examples::read_held_out(folder.path());
    CHECK(read.tokens.size() == 2);
    CHECK(read.tokens[1] == std::vector<std::int32_t>(30, 'x'));

    CHECK(contains(refusal("length", 31), "eval.bin: has 60 bytes; 2 sequences of 31 bytes are needed"));
    CHECK(contains(refusal("length", 2147483647), "2 sequences of 2147483647 bytes"));
    CHECK(contains(refusal("length", 4294967326), "has a number 4294967326; integers from 0 to 2^31 - 1"));
    CHECK(contains(refusal("length", 30.5), "has a number 30.5"));
    CHECK(contains(refusal("digits", 0), "has answers of 0 digits"));
    CHECK(contains(refusal("digits", 2147483647), "has answers of 2147483647 digits"));
    CHECK(contains(refusal("sequences", 3), "has answers of 4 digits for 2 and lines for 2 of 3 sequences"));
    CHECK(contains(refusal("answers", {{27}, {20}}), "has an answer at 27, which is not inside a sequence"));
    CHECK(contains(refusal("answers", {{-1}, {20}}), "has a number -1"));
    CHECK(contains(refusal("lines", {{{4, 31}}, {{0, 9}}}), "has a line from 4 to 31"));
    CHECK(contains(refusal("lines", 7), "eval.json: "));
    folder.write("eval.json", std::string(100000, '['));
    CHECK(contains(test::message_of([&] { examples::read_held_out(folder.path()); }),
                   "eval.json: nests deeper than 16 levels"));
}
