// SPDX-License-Identifier: Apache-2.0
#pragma once

// The one place where the version is written: CMake reads these three lines. This file is not generated, so a
// copy of include/ works without CMake.
#define KVPOLICY_VERSION_MAJOR 0
#define KVPOLICY_VERSION_MINOR 1
#define KVPOLICY_VERSION_PATCH 0

// One number for comparisons in the preprocessor: #if KVPOLICY_VERSION >= 200 means "0.2.0 or later".
#define KVPOLICY_VERSION \
    (KVPOLICY_VERSION_MAJOR * 10000 + KVPOLICY_VERSION_MINOR * 100 + KVPOLICY_VERSION_PATCH)

// Two steps, so that the numbers are substituted before they become text.
#define KVPOLICY_DETAIL_TEXT(x) #x
#define KVPOLICY_DETAIL_DOTTED(major, minor, patch) \
    KVPOLICY_DETAIL_TEXT(major) "." KVPOLICY_DETAIL_TEXT(minor) "." KVPOLICY_DETAIL_TEXT(patch)
#define KVPOLICY_VERSION_STRING \
    KVPOLICY_DETAIL_DOTTED(KVPOLICY_VERSION_MAJOR, KVPOLICY_VERSION_MINOR, KVPOLICY_VERSION_PATCH)

namespace kvpolicy {

inline constexpr int version_major = KVPOLICY_VERSION_MAJOR;
inline constexpr int version_minor = KVPOLICY_VERSION_MINOR;
inline constexpr int version_patch = KVPOLICY_VERSION_PATCH;
inline constexpr const char* version_string = KVPOLICY_VERSION_STRING;

}  // namespace kvpolicy
