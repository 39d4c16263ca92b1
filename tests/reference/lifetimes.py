"""Lifetimes of keys, by brute force from the definitions (design, sections 1 and 2; KVpop, eq. 4, 5, 20, 26).

For one KV head and one sequence of S tokens this answers, for every query q and key t <= q, "is t visible?",
and from that the expiry of every key. It is slow and plain on purpose: it keeps no data structure but the
visible set of the query before.

    visible(h, q, t)  <=>  t <= q  and  q < expiry[h][t]              (never = 2^31 - 1)
    expiry            =    max(sink, keep, window, min(gate, budget))

Run `python3 lifetimes.py --self-test` to check it against the second, differently built brute force in
check_lifetimes.py.
"""

import dataclasses
import sys
from fractions import Fraction

import numpy as np

NEVER = 2**31 - 1  # the expiry of a key that is never evicted
UNLIMITED = 2**31 - 1  # k = infinity
REBASE_LIMIT = 2**29  # static priorities are taken relative to a base that moves by this much


@dataclasses.dataclass(frozen=True)
class Rule:
    """The policy of one KV head.

    sinks s, window w >= 1 and the long-range part: `gate` is "none", "at_least" (open where r >= tau) or
    "above" (open where r > tau); `budget` is k, UNLIMITED for a gate without a cap or a full-attention head,
    and None where the policy has no long-range part at all unless a gate is given (StreamingLLM). tau and
    log_gamma are fp32 values; tau is a logit, as scores are. keep_every = m > 0 adds a keep part: keys t with
    t % m == 0 never leave and do not compete.
    """

    sinks: int = 0
    window: int = 1
    gate: str = "none"
    tau: float = 0.0
    budget: int | None = None
    log_gamma: float = 0.0
    decay_step: int = 1
    keep_every: int = 0
    rebase_limit: int = REBASE_LIMIT

    def __post_init__(self):
        if self.sinks < 0 or self.window < 1 or self.decay_step < 1 or self.rebase_limit < 1:
            raise ValueError(f"impossible numbers in {self}")
        if self.gate not in ("none", "at_least", "above"):
            raise ValueError(f"gate: {self.gate!r} is not one of none, at_least, above")
        if self.budget is not None and self.budget < 0:
            raise ValueError(f"budget: {self.budget} is negative")

    @property
    def places(self):
        """How many long-range keys the head holds: k, or infinity, or 0 without gate and budget."""
        if self.budget is not None:
            return self.budget
        return UNLIMITED if self.gate != "none" else 0

    def keeps(self, t):
        """Whether t never leaves because of its position: a sink, or a key of the keep part."""
        return t < self.sinks or (self.keep_every > 0 and t % self.keep_every == 0)

    def opens(self, score):
        """Whether the gate lets a key with this raw score in. Scores and tau are both fp32, so no
        rounding occurs."""
        score, tau = float(np.float32(score)), float(np.float32(self.tau))
        if self.gate == "at_least":
            return score >= tau
        if self.gate == "above":
            return score > tau
        return True


def plus_product(r, factor, log_gamma):
    """r + factor * log_gamma with one rounding to float64, for fp32 r and log_gamma and an integer factor.

    Below 2^29 the product of a 29-bit integer and a 24-bit significand is exact in float64 (design, section
    2), so the sum below rounds once. Beyond, rational arithmetic gives the same single rounding.
    """
    r, log_gamma = float(np.float32(r)), float(np.float32(log_gamma))
    if abs(factor) < 2**29 or not np.isfinite(r):
        return r + float(factor) * log_gamma
    return float(Fraction(r) + factor * Fraction(log_gamma))


def priority_base(q, limit):
    """The base of static priorities at query q: it moves by `limit`, at multiples of `limit`."""
    return q // limit * limit


