"""Losses of learned gates: WG-KV's sparsity, SP-KV's density, LTE's penalty with its controller and its
straight-through gradient, DMS's compression. Scores are raw logits z, and u = sigmoid(z). A key without a
score has z = -inf (ConvScorer) and u = 0."""

import torch
from torch import nn

from kvpolicy import _native
from kvpolicy._native import Operator
from kvpolicy.losses import loss_gradient, loss_of, loss_setup
from kvpolicy.masks import _GATE, _POLICY, DmsGate, _filled, _native_policy, _wide, numbers_of

_SEQUENCES = "Tensor? lengths, Tensor? cu_seqlens"
_NO_GATE = DmsGate().numbers()


def _decided(scope):
    if scope not in ("all", "decided"):
        raise ValueError(f"scope: {scope!r} is not allowed; it must be 'all' or 'decided'")
    return scope == "decided"


# ---- losses ------------------------------------------------------------------------------------------------


def _gate_loss(scores, weights, kind, instance, sinks, windows, budgets, thresholds, *rest):
    gate, numbers, noise, seed, scale, decided, target, straight_through, total, lengths, cu_seqlens = rest
    wide = _wide(scores)
    d_scores = _filled(scores, 0, wide.dtype, lengths)
    record = torch.zeros(2, dtype=torch.int64, device=scores.device)
    _native.call(
        "gate_loss",
        scores,
        kind,
        _native_policy(instance, sinks, windows, budgets, thresholds),
        wide,
        (lengths, None, cu_seqlens),
        (scale, decided, target, straight_through),
        (gate, *numbers, noise, seed),
        None if weights is None else weights.float().contiguous(),
        total,
        d_scores,
        record,
    )
    return loss_of(record, wide.dtype), d_scores.to(scores.dtype)


def _gate_loss_fake(scores, *_others):
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return torch.empty((), dtype=wide, device=scores.device), torch.empty(
        scores.shape, dtype=scores.dtype, device=scores.device
    )


_gate_loss_operator = Operator(
    "gate_loss",
    f"(Tensor scores, Tensor? weights, str kind, {_POLICY}, {_GATE}, float scale, bool decided, "
    f"float target, bool straight_through, Tensor? total, {_SEQUENCES}) -> (Tensor, Tensor)",
    _gate_loss,
    _gate_loss_fake,
    loss_gradient,
    loss_setup,
    of=(0,),
)


def _loss(kind, policy, scores, scale, scope, lengths, cu_seqlens, weights=None, gate=None, **numbers):
    loss, _ = _gate_loss_operator(
        scores,
        weights,
        kind,
        *numbers_of(policy),
        *(_NO_GATE if gate is None else gate.numbers()),
        scale,
        _decided(scope),
        numbers.get("target", 0.0),
        numbers.get("straight_through", False),
        numbers.get("total"),
        lengths,
        cu_seqlens,
    )
    return loss


def gate_sparsity(policy, scores, *, scale=1.0, scope="all", lengths=None, cu_seqlens=None):
    """WG-KV's sparsity term (3.3): scale * mean over heads and keys of u + u (1 - u).

    scores [B, Hkv, S] in bfloat16, float16, float32 (float64 on the CPU). scope: "all" keys, or the keys
    whose gate is "decided": out of the policy's window before the end, and no sinks. lengths [B] and
    cu_seqlens [segments + 1], int32, as in build_mask. Returns a scalar, with a gradient to scores; without
    keys it is 0. On CUDA the work is enqueued on the current stream. A NaN score that is read raises
    ValueError on the CPU; on CUDA it adds 0."""
    return _loss("sparsity", policy, scores, scale, scope, lengths, cu_seqlens)


def gate_density(policy, scores, *, scale=1.0, scope="all", lengths=None, cu_seqlens=None):
    """SP-KV's density regularizer (eq. 13): -scale * mean over heads and keys of u; minimizing it raises
    density. Arguments as in gate_sparsity."""
    return _loss("density", policy, scores, scale, scope, lengths, cu_seqlens)


def retention_penalty(policy, scores, weights, *, scale=1.0, scope="all", lengths=None, cu_seqlens=None):
    """LTE's penalty (eq. 7): scale * sum over heads h and keys of weights[h] relu(u - 0.5), averaged over
    sequences. weights [Hkv] on the device of the scores: the lambdas of a LambdaController, constants. Other
    arguments as in gate_sparsity; straight_through and retention_counts have the same scopes."""
    return _loss("retention", policy, scores, scale, scope, lengths, cu_seqlens, weights.detach())


