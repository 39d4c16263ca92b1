// Random lives of sequences in DualCaches whose pages no fork shares, since entries of any budget are written
// again: an observed policy whose entries grow with steps, and eviction over all heads.
#include "random_lives.hpp"

TEST_CASE("few calls") {
    test::live_on_device<test::life::snapkv>(1, 20);
    test::live_on_device<test::life::evicted>(1, 20);
}

TEST_CASE("SnapKV") { test::live_on_device<test::life::snapkv>(8, 60); }

TEST_CASE("eviction over all heads") { test::live_on_device<test::life::evicted>(8, 60); }
