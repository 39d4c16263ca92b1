// The oracle and the comparison.
//
// How far an output may be from the host's in double, both from the same 16-bit inputs. With u = 2^-9 the
// unit roundoff of bf16 (2^-12 of fp16), and A = sum p |v| the output that values without signs would have:
// weights are rounded to 16 bits before they meet the values, which moves the output by at most u A; the sum
// of weights is that of the unrounded ones; the output is rounded to 16 bits, by at most u |o| <= u A.
// So |error| <= 2 u A = 3.9e-3 A in bf16, and all else is fp32: exponentials to 2 ulp, sums of a few thousand
// terms, logits to about D/2 ulp of the largest partial sum. The bound that the library promises is 8e-3 A,
// twice that; where logits are large (scale_q), what fp32 makes of them is added. For fp32 inputs u is 2^-24.
#include "attend_case.hpp"

#include "../../../support/cases.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

namespace test {
namespace {

template <class T>
std::vector<double> to_double(const std::vector<T>& values) {
    std::vector<double> wide(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
        if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
            wide[i] = static_cast<double>(values[i]);
        } else {
            wide[i] = static_cast<double>(static_cast<float>(values[i]));
        }
    }
    return wide;
}

kv_view<double> keys_of(const AttendCase& c, const KeyNumbers& n, const std::vector<double>& k,
                        const std::vector<double>& v) {
    kv_view<double> all;
    all.k = rows_of<const double>(c, k.data(), c.kv_heads, n.rows, c.head_dim_qk);
    all.v = rows_of<const double>(c, v.data(), c.kv_heads, n.rows, c.head_dim_vo);
    const auto plane = [&](const auto& values) {
        return values.empty() ? plane_view<const std::remove_reference_t<decltype(values[0])>>{}
                              : view_bhs(values.data(), c.batch, c.kv_heads, n.rows);
    };
    all.position = plane(n.position);
    all.mask.expiry = plane(n.expiry);
    all.mask.log_bias = plane(n.log_bias);
    all.mask.bias_from = c.bias_from.empty() ? nullptr : c.bias_from.data();
    all.first = n.first;
    all.lengths = n.lengths.empty() ? nullptr : n.lengths.data();
    return all;
}

/// The host in double; `magnitude` with the values' absolute values.
AttendResult<double> host_ctx(const AttendCase& c, const AttendTensors<double>& t, bool magnitude) {
    static const host ctx(0);
    AttendTensors<double> tensors = t;
    if (magnitude) {
        for (std::vector<double>* v : {&tensors.v, &tensors.self_v}) {
            for (double& x : *v) {
                x = std::abs(x);
            }
        }
    }
    Sequences sequences;
    sequences.batch = c.batch;
    sequences.length = c.queries;
    sequences.lengths = c.lengths.empty() ? nullptr : c.lengths.data();
    sequences.starts = c.starts.empty() ? nullptr : c.starts.data();
    sequences.cu_seqlens = c.edges.empty() ? nullptr : c.edges.data();
    sequences.segments = c.edges.empty() ? 0 : static_cast<std::int32_t>(c.edges.size()) - 1;
    const auto q = rows_of<const double>(c, tensors.q.data(), c.heads(), c.queries, c.head_dim_qk);
    const kv_view<double> past = keys_of(c, c.past, tensors.k, tensors.v);
    const kv_view<double> self = keys_of(c, c.self, tensors.self_k, tensors.self_v);
    AttendResult<double> result;
    result.out.assign(size_of(c, c.heads(), c.queries, c.head_dim_vo), 0.0);
    result.lse.assign(static_cast<std::size_t>(c.batch) * static_cast<std::size_t>(c.heads()) *
                          static_cast<std::size_t>(c.queries),
                      0.0f);
    const auto out = rows_of(c, result.out.data(), c.heads(), c.queries, c.head_dim_vo);
    const auto lse = view_bhs(result.lse.data(), c.batch, c.heads(), c.queries);
    if (c.self.rows != 0) {
        Workspace workspace(attend_workspace_bytes<double>(ctx, c.attention, q, past, self, sequences));
        attend<double>(ctx, c.attention, q, past, self, sequences, out, lse, workspace);
    } else {
        Workspace workspace(attend_workspace_bytes<double>(ctx, c.attention, q, past, sequences));
        attend<double>(ctx, c.attention, q, past, sequences, out, lse, workspace);
    }
    return result;
}

template <class T>
bool untouched(const T& value) {
    unsigned char bytes[sizeof(T)];
    std::memcpy(bytes, &value, sizeof(T));
    return std::all_of(bytes, bytes + sizeof(T), [](unsigned char byte) { return byte == 0xa5; });
}

template <class T>
constexpr double tolerance() {
    return std::is_same_v<T, bf16>    ? 8e-3
           : std::is_same_v<T, fp16>  ? 1e-3
           : std::is_same_v<T, float> ? 2e-6
                                      : 1e-12;
}

template <class T>
void compare(const AttendCase& c, const AttendResult<T>& got, const AttendResult<double>& wanted,
             const AttendResult<double>& magnitude, const std::string& what) {
    const auto out = rows_of<const T>(c, got.out.data(), c.heads(), c.queries, c.head_dim_vo);
    const auto reference = rows_of<const double>(c, wanted.out.data(), c.heads(), c.queries, c.head_dim_vo);
    const auto size = rows_of<const double>(c, magnitude.out.data(), c.heads(), c.queries, c.head_dim_vo);
    std::int64_t wrong = 0, wrong_lse = 0, dirty = 0;
    std::string first, first_lse;
    double worst = 0.0;
    for (std::int32_t b = 0; b < c.batch; ++b) {
        const std::int32_t length = c.lengths.empty() ? c.queries : c.lengths[static_cast<std::size_t>(b)];
        for (std::int32_t h = 0; h < c.heads(); ++h) {
            for (std::int32_t i = 0; i < c.queries; ++i) {
                const auto at = (static_cast<std::size_t>(b) * static_cast<std::size_t>(c.heads()) +
                                 static_cast<std::size_t>(h)) *
                                    static_cast<std::size_t>(c.queries) +
                                static_cast<std::size_t>(i);
                const std::string place =
                    "b " + std::to_string(b) + " h " + std::to_string(h) + " q " + std::to_string(i);
                if (i >= length) {
                    dirty += untouched(got.lse[at]) ? 0 : 1;
                    for (std::int32_t d = 0; d < c.head_dim_vo; ++d) {
                        dirty += untouched(out.row(b, h, i)[d]) ? 0 : 1;
                    }
                    continue;
                }
                const double lse = wanted.lse[at];
                // The logits' own fp32 rounding, which the weights feel.
                const double large = std::isfinite(lse) ? std::ldexp(std::abs(lse), -21) : 0.0;
                const double lse_error = std::abs(static_cast<double>(got.lse[at]) - lse);
                const bool lse_ok = std::isinf(lse) ? static_cast<double>(got.lse[at]) == lse
                                                    : lse_error <= 1e-3 + std::ldexp(std::abs(lse), -21);
                if (!lse_ok && wrong_lse++ == 0) {
                    first_lse =
                        place + ": " + std::to_string(got.lse[at]) + " instead of " + std::to_string(lse);
                }
                for (std::int32_t d = 0; d < c.head_dim_vo; ++d) {
                    const double value = to_double(std::vector<T>{out.row(b, h, i)[d]})[0];
                    const double error = std::abs(value - reference.row(b, h, i)[d]);
                    const double scale = size.row(b, h, i)[d];
                    const double bound = (tolerance<T>() + large) * scale +
                                         (std::is_same_v<T, fp16> ? std::ldexp(1.0, -25) : 1e-30);
                    if (!std::isfinite(reference.row(b, h, i)[d])) {  // it sees a spoilt value
                        if (std::isfinite(value) && wrong++ == 0) {
                            first = place + " d " + std::to_string(d) + ": " + std::to_string(value) +
                                    " though it sees a value that is not finite";
                        }
                        continue;
                    }
                    worst = std::max(worst, scale > 0.0 ? error / scale : 0.0);
                    if (!(error <= bound) && wrong++ == 0) {
                        first = place + " d " + std::to_string(d) + ": " + std::to_string(value) +
                                " instead of " + std::to_string(reference.row(b, h, i)[d]) + ", size " +
                                std::to_string(scale);
                    }
                }
            }
        }
    }
    CHECK_MESSAGE(wrong == 0, what, ": ", wrong, " outputs; the first ", first, "; worst ", worst);
    CHECK_MESSAGE(wrong_lse == 0, what, ": ", wrong_lse, " lse; the first ", first_lse);
    CHECK_MESSAGE(dirty == 0, what, ": ", dirty, " numbers beyond the lengths written");
}

}  // namespace

