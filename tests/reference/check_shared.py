"""Checks of shared.py against a second, differently built brute force, and the statements of
docs/shared-budget.md: python3 check_shared.py.

Where shared.py sorts the keys held before and the candidates, this file counts, per key and query, the keys
of every head that precede it among all eligible ones; and it admits the candidates of a query one after
another, in a random order, each evicting at most one key.
"""

import math
import random

import numpy as np

import lifetimes
import shared
from check_lifetimes import random_scores
from lifetimes import NEVER, UNLIMITED, Rule
from shared import SharedRule


def precedes(a, value_a, b, value_b):
    """Whether pair a ranks before pair b."""
    (head_a, t_a), (head_b, t_b) = a, b
    if math.isnan(value_a) or math.isnan(value_b):
        if math.isnan(value_a) != math.isnan(value_b):
            return math.isnan(value_b)
    elif value_a != value_b:
        return value_a > value_b
    return (t_a, head_a) < (t_b, head_b)


def counted_held(scores, rule, q):
    """The pairs held at q for a static order with one base, from all eligible pairs alone."""
    heads = range(len(rule.heads))
    value = {
        (h, t): shared.value(rule, scores[h][t], h, t, q)
        for h in heads
        for t in shared.eligible(rule, scores, h, q)
    }
    held = set()
    for x, value_x in value.items():
        better, taken = {}, 0
        for g in heads:
            mine = [y for y in value if y[0] == g]
            better[g] = sum(precedes(y, value[y], x, value_x) for y in mine)
            taken += max(min(rule.floors[g], len(mine)), min(rule.caps[g], better[g]))
        if better[x[0]] < rule.floors[x[0]] or (better[x[0]] < rule.caps[x[0]] and taken < rule.slots):
            held.add(x)
    return held


def one_by_one(scores, rule, source):
    """expiry [heads, S] by single updates: the candidates of a query in a random order. Above its head's cap
    a candidate evicts the head's worst key, else above the layer's slots the worst key of a head above its
    floor."""
    heads, length = len(rule.heads), len(scores[0])
    expiry = np.full((heads, length), NEVER, dtype=np.int64)
    held = set()

    def worst(pairs, q):
        value = {(h, t): shared.value(rule, scores[h][t], h, t, q) for h, t in pairs}
        (last,) = [x for x in pairs if all(y == x or precedes(y, value[y], x, value[x]) for y in pairs)]
        return last

    for q in range(length):
        order = list(range(heads))
        source.shuffle(order)
        for h in order:
            t = q - rule.heads[h].window
            if t < 0 or rule.heads[h].keeps(t):
                continue
            if not rule.heads[h].opens(scores[h][t]):
                expiry[h, t] = q
                continue
            held.add((h, t))
            count = {g: sum(x[0] == g for x in held) for g in range(heads)}
            evicted = None
            if count[h] > rule.caps[h]:
                evicted = worst({x for x in held if x[0] == h}, q)
            elif len(held) > rule.slots:
                evicted = worst({x for x in held if count[x[0]] > rule.floors[x[0]]}, q)
            if evicted is not None:
                held.remove(evicted)
                expiry[evicted] = q
    return expiry


def random_rule(source):
    heads = source.choice([1, 2, 2, 3, 5])
    static = source.random() < 0.6
    gate, keep = source.choice(["none", "none", "at_least", "above"]), source.choice([0, 0, 3])
    gamma = float(np.float32(source.choice([0.0, -0.5, -0.01, -3.0])))
    limit = source.choice([lifetimes.REBASE_LIMIT, lifetimes.REBASE_LIMIT, 16, 5])
    rules = [
        Rule(
            sinks=source.choice([0, 0, 1, 4]),
            window=source.choice([1, 2, 5, 16]),
            gate=gate,
            tau=float(np.float32(source.choice([0.0, 0.5]))),
            budget=source.choice([0, 1, 2, 7]),
            log_gamma=gamma if static else float(np.float32(source.choice([0.0, -0.5, -0.01]))),
            decay_step=1 if static else source.choice([1, 3, 64]),
            keep_every=keep,
            rebase_limit=limit,
        )
        for _ in range(heads)
    ]
    slots, floors = sum(rule.budget for rule in rules), []
    for _ in range(heads):
        floors.append(min(source.choice([0, 0, 1, 3]), slots - sum(floors)))
    caps = [floor + source.choice([0, 1, 5, UNLIMITED - floor]) for floor in floors]
    offsets = [float(np.float32(source.choice([0.0, 0.5, -1.0]))) for _ in range(heads)]
    return SharedRule(tuple(rules), tuple(floors), tuple(caps), tuple(offsets))