def compression_loss(
    policy,
    gate,
    scores,
    target,
    *,
    scale=1.0,
    straight_through=False,
    total=None,
    scope="all",
    lengths=None,
    cu_seqlens=None,
):
    """DMS's compression loss: scale * max(0, target - mean over keys of alpha), alpha = sigmoid((z + n) /
    temperature) the relaxed decision to evict of `gate`, a DmsGate, with the noise of the mask.

    target            the share of keys to evict, 0 to 1 (eviction_target)
    straight_through  count decisions (alpha > 0.5) instead of alphas, with the gradient of alpha
    total             (sum of alphas, number of keys) of all layers and devices: the results of eviction_sums,
                      added up. The mean is over these. The value of each layer's call is then the whole loss,
                      and its gradient is that of the layer's scores. None: the mean is over this call's keys

    Other arguments as in gate_sparsity."""
    if total is not None:
        evicted, keys = total
        bits = evicted.detach().double().reshape(1).view(torch.int64)
        total = torch.cat((bits, keys.reshape(1)))
    return _loss(
        "compression",
        policy,
        scores,
        scale,
        scope,
        lengths,
        cu_seqlens,
        gate=gate,
        target=target,
        straight_through=straight_through,
        total=total,
    )


def eviction_target(step, compression, steps_per_unit=100):
    """DMS's schedule: the compression ratio grows by 1 every `steps_per_unit` steps, from 1 to `compression`;
    the target is 1 - 1 / ratio."""
    if step < 0 or compression < 1 or steps_per_unit < 1:
        raise ValueError(
            f"step, compression, steps_per_unit: {step}, {compression}, {steps_per_unit} are not allowed; "
            "they must be at least 0, 1 and 1"
        )
    return 1 - 1 / min(1 + step / steps_per_unit, compression)


# ---- counts ------------------------------------------------------------------------------------------------


def _eviction_sums(scores, instance, sinks, windows, budgets, thresholds, *rest):
    gate, numbers, noise, seed, straight_through, decided, lengths, cu_seqlens = rest
    record = torch.zeros(2, dtype=torch.int64, device=scores.device)
    _native.call(
        "eviction_sums",
        scores,
        _native_policy(instance, sinks, windows, budgets, thresholds),
        _wide(scores),
        (lengths, None, cu_seqlens),
        (1.0, decided, 0.0, straight_through),
        (gate, *numbers, noise, seed),
        record,
    )
    return loss_of(record, torch.float64), record[1].clone()


def _eviction_sums_fake(scores, *_others):
    return (
        torch.empty((), dtype=torch.float64, device=scores.device),
        torch.empty((), dtype=torch.int64, device=scores.device),
    )


_eviction_sums_operator = Operator(
    "eviction_sums",
    f"(Tensor scores, {_POLICY}, {_GATE}, bool straight_through, bool decided, {_SEQUENCES}) "
    "-> (Tensor, Tensor)",
    _eviction_sums,
    _eviction_sums_fake,
    refusal="the sums of decisions",
)


def eviction_sums(
    policy, gate, scores, *, straight_through=False, scope="all", lengths=None, cu_seqlens=None
):
    """The sum of alphas (or of decisions, with straight_through), a float64 scalar, and the number of keys,
    an int64 scalar: added up over layers and devices they are the `total` of compression_loss. No
    gradient."""
    return _eviction_sums_operator(
        scores.detach(),
        *numbers_of(policy),
        *gate.numbers(),
        straight_through,
        _decided(scope),
        lengths,
        cu_seqlens,
    )


def _retention_counts(scores, instance, sinks, windows, budgets, thresholds, decided, lengths, cu_seqlens):
    counts = torch.empty(scores.shape[1], dtype=torch.float64, device=scores.device)
    policy = _native_policy(instance, sinks, windows, budgets, thresholds)
    _native.call(
        "retention_counts", scores, policy, _wide(scores), (lengths, None, cu_seqlens), decided, counts
    )
    return counts


def _retention_counts_fake(scores, *_others):
    return torch.empty(scores.shape[1], dtype=torch.float64, device=scores.device)


_retention_counts_operator = Operator(
    "retention_counts",
    f"(Tensor scores, {_POLICY}, bool decided, {_SEQUENCES}) -> Tensor",
    _retention_counts,
    _retention_counts_fake,
    refusal="counts",
)


def retention_counts(policy, scores, *, scope="all", lengths=None, cu_seqlens=None):
    """LTE's c (3.1.2), [Hkv] float64: how many keys of each head are retained, the mean over sequences. A key
    is retained if z > 0, and a sink whatever its score (eq. 5), as the cap of LTE counts sinks. scope: "all"
    keys, as the paper's sum; "decided": the keys out of the window before the end, which a cache holds beside
    its window. No gradient. Other arguments as in gate_sparsity."""
    return _retention_counts_operator(
        scores.detach(), *numbers_of(policy), _decided(scope), lengths, cu_seqlens
    )


# ---- LTE ---------------------------------------------------------------------------------------------------


