"""Masks: the first query that no longer sees a key, and log-biases of soft gates."""

import dataclasses
from typing import NamedTuple, Optional

import torch

from kvpolicy import _native, first_use
from kvpolicy._native import Operator
from kvpolicy.policy import ObservedScorer


class Mask(NamedTuple):
    """What a policy does to attention.

    expiry     [B, Hkv, S] int32: query q sees key t where t <= q < expiry[b, h, t]. None: causal.
    log_bias   [B, Hkv, S] float, added to the logit of key t from age bias_from[h] on; None: none.
    bias_from  [Hkv] int32; None: 0.
    """

    expiry: Optional[torch.Tensor]
    log_bias: Optional[torch.Tensor] = None
    bias_from: Optional[torch.Tensor] = None


# The numbers of a policy in the operators' schemas.
_POLICY = "str instance, int[] sinks, int[] windows, int[] budgets, float[] thresholds"


def numbers_of(policy):
    if policy.own_parts:
        raise NotImplementedError(
            f"policy: {policy!r} is not allowed; with a Stride, a CppPart or a SharedBudget there is "
            "build_mask alone"
        )
    return _numbers_of(policy)


def _numbers_of(policy):
    return policy.instance, policy.sinks, policy.windows, policy.budgets, policy.thresholds


def _native_policy(instance, sinks, windows, budgets, thresholds, log_gamma=None):
    log_gammas = (0.0,) if log_gamma is None else log_gamma.detach().tolist()
    return instance, sinks, windows, budgets, thresholds, log_gammas


def _filled(like, value, dtype, lengths):
    """A result of the shape of `like`; tokens beyond a sequence's length are not written."""
    made = _native.empty_like(like, dtype)
    return made if lengths is None else made.fill_(value)


# ---- build_mask --------------------------------------------------------------------------------------------


def _build_mask(scores, instance, sinks, windows, budgets, thresholds, log_gamma, lengths, cu_seqlens):
    expiry = _filled(scores, -1, torch.int32, lengths)
    if not expiry.numel() and expiry.shape[-1]:  # tokens of no head: no memory, which the library asks for
        return expiry
    policy = _native_policy(instance, sinks, windows, budgets, thresholds, log_gamma)
    if instance.startswith("\n"):  # the source of a policy without an instance
        ranked = _native.rows32(scores)
        first_use.build_mask(instance, policy, ranked, lengths, cu_seqlens, expiry)
        return expiry
    ranked = None if instance == "window" else _native.rows32(scores)
    _native.call("build_mask", scores, policy, ranked, (lengths, None, cu_seqlens), expiry)
    return expiry


def _build_mask_fake(scores, *_others):
    return torch.empty(scores.shape, dtype=torch.int32, device=scores.device)


_build_mask_operator = Operator(
    "build_mask",
    f"(Tensor scores, {_POLICY}, Tensor? log_gamma, Tensor? lengths, Tensor? cu_seqlens) -> Tensor",
    _build_mask,
    _build_mask_fake,
    refusal="expiries",
)


def build_mask(policy, scores, *, lengths=None, cu_seqlens=None):
    """The expiry of every key under a policy: expiry = max(sink, window, min(gate, budget)).

    scores      [B, Hkv, S] of any floating-point type, ranked as float32: raw logits. Read only where a key
                leaves its window. For a policy without ranks only the shape and the device count.
    lengths     [B] int32: the tokens of each sequence; keys beyond have expiry -1, which no query sees.
    cu_seqlens  [segments + 1] int32: packed samples, each of which starts anew.

    Returns a Mask with expiry [B, Hkv, S] int32 (2^31 - 1: never). It has no gradient. On CUDA the work is
    enqueued on the current stream. A NaN score that is read raises ValueError on the CPU; on CUDA it ranks
    last. O(S log k) per head.
    """
    if isinstance(policy.scorer, ObservedScorer):
        raise ValueError(f"policy: {policy!r} is not allowed; build_observed_mask takes it, with q and k")
    scores = scores.detach() if scores.requires_grad else scores
    expiry = _build_mask_operator(scores, *_numbers_of(policy), policy.log_gamma, lengths, cu_seqlens)
    return Mask(expiry)


# ---- soft gates --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SoftGate:
    """log_bias = log u, u = sigmoid(score) (SP-KV, eq. 6)."""

    def numbers(self):
        return "soft", (0.0, 0.0, 0.0, 0.0, 1.0), False, 0


@dataclasses.dataclass(frozen=True)
class SoftWriteGate:
    """log_bias = log(u + epsilon) (WG-KV, 3.2)."""

    epsilon: float = 1e-6

    def numbers(self):
        return "soft_write", (self.epsilon, 0.0, 0.0, 0.0, 1.0), False, 0


@dataclasses.dataclass(frozen=True)
class AnnealedGate:
    """log_bias = log((1 - alpha) u + alpha 1[u >= tau]) (SP-KV, eq. 7). At alpha = 1 a key below tau
    expires."""

    alpha: float
    tau: float = 0.5

    def numbers(self):
        return "annealed", (0.0, self.alpha, self.tau, 0.0, 1.0), False, 0


@dataclasses.dataclass(frozen=True)
class ThresholdSoftGate:
    """log u where u >= tau; a key below tau expires (SP-KV, table 4)."""

    tau: float = 0.5

    def numbers(self):
        return "threshold_soft", (0.0, 0.0, self.tau, 0.0, 1.0), False, 0


