// The extension module _host or _cuda. The functions take DLPack capsules, or None for a tensor that is left
// out, and return the bytes of workspace that the call needs where `workspace` is None. kvpolicy/_native.py
// calls them.
#include "operators.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>

namespace nb = nanobind;

namespace kvpolicy::python {
namespace {

// ---- context ----------------------------------------------------------------------------------------------

#if defined(KVPOLICY_PYTHON_CUDA)
/// `stream` is the address of a cudaStream_t.
Context context_of(std::uintptr_t stream, std::int32_t device) {
    return {reinterpret_cast<CUstream_st*>(stream), device};
}
#else
/// The pool of `threads` threads. A forked process has none of its parent's threads, so it makes its own.
const Context& context_of(std::uintptr_t threads, std::int32_t /*device*/) {
    using Pools = std::map<std::uintptr_t, std::unique_ptr<Context>>;
    static std::mutex mutex;
    static Pools* pools = new Pools;
    static pid_t owner = getpid();
    const std::lock_guard lock(mutex);
    if (owner != getpid()) {
        pools = new Pools;  // the parent's threads cannot be joined here
        owner = getpid();
    }
    std::unique_ptr<Context>& pool = (*pools)[threads];
    if (pool == nullptr) {
        pool = std::make_unique<Context>(static_cast<int>(threads));
    }
    return *pool;
}
#endif

// ---- arguments --------------------------------------------------------------------------------------------

dtype dtype_from(const nb::dlpack::dtype& type) {
    const auto is = [&](nb::dlpack::dtype_code code, int bits) {
        return type.code == static_cast<std::uint8_t>(code) && type.bits == bits && type.lanes == 1;
    };
    using code = nb::dlpack::dtype_code;
    return is(code::Bfloat, 16)  ? dtype::bf16
           : is(code::Float, 16) ? dtype::fp16
           : is(code::Float, 32) ? dtype::fp32
           : is(code::Float, 64) ? dtype::fp64
           : is(code::Int, 32)   ? dtype::int32
           : is(code::Int, 64)   ? dtype::int64
           : is(code::UInt, 8)   ? dtype::uint8
                                 : dtype::other;
}

/// The call's tensors: all on one device, the context's.
class Reader {
  public:
    explicit Reader(std::int32_t device) : device_(device) {}

    Tensor operator()(const char* name, nb::handle object) const {
        using kvpolicy::detail::text;
        Tensor tensor;
        tensor.name = name;
        if (object.is_none()) {
            return tensor;
        }
        nb::ndarray<> array;
        if (!nb::try_cast(object, array)) {
            throw type_error(text(name, ": is no tensor that DLPack describes"));
        }
        const bool here =
            array.device_type() == (on_cuda ? nb::device::cuda::value : nb::device::cpu::value) &&
            (!on_cuda || array.device_id() == device_);
        kvpolicy::detail::require(
            here, text(name, ".device"), array.device_type() == nb::device::cpu::value ? "cpu" : "another",
            on_cuda ? text("cuda:", device_, ", as the other tensors") : text("cpu, as the other tensors"));
        kvpolicy::detail::require(array.ndim() <= Tensor::max_dims, text(name, ".dim()"), array.ndim(),
                                  "at most 4");
        tensor.given = true;
        tensor.data = array.data();
        tensor.type = dtype_from(array.dtype());
        tensor.dims = static_cast<int>(array.ndim());
        for (int i = 0; i < tensor.dims; ++i) {
            tensor.shape[i] = static_cast<std::int64_t>(array.shape(static_cast<std::size_t>(i)));
            tensor.strides[i] = array.stride(static_cast<std::size_t>(i));
        }
        return tensor;
    }

    std::vector<Tensor> each(const char* name, const nb::list& objects) const {
        std::vector<Tensor> tensors;
        for (const nb::handle object : objects) {
            tensors.push_back((*this)(name, object));
        }
        return tensors;
    }

    /// (lengths, starts, cu_seqlens)
    SequenceTensors sequences(const nb::tuple& tensors) const {
        return {(*this)("lengths", tensors[0]), (*this)("starts", tensors[1]),
                (*this)("cu_seqlens", tensors[2])};
    }