class LambdaController(nn.Module):
    """LTE's controller of the penalty's weight by head (algorithm 1), `heads` of them over all layers.

    Each step observe(counts); where due(step), update(). With c the running average of a head's count:

        c <- (1 - a) c + a count,      a = 2 / (1 + every / 2)
        weight <- min(weight factor^s, 1),      s = [c > cap] - [c < slack cap]

    A weight below `least` becomes 0, and 0 becomes `least` again where c > cap. Weights are rounded to
    float32: one that is less than 2^-12 (relative, and less than half a step) below `least` becomes `least`,
    so that as many updates down as up end there. `cap` counts the sinks, as the cap b of LTE does: sinks +
    budget of the policy. The buffers `weights` [heads] float32 and `average` [heads] float64 move with the
    module. With several devices, average the counts over them before observe(), or `average` before
    update()."""

    def __init__(self, heads, cap=512.0, *, slack=0.95, factor=1.2, least=1e-9, every=32):
        super().__init__()
        for name, value, allowed, holds in (
            ("heads", heads, "a whole number above 0", isinstance(heads, int) and heads > 0),
            ("cap", cap, "above 0", cap > 0),
            ("slack", slack, "above 0 and at most 1", 0 < slack <= 1),
            ("factor", factor, "above 1", 1 < factor < float("inf")),
            ("least", least, "above 0 and at most 1", 0 < least <= 1),
            ("every", every, "a whole number above 0", isinstance(every, int) and every > 0),
        ):
            if not holds:
                raise ValueError(f"{name}: {value!r} is not allowed; it must be {allowed}")
        self.cap, self.slack, self.factor, self.least, self.every = cap, slack, factor, least, every
        self.register_buffer("weights", torch.full((heads,), least, dtype=torch.float32))
        self.register_buffer("average", torch.full((heads,), -1.0, dtype=torch.float64))

    @torch.no_grad()
    def observe(self, counts):
        """Takes counts [heads] of one step (retention_counts) into the average; the first starts it."""
        a = 1.0 if self.every < 2 else 2.0 / (1.0 + 0.5 * self.every)
        moved = (1 - a) * self.average + a * counts
        self.average.copy_(torch.where(self.average < 0, counts.to(self.average.dtype), moved))

    def due(self, step):
        return step % self.every == 0

    @torch.no_grad()
    def update(self):
        over, under = self.average > self.cap, self.average < self.slack * self.cap
        weights = torch.where(over, self.weights * self.factor, self.weights)
        weights = torch.where(under, weights / self.factor, weights).clamp(max=1.0)
        # Rounded steps may end beside `least` where exact ones reach it.
        least = weights.new_tensor(self.least)
        lowest = self.least * max(2 / (1 + self.factor), 1 - 2**-12)
        floor = torch.where(over | (weights.double() >= lowest), least, 0.0)
        self.weights.copy_(torch.where(weights < least, floor, weights))


def _straight_through_values(
    v, d_v, scores, instance, sinks, windows, budgets, thresholds, decided, lengths, cu_seqlens
):
    real = torch.float64 if v.dtype == torch.float64 else torch.float32
    d_scores = _filled(scores, 0, real, lengths)
    _native.call(
        "straight_through_values",
        v,
        _native_policy(instance, sinks, windows, budgets, thresholds),
        _native.rows(scores.to(real)),
        v,
        _native.rows(d_v),
        (lengths, None, cu_seqlens),
        decided,
        d_scores,
    )
    return d_scores.to(scores.dtype)


def _straight_through_values_fake(v, d_v, scores, *_others):
    return torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)


_straight_through_operator = Operator(
    "straight_through_values",
    f"(Tensor v, Tensor d_v, Tensor scores, {_POLICY}, bool decided, {_SEQUENCES}) -> Tensor",
    _straight_through_values,
    _straight_through_values_fake,
    refusal="the gradient of straight_through (a second derivative)",
)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, scores, *numbers):
        ctx.save_for_backward(v, scores, *numbers[-2:])
        ctx.policy = numbers[:-2]
        return v.view_as(v)

    @staticmethod
    def backward(ctx, d_v):
        v, scores, lengths, cu_seqlens = ctx.saved_tensors
        d_scores = _straight_through_operator(v, d_v, scores, *ctx.policy, lengths, cu_seqlens)
        return (d_v, d_scores, *(None for _ in ctx.policy), None, None)


def straight_through(policy, scores, v, *, scope="all", lengths=None, cu_seqlens=None):
    """LTE's straight-through gate on values (eq. 6): returns v [B, Hkv, S, Dv] as it is, and gives scores [B,
    Hkv, S] the gradient of u v: d z_t = u (1 - u) <v_t, d v_t>. scope: for "all" keys, as the paper has it,
    or for those whose gate is "decided" (out of the window before the end, no sinks), and 0 for the others.
    Pass the result to attend with the mask of the policy. lengths and cu_seqlens as in build_mask."""
    if scores.shape != v.shape[:-1]:
        raise ValueError(
            f"scores.shape: {tuple(scores.shape)} is not allowed; it must be {tuple(v.shape[:-1])}, v's"
        )
    return _StraightThrough.apply(v, scores, *numbers_of(policy), _decided(scope), lengths, cu_seqlens)