@dataclasses.dataclass(frozen=True)
class BernoulliGate:
    """Open with probability clip(u, clip, 1 - clip), without a bias; else the key expires. The derivative is
    that of log u (straight-through; SP-KV, eq. 10 to 12). The same seed draws the same."""

    clip: float = 0.0
    seed: int = 0

    def numbers(self):
        _native.check_seed("BernoulliGate.seed", self.seed)
        return "bernoulli", (0.0, 0.0, 0.0, self.clip, 1.0), False, self.seed


@dataclasses.dataclass(frozen=True)
class DmsGate:
    """log_bias = log(1 - sigmoid((score + n) / temperature)) with logistic noise n, or without (DMS)."""

    temperature: float = 1.0
    noise: bool = True
    seed: int = 0

    def numbers(self):
        _native.check_seed("DmsGate.seed", self.seed)
        return "dms", (0.0, 0.0, 0.0, 0.0, self.temperature), self.noise, self.seed


_GATE = "str gate, float[] numbers, bool noise, int seed"
_TAIL = f"{_POLICY}, {_GATE}, Tensor? lengths, Tensor? cu_seqlens"


def _wide(scores):
    """Scores as the library reads them: float32, or float64."""
    return _native.rows(scores) if scores.dtype == torch.float64 else _native.rows32(scores)


def _build_log_bias(
    scores, instance, sinks, windows, budgets, thresholds, gate, numbers, noise, seed, lengths, cu_seqlens
):
    expiry = _filled(scores, -1, torch.int32, lengths)
    log_bias = _filled(scores, 0, torch.float32, lengths)
    policy = _native_policy(instance, sinks, windows, budgets, thresholds)
    _native.call(
        "build_log_bias",
        scores,
        policy,
        (gate, *numbers, noise, seed),
        _wide(scores),
        (lengths, None, cu_seqlens),
        expiry,
        log_bias,
    )
    return log_bias, expiry


def _build_log_bias_fake(scores, *_others):
    return (
        torch.empty(scores.shape, dtype=torch.float32, device=scores.device),
        torch.empty(scores.shape, dtype=torch.int32, device=scores.device),
    )


def _log_bias_backward(
    scores,
    d_log_bias,
    instance,
    sinks,
    windows,
    budgets,
    thresholds,
    gate,
    numbers,
    noise,
    seed,
    lengths,
    cu_seqlens,
):
    wide = _wide(scores)
    d_scores = _filled(scores, 0, wide.dtype, lengths)
    policy = _native_policy(instance, sinks, windows, budgets, thresholds)
    _native.call(
        "log_bias_backward",
        scores,
        policy,
        (gate, *numbers, noise, seed),
        wide,
        _native.rows(d_log_bias.to(wide.dtype)),
        (lengths, None, cu_seqlens),
        d_scores,
    )
    return d_scores.to(scores.dtype)


def _log_bias_backward_fake(scores, *_others):
    return torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)


_log_bias_backward_operator = Operator(
    "log_bias_backward",
    f"(Tensor scores, Tensor d_log_bias, {_TAIL}) -> Tensor",
    _log_bias_backward,
    _log_bias_backward_fake,
    refusal="the gradient of a gate (a second derivative)",
)


def _log_bias_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], *inputs[-2:])
    ctx.rest = inputs[1:-2]
    ctx.mark_non_differentiable(output[1])


def _log_bias_gradient(ctx, d_log_bias, _d_expiry):
    scores, lengths, cu_seqlens = ctx.saved_tensors
    d_scores = _log_bias_backward_operator(scores, d_log_bias, *ctx.rest, lengths, cu_seqlens)
    return (d_scores,)


_build_log_bias_operator = Operator(
    "build_log_bias",
    f"(Tensor scores, {_TAIL}) -> (Tensor, Tensor)",
    _build_log_bias,
    _build_log_bias_fake,
    _log_bias_gradient,
    _log_bias_setup,
    of=(0,),
)


def build_log_bias(policy, gate, scores, *, lengths=None, cu_seqlens=None):
    """The mask of a gated policy in training: a log-bias for keys outside the window, and the expiry of those
    that the gate closes.

    The policy gives sinks and windows; its own gate is not asked, and a TopKBudget is not allowed. Sinks and
    keys that never leave the window have bias 0. scores [B, Hkv, S] are raw logits in bfloat16, float16,
    float32 (float64 on the CPU). lengths and cu_seqlens as in build_mask.

    Returns a Mask with expiry [B, Hkv, S], log_bias [B, Hkv, S] float32 and bias_from [Hkv]. The gradient
    reaches the scores: d score = d log_bias * derivative of the gate.
    """
    if policy.has_budget:
        raise ValueError("policy: a TopKBudget is not allowed; a soft gate takes sinks and a window")
    log_bias, expiry = _build_log_bias_operator(
        scores, *numbers_of(policy), *gate.numbers(), lengths, cu_seqlens
    )
    # Filled on the device, since a graph captures no copy from the CPU.
    heads = scores.shape[1] if len(policy.windows) == 1 else 1
    bias_from = [torch.full((heads,), w, dtype=torch.int32, device=scores.device) for w in policy.windows]
    return Mask(expiry, log_bias, bias_from[0] if len(bias_from) == 1 else torch.cat(bias_from))
