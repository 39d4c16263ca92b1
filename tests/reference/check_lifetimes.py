"""Checks of lifetimes.py, cutoff.py, metrics.py and cache.py against a second, differently built brute force.

Where lifetimes.py steps through queries with a sorted list of the keys held, this file asks per key and
counts: for n = 1 a key is visible at q as long as fewer than k eligible keys beat it (no state, valid because
the k best of a growing set with static priorities never re-admit); for n > 1 the key evicted by each top-k
update is the key that every other beats. Priorities are rational numbers, rounded once.
"""

import math
import random
from fractions import Fraction

import numpy as np

import cache
import cutoff
import lifetimes
import metrics
from lifetimes import NEVER, UNLIMITED, Rule


def rounded(score, factor, log_gamma):
    """fl64(score + factor * log_gamma) from exact arithmetic; infinite scores stay infinite."""
    if math.isinf(score):
        return score
    return float(Fraction(score) + factor * Fraction(log_gamma))


def beats(value_a, a, value_b, b):
    """Key a ranks before key b: a larger value, or an equal one and the older key."""
    return value_a > value_b or (value_a == value_b and a < b)


def competes(rule, scores, t):
    """Whether t may take a long-range place once it is outside the window."""
    if t < rule.sinks or (rule.keep_every and t % rule.keep_every == 0):
        return False
    return {"none": True, "at_least": scores[t] >= rule.tau, "above": scores[t] > rule.tau}[rule.gate]


def counted_expiry(scores, rule):
    """expiry for n = 1 with one base, per key: the first q >= t + w at which k or more of E(q) beat t."""
    length = len(scores)
    value = [rounded(scores[t], -t, rule.log_gamma) for t in range(length)]
    expiry = []
    for t in range(length):
        if t < rule.sinks or (rule.keep_every and t % rule.keep_every == 0):
            expiry.append(NEVER)
            continue
        first = t + rule.window
        if not competes(rule, scores, t):
            expiry.append(first if first < length else NEVER)
            continue
        # The times (u + w) at which the keys that beat t leave the window: k of them evict t.
        when_better = sorted(
            max(u + rule.window, first)
            for u in range(length)
            if u != t and competes(rule, scores, u) and beats(value[u], u, value[t], t)
        )
        k = rule.places
        when = first if k == 0 else when_better[k - 1] if k <= len(when_better) else NEVER
        expiry.append(when if when < length else NEVER)
    return np.array(expiry, dtype=np.int64)


