// Losses of rows on the device against the host's: the same top logits, values and gradients to rounding.
#include <kvpolicy/losses/cuda/dispatch_distill.cuh>

#include "../../support/loss_value.hpp"
#include "../support/captured.hpp"
#include "../support/device.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

using namespace kvpolicy;
using test::Device;

namespace {

constexpr float untouched = -77.0f;

/// Rows in T, and as the host's floats.
template <class T>
struct Rows {
    std::int32_t batch, heads, length, dim;
    std::vector<T> data;
    std::vector<float> floats;

    Rows(std::int32_t b, std::int32_t h, std::int32_t s, std::int32_t n, unsigned seed, float scale = 3.0f)
        : batch(b), heads(h), length(s), dim(n), data(size()), floats(size()) {
        std::mt19937 generator(seed);
        std::normal_distribution<float> normal(0.0f, scale);
        for (std::size_t i = 0; i < size(); ++i) {
            set(i, normal(generator));
        }
    }
    void set(std::size_t i, float x) {
        data[i] = static_cast<T>(x);
        floats[i] = static_cast<float>(data[i]);
    }
    [[nodiscard]] std::size_t size() const {
        return static_cast<std::size_t>(batch * heads) * static_cast<std::size_t>(length) *
               static_cast<std::size_t>(dim);
    }
    template <class X>
    [[nodiscard]] rows_view<X> view(X* of) const {
        return view_bhsd(of, batch, heads, length, dim);
    }
};

template <class T>
void close(const Device<T>& d, const std::vector<float>& wanted, double near) {
    double largest = 0.0;
    for (const float x : wanted) {
        largest = x == untouched ? largest : std::max(largest, static_cast<double>(std::fabs(x)));
    }
    const double rounding = std::is_same_v<T, float> ? near : std::is_same_v<T, bf16> ? 0x1p-8 : 0x1p-10;
    const std::vector<T> got = d.read();
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        CAPTURE(i);
        const auto x = static_cast<double>(static_cast<float>(got[i])), y = static_cast<double>(wanted[i]);
        if (wanted[i] == untouched) {
            REQUIRE(x == static_cast<double>(static_cast<float>(static_cast<T>(untouched))));
        } else {
            // fp16 gradients this small lose bits: 2^-25 is half its step there.
            REQUIRE(std::fabs(x - y) <=
                    rounding * std::fabs(y) + near * largest + (std::is_same_v<T, fp16> ? 0x1p-25 : 0.0));
        }
    }
}

void same(const Device<LossValue>& got, const LossValue& wanted, double near) {
    const LossValue value = got.read()[0];
    CHECK(value.count == wanted.count);
    CHECK(std::fabs(value.value - wanted.value) <= near * (1e-3 + std::fabs(wanted.value)));
}

