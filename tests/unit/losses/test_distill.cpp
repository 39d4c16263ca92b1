// Distillation losses against formulas written out in double, and against differences.
#include <kvpolicy/losses/distill.hpp>

#include "../../support/cases.hpp"
#include "../../support/differences.hpp"
#include "../../support/loss_value.hpp"
#include "../../support/refusal.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

using namespace kvpolicy;

namespace {

constexpr std::int32_t vocabulary = 37;

struct Inputs {
    std::vector<std::int32_t> lengths{19, 5};
    test::Tensor<double> teacher{2, 1, 19, vocabulary}, student{2, 1, 19, vocabulary};
    test::Tensor<double> d{2, 1, 19, vocabulary};
    explicit Inputs(unsigned seed) {
        std::mt19937 generator(seed);
        teacher.fill_normal(generator, 2.0f);
        student.fill_normal(generator, 2.0f);
        d.fill(-5.0f);
    }
    [[nodiscard]] Sequences sequences() const {
        return {.batch = 2, .length = 19, .lengths = lengths.data()};
    }
    [[nodiscard]] rows_view<const double> of_teacher() const { return teacher.view(); }
    [[nodiscard]] rows_view<const double> of_student() const { return student.view(); }
};

LossValue distill(const host& ctx, const TopDistillation& loss, Inputs& in) {
    test::Workspace workspace(loss.workspace_bytes(ctx, in.of_teacher(), in.sequences()));
    return test::value_of([&](auto* into) {
        loss(ctx, in.of_teacher(), in.of_student(), in.sequences(), in.d.view(), into, workspace);
    });
}

/// KL of one token, with the set found by sorting.
double reference(const TopDistillation& loss, const double* teacher, const double* student) {
    std::vector<std::int32_t> order(vocabulary);
    for (std::int32_t i = 0; i < vocabulary; ++i) {
        order[static_cast<std::size_t>(i)] = i;
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int32_t a, std::int32_t b) { return teacher[a] > teacher[b]; });
    order.resize(static_cast<std::size_t>(std::min(loss.top, vocabulary)));
    const double tau = static_cast<double>(loss.temperature);
    double p_sum = 0.0, s_sum = 0.0, value = 0.0;
    for (const std::int32_t i : order) {
        p_sum += std::exp(teacher[i] / tau);
        s_sum += std::exp(student[i] / tau);
    }
    if (loss.over == student_softmax::all) {
        s_sum = 0.0;
        for (std::int32_t i = 0; i < vocabulary; ++i) {
            s_sum += std::exp(student[i] / tau);
        }
    }
    for (const std::int32_t i : order) {
        const double p = std::exp(teacher[i] / tau) / p_sum, s = std::exp(student[i] / tau) / s_sum;
        value += loss.reverse ? s * std::log(s / p) : p * std::log(p / s);
    }
    return value;
}

}  // namespace

TEST_CASE("KL over the teacher's top logits") {
    const host ctx{2};
    for (const TopDistillation loss :
         {TopDistillation{}, TopDistillation{8, 1.0f, false, 1.0f}, TopDistillation{8, 2.0f, true, 0.5f},
          TopDistillation{1, 1.0f, false, 1.0f}, TopDistillation{37, 0.5f, true, 1.0f},
          TopDistillation{8, 2.0f, false, 0.5f, student_softmax::all},
          TopDistillation{37, 1.0f, false, 1.0f, student_softmax::all}}) {
        CAPTURE(loss.top);
        Inputs in(static_cast<unsigned>(loss.top));
        const LossValue got = distill(ctx, loss, in);
        CHECK(got.count == 24);
        double expected = 0.0;
        for (std::int32_t b = 0; b < 2; ++b) {
            for (std::int32_t t = 0; t < in.lengths[static_cast<std::size_t>(b)]; ++t) {
                expected +=
                    reference(loss, in.teacher.view().row(b, 0, t), in.student.view().row(b, 0, t)) / 24.0;
            }
        }
        expected *= static_cast<double>(loss.scale);
        CHECK(std::abs(got.value - expected) < 1e-12);
        const test::Tensor<double> d = in.d;
        double scale = 0.0;
        for (const double x : d.data) {
            scale = std::max(scale, x == -5.0 ? 0.0 : std::abs(x));
        }
        for (std::int32_t t = 0; t < 19; t += 3) {
            for (std::int32_t i = 0; i < vocabulary; ++i) {
                double& x = in.student.view().row(0, 0, t)[i];
                const double slope = test::difference(
                    x, 1e-2, [&](double to) { x = to; }, [&] { return distill(ctx, loss, in).value; });
                CHECK(test::relative(d.view().row(0, 0, t)[i], slope, std::max(scale, 1e-6)) < 1e-6);
            }
        }
        CHECK(d.view().row(1, 0, 5)[0] == -5.0);  // beyond the length
    }
}