std::vector<expiry_t> policy_lifetimes(std::size_t planes, std::int32_t rows, std::int32_t window,
                                       unsigned every, unsigned most, unsigned seed) {
    std::mt19937 generator(seed);
    std::vector<expiry_t> expiry;
    for (std::size_t p = 0; p < planes; ++p) {
        for (std::int32_t t = 0; t < rows; ++t) {
            const bool sink = t < 4;
            const bool kept = every != 0 && generator() % every == 0;
            expiry.push_back(
                sink ? never : t + window + (kept ? static_cast<std::int32_t>(generator() % (most + 1)) : 0));
        }
    }
    return expiry;
}

template <class T>
AttendTensors<T> random_tensors(const AttendCase& c, unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::size_t count, float scale) {
        std::vector<T> values(count);
        for (T& x : values) {
            x = static_cast<T>(normal(generator) * scale);
        }
        return values;
    };
    AttendTensors<T> tensors;
    tensors.q = fill(size_of(c, c.heads(), c.queries, c.head_dim_qk), c.scale_q);
    tensors.k = fill(size_of(c, c.kv_heads, c.past.rows, c.head_dim_qk), 1.0f);
    tensors.v = fill(size_of(c, c.kv_heads, c.past.rows, c.head_dim_vo), 1.0f);
    tensors.self_k = fill(size_of(c, c.kv_heads, c.self.rows, c.head_dim_qk), 1.0f);
    tensors.self_v = fill(size_of(c, c.kv_heads, c.self.rows, c.head_dim_vo), 1.0f);
    if (c.spoilt != 0) {
        const auto spoil = [&](std::vector<T>& data, std::int32_t count) {
            const auto rows = rows_of<T>(c, data.data(), c.kv_heads, count, c.head_dim_vo);
            for (std::int32_t b = 0; b < c.batch; ++b) {
                for (std::int32_t h = 0; h < c.kv_heads; ++h) {
                    for (std::int32_t t = 0; t < count; ++t) {
                        const float with = generator() % 2 == 0 ? std::nanf("") : INFINITY;
                        if (generator() % c.spoilt == 0) {
                            std::fill_n(rows.row(b, h, t) + generator() % 2, c.head_dim_vo / 2,
                                        static_cast<T>(with));
                        }
                    }
                }
            }
        };
        spoil(tensors.v, c.past.rows);
        spoil(tensors.self_v, c.self.rows);
    }
    if (c.nan_beyond) {
        // Rows that do not count, rows that have expired when they begin, and rows that a bias of -inf hides
        // from there on.
        const auto poison = [&](std::vector<T>& data, const KeyNumbers& n, std::int32_t dim, bool own) {
            const auto rows = rows_of<T>(c, data.data(), c.kv_heads, n.rows, dim);
            const std::vector<std::int32_t>& lengths = own ? c.lengths : n.lengths;
            for (std::int32_t b = 0; b < c.batch; ++b) {
                for (std::int32_t h = 0; h < c.kv_heads; ++h) {
                    for (std::int32_t t = 0; t < n.rows; ++t) {
                        const auto plane =
                            static_cast<std::size_t>(b) * static_cast<std::size_t>(c.kv_heads) +
                            static_cast<std::size_t>(h);
                        const std::size_t at =
                            plane * static_cast<std::size_t>(n.rows) + static_cast<std::size_t>(t);
                        const bool beyond = !lengths.empty() && t >= lengths[static_cast<std::size_t>(b)];
                        const bool dead = !n.expiry.empty() && n.position.empty() &&
                                          n.expiry[at] <= n.first + t && c.starts.empty();
                        const bool hidden =
                            !n.log_bias.empty() && std::isinf(n.log_bias[at]) &&
                            (c.bias_from.empty() || c.bias_from[static_cast<std::size_t>(h)] == 0);
                        if (beyond || dead || hidden) {
                            std::fill_n(rows.row(b, h, t), dim, static_cast<T>(std::nanf("")));
                        }
                    }
                }
            }
        };
        poison(tensors.k, c.past, c.head_dim_qk, false);
        poison(tensors.v, c.past, c.head_dim_vo, false);
        poison(tensors.self_k, c.self, c.head_dim_qk, true);
        poison(tensors.self_v, c.self, c.head_dim_vo, true);
    }
    return tensors;
}