template <class T>
void check_top(std::int32_t length, std::int32_t vocabulary, std::int32_t top, float scale,
               std::vector<std::int32_t> lengths = {}) {
    CAPTURE(vocabulary);
    CAPTURE(top);
    const std::int32_t batch = lengths.empty() ? 1 : static_cast<std::int32_t>(lengths.size());
    const Rows<T> teacher(batch, 1, length, vocabulary, 1, scale),
        student(batch, 1, length, vocabulary, 2, scale);
    const Device<T> of_teacher(teacher.data), of_student(student.data);
    const Device<std::int32_t> of_lengths(lengths);
    const Sequences host_ctx{
        .batch = batch, .length = length, .lengths = lengths.empty() ? nullptr : lengths.data()};
    const Sequences on_gpu{
        .batch = batch, .length = length, .lengths = lengths.empty() ? nullptr : of_lengths.data()};
    const host host_context(1);
    const kvpolicy::cuda ctx{};
    const std::int32_t count = std::min(top, vocabulary);
    // The selection.
    {
        Rows<T> values(batch, 1, length, count, 3);
        std::vector<float> wanted(values.size(), untouched);
        std::vector<std::int32_t> wanted_index(values.size(), -9);
        std::vector<std::byte> memory(top_logits_workspace_bytes(host_context, vocabulary));
        top_logits<float>(host_context, teacher.view(teacher.floats.data()), host_ctx,
                          values.view(wanted.data()), values.view(wanted_index.data()),
                          {memory.data(), memory.size()});
        const Device<T> got(std::vector<T>(values.size(), static_cast<T>(untouched)));
        const Device<std::int32_t> index(std::vector<std::int32_t>(values.size(), -9));
        top_logits<T>(ctx, teacher.view(static_cast<const T*>(of_teacher.data())), on_gpu,
                      values.view(got.data()), values.view(index.data()), {});
        CHECK(index.read() == wanted_index);
        const std::vector<T> read = got.read();
        for (std::size_t i = 0; i < wanted.size(); ++i) {
            REQUIRE(static_cast<float>(read[i]) == static_cast<float>(static_cast<T>(wanted[i])));
        }
    }
    for (const TopDistillation loss :
         {TopDistillation{top, 1.0f, false, 1.0f}, TopDistillation{top, 2.5f, true, 0.5f},
          TopDistillation{top, 2.5f, false, 0.5f, student_softmax::all}}) {
        CAPTURE(loss.reverse);
        CAPTURE(loss.over == student_softmax::all);
        std::vector<float> wanted(student.size(), untouched);
        std::vector<std::byte> memory(
            loss.workspace_bytes(host_context, teacher.view(teacher.floats.data()), host_ctx));
        const LossValue value = test::value_of([&](auto* into) {
            loss(host_context, teacher.view(teacher.floats.data()), student.view(student.floats.data()),
                 host_ctx, student.view(wanted.data()), into, {memory.data(), memory.size()});
        });
        const Device<T> d(std::vector<T>(student.size(), static_cast<T>(untouched)));
        const Device<LossValue> result(1);
        const Device<std::uint32_t> status(std::vector<std::uint32_t>(static_cast<std::size_t>(batch), 0u));
        const auto rows = teacher.view(static_cast<const T*>(of_teacher.data()));
        const Device<unsigned char> workspace(loss.workspace_bytes(ctx, rows, on_gpu));
        loss(ctx, rows, student.view(static_cast<const T*>(of_student.data())), on_gpu,
             student.view(d.data()), result.data(), workspace, {.status = status.data()});
        same(result, value, 1e-11);
        close(d, wanted, 1e-7);
        CHECK(status.read() == std::vector<std::uint32_t>(static_cast<std::size_t>(batch), 0u));
    }
}

template <class T>
void check_cross_entropy(std::int32_t length, std::int32_t vocabulary) {
    CAPTURE(vocabulary);
    const Rows<T> student(2, 1, length, vocabulary, 4, 4.0f);
    std::vector<std::int32_t> labels(2 * static_cast<std::size_t>(length)), lengths{length, length / 3};
    for (std::size_t i = 0; i < labels.size(); ++i) {
        labels[i] =
            i % 5 == 2 ? -1 : static_cast<std::int32_t>(i * 7919 % static_cast<std::size_t>(vocabulary));
    }
    const Device<T> of_student(student.data), d(std::vector<T>(student.size(), static_cast<T>(untouched)));
    const Device<std::int32_t> of_labels(labels), of_lengths(lengths);
    const CrossEntropy loss{2.0f};
    std::vector<float> wanted(student.size(), untouched);
    const LossValue value = test::value_of([&](auto* into) {
        loss(host(1), view_bhs<const std::int32_t>(labels.data(), 2, 1, length),
             student.view(student.floats.data()),
             Sequences{.batch = 2, .length = length, .lengths = lengths.data()}, student.view(wanted.data()),
             into, {});
    });
    const kvpolicy::cuda ctx{};
    const Sequences sequences{.batch = 2, .length = length, .lengths = of_lengths.data()};
    const Device<unsigned char> workspace(
        loss.workspace_bytes(ctx, student.view(of_student.data()), sequences));
    const Device<LossValue> result(1);
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(2, 0u));
    loss(ctx, view_bhs<const std::int32_t>(of_labels.data(), 2, 1, length),
         student.view(static_cast<const T*>(of_student.data())), sequences, student.view(d.data()),
         result.data(), workspace, {.status = status.data()});
    same(result, value, 2e-7);
    close(d, wanted, 2e-6);
    CHECK(status.read() == std::vector<std::uint32_t>(2, 0u));
}

