"""Attention through a mask, and the future-attention target."""

import torch

from kvpolicy import _native
from kvpolicy._native import Operator
from kvpolicy.masks import Mask

_MASK = "Tensor? expiry, Tensor? log_bias, Tensor? bias_from"
_SEQUENCES = "Tensor? lengths, Tensor? starts, Tensor? cu_seqlens"
_NUMBERS = "float sm_scale, float logits_soft_cap"


_CAUSAL = Mask(None)


# ---- attend ------------------------------------------------------------------------------------------------


def attend_into(out, lse, q, k, v, mask, sequences, numbers):
    """attend, into given tensors. mask: (expiry, log_bias, bias_from); sequences: (lengths, starts,
    cu_seqlens); numbers: (sm_scale, logits_soft_cap)."""
    expiry, log_bias, bias_from = mask
    mask = (_native.rows(expiry), _native.rows32(log_bias), bias_from)
    _native.call("attend", q, q, k, v, mask, sequences, *numbers, out, lse)


def _attend(q, k, v, expiry, log_bias, bias_from, lengths, starts, cu_seqlens, sm_scale, logits_soft_cap):
    make = _native.outputs_of(lengths)
    *sizes, _ = q.shape
    out = make(*sizes, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = make(*sizes, dtype=torch.float32, device=q.device)
    mask, sequences = (expiry, log_bias, bias_from), (lengths, starts, cu_seqlens)
    attend_into(out, lse, q, k, v, mask, sequences, (sm_scale, logits_soft_cap))
    return out, lse


def _attend_fake(q, k, v, *_others):
    return (
        torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device),
        torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device),
    )


def attend_backward_into(gradients, saved, q, k, v, mask, sequences, numbers):
    """The gradients (d_q, d_k, d_v, d_log_bias) of attend, into given tensors. saved: (out, lse, d_out);
    numbers: (sm_scale, logits_soft_cap, deterministic); the others as in attend_into."""
    expiry, log_bias, bias_from = mask
    mask = (_native.rows(expiry), _native.rows32(log_bias), bias_from)
    out, lse, d_out = saved
    saved = (out, lse, _native.rows(d_out))
    _native.call("attend_backward", q, q, k, v, mask, sequences, *numbers, saved, gradients)


def _attend_backward(
    d_out,
    out,
    lse,
    q,
    k,
    v,
    expiry,
    log_bias,
    bias_from,
    lengths,
    starts,
    cu_seqlens,
    sm_scale,
    logits_soft_cap,
    deterministic,
):
    make = _native.outputs_of(lengths)
    d_q = make(*q.shape, dtype=q.dtype, device=q.device)
    d_k, d_v = _native.empty_like(k), _native.empty_like(v)
    real = torch.float64 if q.dtype == torch.float64 else torch.float32
    d_log_bias = None if log_bias is None else _native.empty_like(log_bias, real)
    mask, sequences = (expiry, log_bias, bias_from), (lengths, starts, cu_seqlens)
    numbers = (sm_scale, logits_soft_cap, deterministic)
    attend_backward_into(
        (d_q, d_k, d_v, d_log_bias), (out, lse, d_out), q, k, v, mask, sequences, numbers
    )
    if d_log_bias is None:
        return d_q, d_k, d_v, torch.empty(0, dtype=real, device=q.device)
    return d_q, d_k, d_v, d_log_bias.to(log_bias.dtype)


def _attend_backward_fake(d_out, out, lse, q, k, v, expiry, log_bias, *_others):
    def like(x):
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    real = torch.float64 if q.dtype == torch.float64 else torch.float32
    d_log_bias = torch.empty(0, dtype=real, device=q.device) if log_bias is None else like(log_bias)
    return like(q), like(k), like(v), d_log_bias


_attend_backward_operator = Operator(
    "attend_backward",
    f"(Tensor d_out, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, {_MASK}, {_SEQUENCES}, "
    f"{_NUMBERS}, bool deterministic) -> (Tensor, Tensor, Tensor, Tensor)",
    _attend_backward,
    _attend_backward_fake,
    refusal="the gradient of attend (a second derivative)",
)