def rank_value(rule, score, t, q):
    """What ranks key t at query q; larger is better.

    n = 1: the static priority p_t = r_t - (t - base) * log(gamma) (KVpop, eq. 20, rebased).
    n > 1: the effective score fl64(r_t + floor((q - t) / n) * log(gamma)) (eq. 5).
    """
    if rule.decay_step == 1:
        return plus_product(score, -(t - priority_base(q, rule.rebase_limit)), rule.log_gamma)
    return plus_product(score, (q - t) // rule.decay_step, rule.log_gamma)


def best(values, k):
    """The k best keys of {t: value}: larger values first, ties to the older key; -0 and +0 are equal."""
    if any(np.isnan(value) for value in values.values()):
        raise ValueError("a score is NaN")
    return set(sorted(values, key=lambda t: (-values[t], t))[:k])


def eligible(scores, rule, q):
    """E(q) = {t : s <= t <= q - w} (eq. 4), less the keys of the keep part; under a gate, its
    open keys only."""
    return [t for t in range(rule.sinks, q - rule.window + 1) if not rule.keeps(t) and rule.opens(scores[t])]


def visible_matrix(scores, rule):
    """M[q, t] of eq. 26 as a bool matrix [S, S].

    At q the k best keys among those held at q - 1 and the candidate q - w stay: an evicted key stays
    evicted. For n = 1 and one base this equals the k best of the whole of E(q) (which
    check_lifetimes.py verifies).
    """
    length = len(scores)
    visible = np.zeros((length, length), dtype=bool)
    held = set()
    for q in range(length):
        contenders = [t for t in eligible(scores, rule, q) if t in held or t == q - rule.window]
        held = best({t: rank_value(rule, scores[t], t, q) for t in contenders}, rule.places)
        for t in range(q + 1):
            visible[q, t] = rule.keeps(t) or q - t < rule.window or t in held
    return visible


def expiry_of(visible):
    """expiry[t]: the first q >= t at which t is not visible, else NEVER. Refuses a key that comes back."""
    length = visible.shape[0]
    expiry = np.full(length, NEVER, dtype=np.int64)
    for t in range(length):
        gone = [q for q in range(t, length) if not visible[q, t]]
        if gone:
            expiry[t] = gone[0]
            if gone != list(range(gone[0], length)):
                raise AssertionError(f"key {t} comes back after query {gone[0]}")
    return expiry


def lifetimes(scores, rule):
    """expiry[S] of one head, from fp32 raw scores[S]. Values are NEVER or below S."""
    return expiry_of(visible_matrix(np.asarray(scores, dtype=np.float32), rule))


def packed_lifetimes(scores, rule, cu_seqlens):
    """expiry[S] of packed segments where everything starts anew at each edge.

    Each segment is a sequence of its own: positions (so sinks, keep part, decay base) count from its first
    token, and no key is visible past its segment's end, so its expiry is clamped to that end.
    """
    scores = np.asarray(scores, dtype=np.float32)
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != len(scores):
        raise ValueError(f"cu_seqlens: {list(cu_seqlens)} does not cover 0..{len(scores)}")
    expiry = np.empty(len(scores), dtype=np.int64)
    for begin, end in zip(cu_seqlens[:-1], cu_seqlens[1:]):
        local = lifetimes(scores[begin:end], rule)
        expiry[begin:end] = np.minimum(local, end - begin) + begin
    return expiry


def clamped(expiry, length):
    """The form in which masks are compared: any expiry >= S means never within the sequence."""
    return np.minimum(expiry, length).astype(np.int32)


def unread(length, rule):
    """True for keys whose score nothing may read: they never leave the window within the sequence, or never
    leave at all (sinks, keep part). Without a gate and a budget, every key's."""
    ranked = rule.gate != "none" or rule.budget is not None
    return np.array([not ranked or rule.keeps(t) or t + rule.window >= length for t in range(length)],
                    dtype=bool)


if __name__ == "__main__":
    if sys.argv[1:] != ["--self-test"]:
        sys.exit("usage: python3 lifetimes.py --self-test")
    import check_lifetimes

    check_lifetimes.main()