template <class T>
void check_l2(std::int32_t heads, std::int32_t length, std::int32_t dim) {
    const Rows<T> teacher(2, heads, length, dim, 5), student(2, heads, length, dim, 6);
    const Device<T> of_teacher(teacher.data), of_student(student.data),
        d(std::vector<T>(student.size(), static_cast<T>(untouched)));
    std::vector<std::int32_t> lengths{length - 1, length};
    const Device<std::int32_t> of_lengths(lengths);
    const L2Distillation loss{100.0f};
    std::vector<float> wanted(student.size(), untouched);
    const LossValue value = test::value_of([&](auto* into) {
        loss(host(1), teacher.view(teacher.floats.data()), student.view(student.floats.data()),
             Sequences{.batch = 2, .length = length, .lengths = lengths.data()}, student.view(wanted.data()),
             into, {});
    });
    const kvpolicy::cuda ctx{};
    const Sequences sequences{.batch = 2, .length = length, .lengths = of_lengths.data()};
    const Device<unsigned char> workspace(
        loss.workspace_bytes(ctx, student.view(of_student.data()), sequences));
    const Device<LossValue> result(1);
    loss(ctx, teacher.view(static_cast<const T*>(of_teacher.data())),
         student.view(static_cast<const T*>(of_student.data())), sequences, student.view(d.data()),
         result.data(), workspace);
    same(result, value, 1e-12);
    close(d, wanted, 1e-7);
}

}  // namespace

TEST_CASE("KL over the teacher's top logits and the logits themselves") {
    check_top<float>(5, 1000, 256, 3.0f);
    check_top<float>(3, 37, 256, 3.0f);  // fewer than top
    check_top<float>(3, 37, 1, 3.0f, {3, 2, 0});
    check_top<float>(2, 49152, 256, 5.0f, {2, 1});
    check_top<float>(2, 9000, 4096, 1.0f);
    check_top<bf16>(4, 2000, 256, 3.0f);  // many logits are equal
    check_top<bf16>(2, 700, 64, 0.0f);    // all are
    check_top<fp16>(3, 515, 100, 2.0f, {3, 1});
}

TEST_CASE("cross-entropy") {
    check_cross_entropy<float>(9, 700);
    check_cross_entropy<float>(4, 3);
    check_cross_entropy<bf16>(6, 49152);
    check_cross_entropy<fp16>(6, 257);
}

TEST_CASE("L2 of hidden states") {
    check_l2<float>(1, 7, 576);
    check_l2<bf16>(3, 5, 64);
    check_l2<fp16>(1, 4, 33);
}