def _attend_setup(ctx, inputs, output):
    ctx.save_for_backward(*output, *inputs[:9])
    ctx.numbers = inputs[9:]
    ctx.set_materialize_grads(False)


def with_lse_gradient(d_out, d_lse, out, v):
    """(d_out, out, v) whose attend_backward has the gradient of lse, too.

    d logit = P (<d_out, v> - <out, d_out> + d_lse). Eight more numbers per row add d_lse: the first is 0 in
    v, -d_lse in out and 1 in d_out, the rest are 0."""
    d_out = torch.zeros_like(out) if d_out is None else d_out
    if d_lse is None:
        return d_out, out, v
    pad = torch.nn.functional.pad
    v = pad(v, (0, 8))
    out = pad(torch.cat((out, -d_lse[..., None].to(out.dtype)), -1), (0, 7))
    return pad(pad(d_out, (0, 1), value=1.0), (0, 7)), out, v


def _attend_gradient(ctx, d_out, d_lse):
    if d_out is None and d_lse is None:
        return (None,) * 4
    out, lse, q, k, v, *others = ctx.saved_tensors
    value_dim = v.shape[-1]
    d_out, out, v = with_lse_gradient(d_out, d_lse, out, v)
    d_q, d_k, d_v, d_log_bias = _attend_backward_operator(
        d_out, out, lse, q, k, v, *others, *ctx.numbers, torch.are_deterministic_algorithms_enabled()
    )
    d_v = d_v if d_lse is None else d_v[..., :value_dim]
    return d_q, d_k, d_v, None if others[1] is None else d_log_bias


_attend_operator = Operator(
    "attend",
    f"(Tensor q, Tensor k, Tensor v, {_MASK}, {_SEQUENCES}, {_NUMBERS}) -> (Tensor, Tensor)",
    _attend,
    _attend_fake,
    _attend_gradient,
    _attend_setup,
    of=(0, 1, 2, 4),
)


def attend(
    q,
    k,
    v,
    mask=None,
    *,
    lengths=None,
    starts=None,
    cu_seqlens=None,
    sm_scale=None,
    logits_soft_cap=0.0,
    return_lse=False,
):
    """Attention of every query to the keys that the mask leaves visible, at a cost proportional to them.

    q [B, Hq, S, Dk], k [B, Hkv, Skv, Dk], v [B, Hkv, Skv, Dv]; Hq = G Hkv, and query heads h G to h G + G - 1
    belong to KV head h. bfloat16, float16, float32 or float64; the last dimension is contiguous, and a
    multiple of 8. With logit = sm_scale <q, k> (default 1 / sqrt(Dk)), then c tanh(logit / c) where c =
    logits_soft_cap > 0, plus the mask's log_bias:

        out = sum over visible t of softmax(logit)(t) v_t,      lse = log sum over visible t of exp(logit)

    mask        a Mask, or None for causal attention
    lengths     [B] int32: queries per sequence; out and lse are 0 beyond
    starts      [B] int32: the position of each sequence's first query among the keys (default 0)
    cu_seqlens  [segments + 1] int32: queries see keys of their own packed segment

    Returns out [B, Hq, S, Dv] of q's dtype, and lse [B, Hq, S] float32 with return_lse. A query that sees no
    key has out = 0 and lse = -inf. Gradients of out and lse reach q, k, v and mask.log_bias; expiries are
    constants. torch.use_deterministic_algorithms(True) makes those of 16-bit CUDA tensors the same bits in
    every run. On CUDA the work is enqueued on the current stream.
    """
    mask = _CAUSAL if mask is None else mask
    out, lse = _attend_operator(q, k, v, *mask, lengths, starts, cu_seqlens, sm_scale or 0.0, logits_soft_cap)
    return (out, lse) if return_lse else out


# ---- future_mass -------------------------------------------------------------------------------------------