TEST_CASE("a student's mass outside the set counts with its softmax over all logits") {
    double teacher[] = {3.0, 2.0, -5.0, -5.0}, student[] = {3.0, 2.0, 9.0, 9.0}, d[4];
    const auto loss_of = [&](const TopDistillation& loss) {
        const Sequences one{.batch = 1, .length = 1};
        const auto of_teacher = view_bhsd<const double>(teacher, 1, 1, 1, 4);
        test::Workspace workspace(loss.workspace_bytes(host{1}, of_teacher, one));
        return test::value_of([&](auto* into) {
                   loss(host{1}, of_teacher, view_bhsd<const double>(student, 1, 1, 1, 4), one,
                        view_bhsd(d, 1, 1, 1, 4), into, workspace);
               })
            .value;
    };
    TopDistillation loss{.top = 2};
    CHECK(std::abs(loss_of(loss)) < 1e-12);
    CHECK(std::abs(d[2]) + std::abs(d[3]) == 0.0);
    loss.over = student_softmax::all;
    const double inside = std::exp(3.0) + std::exp(2.0), all = inside + 2.0 * std::exp(9.0);
    CHECK(std::abs(loss_of(loss) - std::log(all / inside)) < 1e-12);  // 6.387
    for (int i = 0; i < 4; ++i) {
        const double p = i < 2 ? std::exp(teacher[i]) / inside : 0.0;
        CHECK(std::abs(d[i] - (std::exp(student[i]) / all - p)) < 1e-12);
    }
    loss.reverse = true;
    CHECK_REFUSED(loss_of(loss),
                  "reverse: true is not allowed; it must be false where the student's softmax "
                  "is over all logits");
    student[3] = std::nan("");
    loss.reverse = false;
    CHECK_REFUSED(loss_of(loss), "student[0][0][0][3]: NaN");
}

TEST_CASE("stored top logits give the same loss, ties by index, fp32 close to double") {
    const host ctx{2};
    Inputs in(3);
    for (std::int32_t i = 0; i < vocabulary; ++i) {
        in.teacher.view().row(0, 0, 2)[i] = 1.0;
    }
    const TopDistillation loss{8, 1.0f, false, 1.0f};
    const LossValue expected = distill(ctx, loss, in);
    const test::Tensor<double> d = in.d;
    test::Tensor<double> values(2, 1, 19, 8);
    test::Tensor<std::int32_t> indices(2, 1, 19, 8);
    test::Workspace workspace(top_logits_workspace_bytes(ctx, vocabulary));
    top_logits<double>(ctx, in.of_teacher(), in.sequences(), values.view(), indices.view(), workspace);
    for (std::int32_t i = 0; i < 8; ++i) {
        CHECK(indices.view().row(0, 0, 2)[i] == i);
    }
    const test::Tensor<double>& stored = values;
    const test::Tensor<std::int32_t>& at = indices;
    const LossValue got = test::value_of([&](auto* into) {
        loss(ctx, stored.view(), at.view(), in.of_student(), in.sequences(), in.d.view(), into, {});
    });
    CHECK(got.value == expected.value);
    CHECK(in.d.data == d.data);
    test::Tensor<float> teacher(2, 1, 19, vocabulary), student(2, 1, 19, vocabulary),
        d32(2, 1, 19, vocabulary);
    for (std::size_t i = 0; i < teacher.data.size(); ++i) {
        teacher.data[i] = static_cast<float>(in.teacher.data[i]);  // drawn as floats
        student.data[i] = static_cast<float>(in.student.data[i]);
    }
    const test::Tensor<float>&t32 = teacher, &s32 = student;
    test::Workspace more(loss.workspace_bytes(ctx, t32.view(), in.sequences()));
    CHECK(test::value_of([&](auto* into) {
              loss(ctx, t32.view(), s32.view(), in.sequences(), d32.view(), into, more);
          }).value == expected.value);
    CHECK(std::abs(static_cast<double>(d32.data[5]) - d.data[5]) <= 0x1p-24 * std::abs(d.data[5]));

    indices.view().row(1, 0, 4)[3] = vocabulary;
    CHECK_REFUSED(test::value_of([&](auto* into) {
                      loss(ctx, stored.view(), at.view(), in.of_student(), in.sequences(), in.d.view(), into,
                           {});
                  }),
                  "indices[1][0][4][3]: 37");
}