TEST_CASE("infinite logits are the host's; NaN is told and so is what is outside a row") {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    Rows<float> student(2, 1, 2, 40, 8), teacher(2, 1, 2, 40, 9);
    for (std::size_t i = 0; i < 20; ++i) {
        student.set(i, -infinity);
        teacher.set(40 + i, -infinity);
    }
    std::vector<std::int32_t> labels{30, 39, 0, 5};
    const kvpolicy::cuda ctx{};
    const Sequences sequences{.batch = 2, .length = 2};
    const Device<LossValue> result(1);
    const auto plane = [](const std::int32_t* data) { return view_bhs(data, 2, 1, 2); };
    const auto entropy = [&](Device<std::uint32_t>& status, const Device<float>& d) {
        const Device<float> of_student(student.data);
        const Device<std::int32_t> of_labels(labels);
        const Device<unsigned char> workspace(
            CrossEntropy{}.workspace_bytes(ctx, student.view(of_student.data()), sequences));
        CrossEntropy{}(ctx, plane(of_labels.data()),
                       student.view(static_cast<const float*>(of_student.data())), sequences,
                       student.view(d.data()), result.data(), workspace, {.status = status.data()});
    };
    {
        std::vector<float> wanted(student.size());
        const LossValue value = test::value_of([&](auto* into) {
            CrossEntropy{}(host(1), plane(labels.data()), student.view(student.floats.data()), sequences,
                           student.view(wanted.data()), into, {});
        });
        Device<std::uint32_t> status(std::vector<std::uint32_t>(2, 0u));
        const Device<float> d(student.size());
        entropy(status, d);
        same(result, value, 2e-7);
        close(d, wanted, 2e-6);
    }
    {
        const TopDistillation loss{25};
        std::vector<float> wanted(student.size());
        std::vector<std::byte> memory(
            loss.workspace_bytes(host(1), teacher.view(teacher.floats.data()), sequences));
        const LossValue value = test::value_of([&](auto* into) {
            loss(host(1), teacher.view(teacher.floats.data()), student.view(student.floats.data()), sequences,
                 student.view(wanted.data()), into, {memory.data(), memory.size()});
        });
        const Device<float> of_student(student.data), of_teacher(teacher.data), d(student.size());
        const auto rows = teacher.view(static_cast<const float*>(of_teacher.data()));
        const Device<unsigned char> workspace(loss.workspace_bytes(ctx, rows, sequences));
        loss(ctx, rows, student.view(static_cast<const float*>(of_student.data())), sequences,
             student.view(d.data()), result.data(), workspace);
        const LossValue got = result.read()[0];
        CHECK(got.count == value.count);
        CHECK((got.value == value.value ||
               std::fabs(got.value - value.value) <= 1e-10 * std::fabs(value.value)));
    }
    student.set(85, std::numeric_limits<float>::quiet_NaN());
    labels[0] = 40, labels[1] = -2;
    Device<std::uint32_t> status(std::vector<std::uint32_t>(2, 0u));
    const Device<float> d(student.size());
    entropy(status, d);
    CHECK(status.read() == std::vector<std::uint32_t>{status_bad_index, status_not_finite});
    CHECK(result.read()[0].count == 2);
    CHECK(d.read()[3] == 0.0f);
}

namespace {

/// Captured with some rows, lengths and labels, replayed with others: what a call makes of those.
template <class Call>
void check_captured(const Rows<bf16>& first, const Rows<bf16>& second, const Call& call,
                    std::size_t workspace_bytes, const Device<bf16>& teacher, const Device<bf16>& student,
                    const Device<std::int32_t>& lengths, const Device<std::int32_t>& labels,
                    const Device<bf16>& d, const Device<LossValue>& value) {
    const Device<unsigned char> workspace(workspace_bytes);
    const test::Captured graph([&](const kvpolicy::cuda& ctx) { call(ctx, workspace); });
    for (const bool other : {true, false}) {
        CAPTURE(other);
        test::write(student, other ? first.data : second.data);
        test::write(teacher, other ? second.data : first.data);
        test::write(lengths, other ? std::vector<std::int32_t>{2, 5} : std::vector<std::int32_t>{5, 0});
        std::vector<std::int32_t> named(labels.size());
        for (std::size_t i = 0; i < named.size(); ++i) {
            named[i] = i % 3 == (other ? 1u : 2u) ? -1 : static_cast<std::int32_t>(i * 37 % 300);
        }
        test::write(labels, named);
        const std::vector<bf16> before(d.size(), static_cast<bf16>(untouched));
        test::write(d, before);
        test::poison(value);
        call(kvpolicy::cuda{}, workspace);
        const std::vector<bf16> wanted = d.read();
        const LossValue of_call = value.read()[0];
        CHECK(of_call.count > 0);
        test::write(d, before);
        test::poison(value);
        test::poison(workspace);
        graph.replay();
        const std::vector<bf16> got = d.read();
        CHECK(std::equal(got.begin(), got.end(), wanted.begin(),
                         [](bf16 x, bf16 y) { return x.bits == y.bits; }));
        CHECK(!std::equal(got.begin(), got.end(), before.begin(),
                          [](bf16 x, bf16 y) { return x.bits == y.bits; }));
        same(value, of_call, 1e-12);
    }
}

}  // namespace

