// Attention calls as data: the same case runs on the host in double and on the device on every path,
// and is compared.
#pragma once

#include <kvpolicy/attention/attend.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace test {

using namespace kvpolicy;

/// One segment's numbers besides its tensors; empty vectors are not given. Planes are [B][Hkv][rows].
struct KeyNumbers {
    std::int32_t rows = 0;
    std::int32_t first = 0;
    std::vector<std::int32_t> position;
    std::vector<std::int32_t> lengths;
    std::vector<expiry_t> expiry;
    std::vector<float> log_bias;
};

struct AttendCase {
    std::string what;
    std::int32_t batch = 1, kv_heads = 1, group = 1, queries = 1, head_dim_qk = 64, head_dim_vo = 64;
    bool by_token = false;  // [B, S, H, D] in memory, rows padded by 8 elements, rather than [B, H, S, D]
    float scale_q = 1.0f;   // of the random queries
    AttentionParams attention;
    KeyNumbers past;
    KeyNumbers self;  // rows = 0: one segment
    std::vector<std::int32_t> lengths, starts, edges, bias_from;
    bool nan_beyond = false;  // rows that nobody may read hold NaN
    unsigned spoilt = 0;      // of so many values one is NaN or infinite in some columns, whoever sees it

    [[nodiscard]] std::size_t planes() const {
        return static_cast<std::size_t>(batch) * static_cast<std::size_t>(kv_heads);
    }
    [[nodiscard]] std::int32_t heads() const { return kv_heads * group; }
};

/// The tensors of a case, in the case's layout.
template <class T>
struct AttendTensors {
    std::vector<T> q, k, v, self_k, self_v;
};

template <class T>
rows_view<T> rows_of(const AttendCase& c, T* data, std::int32_t heads, std::int32_t length,
                     std::int32_t dim) {
    if (!c.by_token) {
        return view_bhsd(data, c.batch, heads, length, dim);
    }
    const std::int64_t row = dim + 8;
    return {data, c.batch, heads, length, dim, row * heads * length, row, row * heads};
}
inline std::size_t size_of(const AttendCase& c, std::int32_t heads, std::int32_t length, std::int32_t dim) {
    return static_cast<std::size_t>(c.batch) * static_cast<std::size_t>(heads) *
           static_cast<std::size_t>(length) * static_cast<std::size_t>(dim + (c.by_token ? 8 : 0));
}

/// Outputs; what the call did not write holds 0xa5 in every byte.
template <class T>
struct AttendResult {
    std::vector<T> out;
    std::vector<float> lse;
};

/// How the device goes about it.
struct AttendWay {
    bool scan = false, gather = false, portable = false, boxes = true, count = false;
    kvpolicy::attend_tiles tiles = kvpolicy::attend_tiles::automatic;
};

/// One call on the device. Defined in device.cuh, instantiated for every storage type.
template <class T>
AttendResult<T> attend_on_device(const AttendCase& c, const AttendTensors<T>& tensors, const AttendWay& way,
                                 int repeats = 1);

/// Random tensors for a case.
template <class T>
AttendTensors<T> random_tensors(const AttendCase& c, unsigned seed);

/// Runs the case on every path with this storage type, and checks each against the host in double.
template <class T>
void check_attend(const AttendCase& c, unsigned seed = 1);

/// Lifetimes of a window and of one key of `every` that is kept for up to `most` further queries.
std::vector<expiry_t> policy_lifetimes(std::size_t planes, std::int32_t rows, std::int32_t window,
                                       unsigned every, unsigned most, unsigned seed);

}  // namespace test
