# cmake -D SOURCE_DIR=... -D VERSION=... -P version.cmake: what vcpkg.json must write
# out says the same as version.hpp.
cmake_minimum_required(VERSION 3.25)
file(READ ${SOURCE_DIR}/packaging/vcpkg/kvpolicy/vcpkg.json text)
string(JSON version GET "${text}" version-semver)
if(NOT version STREQUAL VERSION)
    message(FATAL_ERROR
        "packaging/vcpkg/kvpolicy/vcpkg.json says ${version}, and include/kvpolicy/version.hpp ${VERSION}")
endif()
