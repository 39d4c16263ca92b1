// Two parts of one kind.
// expect: kvpolicy: a Policy has at most one Window
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/window.hpp>

#ifndef KVPOLICY_CONTROL
kvpolicy::Policy<kvpolicy::Window<4>, kvpolicy::Sink<1>, kvpolicy::Window<8>> policy;
#else
kvpolicy::Policy<kvpolicy::Window<4>, kvpolicy::Sink<1>> policy;
#endif
