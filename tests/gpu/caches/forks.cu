// Random lives of sequences in DualCaches whose forks share pages: budgets of 0, of some entries and without
// a limit by head, and beside keys that a keep part holds.
#include "random_lives.hpp"

TEST_CASE("few calls") {
    test::live_on_device<test::life::budgets>(1, 20);
    test::live_on_device<test::life::kept>(1, 20);
}

TEST_CASE("budgets") { test::live_on_device<test::life::budgets>(8, 60); }

TEST_CASE("keep parts") { test::live_on_device<test::life::kept>(8, 60); }
