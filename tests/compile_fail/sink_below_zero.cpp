// A negative count of sinks; -1 means nothing else.
// expect: kvpolicy: Sink<s> needs s >= 0
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/sink.hpp>

#ifndef KVPOLICY_CONTROL
kvpolicy::Sink<-1> sink;
#else
kvpolicy::Sink<0> sink;
kvpolicy::Sink<kvpolicy::dynamic> at_run_time;
#endif
