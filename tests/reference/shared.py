"""Lifetimes of keys under a budget that the KV heads of a layer share, by brute force from the definition
(docs/shared-budget.md).

A key of a layer is a pair (h, t). At every query all pairs that hold a slot and all candidates are sorted,
and the definition's sets are taken from the sorted list. check_shared.py has a second, differently built
brute force.

shared.kvpv (python3 make_vectors.py writes it)
    scores           float32 [patterns, 300]  raw scores, NaN among them
    cases            int32 [cases, 4]         heads, length, rebase_limit, keep_every
    first_head       int32 [cases + 1]        the heads of case i are rows first_head[i] : first_head[i + 1]
    rules            int32 [heads, 9]         pattern, where its scores begin, sinks, window, gate, k, decay
                                              step, floor, cap (2^31 - 1 is none); the gate is one for a case
    levels           float32 [heads, 3]       tau (a logit), log_gamma, score offset
    cu_offsets, cu   int32                    packed segments, as in lifetimes.kvpv
    offsets, expiry  int32                    expiry[offsets[i] : offsets[i + 1]] is [heads, length], clamped
    slot             int32                    beside expiry: the slot that the key holds from t + w on, or -1;
                                              -1 for packed cases
"""

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np

import lifetimes
from lifetimes import UNLIMITED, Rule

GATES = ["none", "at_least", "above"]


@dataclasses.dataclass(frozen=True)
class SharedRule:
    """The policy of a layer. `heads` are the rules of its KV heads; their budgets add up to the layer's
    slots. Floors, caps and score offsets are by head; offsets are fp32 values. All rebase_limits are one."""

    heads: tuple
    floors: tuple
    caps: tuple
    offsets: tuple

    def __post_init__(self):
        count = len(self.heads)
        if not count == len(self.floors) == len(self.caps) == len(self.offsets):
            raise ValueError(f"numbers of {count} heads do not agree")
        if any(c < f or f < 0 for f, c in zip(self.floors, self.caps)) or sum(self.floors) > self.slots:
            raise ValueError(f"impossible limits in {self}")
        if len({rule.rebase_limit for rule in self.heads}) != 1:
            raise ValueError("one rebase limit for all heads")

    @property
    def slots(self):
        return sum(rule.budget for rule in self.heads)

    @property
    def is_static(self):
        """Whether the order of pairs is static: one log gamma, and decay step 1 or no decay."""
        gammas = {float(np.float32(rule.log_gamma)) for rule in self.heads}
        return len(gammas) == 1 and (gammas == {0.0} or all(rule.decay_step == 1 for rule in self.heads))


def plus_product(r, factor, log_gamma):
    """fl64(r + factor * log_gamma), for a float64 r, an integer factor and an fp32 log_gamma."""
    log_gamma = float(np.float32(log_gamma))
    if abs(factor) < 2**29 or not math.isfinite(r):
        return r + float(factor) * log_gamma
    return float(Fraction(r) + factor * Fraction(log_gamma))


