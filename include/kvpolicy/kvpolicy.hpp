// All public headers but fmt.hpp, which needs the fmt library. Under nvcc, the CUDA declarations too. A
// program that uses one system includes that system's header instead (kvpop.hpp, lte.hpp, spkv.hpp, wgkv.hpp,
// dms.hpp, h2o.hpp, tova.hpp, snapkv.hpp, quest.hpp, streaming_llm.hpp, uniform.hpp).
#pragma once

#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/attention/future_mass.hpp>
#include <kvpolicy/attention/observed_mask.hpp>
#include <kvpolicy/attention/received_mass.hpp>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/caches/transfer.hpp>
#include <kvpolicy/dms.hpp>
#include <kvpolicy/h2o.hpp>
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/losses/boundary.hpp>
#include <kvpolicy/losses/distill.hpp>
#include <kvpolicy/lte.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/metrics/density.hpp>
#include <kvpolicy/metrics/gates.hpp>
#include <kvpolicy/metrics/recall.hpp>
#include <kvpolicy/metrics/retention.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/quest.hpp>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/initialize.hpp>
#include <kvpolicy/scorers/sequence.hpp>
#include <kvpolicy/snapkv.hpp>
#include <kvpolicy/spkv.hpp>
#include <kvpolicy/streaming_llm.hpp>
#include <kvpolicy/tova.hpp>
#include <kvpolicy/uniform.hpp>
#include <kvpolicy/version.hpp>
#include <kvpolicy/wgkv.hpp>
