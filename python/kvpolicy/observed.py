"""Policies that observe attention: H2O, TOVA and SnapKV, the mass that keys receive, and the masks."""

import dataclasses
import warnings

import torch

from kvpolicy import _native
from kvpolicy._native import Operator
from kvpolicy.masks import _POLICY, Mask, _filled, _native_policy, numbers_of
from kvpolicy.policy import UNLIMITED, ObservedScorer, Policy, TopKBudget, Window

_NUMBERS = "float sm_scale, float logits_soft_cap"


def _largest(aggregate):
    if aggregate not in ("max", "mean"):
        raise ValueError(f"aggregate: {aggregate!r} is not allowed; it must be 'max' or 'mean'")
    return aggregate == "max"


def _chunk(prefill):
    """Tokens per block of a prompt; 0 for all."""
    if prefill == "dense":
        return 0
    if isinstance(prefill, int) and not isinstance(prefill, bool) and prefill >= 1:
        return prefill
    raise ValueError(f"prefill: {prefill!r} is not allowed; it must be 'dense' or the tokens of a chunk")


# ---- policies ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AccumulatedMass(ObservedScorer):
    """H2O's score: the attention that a key has received from all queries so far. With G query heads per KV
    head their weights count as `aggregate`, mean or max. `prefill` says how a prompt is taken: "dense"
    attends to all of it and prunes then, as the papers do; a number of tokens prunes after every such
    chunk, 1 after every token."""

    prefill: object = "dense"
    aggregate: str = "mean"
    instance = "h2o"

    def numbers(self):
        return _chunk(self.prefill), _largest(self.aggregate), False, 1, False


@dataclasses.dataclass(frozen=True)
class LastMass(ObservedScorer):
    """TOVA's score: the attention of the last query, averaged over all heads of the layer (`whole_layer`,
    which then keep the same keys) or over the query heads of each KV head. prefill as in AccumulatedMass."""

    prefill: object = "dense"
    aggregate: str = "mean"
    whole_layer: bool = True
    instance = "tova"

    def numbers(self):
        return _chunk(self.prefill), _largest(self.aggregate), self.whole_layer, 1, False


@dataclasses.dataclass(frozen=True)
class WindowMass(ObservedScorer):
    """SnapKV's score: the attention of a prompt's last w queries, smoothed over `pool` neighboring keys (odd;
    1: not) by their mean or, with `pool_largest`, their maximum. prefill as in AccumulatedMass."""

    prefill: object = "dense"
    aggregate: str = "mean"
    pool: int = 5
    pool_largest: bool = False
    instance = "snapkv"

    def numbers(self):
        return _chunk(self.prefill), _largest(self.aggregate), False, self.pool, self.pool_largest


def H2O(heavy, recent, **options):
    """The `heavy` keys with the most attention so far and the `recent` newest, besides the current token
    (Zhang et al., 2023). Options are AccumulatedMass's. Warns of a head without recent keys: a new key then
    competes with the attention of one query against sums over many, and is hardly ever kept."""
    several = isinstance(recent, (list, tuple))
    if 0 in (recent if several else (recent,)):
        warnings.warn(
            "H2O: recent is 0: once the budget is full, new keys are hardly ever kept", stacklevel=2
        )
    recent = [r + 1 for r in recent] if several else recent + 1
    return Policy(Window(recent), TopKBudget(heavy), AccumulatedMass(**options))


def TOVA(keys, **options):
    """The `keys` keys that the last query attends to most, besides the current token (Oren et al., 2024).
    Options are LastMass's."""
    return Policy(Window(1), TopKBudget(keys), LastMass(**options))


def SnapKV(keys, window=32, **options):
    """A prompt's last `window` keys and the `keys` others to which they attend most; decoded tokens stay (Li
    et al., 2024). Options are WindowMass's."""
    return Policy(Window(window), TopKBudget(keys), WindowMass(**options))


# ---- masks -------------------------------------------------------------------------------------------------