TEST_CASE("captured losses serve other rows, lengths and labels") {
    const Rows<bf16> first(2, 1, 5, 300, 1), second(2, 1, 5, 300, 2);
    const Device<bf16> teacher(first.data), student(second.data), d(first.size()), values(10 * 64);
    const Device<std::int32_t> lengths(std::vector<std::int32_t>{3, 1}),
        labels(std::vector<std::int32_t>(10, 7)), indices(10 * 64);
    const Device<LossValue> value(1);
    const Sequences sequences{.batch = 2, .length = 5, .lengths = lengths.data()};
    const auto in = [&](const Device<bf16>& of) { return first.view(static_cast<const bf16*>(of.data())); };
    const auto out = first.view(d.data());
    const auto top = view_bhsd(values.data(), 2, 1, 5, 64);
    const auto places = view_bhsd(indices.data(), 2, 1, 5, 64);
    const kvpolicy::cuda ctx{};
    const auto check = [&](std::size_t bytes, const auto& call) {
        check_captured(first, second, call, bytes, teacher, student, lengths, labels, d, value);
    };
    const TopDistillation loss{64, 2.0f};
    check(loss.workspace_bytes(ctx, in(teacher), sequences),
          [&](const kvpolicy::cuda& by, workspace_view workspace) {
              loss(by, in(teacher), in(student), sequences, out, value.data(), workspace);
          });
    check(loss.workspace_bytes(ctx, top, places, sequences),
          [&](const kvpolicy::cuda& by, workspace_view workspace) {
              top_logits<bf16>(by, in(teacher), sequences, top, places, {});
              loss(by, top, places, in(student), sequences, out, value.data(), workspace);
          });
    check(CrossEntropy{}.workspace_bytes(ctx, in(student), sequences),
          [&](const kvpolicy::cuda& by, workspace_view workspace) {
              CrossEntropy{}(by, view_bhs<const std::int32_t>(labels.data(), 2, 1, 5), in(student), sequences,
                             out, value.data(), workspace);
          });
    check(L2Distillation{}.workspace_bytes(ctx, in(student), sequences),
          [&](const kvpolicy::cuda& by, workspace_view workspace) {
              L2Distillation{}(by, in(teacher), in(student), sequences, out, value.data(), workspace);
          });
}

TEST_CASE("refusals") {
    const Rows<float> rows(1, 1, 2, 5000, 1);
    const Device<float> of_rows(rows.data), d(rows.size());
    const Device<LossValue> result(1);
    const Device<unsigned char> workspace(1u << 20);
    const kvpolicy::cuda ctx{};
    const Sequences sequences{.batch = 1, .length = 2};
    const auto in = rows.view(static_cast<const float*>(of_rows.data()));
    const auto call = [&](const TopDistillation& loss, workspace_view scratch) {
        loss(ctx, in, in, sequences, rows.view(d.data()), result.data(), scratch);
    };
    CHECK_THROWS_WITH_AS(call({4097}, workspace), doctest::Contains("at most 4096"), invalid_argument);
    CHECK_THROWS_AS(call({0}, workspace), invalid_argument);
    CHECK_THROWS_AS(call({256, 0.0f}, workspace), invalid_argument);
    CHECK_THROWS_AS(call({256}, {workspace.data(), 100}), invalid_argument);
    CHECK_THROWS_AS(L2Distillation{}(ctx, in, in, Sequences{.batch = 1, .length = 3}, rows.view(d.data()),
                                     result.data(), workspace),
                    invalid_argument);
}
