// A negative count of sinks (-1 is `dynamic`).
// expect: kvpolicy: Sink<s> needs s >= 0
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/sink.hpp>

#ifndef KVPOLICY_CONTROL
kvpolicy::Sink<-2> sink;
#else
kvpolicy::Sink<0> sink;
kvpolicy::Sink<-1> at_run_time;
#endif