def _observed_mask(q, k, instance, sinks, windows, budgets, thresholds, *rest):
    chunk, largest, whole_layer, pool, pool_largest, prompt, sm_scale, logits_soft_cap, lengths = rest
    expiry = _filled(k[..., 0], -1, torch.int32, lengths)
    _native.call(
        "observed_mask",
        q,
        _native_policy(instance, sinks, windows, budgets, thresholds),
        (chunk, largest, whole_layer, pool, pool_largest, prompt),
        q,
        k,
        (lengths, None, None),
        sm_scale,
        logits_soft_cap,
        expiry,
    )
    return expiry


def _observed_mask_fake(q, k, *_others):
    return torch.empty(k.shape[:-1], dtype=torch.int32, device=q.device)


_observed_mask_operator = Operator(
    "observed_mask",
    f"(Tensor q, Tensor k, {_POLICY}, int chunk, bool largest, bool whole_layer, int pool, "
    f"bool pool_largest, int prompt, {_NUMBERS}, Tensor? lengths) -> Tensor",
    _observed_mask,
    _observed_mask_fake,
    refusal="expiries",
)


def build_observed_mask(policy, q, k, *, prompt=None, lengths=None, sm_scale=None, logits_soft_cap=0.0):
    """The expiry of every key under a policy that observes attention (H2O, TOVA, SnapKV), from q [B, Hq, S,
    Dk] and k [B, Hkv, S, Dk]: what a cache holds that takes the first `prompt` tokens (None: all) as the
    policy's `prefill` says, and the others one by one. A key that is evicted after query q has expiry q + 1,
    and queries see the keys that the policy left them.

    bfloat16, float16, float32 or float64; lengths [B] int32: keys beyond have expiry -1. Returns a Mask
    without a gradient. On CUDA the work is enqueued on the current stream. A NaN or infinity in q or k raises
    ValueError on the CPU. O(S) products per token, at most O(S^2)."""
    if not isinstance(policy.scorer, ObservedScorer):
        raise ValueError(f"policy: {policy!r} is not allowed; it must observe attention: H2O, TOVA or SnapKV")
    expiry = _observed_mask_operator(
        q.detach(),
        k.detach(),
        *numbers_of(policy),
        *policy.scorer.numbers(),
        UNLIMITED if prompt is None else prompt,
        sm_scale or 0.0,
        logits_soft_cap,
        lengths,
    )
    return Mask(expiry)


# ---- mass --------------------------------------------------------------------------------------------------


def _received_mass(q, k, expiry, queries, largest, sm_scale, logits_soft_cap, lengths):
    mass = _filled(k[..., 0], 0, torch.float32, lengths)
    _native.call(
        "received_mass",
        q,
        q,
        k,
        _native.rows(expiry),
        (lengths, None, None),
        sm_scale,
        logits_soft_cap,
        queries,
        largest,
        mass,
    )
    return mass


def _received_mass_fake(q, k, *_others):
    return torch.empty(k.shape[:-1], dtype=torch.float32, device=q.device)


_received_mass_operator = Operator(
    "received_mass",
    f"(Tensor q, Tensor k, Tensor? expiry, int queries, bool largest, {_NUMBERS}, Tensor? lengths) -> Tensor",
    _received_mass,
    _received_mass_fake,
    refusal="the mass",
)


def received_mass(
    q,
    k,
    mask=None,
    *,
    queries=None,
    aggregate="mean",
    lengths=None,
    sm_scale=None,
    logits_soft_cap=0.0,
):
    """The attention that each key receives from the last `queries` queries (None: all): [B, Hkv, S] float32,

        mass(t) = sum over q of agg_g p_q,g(t)

    with p the softmax weights over the keys that a query sees through the mask (None: causal) and agg the
    mean or max over the query heads of a KV head. q [B, Hq, S, Dk], k [B, Hkv, S, Dk] in bfloat16, float16,
    float32 or float64. It has no gradient. On CUDA the work is enqueued on the current stream. O(queries S)
    per head."""
    return _received_mass_operator(
        q.detach(),
        k.detach(),
        None if mask is None else mask.expiry,
        UNLIMITED if queries is None else queries,
        _largest(aggregate),
        sm_scale or 0.0,
        logits_soft_cap,
        lengths,
    )