template <class T>
void check_attend(const AttendCase& c, unsigned seed) {
    const AttendTensors<T> tensors = random_tensors<T>(c, seed);
    const AttendTensors<double> wide{to_double(tensors.q), to_double(tensors.k), to_double(tensors.v),
                                     to_double(tensors.self_k), to_double(tensors.self_v)};
    const AttendResult<double> wanted = host_ctx(c, wide, false);
    const AttendResult<double> magnitude = host_ctx(c, wide, true);
    const bool fast = std::is_same_v<T, bf16> || std::is_same_v<T, fp16>;
    for (int way = 0; way < (fast ? 7 : 1); ++way) {
        AttendWay how;
        how.portable = way % 2 != 0;
        how.gather = way != 2 && way != 3;
        how.scan = !how.gather;
        how.boxes = way != 4;
        how.count = way == 5;
        how.portable = how.portable && !how.count;
        how.tiles = way == 2 || way == 4 ? attend_tiles::mixed
                    : way == 5           ? attend_tiles::automatic
                    : way == 6           ? attend_tiles::narrow
                                         : attend_tiles::wide;
        const std::string name = c.what +
                                 (!fast          ? " (plain)"
                                  : how.portable ? " (portable, "
                                                 : " (hopper, ") +
                                 (!fast        ? ""
                                  : !how.boxes ? "gather, every row alone)"
                                  : how.count  ? "gather, boxes by what the plan counts)"
                                  : way == 6   ? "gather, narrow tiles)"
                                  : how.gather ? "gather)"
                                               : "scan)");
        compare(c, attend_on_device(c, tensors, how), wanted, magnitude, name);
    }
}

template AttendTensors<bf16> random_tensors(const AttendCase&, unsigned);
template AttendTensors<fp16> random_tensors(const AttendCase&, unsigned);
template AttendTensors<float> random_tensors(const AttendCase&, unsigned);
template AttendTensors<double> random_tensors(const AttendCase&, unsigned);
template void check_attend<bf16>(const AttendCase&, unsigned);
template void check_attend<fp16>(const AttendCase&, unsigned);
template void check_attend<float>(const AttendCase&, unsigned);
template void check_attend<double>(const AttendCase&, unsigned);

}  // namespace test