TEST_CASE("cross-entropy and L2") {
    const host ctx{2};
    Inputs in(4);
    test::Plane<std::int32_t> labels(2, 1, 19, -1);
    for (std::int32_t t = 0; t < 19; t += 2) {
        labels.at(0, 0, t) = (t * 7) % vocabulary;
    }
    labels.at(1, 0, 0) = 36;
    const test::Plane<std::int32_t>& wanted = labels;
    const auto entropy = [&] {
        return test::value_of([&](auto* into) {
            CrossEntropy{0.5f}(ctx, wanted.view(), in.of_student(), in.sequences(), in.d.view(), into, {});
        });
    };
    const auto l2 = [&] {
        return test::value_of([&](auto* into) {
            L2Distillation{3.0f}(ctx, in.of_teacher(), in.of_student(), in.sequences(), in.d.view(), into,
                                 {});
        });
    };
    CHECK(entropy().count == 11);
    CHECK(l2().count == 24);
    // A row's loss has no position, so a chunk's start changes nothing.
    static constexpr std::int32_t starts[] = {40, 7};
    Sequences chunk = in.sequences();
    chunk.starts = starts;
    CHECK(test::value_of([&](auto* into) {
              CrossEntropy{0.5f}(ctx, wanted.view(), in.of_student(), chunk, in.d.view(), into, {});
          }).value == entropy().value);
    CHECK(test::value_of([&](auto* into) {
              L2Distillation{3.0f}(ctx, in.of_teacher(), in.of_student(), chunk, in.d.view(), into, {});
          }).value == l2().value);
    double squares = 0.0;
    for (std::int32_t b = 0; b < 2; ++b) {
        for (std::int32_t t = 0; t < in.lengths[static_cast<std::size_t>(b)]; ++t) {
            for (std::int32_t i = 0; i < vocabulary; ++i) {
                const double off = in.student.view().row(b, 0, t)[i] - in.teacher.view().row(b, 0, t)[i];
                squares += off * off;
            }
        }
    }
    CHECK(l2().value == doctest::Approx(3.0 * squares / (24.0 * vocabulary)).epsilon(1e-12));
    for (const bool first : {true, false}) {
        const auto call = [&] { return first ? entropy().value : l2().value; };
        call();
        const test::Tensor<double> d = in.d;
        for (std::int32_t t = 0; t < 4; ++t) {
            for (std::int32_t i = 0; i < vocabulary; ++i) {
                double& x = in.student.view().row(0, 0, t)[i];
                const double slope = test::difference(
                    x, 1e-2, [&](double to) { x = to; }, call);
                CHECK(test::relative(d.view().row(0, 0, t)[i], slope, 0.01) < 1e-6);
            }
        }
    }
    labels.at(1, 0, 1) = vocabulary;
    CHECK_REFUSED(entropy(), "labels[1][0][1]: 37");
    labels.at(1, 0, 1) = -1;
    in.student.view().row(0, 0, 2)[9] = std::numeric_limits<double>::quiet_NaN();
    CHECK_REFUSED(entropy(), "student[0][0][2][9]: NaN");
    CHECK_REFUSED(l2(), "student[0][0][2]");
    CHECK_REFUSED(distill(ctx, TopDistillation{}, in), "student[0][0][2][9]: NaN");
    in.student.view().row(0, 0, 2)[9] = 0.0;
    in.teacher.view().row(1, 0, 3)[0] = std::numeric_limits<double>::quiet_NaN();
    CHECK_REFUSED(distill(ctx, TopDistillation{}, in), "teacher[1][0][3][0]: NaN");
    CHECK_REFUSED(distill(ctx, TopDistillation{0}, in), "top: 0");
    CHECK_REFUSED(top_logits_workspace_bytes(ctx, -1), "vocabulary: -1");
    CHECK_REFUSED(TopDistillation{}.workspace_bytes(
                      ctx, rows_view<const float>{nullptr, 1, 1, -1, 8, 0, 0, 0}, in.sequences()),
                  "teacher: 1 x 1 x -1");
    CHECK_REFUSED(distill(ctx, TopDistillation{4, 0.0f}, in), "temperature: 0");
    test::Tensor<double> narrow(2, 1, 19, 8);
    const test::Tensor<double>& other = narrow;
    CHECK_REFUSED(test::value_of([&](auto* into) {
                      L2Distillation{}(ctx, other.view(), in.of_student(), in.sequences(), in.d.view(), into,
                                       {});
                  }),
                  "teacher: 2 x 1 x 19 x 8");
    Inputs none(1);
    none.lengths = {0, 0};
    CHECK(distill(ctx, TopDistillation{}, none).count == 0);
    CHECK(distill(ctx, TopDistillation{}, none).value == 0.0);
}

