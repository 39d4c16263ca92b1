// Loops of two lengths: variants that run again what another one has run, and slowly, take the short ones.
#pragma once

namespace test {

#if defined(KVPOLICY_TEST_SHORT_LOOPS)
inline constexpr bool short_loops = true;
#else
inline constexpr bool short_loops = false;
#endif

/// `few` where loops are short, and `all` elsewhere.
constexpr int rounds(int all, int few) { return short_loops ? few : all; }

}  // namespace test
