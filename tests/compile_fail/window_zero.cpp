// A window of no keys.
// expect: kvpolicy: Window<w> needs w >= 1, since a query always sees itself
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/window.hpp>

#ifndef KVPOLICY_CONTROL
kvpolicy::Window<0> window;
#else
kvpolicy::Window<1> window;
#endif
