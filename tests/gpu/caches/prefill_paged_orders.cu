// Prefills of a DualCache in every order of scores, with gates, budgets and keep parts, beside the host's.
#include "prefill_case.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

constexpr float all_open = HeadNumbers::all_open;
using Gated = GatedSystem<true>;

}  // namespace

TEST_CASE("few calls") {
    check_long<Gated>({.budgets = {1, unlimited, 200}, .gates = {all_open, 0.0f, 0.0f}},
                      {Order::random, Order::rising}, {no_decay, decay_of_step_1}, {{600}, {70, 1, 529}});
    check_long<KeepSystem>({.budgets = {5, 33, unlimited}, .gates = {all_open, all_open, 0.0f}},
                           {Order::random, Order::rising}, {decay_of_step_1}, {{600}});
}

TEST_CASE("every order of scores and decay, gates and small budgets") {
    check_orders<Gated>({{.budgets = {1, 2, 31}},
                         {.budgets = {512, 513, unlimited}, .gates = {0.0f, all_open, 0.0f}},
                         {.budgets = {unlimited, 4096, 0}, .gates = {all_open, -0.5f, all_open}}});
}

TEST_CASE("keys that are kept for their position") {
    check_orders<KeepSystem>(
        {{.budgets = {1, 31, 0}}, {.budgets = {512, 100, unlimited}, .gates = {0.0f, all_open, 0.0f}}});
}

TEST_CASE("chunks at the edges of warps, blocks and rounds") {
    check_chunk_lengths<Gated>({.budgets = {unlimited, 700, 4096}, .gates = {0.0f, all_open, -0.5f}},
                               {1, 32, 33, 512, 513, 2049, 4096, 16384, 16385}, {0, 300, 5000});
    check_chunk_lengths<KeepSystem>({.budgets = {1, 700, 2000}}, {1, 31, 512, 513, 4097, 16385}, {0, 3000});
}

TEST_CASE("budgets of more slots than a round has candidates") {
    check_long<Gated>({.budgets = {20000, 9000, 16385}},
                      {Order::random, Order::rising, Order::equal, Order::uneven}, {decay_of_step_1},
                      {{24000}, {5000, 12000, 7000}});
}

TEST_CASE("more top-k slots in use than half of what a block of 4096 keys ranks") {
    check_long<Gated>({.budgets = {3000, 2049, 2500}, .gates = {all_open, all_open, 0.0f}},
                      {Order::random, Order::rising, Order::equal}, {no_decay, decay_of_step_1},
                      {{4000, 900, 70, 900}});
}

TEST_CASE("a prompt of 40k tokens") {
    check_long<Gated>({.budgets = {512, unlimited, 4096}, .gates = {all_open, 0.8f, 0.0f}},
                      {Order::random, Order::rising, Order::falling, Order::two_values, Order::falling_teeth},
                      {no_decay, decay_of_step_1}, {{40000}});
    check_long<KeepSystem>({.budgets = {512, 31, 4096}}, {Order::random, Order::rising, Order::level},
                           {decay_of_step_1}, {{40000}});
}

TEST_CASE("batches of ragged lengths") {
    CHECK(check_ragged<Gated>({.budgets = {unlimited, 600, 2500}, .gates = {0.0f, all_open, all_open}}) == 0);
    CHECK(check_ragged<KeepSystem>({.budgets = {1, 600, 100}}) == 0);
}

TEST_CASE("batches that find no pages") {
    CHECK(check_ragged<Gated>({.budgets = {unlimited, 600, 2500}}, 9300) != 0);
}

TEST_CASE("draft tokens") {
    check_drafts<Gated>({.budgets = {unlimited, 512, 900}, .gates = {0.0f, all_open, all_open}});
    check_drafts<KeepSystem>({.budgets = {1, 512, 31}});
}

TEST_CASE("a base that moves within a chunk") {
    check_rebase<Gated>({.budgets = {2, 513, 1000}, .gates = {all_open, all_open, -3.0f}});
    check_rebase<KeepSystem>({.budgets = {2, 513, 1000}});
}

TEST_CASE("scores that are NaN") {
    check_nan<Gated>({.budgets = {1, 513, 900}});
    check_nan<KeepSystem>({.budgets = {1, 513, 900}});
}

TEST_CASE("chunks equal steps") {
    check_steps<Gated>({.budgets = {1, 31, unlimited}, .gates = {all_open, 0.0f, 0.5f}});
    check_steps<KeepSystem>({.budgets = {1, 31, 200}});
}

TEST_CASE("positions beyond 31 and 32 bits") { check_far_positions<Gated>({.budgets = {31, 513, 2000}}); }
