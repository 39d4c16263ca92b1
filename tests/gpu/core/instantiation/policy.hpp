#pragma once

#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

using EnginePolicy = kvpolicy::Policy<kvpolicy::Sink<2>, kvpolicy::Window<8>, kvpolicy::TopKBudget<30>>;