def value(shared, score, h, t, q):
    """What ranks pair (h, t) at query q; larger is better."""
    rule = shared.heads[h]
    r = float(np.float32(score)) + float(np.float32(shared.offsets[h]))
    if shared.is_static:
        return plus_product(r, -(t - lifetimes.priority_base(q, rule.rebase_limit)), rule.log_gamma)
    return plus_product(r, (q - t) // rule.decay_step, rule.log_gamma)


def in_order(values):
    """The pairs of {(h, t): value}, best first: larger values, NaN last; ties to the older key, then to the
    lower head."""

    def place(pair):
        h, t = pair
        number = values[pair]
        return (math.isnan(number), 0.0 if math.isnan(number) else -number, t, h)

    return sorted(values, key=place)


def choose(values, floors, caps, slots):
    """The pairs that hold slots, of contenders {(h, t): value}."""
    order = in_order(values)
    floor_keys, capped = set(), []
    for h, (floor, cap) in enumerate(zip(floors, caps)):
        mine = [pair for pair in order if pair[0] == h]
        floor_keys |= set(mine[:floor])
        capped += mine[floor:cap]
    rest = [pair for pair in order if pair in set(capped)]
    return floor_keys | set(rest[: slots - len(floor_keys)])


def eligible(shared, scores, h, q):
    """E(q) of one head: keys that have left its window, are no sinks, kept by no part, and open."""
    rule = shared.heads[h]
    return lifetimes.eligible(scores[h], rule, q)


def held_sets(scores, shared):
    """[held after query q for q = 0 .. S - 1], sets of pairs."""
    length = len(scores[0])
    held, history = set(), []
    for q in range(length):
        contenders = {}
        for h, rule in enumerate(shared.heads):
            for t in eligible(shared, scores, h, q):
                if (h, t) in held or t == q - rule.window:
                    contenders[h, t] = value(shared, scores[h][t], h, t, q)
        held = choose(contenders, shared.floors, shared.caps, shared.slots)
        history.append(held)
    return history


def slots_after(history):
    """[{(h, t): slot} after query q]. Admitted candidates take the slots of the evicted keys, older first,
    then the lower head; then unused slots in rising order. Candidates in the order of their heads."""
    owner, before, used, result = {}, set(), 0, []
    for held in history:
        evicted = sorted(before - held, key=lambda pair: (pair[1], pair[0]))
        free = [owner.pop(pair) for pair in evicted]
        admitted = sorted(held - before)
        assert len(admitted) >= len(free)
        for pair in admitted:
            if free:
                owner[pair] = free.pop(0)
            else:
                owner[pair] = used
                used += 1
        before = held
        result.append(dict(owner))
    return result


def visible_matrix(scores, shared):
    """M[h, q, t] as a bool array."""
    history = held_sets(scores, shared)
    heads, length = len(shared.heads), len(scores[0])
    visible = np.zeros((heads, length, length), dtype=bool)
    for h, rule in enumerate(shared.heads):
        for q in range(length):
            for t in range(q + 1):
                visible[h, q, t] = rule.keeps(t) or q - t < rule.window or (h, t) in history[q]
    return visible


def expiries(scores, shared):
    """expiry [heads, S], from fp32 raw scores [heads, S]. Values are NEVER or below S."""
    scores = np.asarray(scores, dtype=np.float32)
    visible = visible_matrix(scores, shared)
    return np.array([lifetimes.expiry_of(visible[h]) for h in range(len(shared.heads))]).reshape(scores.shape)


def packed_expiries(scores, shared, cu_seqlens):
    """The same where everything starts anew at each edge, and keys expire with their segment."""
    scores = np.asarray(scores, dtype=np.float32)
    expiry = np.empty(scores.shape, dtype=np.int64)
    for begin, end in itertools.pairwise(cu_seqlens):
        local = expiries(scores[:, begin:end], shared)
        expiry[:, begin:end] = np.minimum(local, end - begin) + begin
    return expiry


def cases(names, random):
    """(shared rule, [(pattern, begin)] by head, length, cu_seqlens) of every case."""
    result = []
    f32 = np.float32

    def pick(values):
        return values[random.randint(len(values))]

    def add(
        heads,
        length,
        cu=(),
        gate="none",
        keep=0,
        limit=lifetimes.REBASE_LIMIT,
        gammas=None,
        steps=(1,),
        limited=True,
        k=(0, 1, 2, 5, 9),
        pattern=None,
        windows=(1, 2, 5, 16, 70),
        offsets=True,
    ):
        rules, floors, caps, shifts, rows = [], [], [], [], []
        one_window, one_gamma = pick(windows), f32(pick([0.0, -0.01, -0.25, -0.7, -3.0]))
        uniform = random.randint(2) == 0
        for h in range(heads):
            rules.append(
                Rule(
                    sinks=pick([0, 0, 1, 4]),
                    window=one_window if uniform else pick(windows),
                    gate=gate,
                    tau=f32(pick([0.5, 0.0, -0.5])),
                    budget=pick(k),
                    log_gamma=one_gamma if gammas is None else f32(pick(gammas)),
                    decay_step=pick(steps),
                    keep_every=keep,
                    rebase_limit=limit,
                )
            )
            shifts.append(f32(pick([0.0, 0.0, 0.5, -1.0, 1e-8])) if offsets else f32(0.0))
            rows.append((pick(range(len(names))) if pattern is None else pattern, random.randint(0, 100)))
        slots = sum(rule.budget for rule in rules)
        for h in range(heads):
            floor = min(pick([0, 0, 1, 3, 6]) if limited else 0, slots - sum(floors))
            floors.append(floor)
            caps.append(pick([UNLIMITED, floor, floor + 1, floor + 7]) if limited else UNLIMITED)
        result.append(
            (SharedRule(tuple(rules), tuple(floors), tuple(caps), tuple(shifts)), rows, length, list(cu))
        )

    # Static orders, without and with limits; then orders that depend on the query.
    for pattern in range(len(names)):
        for limited in (False, True):
            add(pick([1, 2, 3, 5]), pick([60, 90]), pattern=pattern, limited=limited, offsets=limited)
            add(
                pick([2, 3, 4]),
                pick([40, 70]),
                pattern=pattern,
                limited=limited,
                gammas=[0.0, -0.01, -0.25, -1.0],
            )
            add(pick([2, 3]), pick([40, 70]), pattern=pattern, limited=limited, steps=(1, 3, 64))
            add(pick([2, 3]), pick([70]), pattern=pattern, limited=limited, limit=pick([1, 5, 32]))
    for gate in GATES:
        for keep in (0, 3):
            for limited in (False, True):
                add(pick([2, 3, 7]), pick([50, 80]), gate=gate, keep=keep, limited=limited)
                add(
                    pick([2, 3]),
                    pick([50, 80]),
                    gate=gate,
                    keep=keep,
                    limited=limited,
                    steps=(3,),
                    gammas=[-0.25],
                )
    # Lengths at every edge, and many heads.
    for length in (0, 1, 2, 3, 6, 17):
        for limited in (False, True):
            add(3, length, limited=limited, windows=(1, 2, 5))
    for heads in (1, 33, 70):
        add(heads, 20, windows=(1, 3), k=(0, 1))
    # Packed segments.
    for cu in ([0, 90], [0, 40, 41, 41, 90], [0, 0, 3, 64, 90, 90], list(range(0, 91, 10))):
        for limited in (False, True):
            add(3, 90, cu, limited=limited, windows=(1, 3, 8))
            add(2, 90, cu, limited=limited, windows=(1, 3, 8), gammas=[-0.1, -0.5], keep=3)
    return result


def make(patterns):
    """The arrays of shared.kvpv, from score patterns {name: float32 [300]}."""
    random = np.random.RandomState(16)
    normal = random.standard_normal(300)
    patterns = dict(patterns)
    patterns["NaN"] = np.where(random.randint(0, 4, 300) == 0, np.nan, normal)
    names, scores = list(patterns), np.array(list(patterns.values())).astype(np.float32)
    rows, first, rules, levels, segments, expiry, slots = [], [0], [], [], [], [], []
    for shared, sources, length, cu in cases(names, random):
        mine = np.array([scores[p, b : b + length] for p, b in sources]).reshape(len(sources), length)
        found = packed_expiries(mine, shared, cu) if cu else expiries(mine, shared)
        rows.append([len(sources), length, shared.heads[0].rebase_limit, shared.heads[0].keep_every])
        first.append(first[-1] + len(sources))
        for h, rule in enumerate(shared.heads):
            rules.append(
                [
                    *sources[h],
                    rule.sinks,
                    rule.window,
                    GATES.index(rule.gate),
                    rule.budget,
                    rule.decay_step,
                    shared.floors[h],
                    shared.caps[h],
                ]
            )
            levels.append([rule.tau, rule.log_gamma, shared.offsets[h]])
        segments.append(cu)
        expiry.append(lifetimes.clamped(found, length).reshape(-1))
        table = np.full(found.shape, -1)
        for owners in slots_after(held_sets(mine, shared)) if not cu else []:
            for (h, t), slot in owners.items():
                table[h, t] = slot  # a key keeps its slot
        slots.append(table.reshape(-1))

    def offsets(parts):
        return np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int32)

    def joined(parts):
        return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])

    return {
        "scores": scores,
        "cases": np.array(rows),
        "first_head": np.array(first),
        "rules": np.array(rules),
        "levels": np.array(levels, dtype=np.float32),
        "cu_offsets": offsets(segments),
        "cu": joined(segments),
        "offsets": offsets(expiry),
        "expiry": joined(expiry),
        "slot": joined(slots),
    }