def top_k_expiry(scores, rule):
    """expiry for any n and any base: one candidate per query, and one evicted key where the
    budget is used up."""
    length = len(scores)
    expiry = np.full(length, NEVER, dtype=np.int64)
    held = []
    for candidate in range(rule.sinks, length - rule.window):
        q = candidate + rule.window
        if rule.keep_every and candidate % rule.keep_every == 0:
            continue
        if not competes(rule, scores, candidate):
            expiry[candidate] = q
            continue
        held.append(candidate)
        if len(held) <= rule.places:
            continue
        if rule.decay_step == 1:
            base = q - q % rule.rebase_limit
            value = {t: rounded(scores[t], base - t, rule.log_gamma) for t in held}
        else:
            value = {t: rounded(scores[t], (q - t) // rule.decay_step, rule.log_gamma) for t in held}
        worst = [t for t in held if all(u == t or beats(value[u], u, value[t], t) for u in held)]
        (evicted,) = worst
        held.remove(evicted)
        expiry[evicted] = q
    return expiry


def random_scores(source, length):
    """fp32 scores of a kind that makes trouble."""
    kind = source.randrange(7)
    if kind == 0:
        values = [source.gauss(0, 1) for _ in range(length)]
    elif kind == 1:
        values = [source.choice([-1.0, 0.0, -0.0, 1.0]) for _ in range(length)]
    elif kind == 2:
        values = [source.choice([math.inf, -math.inf, 3e38, -3e38, 0.0]) for _ in range(length)]
    elif kind == 3:
        values = [2.0**53 * source.choice([1, 1, 2, -1]) for _ in range(length)]
    elif kind == 4:
        values = [0.25 * t * source.choice([1, 1, -1]) for t in range(length)]
    elif kind == 5:
        values = [-0.5 * t for t in range(length)]
    else:
        values = [0.5] * length
    return [float(np.float32(value)) for value in values]


def random_rule(source):
    """A rule of any composition, with small numbers."""
    gate = source.choice(["none", "at_least", "above"])
    return Rule(
        sinks=source.choice([0, 0, 1, 4]),
        window=source.choice([1, 2, 5, 16, 100]),
        gate=gate,
        tau=float(np.float32(source.choice([0.0, -0.0, 0.5, -0.7, math.inf, -math.inf]))),
        budget=source.choice([0, 1, 2, 7, 7, 20, UNLIMITED, None]),
        log_gamma=float(np.float32(source.choice([0.0, -0.5, -0.25, -0.01, -3.0, -1e-38]))),
        decay_step=source.choice([1, 1, 3, 64]),
        keep_every=source.choice([0, 0, 0, 3, 16]),
        rebase_limit=source.choice([lifetimes.REBASE_LIMIT, 16, 5]),
    )


def check_one(scores, rule):
    """All statements that hold for one random case."""
    length = len(scores)
    visible = lifetimes.visible_matrix(np.asarray(scores, dtype=np.float32), rule)
    expiry = lifetimes.expiry_of(visible)
    assert np.array_equal(expiry, top_k_expiry(scores, rule)), (scores, rule)
    if rule.decay_step == 1 and rule.rebase_limit >= length:
        assert np.array_equal(expiry, counted_expiry(scores, rule)), (scores, rule)
        assert np.array_equal(expiry, cutoff.expiry_from_cutoffs(scores, rule)), (scores, rule)
        competing = cutoff.competing_ranks(scores, rule)
        assert np.array_equal(expiry, cutoff.expiry_from_cutoffs(scores, rule, competing)), (scores, rule)
        assert np.array_equal(cutoff.cutoffs(scores, rule)[1], cutoff.cutoffs(scores, rule, competing)[1])

    # A query sees itself and its window; long-range keys are within the budget; nobody reads what
    # is never scored.
    t = np.arange(length)
    for q in range(length):
        assert np.array_equal(visible[q], (t <= q) & (q < expiry))
        assert visible[q, max(0, q - rule.window + 1) : q + 1].all()
        kept = [u for u in range(q - rule.window + 1) if visible[q, u] and not rule.keeps(u)]
        assert len(kept) <= rule.places
    poisoned = np.where(lifetimes.unread(length, rule), np.float32(1e30),
                        np.asarray(scores, dtype=np.float32))
    assert np.array_equal(expiry, lifetimes.lifetimes(poisoned, rule)), (scores, rule)

    # The past does not depend on the future: a prefix has the same mask.
    part = length // 2
    prefix = lifetimes.lifetimes(scores[:part], rule)
    assert np.array_equal(lifetimes.clamped(prefix, part), lifetimes.clamped(expiry[:part], part))

    assert metrics.live_keys(expiry, length).tolist() == visible.sum(axis=1).tolist()
    if length:
        causal = length * (length + 1) // 2
        assert math.isclose(metrics.density(expiry, length), visible.sum() / causal)


def check_cache(scores, rule, random):
    """A cache holds what the mask says is visible, never more than s + w + k rows, and its outputs are those
    of dense attention whose invisible logits are -inf. It asks for a score only where the key competes."""
    length, group, dim = len(scores), 2, 4
    q, k, v = (random.standard_normal(shape)
               for shape in ((group, length, dim), (1, length, dim), (1, length, dim)))
    expiry = lifetimes.lifetimes(scores, rule)
    never_read = lifetimes.unread(length, rule)
    given = np.where(never_read, np.nan, np.asarray(scores, dtype=np.float64))[None]
    for soft_cap in (0.0, 2.0):
        out, lse, retained = cache.run([rule], given, q, k, v, 0.5, soft_cap)
        logits = 0.5 * np.einsum("gqd,td->gqt", q, k[0])
        logits = soft_cap * np.tanh(logits / soft_cap) if soft_cap else logits
        logits = np.where(metrics.visible(expiry, length), logits, -np.inf)
        weights = np.exp(logits)
        total = weights.sum(axis=2)
        assert np.allclose(lse, np.log(total), rtol=1e-12, atol=1e-12)
        assert np.allclose(out, np.einsum("gqt,td->gqd", weights, v[0]) / total[:, :, None], rtol=1e-11,
                           atol=1e-11)
        for step in range(length):
            assert retained[0][step] == np.flatnonzero(metrics.visible(expiry, length)[step]).tolist()
            if rule.keep_every == 0:
                assert len(retained[0][step]) <= rule.sinks + rule.window + rule.places


def check_known_answers():
    """Small cases worked by hand."""
    keys = [0.0] * 8

    def expiry(**numbers):
        return lifetimes.lifetimes(keys, Rule(**numbers)).tolist()

    n = NEVER
    assert expiry() == [1, 2, 3, 4, 5, 6, 7, n]  # no part at all: a window of 1
    assert expiry(sinks=2, window=3) == [n, n, 5, 6, 7, n, n, n]  # StreamingLLM
    assert expiry(sinks=2, window=3, budget=2) == [n, n, n, n, 7, n, n, n]  # all equal: the two oldest stay
    assert expiry(sinks=2, window=3, budget=0) == [n, n, 5, 6, 7, n, n, n]
    assert expiry(sinks=2, window=3, budget=UNLIMITED) == [n] * 8
    assert expiry(sinks=2, window=3, gate="at_least") == [n] * 8  # 0 >= 0
    assert expiry(sinks=2, window=3, gate="above") == [n, n, 5, 6, 7, n, n, n]  # 0 > 0 is false
    # with decay the newest wins
    assert expiry(window=2, budget=1, log_gamma=-1.0) == [3, 4, 5, 6, 7, n, n, n]
    assert expiry(window=8, budget=1) == [n] * 8
    assert expiry(window=1, budget=1, keep_every=3) == [n, n, 3, n, 5, 6, n, n]
    rising = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert lifetimes.lifetimes(rising, Rule(window=1, budget=2)).tolist() == [3, 4, n, n, n]
    packed = lifetimes.packed_lifetimes(keys, Rule(sinks=1, window=2), [0, 3, 3, 8])
    assert packed.tolist() == [3, 3, 3, 8, 6, 7, 8, 8]
    # n = 3, w = 1, k = 1, log gamma = -1: at q = 2 key 0 (age 2, no decay yet) ties with key 1 and wins; at
    # q = 3 it has age 3 and loses to key 2; key 1, though now better than key 0, is gone for good.
    assert lifetimes.lifetimes([0.0] * 4,
                               Rule(budget=1, log_gamma=-1.0, decay_step=3)).tolist() == [3, 2, n, n]

    # Cutoffs: INT32_MAX while fewer than k keys are eligible, -1 for k = 0.
    limit, boundary = cutoff.cutoffs(rising, Rule(window=1, budget=2))
    assert limit.tolist() == [cutoff.NO_CUTOFF, cutoff.NO_CUTOFF, 4, 3, 2]
    assert boundary.tolist() == [-1, -1, 0, 1, 2]
    assert cutoff.cutoffs(rising, Rule(window=1, budget=0))[0].tolist() == [-1] * 5

    # Metrics: teacher keeps keys {0, 1}, student the two newest.
    teacher = lifetimes.lifetimes(rising[::-1], Rule(window=1, budget=2))
    student = lifetimes.lifetimes(rising, Rule(window=1, budget=2))
    recall = metrics.oracle_recall(teacher, student, 5, sinks=0, window=1, budget=2)
    assert recall["queries"] == 2 and recall["mean"] == 0.25 and recall["last"] == 0.0
    assert recall["chance_mean"] == (2 / 3 + 2 / 4) / 2 and recall["chance_last"] == 0.5
    stream = lifetimes.lifetimes(keys, Rule(sinks=2, window=3))
    assert metrics.evict_ratio(stream, 8, sinks=2, window=3) == 1.0
    assert metrics.evict_ratio(np.full(8, NEVER), 8, sinks=2, window=3) == 0.0
    assert metrics.density(np.full(8, NEVER), 8) == 1.0


def main(cases=600, seed=20260101):
    check_known_answers()
    source = random.Random(seed)
    random_numbers = np.random.RandomState(seed)
    for _ in range(cases):
        scores, rule = random_scores(source, source.choice([0, 1, 2, 3, 5, 17, 33, 60])), random_rule(source)
        check_one(scores, rule)
        check_cache(scores, rule, random_numbers)
    # Where every priority is exact, moving the base changes nothing.
    for _ in range(cases // 10):
        scores = [float(source.randrange(-8, 8)) for _ in range(50)]
        numbers = dict(sinks=2, window=3, budget=6, log_gamma=-0.25)
        once = lifetimes.lifetimes(scores, Rule(**numbers))
        assert np.array_equal(once, lifetimes.lifetimes(scores, Rule(**numbers, rebase_limit=7)))
    print(f"lifetimes, cutoffs, metrics, caches: {cases} random cases and the known answers agree")


if __name__ == "__main__":
    main()
