// The functions of gate losses, distillation, metrics and observed policies.
#include "binding.hpp"
#include "distill.hpp"
#include "gates.hpp"
#include "metrics.hpp"
#include "observed.hpp"

namespace kvpolicy::python {
namespace {

/// `numbers` is (scale, decided, target, straight_through).
GateLossArgs gate_loss_args(const Reader& read, const nb::tuple& policy, Object scores,
                            const nb::tuple& sequences, const nb::tuple& numbers, const nb::tuple& gate) {
    GateLossArgs args;
    args.policy = policy_from(policy);
    args.scores = read("scores", scores);
    args.sequences = read.sequences(sequences);
    args.scale = nb::cast<float>(numbers[0]);
    args.decided = nb::cast<bool>(numbers[1]);
    args.target = nb::cast<float>(numbers[2]);
    args.straight_through = nb::cast<bool>(numbers[3]);
    args.gate = gate_from(gate);
    return args;
}

void call_gate_loss(Stream stream, Device device, const std::string& kind, const nb::tuple& policy,
                    Object scores, const nb::tuple& sequences, const nb::tuple& numbers,
                    const nb::tuple& gate, Object lambda, Object total, Object d_scores, Object value) {
    const Reader read(device);
    GateLossArgs args = gate_loss_args(read, policy, scores, sequences, numbers, gate);
    args.kind = kind;
    args.lambda = read("weights", lambda), args.total = read("total", total);
    args.d_scores = read("d_scores", d_scores), args.value = read("value", value);
    run(stream, device, [&](const Context& ctx, const workspace_view* view) {
        return with_type(score_types{}, args.scores,
                         [&]<class Real>() { return gate_loss<Real>(ctx, args, view); });
    });
}

void call_eviction_sums(Stream stream, Device device, const nb::tuple& policy, Object scores,
                        const nb::tuple& sequences, const nb::tuple& numbers, const nb::tuple& gate,
                        Object value) {
    const Reader read(device);
    GateLossArgs args = gate_loss_args(read, policy, scores, sequences, numbers, gate);
    args.value = read("value", value);
    run(stream, device, [&](const Context& ctx, const workspace_view* view) {
        return with_type(score_types{}, args.scores,
                         [&]<class Real>() { return eviction_sums<Real>(ctx, args, view); });
    });
}

void call_retention_counts(Stream stream, Device device, const nb::tuple& policy, Object scores,
                           const nb::tuple& sequences, bool decided, Object counts) {
    const Reader read(device);
    const RetentionArgs args{policy_from(policy), read("scores", scores), read.sequences(sequences), decided,
                             read("counts", counts)};
    run(stream, device, [&](const Context& ctx, const workspace_view* view) {
        return with_type(score_types{}, args.scores,
                         [&]<class Real>() { return retention_counts<Real>(ctx, args, view); });
    });
}

void call_straight_through_values(Stream stream, Device device, const nb::tuple& policy, Object scores,
                                  Object v, Object d_v, const nb::tuple& sequences, bool decided,
                                  Object d_scores) {
    const Reader read(device);
    const StraightThroughArgs args{policy_from(policy),       read("scores", scores),    read("v", v),
                                   read("d_v", d_v),          read.sequences(sequences), decided,
                                   read("d_scores", d_scores)};
    run(stream, device, [&](const Context& ctx, const workspace_view* view) {
        return with_type(scorer_types{}, args.v,
                         [&]<class T>() { return straight_through_values<T>(ctx, args, view); });
    });
}

void call_top_logits(Stream stream, Device device, Object logits, const nb::tuple& sequences, Object values,
                     Object indices) {
    const Reader read(device);
    const TopLogitsArgs args{read("logits", logits), read.sequences(sequences), read("values", values),
                             read("indices", indices)};
    run(stream, device, [&](const Context& ctx, const workspace_view* view) {
        return with_type(distill_types{}, args.logits,
                         [&]<class T>() { return top_logits<T>(ctx, args, view); });
    });
}

/// `numbers` is (top, temperature, reverse, scale, over_all).
void call_distill(Stream stream, Device device, const std::string& kind, Object teacher, Object student,
                  Object indices, const nb::tuple& sequences, const nb::tuple& numbers, Object d_student,
                  Object value) {
    const Reader read(device);
    const DistillArgs args{kind,
                           read("teacher", teacher),
                           read("student", student),
                           read("indices", indices),
                           read.sequences(sequences),
                           nb::cast<std::int32_t>(numbers[0]),
                           nb::cast<float>(numbers[1]),
                           nb::cast<bool>(numbers[2]),
                           nb::cast<float>(numbers[3]),
                           nb::cast<bool>(numbers[4]),
                           read("d_student", d_student),
                           read("value", value)};
    run(stream, device, [&](const Context& ctx, const workspace_view* view) {
        return with_type(distill_types{}, args.student,
                         [&]<class T>() { return distill<T>(ctx, args, view); });
    });
}

void call_metric(Stream stream, Device device, const std::string& kind, const nb::tuple& policy,
                 Object expiry, Object second, const nb::tuple& sequences, Object out) {
    const Reader read(device);
    const MetricArgs args{kind,
                          policy_from(policy),
                          read("expiry", expiry),
                          read("student", second),
                          read.sequences(sequences),
                          read("out", out)};
    run(stream, device,
        [&](const Context& ctx, const workspace_view* view) { return metric(ctx, args, view); });
}

void call_received_mass(Stream stream, Device device, Object q, Object k, Object expiry,
                        const nb::tuple& sequences, float sm_scale, float logits_soft_cap,
                        std::int32_t queries, bool largest, Object mass) {
    const Reader read(device);
    const ReceivedMassArgs args{read("q", q),
                                read("k", k),
                                read("expiry", expiry),
                                read.sequences(sequences),
                                {sm_scale, logits_soft_cap},
                                queries,
                                largest,
                                read("mass", mass)};
    run(stream, device, [&](const Context& ctx, const workspace_view* view) {
        return with_type(attention_types{}, args.q,
                         [&]<class T>() { return received_mass<T>(ctx, args, view); });
    });
}

/// `numbers` is (chunk, largest, whole_layer, pool, pool_largest, prompt).
void call_observed_mask(Stream stream, Device device, const nb::tuple& policy, const nb::tuple& numbers,
                        Object q, Object k, const nb::tuple& sequences, float sm_scale, float logits_soft_cap,
                        Object expiry) {
    const Reader read(device);
    const auto whole = [&](std::size_t i) { return nb::cast<std::int32_t>(numbers[i]); };
    const auto is = [&](std::size_t i) { return nb::cast<bool>(numbers[i]); };
    const ObservedMaskArgs args{policy_from(policy),
                                whole(0),
                                is(1),
                                is(2),
                                whole(3),
                                is(4),
                                whole(5),
                                read("q", q),
                                read("k", k),
                                read.sequences(sequences),
                                {sm_scale, logits_soft_cap},
                                read("expiry", expiry)};
    run(stream, device, [&](const Context& ctx, const workspace_view* view) {
        return with_type(attention_types{}, args.q,
                         [&]<class T>() { return observed_mask<T>(ctx, args, view); });
    });
}

}  // namespace

void bind_training(nb::module_& m) {
    add(m, "gate_loss", call_gate_loss);
    add(m, "eviction_sums", call_eviction_sums);
    add(m, "retention_counts", call_retention_counts);
    add(m, "straight_through_values", call_straight_through_values);
    add(m, "top_logits", call_top_logits);
    add(m, "distill", call_distill);
    add(m, "metric", call_metric);
    add(m, "received_mass", call_received_mass);
    add(m, "observed_mask", call_observed_mask);
}

}  // namespace kvpolicy::python
