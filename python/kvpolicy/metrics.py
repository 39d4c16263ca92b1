"""Metrics of masks: what queries see, and how much of a teacher's choice a student shares (KVpop, 4.3)."""

from typing import NamedTuple

import torch

from kvpolicy import _native
from kvpolicy._native import Operator
from kvpolicy.masks import _POLICY, _native_policy, numbers_of
from kvpolicy.policy import StreamingLLM

# For metrics that ask no policy.
_ANY = numbers_of(StreamingLLM(0, 1))

_SHAPES = {
    "live_keys": (lambda b, h, s: (b, h, s), torch.int32),
    "density": (lambda b, h, s: (b, h), torch.float64),
    "evict_ratio": (lambda b, h, s: (b, h), torch.float64),
    "recall": (lambda b, h, s: (b, h, 5), torch.int64),
}


def _metric(expiry, second, kind, instance, sinks, windows, budgets, thresholds, lengths):
    shape, dtype = _SHAPES[kind]
    out = _native.outputs_of(lengths)(*shape(*expiry.shape), dtype=dtype, device=expiry.device)
    policy = _native_policy(instance, sinks, windows, budgets, thresholds)
    planes = (_native.rows(expiry), _native.rows(second))
    _native.call("metric", expiry, kind, policy, *planes, (lengths, None, None), out)
    return out


def _metric_fake(expiry, _second, kind, *_others):
    shape, dtype = _SHAPES[kind]
    return torch.empty(shape(*expiry.shape), dtype=dtype, device=expiry.device)


_metric_operator = Operator(
    "metric",
    f"(Tensor expiry, Tensor? second, str kind, {_POLICY}, Tensor? lengths) -> Tensor",
    _metric,
    _metric_fake,
    refusal="a metric",
)


def _expiry_of(mask):
    """The expiry of a Mask, or the tensor itself."""
    return getattr(mask, "expiry", mask)


def live_keys(mask, *, lengths=None):
    """[B, Hkv, S] int32: the keys that each query sees, |{t : t <= q < expiry[t]}|. mask: a Mask, or its
    expiry [B, Hkv, S]. lengths [B] int32: entries beyond are 0. On CUDA the work is enqueued on the current
    stream. O(S) per head."""
    return _metric_operator(_expiry_of(mask), None, "live_keys", *_ANY, lengths)


def density(mask, *, lengths=None):
    """[B, Hkv] float64: the share of visible pairs among the S (S + 1) / 2 causal ones, those of the window
    among them; SP-KV's density is open_gates. Arguments as in live_keys."""
    return _metric_operator(_expiry_of(mask), None, "density", *_ANY, lengths)


def evict_ratio(policy, mask, *, lengths=None):
    """[B, Hkv] float64: the share of pairs with s <= t <= q - w that are not visible, s and w the policy's
    sinks and window (KVpop, figure 8); 0 where no such pair exists. Arguments as in live_keys."""
    return _metric_operator(_expiry_of(mask), None, "evict_ratio", *numbers_of(policy), lengths)


def _by_head(values, like):
    """Numbers of a policy, one or one per KV head, as [1, H or 1, 1] beside a plane."""
    return torch.tensor(values, device=like.device)[None, :, None]


def _tokens(plane, lengths):
    """Positions [S], and which of them are inside [B, 1, S] or [1, 1, S], with the lengths in float64."""
    t = torch.arange(plane.shape[-1], device=plane.device)
    if lengths is None:
        lengths = torch.full((1,), plane.shape[-1], dtype=torch.int32, device=plane.device)
    return t, lengths[:, None, None]


def open_gates(policy, scores, *, lengths=None):
    """[B, Hkv] float64: the share of keys whose gate is open, 0 for no keys. Its mean over layers and heads
    is SP-KV's density rho (eq. 8), which does not know the window; density is the share of visible pairs.

    policy  with a ThresholdGate or an EvictionGate
    scores  [B, Hkv, S] float32, raw logits; a NaN is not open
    lengths [B] int32: keys beyond do not count

    On CUDA the work is enqueued on the current stream. O(S) per head."""
    if policy.instance not in ("gate_at_least", "gate_above", "gate_evict"):
        raise NotImplementedError(f"policy: {policy!r} is not allowed; open_gates takes one with a gate")
    threshold = _by_head(policy.thresholds, scores).to(torch.float32)
    if policy.instance == "gate_evict":
        opened = ~(scores > threshold)
    else:
        opened = scores >= threshold if policy.instance == "gate_at_least" else scores > threshold
    t, ends = _tokens(scores, lengths)
    count = (opened & (t < ends)).sum(-1, dtype=torch.float64)
    return count / ends[..., 0].clamp(min=1)


class Coverage(NamedTuple):
    """By head, [B, Hkv] int64. keys: the reference's long-range keys; covered: those of them that the other
    mask has, too. covered / keys is a head's coverage; over several heads, the quotient of the sums."""

    keys: torch.Tensor
    covered: torch.Tensor


def coverage(policy, reference, other, *, lengths=None):
    """How many of a reference's long-range keys, those visible beyond their window and no sinks, are
    long-range keys of another mask, too: say of trained gates and of a layout where some heads keep all keys
    and the rest their window (SP-KV, density coverage, figure 4). Sinks and windows are the policy's. Returns
    a Coverage. Arguments as in live_keys."""
    mine, theirs = _expiry_of(reference), _expiry_of(other)
    if mine.shape != theirs.shape:
        raise ValueError(f"other: shape {tuple(theirs.shape)} is not allowed; it must be {tuple(mine.shape)}")
    t, ends = _tokens(mine, lengths)
    left = t + _by_head(policy.windows, mine)
    kept = (t >= _by_head(policy.sinks, mine)) & (left < ends) & (mine > left)
    return Coverage(kept.sum(-1), (kept & (theirs > left)).sum(-1))


class Recall(NamedTuple):
    """By head, [B, Hkv] each. queries, int64: those from s + w + k on, over which means are taken; mean and
    last (the last query alone), float64: |T & U| / |T|, with T and U the long-range keys that teacher and
    student see; chance_mean and chance_last, float64: |U| / |E|, E all long-range keys."""

    queries: torch.Tensor
    mean: torch.Tensor
    chance_mean: torch.Tensor
    last: torch.Tensor
    chance_last: torch.Tensor


def oracle_recall(policy, teacher, student, *, lengths=None):
    """How many of a teacher's long-range keys a student keeps (KVpop, 4.3 and figure 7), from two masks of
    one policy of Sink, Window and TopKBudget. Returns a Recall. Arguments as in live_keys."""
    if policy.instance != "top_k":
        raise NotImplementedError(
            f"policy: {policy!r} is not allowed; oracle_recall takes Sink, Window, TopKBudget and Decay"
        )
    record = _metric_operator(
        _expiry_of(teacher), _expiry_of(student), "recall", *numbers_of(policy), lengths
    )
    shares = record[..., 1:].contiguous().view(torch.float64)
    return Recall(record[..., 0], *shares.unbind(-1))


def retention_map(mask, query, *, lengths=None):
    """[B, S] int32: how many KV heads see key t at query `query`; 0 for t > query (KVpop, figures 6 and 9).
    Arguments as in live_keys."""
    if query < 0:
        raise ValueError(f"query: {query} is not allowed; it must be 0 or more")
    expiry = _expiry_of(mask)
    t = torch.arange(expiry.shape[-1], device=expiry.device)
    held = ((t <= query) & (query < expiry)).sum(1, dtype=torch.int32)
    return held if lengths is None else held * (t < lengths[:, None])