def check_one(scores, rule, source):
    heads, length = scores.shape
    visible = shared.visible_matrix(scores, rule)
    expiry = shared.expiries(scores, rule)
    history = shared.held_sets(scores, rule)
    assert np.array_equal(expiry, clipped(one_by_one(scores, rule, source), expiry, rule)), (scores, rule)
    if rule.is_static and rule.heads[0].rebase_limit >= length:
        for q in range(length):
            assert history[q] == counted_held(scores, rule, q), (scores, rule, q)

    for q in range(length):
        held = history[q]
        assert len(held) <= rule.slots and (q == 0 or len(held) >= len(history[q - 1]))
        for h in range(heads):
            assert sum(x[0] == h for x in held) <= min(rule.caps[h], rule.slots)
    # Slots: one key each, below the layer's number, and a key keeps its slot.
    owners = shared.slots_after(history)
    for q, owner in enumerate(owners):
        assert set(owner) == history[q] and len(set(owner.values())) == len(owner)
        assert all(slot < len(owner) for slot in owner.values())
        if q:
            assert all(owner[x] == slot for x, slot in owners[q - 1].items() if x in owner)
    # The bound of a tile, less what keep parts hold.
    for tile in (1, 3, 8):
        for first in range(0, length, tile):
            for h, of in enumerate(rule.heads):
                seen = visible[h, first : first + tile].any(axis=0)
                kept = [t for t in range(of.sinks, length) if of.keeps(t)]
                seen[kept] = False
                assert seen.sum() <= of.sinks + of.window + min(rule.caps[h], rule.slots) + tile - 1
    # The past does not depend on the future.
    part = length // 2
    prefix = shared.expiries(scores[:, :part], rule)
    assert np.array_equal(lifetimes.clamped(prefix, part), lifetimes.clamped(expiry[:, :part], part))
    # One head alone is a budget of its own.
    if heads == 1 and rule.floors == (0,) and rule.caps == (UNLIMITED,) and rule.offsets == (0.0,):
        of = rule.heads[0]
        if not np.isnan(scores).any() and (of.decay_step != 1 or rule.is_static):
            assert np.array_equal(expiry[0], lifetimes.lifetimes(scores[0], of))


def clipped(single, expiry, rule):
    """Expiries of keys that never compete do not come from updates."""
    heads, length = expiry.shape
    for h in range(heads):
        for t in range(length):
            if rule.heads[h].keeps(t) or t + rule.heads[h].window >= length:
                single[h, t] = NEVER
    return single


def check_known_answers():
    n = NEVER

    def rule(
        windows=(1, 1), k=(1, 1), floors=(0, 0), caps=(UNLIMITED, UNLIMITED), offsets=(0.0, 0.0), **numbers
    ):
        heads = tuple(Rule(window=w, budget=b, **numbers) for w, b in zip(windows, k))
        return SharedRule(heads, floors, caps, offsets)

    def expiry(scores, of):
        return shared.expiries(np.array(scores, dtype=np.float32), of).tolist()

    # Two slots: (0, 0) and (1, 0) at q = 1; 3 replaces 1, then 2 is replaced by nothing better.
    assert expiry([[1, 0, 0, 0], [2, 3, 0, 0]], rule()) == [[2, 2, 3, n], [n, n, 3, n]]
    # Ties: the older key, then the lower head.
    assert expiry([[0, 0, 0], [0, 0, 0]], rule(k=(1, 0))) == [[n, 2, n], [1, 2, n]]
    # A candidate of a head with a longer window is older than a key that holds the slot.
    assert expiry([[0, 0, 0, 0], [0, 0, 0, 0]], rule(windows=(1, 2), k=(1, 0))) == [
        [n, 2, 3, n],
        [2, 3, n, n],
    ]
    assert expiry([[0, 0, 0, 0], [0, 0, 0, 0]], rule(windows=(2, 1), k=(1, 0))) == [
        [n, 3, n, n],
        [2, 2, 3, n],
    ]
    # An offset decides between heads, a floor keeps the worst head's best key, a cap bounds the best head.
    assert expiry([[0, 0, 0], [1, 1, 0]], rule(offsets=(2.0, 0.0))) == [[n, n, n], [2, 2, n]]
    assert expiry([[0, 0, 0], [1, 1, 0]], rule()) == [[2, 2, n], [n, n, n]]
    assert expiry([[0, 0, 0], [1, 1, 0]], rule(floors=(1, 0))) == [[n, 2, n], [n, 2, n]]
    assert expiry([[0, 0, 0], [1, 1, 0]], rule(caps=(UNLIMITED, 1))) == [[n, 2, n], [n, 2, n]]
    # A floor that is not used is free for others.
    assert expiry([[0, 0, 0], [1, 1, 0]], rule(windows=(3, 1), floors=(1, 0))) == [[n, n, n], [n, n, n]]
    # Decays by head (the page's example): (0, 0) is out at q = 1 and stays out.
    decays = SharedRule(
        (Rule(budget=1), Rule(budget=0, log_gamma=-1.0)), (0, 0), (UNLIMITED, UNLIMITED), (0.0, 0.0)
    )
    found = expiry([[0.5, 0, 0, 0], [3, 0, 0, 0]], decays)
    assert found[0][0] == 1 and found[1][0] == n

    # Floors that grow with the length would bring (0, 1) back.
    def held(q):
        values = {
            (h, t): s for h, line in enumerate([[5, 4, 0, 0], [9, 9, 9, 9]]) for t, s in enumerate(line[:q])
        }
        return shared.choose(values, [min(2, q // 2)] * 2, [UNLIMITED] * 2, 4)

    assert [(0, 1) in held(q) for q in (2, 3, 4)] == [True, False, True]


def main(cases=500, seed=20261201):
    check_known_answers()
    source = random.Random(seed)
    for _ in range(cases):
        rule = random_rule(source)
        length = source.choice([0, 1, 2, 3, 5, 17, 33])
        scores = np.array([random_scores(source, length) for _ in rule.heads], dtype=np.float32)
        scores = scores.reshape(len(rule.heads), length)
        if source.random() < 0.2:
            scores[
                np.array(
                    [[source.random() < 0.2 for _ in range(length)] for _ in rule.heads], dtype=bool
                ).reshape(scores.shape)
            ] = np.nan
        check_one(scores, rule, source)
    print(f"shared budgets: {cases} random cases and the known answers agree")


if __name__ == "__main__":
    main()
