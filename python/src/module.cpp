// The extension module _host or _cuda. kvpolicy/_native.py calls its functions (binding.hpp).
#include "binding.hpp"
#include "operators.hpp"

namespace kvpolicy::python {
namespace {

void call_build_mask(Stream stream, Device device, const nb::tuple& policy, Object scores,
                     const nb::tuple& sequences, Object expiry) {
    const Reader read(device);
    const MaskArgs args{policy_from(policy), read("scores", scores), read.sequences(sequences),
                        read("expiry", expiry)};
    run(stream, device,
        [&](const Context& ctx, const workspace_view* view) { return build_mask(ctx, args, view); });
}

void call_build_log_bias(Stream stream, Device device, const nb::tuple& policy, const nb::tuple& gate,
                         Object scores, const nb::tuple& sequences, Object expiry, Object log_bias) {
    const Reader read(device);
    LogBiasArgs args{policy_from(policy), gate_from(gate), read("scores", scores), read.sequences(sequences)};
    args.expiry = read("expiry", expiry);
    args.log_bias = read("log_bias", log_bias);
    run(stream, device,
        [&](const Context& ctx, const workspace_view* view) { return build_log_bias(ctx, args, view); });
}

void call_log_bias_backward(Stream stream, Device device, const nb::tuple& policy, const nb::tuple& gate,
                            Object scores, Object d_log_bias, const nb::tuple& sequences, Object d_scores) {
    const Reader read(device);
    LogBiasArgs args{policy_from(policy), gate_from(gate), read("scores", scores), read.sequences(sequences)};
    args.d_log_bias = read("d_log_bias", d_log_bias);
    args.d_scores = read("d_scores", d_scores);
    run(stream, device,
        [&](const Context& ctx, const workspace_view* view) { return log_bias_backward(ctx, args, view); });
}

/// `mask` is (expiry, log_bias, bias_from).
AttendArgs attend_args(const Reader& read, Object q, Object k, Object v, const nb::tuple& mask,
                       const nb::tuple& sequences, float sm_scale, float logits_soft_cap) {
    AttendArgs args;
    args.q = read("q", q), args.k = read("k", k), args.v = read("v", v);
    args.expiry = read("expiry", mask[0]);
    args.log_bias = read("log_bias", mask[1]);
    args.bias_from = read("bias_from", mask[2]);
    args.sequences = read.sequences(sequences);
    args.params = {sm_scale, logits_soft_cap};
    return args;
}

void call_attend(Stream stream, Device device, Object q, Object k, Object v, const nb::tuple& mask,
                 const nb::tuple& sequences, float sm_scale, float logits_soft_cap, Object out, Object lse) {
    const Reader read(device);
    AttendArgs args = attend_args(read, q, k, v, mask, sequences, sm_scale, logits_soft_cap);
    args.out = read("out", out), args.lse = read("lse", lse);
    run(stream, device, [&](const Context& ctx, const workspace_view* view) {
        return with_type(attention_types{}, args.q, [&]<class T>() { return attend<T>(ctx, args, view); });
    });
}

/// `saved` is (out, lse, d_out), `grads` (d_q, d_k, d_v, d_log_bias).
void call_attend_backward(Stream stream, Device device, Object q, Object k, Object v, const nb::tuple& mask,
                          const nb::tuple& sequences, float sm_scale, float logits_soft_cap,
                          bool deterministic, const nb::tuple& saved, const nb::tuple& grads) {
    const Reader read(device);
    AttendArgs args = attend_args(read, q, k, v, mask, sequences, sm_scale, logits_soft_cap);
    args.deterministic = deterministic;
    args.out = read("out", saved[0]), args.lse = read("lse", saved[1]), args.d_out = read("d_out", saved[2]);
    args.d_q = read("d_q", grads[0]), args.d_k = read("d_k", grads[1]), args.d_v = read("d_v", grads[2]);
    args.d_log_bias = read("d_log_bias", grads[3]);
    run(stream, device, [&](const Context& ctx, const workspace_view* view) {
        return with_type(attention_types{}, args.q,
                         [&]<class T>() { return attend_backward<T>(ctx, args, view); });
    });
}

void call_causal_lse(Stream stream, Device device, Object q, Object k, const nb::tuple& sequences,
                     float sm_scale, float logits_soft_cap, Object lse) {
    const Reader read(device);
    FutureMassArgs args{read("q", q), read("k", k), read.sequences(sequences), {sm_scale, logits_soft_cap}};
    args.lse = read("lse", lse);
    run(stream, device, [&](const Context& ctx, const workspace_view* view) {
        return with_type(attention_types{}, args.q,
                         [&]<class T>() { return causal_lse<T>(ctx, args, view); });
    });
}

void call_future_mass(Stream stream, Device device, Object q, Object k, Object lse,
                      const nb::tuple& sequences, float sm_scale, float logits_soft_cap,
                      const std::vector<std::int32_t>& windows, std::int32_t look_ahead, bool normalize,
                      bool mean, float epsilon, float beta, Object target) {
    const Reader read(device);
    const FutureMassArgs args{read("q", q),
                              read("k", k),
                              read.sequences(sequences),
                              {sm_scale, logits_soft_cap},
                              read("lse", lse),
                              read("target", target),
                              windows,
                              look_ahead,
                              normalize,
                              mean,
                              epsilon,
                              beta};
    run(stream, device, [&](const Context& ctx, const workspace_view* view) {
        return with_type(attention_types{}, args.q,
                         [&]<class T>() { return future_mass<T>(ctx, args, view); });
    });
}

/// `scorer` is (kind, sizes, numbers, frequencies) with the sizes (hidden, d_qk, d_v, delay, rope_layout,
/// rope_dims, norm) and the numbers (gate_softcap, rope_base); a seed and a rate of dropout may follow.
ScoreArgs score_args(const Reader& read, const nb::tuple& scorer, Object k, Object v,
                     const nb::list& parameters, const nb::tuple& sequences, Object scores) {
    ScoreArgs args;
    args.kind = nb::cast<std::string>(scorer[0]);
    args.k = read("k", k), args.v = read("v", v);
    args.parameters = read.each("parameter", parameters);
    const auto sizes = nb::cast<std::vector<std::int32_t>>(scorer[1]);
    const auto numbers = nb::cast<std::vector<float>>(scorer[2]);
    args.hidden = sizes.at(0), args.d_qk = sizes.at(1), args.d_v = sizes.at(2), args.delay = sizes.at(3);
    args.rope_layout = sizes.at(4), args.rope_dims = sizes.at(5), args.norm = sizes.at(6);
    args.gate_softcap = numbers.at(0), args.rope_base = numbers.at(1);
    if (numbers.size() > 2) {
        args.dropout = numbers.at(2), args.dropout_seed = static_cast<std::uint64_t>(sizes.at(7));
    }
    args.frequencies = read("frequencies", scorer[3]);
    args.sequences = read.sequences(sequences);
    args.scores = read("scores", scores);
    return args;
}

void call_score(Stream stream, Device device, const nb::tuple& scorer, Object k, Object v,
                const nb::list& parameters, const nb::tuple& sequences, Object scores) {
    const Reader read(device);
    const ScoreArgs args = score_args(read, scorer, k, v, parameters, sequences, scores);
    run(stream, device, [&](const Context& ctx, const workspace_view* view) {
        return with_type(scorer_types{}, args.k, [&]<class T>() { return score<T>(ctx, args, view); });
    });
}

void call_score_backward(Stream stream, Device device, const nb::tuple& scorer, Object k, Object v,
                         const nb::list& parameters, const nb::tuple& sequences, Object d_scores, Object d_k,
                         Object d_v, const nb::list& d_parameters) {
    const Reader read(device);
    ScoreArgs args = score_args(read, scorer, k, v, parameters, sequences, d_scores);
    args.d_k = read("d_k", d_k), args.d_v_rows = read("d_v", d_v);
    args.d_parameters = read.each("d_parameter", d_parameters);
    run(stream, device, [&](const Context& ctx, const workspace_view* view) {
        return with_type(scorer_types{}, args.k,
                         [&]<class T>() { return score_backward<T>(ctx, args, view); });
    });
}

/// `numbers` is (temperature, omega_min, margin_temperature, balance, balance_least, balance_most, count,
/// late, scale, seed).
void call_boundary_loss(Stream stream, Device device, const nb::tuple& policy, Object scores, Object target,
                        Object log_gamma, const nb::tuple& sequences, const nb::tuple& numbers,
                        Object d_scores, Object d_log_gamma, Object value) {
    const Reader read(device);
    const auto number = [&](std::size_t i) { return nb::cast<float>(numbers[i]); };
    const BoundaryArgs args{policy_from(policy),
                            read("scores", scores),
                            read("target", target),
                            read("log_gamma", log_gamma),
                            read.sequences(sequences),
                            number(0),
                            number(1),
                            number(2),
                            nb::cast<bool>(numbers[3]),
                            number(4),
                            number(5),
                            nb::cast<std::int32_t>(numbers[6]),
                            number(7),
                            number(8),
                            nb::cast<std::uint64_t>(numbers[9]),
                            read("d_scores", d_scores),
                            read("d_log_gamma", d_log_gamma),
                            read("value", value)};
    run(stream, device, [&](const Context& ctx, const workspace_view* view) {
        return with_type(score_types{}, args.scores,
                         [&]<class Real>() { return boundary_loss<Real>(ctx, args, view); });
    });
}

/// The names of compiled storage types.
template <class... T>
nb::list names_of(types<T...>) {
    nb::list names;
    (names.append(name_of(dtype_of<T>)), ...);
    return names;
}

void translate(const std::exception_ptr& thrown, void* /*unused*/) {
    try {
        std::rethrow_exception(thrown);
    } catch (const type_error& error) {
        PyErr_SetString(PyExc_TypeError, error.what());
    }
}

}  // namespace
}  // namespace kvpolicy::python

NB_MODULE(KVPOLICY_PYTHON_MODULE, m) {
    using namespace kvpolicy::python;
    nb::register_exception_translator(translate);
    m.attr("attention_types") = names_of(attention_types{});
    m.attr("scorer_types") = names_of(scorer_types{});
    add(m, "build_mask", call_build_mask);
    add(m, "build_log_bias", call_build_log_bias);
    add(m, "log_bias_backward", call_log_bias_backward);
    add(m, "attend", call_attend);
    add(m, "attend_backward", call_attend_backward);
    add(m, "causal_lse", call_causal_lse);
    add(m, "future_mass", call_future_mass);
    add(m, "score", call_score);
    add(m, "score_backward", call_score_backward);
    add(m, "boundary_loss", call_boundary_loss);
    bind_training(m);
    bind_caches(m);
}
