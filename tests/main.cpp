// The one translation unit with doctest's implementation and main().
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
// The first implies it only where doctest.h has not been read yet, and the precompiled header has read it.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
