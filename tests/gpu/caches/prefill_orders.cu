// Prefills of a FixedBudgetCache in every order of scores, at the edges of warps, blocks and rounds, beside
// the host's.
#include "prefill_case.hpp"

using namespace kvpolicy;
using namespace test;

TEST_CASE("few calls") {
    check_long<FixedSystem>({.budgets = {1, 31, 200}}, {Order::random, Order::rising, Order::two_values},
                            {no_decay, decay_of_step_1, decay_of_longer_steps}, {{600}, {70, 1, 529}});
    check_long<GatedSystem<false>>({.budgets = {5, 33, 64}, .gates = {-1.0f, HeadNumbers::all_open, 0.0f}},
                                   {Order::random}, {no_decay}, {{600}});
}

TEST_CASE("every order of scores, decay and small budget") {
    check_orders<FixedSystem>(
        {{.budgets = {1, 2, 31}}, {.budgets = {512, 513, 400}}, {.budgets = {1, 4096, 0}}});
}

TEST_CASE("gates beside budgets") {
    check_orders<GatedSystem<false>>(
        {{.budgets = {31, 513, 2}, .gates = {0.0f, HeadNumbers::all_open, -1.0f}}});
}

TEST_CASE("chunks at the edges of warps, blocks and rounds") {
    check_chunk_lengths<FixedSystem>({.budgets = {1, 700, 4096}}, edge_lengths(), {0, 300, 5000});
}

TEST_CASE("budgets of more slots than a round has candidates") {
    const HeadNumbers of{.budgets = {20000, 9000, 16385}};
    check_long<FixedSystem>(
        of, {Order::random, Order::rising, Order::falling, Order::equal, Order::uneven, Order::level},
        {no_decay, decay_of_step_1}, {{24000}, {5000, 12000, 7000}});
    check_long<FixedSystem>(of, {Order::random}, {decay_of_longer_steps}, {{24000}});
}

TEST_CASE("more top-k slots in use than half of what a block of 4096 keys ranks") {
    // Slots and a chunk of 900 tokens: at most 4096 keys.
    check_long<FixedSystem>({.budgets = {3000, 2049, 2500}},
                            {Order::random, Order::rising, Order::falling, Order::equal, Order::uneven},
                            {no_decay, decay_of_step_1}, {{4000, 900, 70, 900}});
}

TEST_CASE("a prompt of 40k tokens") {
    check_long<FixedSystem>({.budgets = {512, 4096, 1}}, {std::begin(all_orders), std::end(all_orders)},
                            {no_decay, decay_of_step_1}, {{40000}});
    check_long<FixedSystem>({.budgets = {513, 2000, 31}}, {Order::random, Order::two_values},
                            {decay_of_longer_steps}, {{40000}});
    check_long<FixedSystem>({.budgets = {512, 3836, 1000}},
                            {Order::random, Order::rising, Order::equal, Order::infinities, Order::uneven},
                            {decay_of_longer_steps, decay_of_long_steps}, {{16384}, {9000, 7, 7377}});
}

TEST_CASE("batches of ragged lengths") { check_ragged<FixedSystem>({.budgets = {1, 600, 2500}}); }

TEST_CASE("draft tokens") { check_drafts<FixedSystem>({.budgets = {1, 512, 900}}); }

TEST_CASE("a base that moves within a chunk") { check_rebase<FixedSystem>({.budgets = {2, 513, 1000}}); }

TEST_CASE("scores that are NaN") { check_nan<FixedSystem>({.budgets = {1, 513, 900}}); }

TEST_CASE("chunks equal steps") {
    check_steps<FixedSystem>({.budgets = {1, 31, 200}});
    check_steps<FixedSystem>({.budgets = {64, 0, 1000}});
}

TEST_CASE("positions beyond 31 and 32 bits") {
    check_far_positions<FixedSystem>({.budgets = {31, 513, 2000}});
}
