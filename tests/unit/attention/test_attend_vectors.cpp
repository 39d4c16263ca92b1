// attend against outputs that NumPy computed in float64 from the formula (tests/reference/attention.py), for
// every storage type: the inputs are exact in all of them.
#include "../../support/draw.hpp"
#include "../../support/vectors.hpp"
#include "attention_reference.hpp"

#include <cmath>

using namespace attention_test;

namespace {

constexpr std::int32_t column_step = 9;

template <class T>
void check_vectors() {
    static const kvpolicy_test::vectors file = kvpolicy_test::vectors::load("attention.kvpv");
    const auto& cases = file.get<std::int32_t>("cases");
    for (std::int64_t n = 0; n < cases.shape[0]; ++n) {
        CAPTURE(n);
        const std::int32_t* row = cases.row(n);
        Problem<T> p({1, row[1], row[2], row[3], row[4], row[5], row[6]});
        const auto fill = [&](std::vector<T>& to, std::uint64_t array) {
            const std::vector<float> drawn =
                test::draw(3 * static_cast<std::uint64_t>(row[0]) + array, to.size(), 2.0f);
            for (std::size_t i = 0; i < to.size(); ++i) {
                to[i] = stored<T>(std::floor(static_cast<double>(drawn[i]) * 64.0) / 64.0);
            }
        };
        fill(p.q, 0);
        fill(p.k, 1);
        fill(p.v, 2);
        p.starts = {row[7]};
        const std::int64_t at = file.get<std::int32_t>("plane_offsets")[n];
        const auto plane = [&](auto& to, const auto& from) {
            to.assign(from.data() + at, from.data() + at + static_cast<std::int64_t>(p.planes()));
        };
        plane(p.expiry, file.get<std::int32_t>("expiry"));
        plane(p.position, file.get<std::int32_t>("position"));
        if (row[9] != 0) {
            plane(p.log_bias, file.get<float>("log_bias"));
            const std::int32_t* from = file.get<std::int32_t>("bias_from").row(n);
            p.bias_from.assign(from, from + p.shape.kv_heads);
        }
        p.attention = {file.get<float>("levels").row(n)[0], file.get<float>("levels").row(n)[1]};

        const double* out = file.get<double>("out").data() + file.get<std::int32_t>("out_offsets")[n];
        const double* lse = file.get<double>("lse").data() + file.get<std::int32_t>("lse_offsets")[n];
        for (const isa set : instruction_sets()) {
            const Result<T> result = run(host(1, set), p);
            const double* expected_out = out;
            const double* expected_lse = lse;
            std::int64_t wrong = 0, disagreements = 0;
            for (std::int32_t head = 0; head < p.shape.kv_heads * p.shape.group; ++head) {
                for (std::int32_t i = 0; i < p.shape.queries; ++i, ++expected_lse) {
                    // The loops' tolerance, the file's numbers; the two references agree far more closely.
                    const Expected e = expect(p, 0, head, i);
                    const auto sum = static_cast<double>(result.sum(0, head, i));
                    wrong += sum != *expected_lse && !(std::fabs(sum - *expected_lse) <= e.lse_tolerance);
                    disagreements += e.lse != *expected_lse && !(std::fabs(e.lse - *expected_lse) <= 1e-11);
                    for (std::int32_t c = 0; c < p.shape.head_dim_vo; c += column_step, ++expected_out) {
                        const double x = number(result.row(0, head, i)[c]);
                        wrong += !(std::fabs(x - *expected_out) <= e.out_tolerance);
                        disagreements +=
                            !(std::fabs(e.out[static_cast<std::size_t>(c)] - *expected_out) <= 1e-11);
                    }
                }
            }
            CHECK(wrong == 0);
            CHECK(disagreements == 0);
        }
    }
}

}  // namespace

TEST_CASE("NumPy's attention, bf16") { check_vectors<bf16>(); }
TEST_CASE("NumPy's attention, fp16") { check_vectors<fp16>(); }
TEST_CASE("NumPy's attention, fp32") { check_vectors<float>(); }
TEST_CASE("NumPy's attention, double") { check_vectors<double>(); }