  private:
    std::int32_t device_;
};

/// (instance, sinks, windows, budgets, thresholds, log_gammas)
PolicyNumbers policy_from(const nb::tuple& policy) {
    using Ints = std::vector<std::int32_t>;
    using Floats = std::vector<float>;
    return {nb::cast<std::string>(policy[0]), nb::cast<Ints>(policy[1]),   nb::cast<Ints>(policy[2]),
            nb::cast<Ints>(policy[3]),        nb::cast<Floats>(policy[4]), nb::cast<Floats>(policy[5])};
}

/// (kind, epsilon, alpha, tau, clip, temperature, noise, seed)
GateNumbers gate_from(const nb::tuple& gate) {
    return {nb::cast<std::string>(gate[0]), nb::cast<float>(gate[1]),        nb::cast<float>(gate[2]),
            nb::cast<float>(gate[3]),       nb::cast<float>(gate[4]),        nb::cast<float>(gate[5]),
            nb::cast<bool>(gate[6]),        nb::cast<std::uint64_t>(gate[7])};
}

/// Runs call(context, workspace) without the interpreter's lock.
template <class Call>
std::size_t run(std::uintptr_t stream, std::int32_t device, nb::handle workspace, Call&& call) {
    const Tensor memory = Reader(device)("workspace", workspace);
    const workspace_view view{array_of<std::uint8_t>(memory, memory.count()),
                              static_cast<std::size_t>(memory.count())};
    const nb::gil_scoped_release release;
    const auto& ctx = context_of(stream, device);
    return call(ctx, memory.given ? &view : nullptr);
}

// ---- functions --------------------------------------------------------------------------------------------

using Stream = std::uintptr_t;  // of _host: the number of threads
using Device = std::int32_t;
using Object = nb::handle;

std::size_t call_build_mask(Stream stream, Device device, const nb::tuple& policy, Object scores,
                            const nb::tuple& sequences, Object expiry, Object workspace) {
    const Reader read(device);
    const MaskArgs args{policy_from(policy), read("scores", scores), read.sequences(sequences),
                        read("expiry", expiry)};
    return run(stream, device, workspace,
               [&](const Context& ctx, const workspace_view* view) { return build_mask(ctx, args, view); });
}

std::size_t call_build_log_bias(Stream stream, Device device, const nb::tuple& policy, const nb::tuple& gate,
                                Object scores, const nb::tuple& sequences, Object expiry, Object log_bias,
                                Object workspace) {
    const Reader read(device);
    LogBiasArgs args{policy_from(policy), gate_from(gate), read("scores", scores), read.sequences(sequences)};
    args.expiry = read("expiry", expiry);
    args.log_bias = read("log_bias", log_bias);
    return run(stream, device, workspace, [&](const Context& ctx, const workspace_view* view) {
        return build_log_bias(ctx, args, view);
    });
}

std::size_t call_log_bias_backward(Stream stream, Device device, const nb::tuple& policy,
                                   const nb::tuple& gate, Object scores, Object d_log_bias,
                                   const nb::tuple& sequences, Object d_scores, Object workspace) {
    const Reader read(device);
    LogBiasArgs args{policy_from(policy), gate_from(gate), read("scores", scores), read.sequences(sequences)};
    args.d_log_bias = read("d_log_bias", d_log_bias);
    args.d_scores = read("d_scores", d_scores);
    return run(stream, device, workspace, [&](const Context& ctx, const workspace_view* view) {
        return log_bias_backward(ctx, args, view);
    });
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

std::size_t call_attend(Stream stream, Device device, Object q, Object k, Object v, const nb::tuple& mask,
                        const nb::tuple& sequences, float sm_scale, float logits_soft_cap, Object out,
                        Object lse, Object workspace) {
    const Reader read(device);
    AttendArgs args = attend_args(read, q, k, v, mask, sequences, sm_scale, logits_soft_cap);
    args.out = read("out", out), args.lse = read("lse", lse);
    return run(stream, device, workspace, [&](const Context& ctx, const workspace_view* view) {
        return with_type(attention_types{}, args.q, [&]<class T>() { return attend<T>(ctx, args, view); });
    });
}

/// `saved` is (out, lse, d_out), `grads` (d_q, d_k, d_v, d_log_bias).
std::size_t call_attend_backward(Stream stream, Device device, Object q, Object k, Object v,
                                 const nb::tuple& mask, const nb::tuple& sequences, float sm_scale,
                                 float logits_soft_cap, bool deterministic, const nb::tuple& saved,
                                 const nb::tuple& grads, Object workspace) {
    const Reader read(device);
    AttendArgs args = attend_args(read, q, k, v, mask, sequences, sm_scale, logits_soft_cap);
    args.deterministic = deterministic;
    args.out = read("out", saved[0]), args.lse = read("lse", saved[1]), args.d_out = read("d_out", saved[2]);
    args.d_q = read("d_q", grads[0]), args.d_k = read("d_k", grads[1]), args.d_v = read("d_v", grads[2]);
    args.d_log_bias = read("d_log_bias", grads[3]);
    return run(stream, device, workspace, [&](const Context& ctx, const workspace_view* view) {
        return with_type(attention_types{}, args.q,
                         [&]<class T>() { return attend_backward<T>(ctx, args, view); });
    });
}

std::size_t call_causal_lse(Stream stream, Device device, Object q, Object k, const nb::tuple& sequences,
                            float sm_scale, float logits_soft_cap, Object lse, Object workspace) {
    const Reader read(device);
    FutureMassArgs args{read("q", q), read("k", k), read.sequences(sequences), {sm_scale, logits_soft_cap}};
    args.lse = read("lse", lse);
    return run(stream, device, workspace, [&](const Context& ctx, const workspace_view* view) {
        return with_type(attention_types{}, args.q,
                         [&]<class T>() { return causal_lse<T>(ctx, args, view); });
    });
}

std::size_t call_future_mass(Stream stream, Device device, Object q, Object k, Object lse,
                             const nb::tuple& sequences, float sm_scale, float logits_soft_cap,
                             const std::vector<std::int32_t>& windows, std::int32_t look_ahead,
                             bool normalize, bool mean, float epsilon, float beta, Object target,
                             Object workspace) {
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
    return run(stream, device, workspace, [&](const Context& ctx, const workspace_view* view) {
        return with_type(attention_types{}, args.q,
                         [&]<class T>() { return future_mass<T>(ctx, args, view); });
    });
}

/// `scorer` is (kind, hidden, d_qk, d_v, gate_softcap, delay).
ScoreArgs score_args(const Reader& read, const nb::tuple& scorer, Object k, Object v,
                     const nb::list& parameters, const nb::tuple& sequences, Object scores) {
    ScoreArgs args;
    args.kind = nb::cast<std::string>(scorer[0]);
    args.k = read("k", k), args.v = read("v", v);
    args.parameters = read.each("parameter", parameters);
    args.hidden = nb::cast<std::int32_t>(scorer[1]);
    args.d_qk = nb::cast<std::int32_t>(scorer[2]);
    args.d_v = nb::cast<std::int32_t>(scorer[3]);
    args.gate_softcap = nb::cast<float>(scorer[4]);
    args.delay = nb::cast<std::int32_t>(scorer[5]);
    args.sequences = read.sequences(sequences);
    args.scores = read("scores", scores);
    return args;
}

std::size_t call_score(Stream stream, Device device, const nb::tuple& scorer, Object k, Object v,
                       const nb::list& parameters, const nb::tuple& sequences, Object scores,
                       Object workspace) {
    const Reader read(device);
    const ScoreArgs args = score_args(read, scorer, k, v, parameters, sequences, scores);
    return run(stream, device, workspace, [&](const Context& ctx, const workspace_view* view) {
        return with_type(scorer_types{}, args.k, [&]<class T>() { return score<T>(ctx, args, view); });
    });
}

std::size_t call_score_backward(Stream stream, Device device, const nb::tuple& scorer, Object k, Object v,
                                const nb::list& parameters, const nb::tuple& sequences, Object d_scores,
                                Object d_k, Object d_v, const nb::list& d_parameters, Object workspace) {
    const Reader read(device);
    ScoreArgs args = score_args(read, scorer, k, v, parameters, sequences, d_scores);
    args.d_k = read("d_k", d_k), args.d_v_rows = read("d_v", d_v);
    args.d_parameters = read.each("d_parameter", d_parameters);
    return run(stream, device, workspace, [&](const Context& ctx, const workspace_view* view) {
        return with_type(scorer_types{}, args.k,
                         [&]<class T>() { return score_backward<T>(ctx, args, view); });
    });
}

/// `numbers` is (temperature, omega_min, margin_temperature, balance, balance_least, balance_most, count,
/// late, scale, seed).
std::size_t call_boundary_loss(Stream stream, Device device, const nb::tuple& policy, Object scores,
                               Object target, Object log_gamma, const nb::tuple& sequences,
                               const nb::tuple& numbers, Object d_scores, Object d_log_gamma, Object value,
                               Object workspace) {
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
    return run(stream, device, workspace, [&](const Context& ctx, const workspace_view* view) {
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
    // Without none() an argument of any type would not take None.
    const auto add = [&]<class... Args>(const char* name, std::size_t (*function)(Args...)) {
        m.def(name, function, (static_cast<void>(sizeof(Args)), nb::arg().none())...);
    };
    m.attr("attention_types") = names_of(attention_types{});
    m.attr("scorer_types") = names_of(scorer_types{});
    add("build_mask", call_build_mask);
    add("build_log_bias", call_build_log_bias);
    add("log_bias_backward", call_log_bias_backward);
    add("attend", call_attend);
    add("attend_backward", call_attend_backward);
    add("causal_lse", call_causal_lse);
    add("future_mass", call_future_mass);
    add("score", call_score);
    add("score_backward", call_score_backward);
    add("boundary_loss", call_boundary_loss);
}
