#include <kvpolicy/version.hpp>

#include <doctest/doctest.h>

#include <string>

TEST_CASE("the version's text and numbers agree") {
    const std::string dotted = std::to_string(kvpolicy::version_major) + "." +
                               std::to_string(kvpolicy::version_minor) + "." +
                               std::to_string(kvpolicy::version_patch);
    CHECK(kvpolicy::version_string == dotted);
    CHECK(KVPOLICY_VERSION ==
          kvpolicy::version_major * 10000 + kvpolicy::version_minor * 100 + kvpolicy::version_patch);
}

TEST_CASE("CMake and the header agree on the version") {
    CHECK(std::string(KVPOLICY_TEST_PROJECT_VERSION) == kvpolicy::version_string);
}
