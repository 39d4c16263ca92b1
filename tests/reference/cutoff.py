"""The running cutoff rank for n = 1, by brute force (KVpop, C.1-C.2 and algorithm 2; design, section 2).

The design's values where the paper contradicts itself: INT32_MAX while fewer than k keys are eligible (all of
them are visible), and -1 for k = 0 (none is).
"""

import numpy as np

from lifetimes import NEVER, eligible, rank_value

NO_CUTOFF = 2**31 - 1


def priorities(scores, rule):
    """p_t = r_t - t log(gamma) (eq. 20) for all S tokens, with base 0."""
    if rule.decay_step != 1 or len(scores) > rule.rebase_limit:
        raise ValueError("a cutoff rank exists for n = 1 and one base only")
    return np.array([rank_value(rule, score, t, 0) for t, score in enumerate(scores)], dtype=np.float64)


def ranks(scores, rule):
    """rank(t): the place of t among all S tokens by priority, larger first, ties to the older;
    0 is the best."""
    priority = priorities(scores, rule)
    rank = np.empty(len(scores), dtype=np.int64)
    rank[sorted(range(len(scores)), key=lambda t: (-priority[t], t))] = np.arange(len(scores))
    return rank


def competing_ranks(scores, rule):
    """The same order among the keys that compete within the sequence only (those in E(S - 1)), and INT32_MAX
    for the others, whose scores are then not read. Visibility and boundary are the same as with ranks()."""
    rank = ranks(scores, rule)
    competing = sorted(eligible(scores, rule, len(scores) - 1), key=lambda t: rank[t])
    result = np.full(len(scores), NO_CUTOFF, dtype=np.int64)
    result[competing] = np.arange(len(competing))
    return result


def cutoffs(scores, rule, rank=None):
    """(cutoff[q], boundary[q]): the rank, and the position, of the k-th best key of E(q).

    With fewer than k eligible keys the cutoff is INT32_MAX and with k = 0 it is -1; the position is -1
    in both cases. The position depends on the eligible keys alone, the rank also on the scores of keys
    that never compete.
    """
    rank = ranks(scores, rule) if rank is None else rank
    cutoff = np.full(len(scores), NO_CUTOFF, dtype=np.int64)
    boundary = np.full(len(scores), -1, dtype=np.int64)
    for q in range(len(scores)):
        ranked = sorted(eligible(scores, rule, q), key=lambda t: rank[t])
        if rule.places == 0:
            cutoff[q] = -1
        elif len(ranked) >= rule.places:
            boundary[q] = ranked[rule.places - 1]
            cutoff[q] = rank[boundary[q]]
    return cutoff, boundary


def expiry_from_cutoffs(scores, rule, rank=None):
    """The expiry that rank and cutoff imply (eq. 26): a long-range key is visible at q while rank(t)
    <= cutoff[q]."""
    rank = ranks(scores, rule) if rank is None else rank
    cutoff, _ = cutoffs(scores, rule, rank)
    expiry = np.full(len(scores), NEVER, dtype=np.int64)
    for t in range(len(scores)):
        if rule.keeps(t):
            continue
        for q in range(t + rule.window, len(scores)):
            if not rule.opens(scores[t]) or rank[t] > cutoff[q]:
                expiry[t] = q
                break
    return expiry
