// The parts of a selection's choice of pages, alone: more keys than a block looks at together, and bounds of
// numbers that are not finite.
#include <kvpolicy/caches/cuda/paged/agent_bound_stream.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/block_find_largest.cuh>

#include "../support/device.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

using namespace kvpolicy;
using namespace test;
namespace cb = kvpolicy::cuda_backend;

namespace {

constexpr int threads = 512;

template <class Key>
__global__ void __launch_bounds__(threads)
    choose(const Key* keys, std::int32_t count, std::int32_t wanted, std::int32_t* chosen) {
    __shared__ cb::find_memory<Key, threads> memory;
    cb::find_largest(memory, keys, count, wanted,
                     [&](std::int32_t slot, std::int32_t rank) { chosen[rank] = slot; });
}

template <class Key>
void check_choice(std::int32_t count, std::int32_t wanted, std::uint64_t kinds, std::mt19937_64& generator) {
    CAPTURE(count);
    CAPTURE(wanted);
    CAPTURE(kinds);
    std::vector<Key> keys(static_cast<std::size_t>(count));
    for (Key& key : keys) {
        const std::uint64_t x = generator();
        key = kinds == 0 ? static_cast<Key>(x) : static_cast<Key>(Key(0x3f800000) + x % kinds);
    }
    keys[keys.size() / 2] = ~Key(0);
    std::vector<std::int32_t> expected(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) {
        expected[i] = static_cast<std::int32_t>(i);
    }
    std::stable_sort(expected.begin(), expected.end(), [&](std::int32_t a, std::int32_t b) {
        return keys[static_cast<std::size_t>(a)] > keys[static_cast<std::size_t>(b)];
    });
    expected.resize(static_cast<std::size_t>(wanted));
    std::sort(expected.begin(), expected.end());
    const Device<Key> on_device(keys);
    const Device<std::int32_t> chosen(expected.size());
    choose<<<1, threads>>>(on_device.data(), count, wanted, chosen.data());
    CHECK(chosen.read() == expected);
}

/// Bounds of pages, one after the other.
template <class T>
struct PageRows {
    T* first;
    std::int32_t dim;
    __device__ T* bounds(std::int32_t page) const { return first + std::int64_t{page} * 2 * dim; }
};

template <class T>
__global__ void __launch_bounds__(32) bound(const float* queries, PageRows<T> rows, std::int32_t pages,
                                            std::int32_t dim, std::int32_t group, bool mean, float* bounds) {
    using Stream = cb::bound_stream<T>;
    unsigned char* const stages = cb::dynamic_shared();
    auto* const query = reinterpret_cast<float*>(stages + cb::bound_stages::warp_bytes);
    const auto given = [&](std::int32_t g, std::int32_t d) { return queries[g * dim + d]; };
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < Stream::query_numbers(group, dim); i += 32) {
        query[i] = Stream::query_number(i, group, dim, given);
    }
    __syncwarp();
    Stream(query, stages, dim, group)
        .run(rows, pages, static_cast<std::int32_t>(blockIdx.x), static_cast<std::int32_t>(gridDim.x), mean,
             [&](std::int32_t page, float x) { bounds[page] = x; });
}

template <class T>
void check_bounds(std::int32_t dim, std::int32_t group, std::int32_t pages, bool mean) {
    CAPTURE(dim);
    CAPTURE(group);
    CAPTURE(pages);
    CAPTURE(mean);
    std::mt19937 generator(static_cast<unsigned>(dim + group + pages));
    std::normal_distribution<float> normal;
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const auto some = [&] {
        const float strange[] = {infinity, -infinity, std::numeric_limits<float>::quiet_NaN(), 0.0f, -0.0f};
        return generator() % 900 == 0 ? strange[generator() % 5] : normal(generator);
    };
    std::vector<float> query(static_cast<std::size_t>(group * dim));
    std::vector<T> rows(static_cast<std::size_t>(pages * 2 * dim));
    std::vector<float> expected(static_cast<std::size_t>(pages));
    const auto of_query = [&](std::int32_t g, std::int32_t d) -> float& {
        return query[static_cast<std::size_t>(g * dim + d)];
    };
    for (std::int32_t g = 0; g < group; ++g) {
        for (std::int32_t d = 0; d < dim; ++d) {
            of_query(g, d) = d == 3 ? 0.0f : d == 5 ? -0.0f : normal(generator);
        }
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const std::size_t row = i / static_cast<std::size_t>(dim);
        const float x = some(), y = some();
        rows[i] = T(x);
        if (row % 2 != 0) {  // the high bound
            T& low = rows[i - static_cast<std::size_t>(dim)];
            rows[i] = static_cast<float>(low) > y ? low : T(y);
        }
    }
    for (std::int32_t page = 0; page < pages; ++page) {
        const T* const least = rows.data() + std::ptrdiff_t{page} * 2 * dim;
        float joined = 0.0f;
        for (std::int32_t g = 0; g < group; ++g) {
            float sum = 0.0f;
            for (std::int32_t d = 0; d < dim; ++d) {
                const volatile float a =
                    of_query(g, d) * static_cast<float>(least[d]);  // rounded before it is added
                const volatile float b = of_query(g, d) * static_cast<float>(least[dim + d]);
                const float x = a, y = b;
                sum += std::max(x, y);
            }
            joined = mean ? joined + sum : g == 0 ? sum : std::max(joined, sum);
        }
        expected[static_cast<std::size_t>(page)] = joined;
    }
    const Device<float> of_device(query), bounds(expected.size());
    const Device<T> row_memory(rows);
    const std::size_t shared =
        cb::bound_stages::warp_bytes +
        static_cast<std::size_t>(cb::bound_stream<T>::query_numbers(group, dim)) * sizeof(float);
    cb::allow_shared("bound", reinterpret_cast<const void*>(bound<T>), shared);
    bound<T><<<3, 32, shared>>>(of_device.data(), PageRows<T>{row_memory.data(), dim}, pages, dim, group,
                                mean, bounds.data());
    const std::vector<float> found = bounds.read();
    bool same = true;
    for (std::size_t i = 0; i < found.size(); ++i) {
        same = same && (found[i] == expected[i] || (found[i] != found[i] && expected[i] != expected[i]));
    }
    CHECK(same);
}

}  // namespace

TEST_CASE("the largest of many keys, of equal ones the first") {
    std::mt19937_64 generator(3);
    for (const std::int32_t count : {1, 2, 100, 4095, 4096, 4097, 9000, 20000}) {
        for (const std::uint64_t kinds : {0, 2, 5, 3000}) {
            for (const std::int32_t wanted : {1, count / 2, count - 1, count}) {
                if (wanted >= 1) {
                    check_choice<std::uint32_t>(count, wanted, kinds, generator);
                    check_choice<std::uint64_t>(count, wanted, kinds, generator);
                }
            }
        }
    }
}

TEST_CASE("bounds as the host finds them, whatever the numbers") {
    for (const std::int32_t dim : {8, 64, 72, 128, 256}) {
        for (const std::int32_t group : {1, 4, 7, 12}) {
            for (const std::int32_t pages : {1, 31, 32, 257}) {
                check_bounds<bf16>(dim, group, pages, group == 7);
                check_bounds<fp16>(dim, group, pages, group == 4);
            }
        }
    }
}