def _causal_lse(q, k, lengths, sm_scale, logits_soft_cap):
    *sizes, _ = q.shape
    lse = _native.outputs_of(lengths)(*sizes, dtype=torch.float32, device=q.device)
    _native.call("causal_lse", q, q, k, (lengths, None, None), sm_scale, logits_soft_cap, lse)
    return lse


def _causal_lse_fake(q, *_others):
    return torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)


_causal_lse_operator = Operator(
    "causal_lse",
    f"(Tensor q, Tensor k, Tensor? lengths, {_NUMBERS}) -> Tensor",
    _causal_lse,
    _causal_lse_fake,
    refusal="lse",
)


def causal_lse(q, k, *, lengths=None, sm_scale=None, logits_soft_cap=0.0):
    """lse[b, h, d] = log sum over t <= d of exp(logit(d, t)), [B, Hq, S] float32: the normalizer of dense
    causal attention, for q [B, Hq, S, Dk] and k [B, Hkv, S, Dk]. O(S^2) time, no S x S array. It has no
    gradient."""
    return _causal_lse_operator(q, k, lengths, sm_scale or 0.0, logits_soft_cap)


def _future_mass(
    q,
    k,
    lse,
    lengths,
    sm_scale,
    logits_soft_cap,
    windows,
    look_ahead,
    normalize,
    mean,
    epsilon,
    beta,
):
    *sizes, _ = k.shape
    target = _native.outputs_of(lengths)(*sizes, dtype=torch.float32, device=q.device)
    _native.call(
        "future_mass",
        q,
        q,
        k,
        _native.rows(lse),
        (lengths, None, None),
        sm_scale,
        logits_soft_cap,
        list(windows),
        look_ahead,
        normalize,
        mean,
        epsilon,
        beta,
        target,
    )
    return target


def _future_mass_fake(q, k, *_others):
    return torch.empty(k.shape[:-1], dtype=torch.float32, device=q.device)


_future_mass_operator = Operator(
    "future_mass",
    f"(Tensor q, Tensor k, Tensor lse, Tensor? lengths, {_NUMBERS}, int[] windows, int look_ahead, "
    "bool normalize, bool mean, float epsilon, float beta) -> Tensor",
    _future_mass,
    _future_mass_fake,
    refusal="the future-attention target",
)


def future_mass(
    q,
    k,
    window,
    *,
    lse=None,
    lengths=None,
    look_ahead=None,
    normalize=True,
    aggregate="max",
    epsilon=1e-8,
    beta=1.0,
    sm_scale=None,
    logits_soft_cap=0.0,
):
    """The future-attention target of KVpop (eq. 2, 3, 8): the logarithm of the attention that a key receives
    after it has left the window.

    q [B, Hq, S, Dk], k [B, Hkv, S, Dk], lse [B, Hq, S] (default: causal_lse, which makes it exact). With
    p_d(t) = exp(logit(d, t) - lse_d) and d from t + w to min(S - 1, t + w + look_ahead):

        M_g(t)    = (1 / N_t sum_d p_d(t)^beta)^(1 / beta)
        N_t       = max(1, S - (t + w)), at most look_ahead + 1
        target(t) = max_g log(epsilon + M_g),   or log(epsilon + mean_g M_g) with aggregate="mean"

    window: w, an int or one per KV head. look_ahead: None for all queries. beta: 1 to infinity; 1 is the
    paper's mean. normalize=False leaves N_t out. Returns [B, Hkv, S] float32; it has no gradient. O(S^2)
    time.
    """
    if aggregate not in ("max", "mean"):
        raise ValueError(f"aggregate: {aggregate!r} is not allowed; it must be 'max' or 'mean'")
    if lse is None:
        lse = causal_lse(q, k, lengths=lengths, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap)
    windows = (window,) if isinstance(window, int) else tuple(window)
    return _future_mass_operator(
        q,
        k,
        lse,
        lengths,
        sm_scale or 0.0,
        logits_soft_cap,
        windows,
        2**31 - 1 if look_ahead is None else look_ahead,
        normalize,
        aggregate == "mean",
        epsilon,
        beta,
    )