TEST_CASE("with a status, NaN rows and bad indices are reported, and bad indices left out, as on a device") {
    const host ctx{2};
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    const Inputs good(6);
    Inputs in(6);
    std::uint32_t status[2] = {0, 0};
    const LossOptions options{.status = status};
    const auto reports = [&](std::uint32_t first, std::uint32_t second) {
        const bool as_expected = status[0] == first && status[1] == second;
        status[0] = status[1] = 0;
        return as_expected;
    };
    const auto same_row = [](const test::Tensor<double>& a, const test::Tensor<double>& b, std::int32_t batch,
                             std::int32_t t) {
        return std::equal(a.view().row(batch, 0, t), a.view().row(batch, 0, t) + vocabulary,
                          b.view().row(batch, 0, t));
    };
    const auto l2 = [&](Inputs& of) {
        return test::value_of([&](auto* into) {
            L2Distillation{}(ctx, of.of_teacher(), of.of_student(), of.sequences(), of.d.view(), into, {},
                             options);
        });
    };
    const auto kl = [&](Inputs& of) {
        const TopDistillation loss{.top = 8};
        test::Workspace workspace(loss.workspace_bytes(ctx, of.of_teacher(), of.sequences()));
        return test::value_of([&](auto* into) {
            loss(ctx, of.of_teacher(), of.of_student(), of.sequences(), of.d.view(), into, workspace,
                 options);
        });
    };
    Inputs plain = good;
    in.student.view().row(1, 0, 2)[3] = nan;
    in.student.view().row(1, 0, 9)[3] = nan;  // beyond the length
    l2(plain);
    CHECK(reports(0, 0));
    CHECK(std::isnan(l2(in).value));
    CHECK(reports(0, status_not_finite));
    CHECK(same_row(in.d, plain.d, 0, 4));
    CHECK(same_row(in.d, plain.d, 1, 3));
    in.student = good.student;
    in.student.view().row(0, 0, 2)[3] = in.teacher.view().row(0, 0, 2)[3] =
        std::numeric_limits<double>::infinity();
    CHECK(std::isnan(l2(in).value));
    CHECK(reports(status_not_finite, 0));

    // A teacher's NaN logit ranks last.
    in = good;
    in.teacher.view().row(0, 0, 2)[3] = nan;
    kl(plain);
    CHECK(reports(0, 0));
    CHECK(std::isfinite(kl(in).value));
    CHECK(reports(status_not_finite, 0));
    CHECK(same_row(in.d, plain.d, 0, 3));
    test::Tensor<double> values(2, 1, 19, vocabulary);
    std::vector<std::int32_t> memory(2 * 19 * vocabulary);
    const auto indices = view_bhsd(memory.data(), 2, 1, 19, vocabulary);
    const auto rank = [&] {
        test::Workspace workspace(top_logits_workspace_bytes(ctx, vocabulary));
        top_logits(ctx, in.of_teacher(), in.sequences(), values.view(), indices, workspace, options);
    };
    rank();
    CHECK(reports(status_not_finite, 0));
    CHECK(indices.row(0, 0, 2)[vocabulary - 1] == 3);

    // An index outside its row counts as if its logit were not stored.
    in = good;
    rank();
    CHECK(reports(0, 0));
    const auto stored = [&](std::int32_t count) {
        const test::Tensor<double>& all = values;
        rows_view<const double> some = all.view();
        rows_view<const std::int32_t> at = indices;
        some.dim = at.dim = count;
        return test::value_of([&](auto* into) {
            TopDistillation{}(ctx, some, at, in.of_student(), in.sequences(), in.d.view(), into, {}, options);
        });
    };
    stored(4);
    const test::Tensor<double> of_four = in.d;
    stored(5);
    const test::Tensor<double> of_five = in.d;
    CHECK(reports(0, 0));
    for (const std::int32_t bad : {-1, vocabulary}) {
        indices.row(1, 0, 1)[4] = bad;
        stored(5);
        CHECK(reports(0, status_bad_index));
        CHECK(same_row(in.d, of_four, 1, 1));
        CHECK(same_row(in.d, of_five, 1, 2));
    }

    // So does a label; the token has no gradient.
    test::Plane<std::int32_t> labels(2, 1, 19, 5);
    labels.at(0, 0, 3) = vocabulary, labels.at(1, 0, 1) = -2;
    const auto entropy = [&] {
        const test::Plane<std::int32_t>& wanted = labels;
        return test::value_of([&](auto* into) {
            CrossEntropy{}(ctx, wanted.view(), in.of_student(), in.sequences(), in.d.view(), into, {},
                           options);
        });
    };
    const LossValue without = entropy();
    CHECK(reports(status_bad_index, status_bad_index));
    CHECK(without.count == 22);
    CHECK(in.d.view().row(0, 0, 3)[5] == 0.0);
    labels.at(0, 0, 3) = labels.at(1, 0, 1) = -1;
    CHECK(entropy().value == without.value);
    CHECK(reports(0, 0));
    in.student.view().row(0, 0, 3)[0] = nan;  // no label: not read
    CHECK(entropy().value == without.value);
    in.student.view().row(0, 0, 4)[0] = nan;
    CHECK(std::isnan(entropy().value));
    CHECK(reports(status_not_finite, 0));
}
