"""Numbers about a mask, by their definitions. All take expiry[S] of one head; means over heads
are plain means.

Pairs (q, t) are query and key positions of one sequence of S tokens; visible is t <= q < expiry[t].
"""

import numpy as np


def visible(expiry, length):
    """The bool matrix [q, t] behind an expiry."""
    q, t = np.arange(length)[:, None], np.arange(length)[None, :]
    return (t <= q) & (q < np.asarray(expiry)[None, :])


def live_keys(expiry, length):
    """How many keys each query sees: live[q] = |{t : t <= q < expiry[t]}|."""
    return visible(expiry, length).sum(axis=1)


def density(expiry, length):
    """The share of visible pairs among all causal pairs, S (S + 1) / 2. 1 is dense attention; 0 for S = 0."""
    return float(visible(expiry, length).sum() / (length * (length + 1) / 2)) if length else 0.0


def eligible_pairs(length, sinks, window):
    """The pairs with t in E(q) = {t : s <= t <= q - w} (KVpop, eq. 4), as a bool matrix [q, t]."""
    q, t = np.arange(length)[:, None], np.arange(length)[None, :]
    return (t >= sinks) & (t <= q - window)


def evict_ratio(expiry, length, sinks, window):
    """KVpop, figure 8: 0 is dense attention, 1 means that nothing beyond the window (and the sinks,
    which are not evictable) is seen. The share of pairs with t in E(q) that are not visible; 0 where no
    such pair exists."""
    pairs = eligible_pairs(length, sinks, window)
    return float((pairs & ~visible(expiry, length)).sum() / pairs.sum()) if pairs.any() else 0.0


def oracle_recall(teacher_expiry, student_expiry, length, sinks, window, budget):
    """KVpop, section 4.3 and figure 7; design, section 6: what share of the teacher's long-range keys the
    student keeps under the same budget.

    With T(q) and U(q) the long-range keys (those in E(q)) visible at q under teacher and student:
        recall(q) = |T(q) & U(q)| / |T(q)|, and 1 where T(q) is empty
        chance(q) = |U(q)| / |E(q)|, the expected recall of as many keys drawn at random, and 1 where E(q)
                    is empty
    `mean` averages over the queries q >= s + w + k, the first at which the budget is too small for
    E(q); `last` is the last query alone. Without such a query (`queries` = 0) nothing was ever dropped
    and the mean is 1.
    """
    pairs = eligible_pairs(length, sinks, window)
    teacher = visible(teacher_expiry, length) & pairs
    student = visible(student_expiry, length) & pairs
    recall, chance = np.ones(length), np.ones(length)
    for q in range(length):
        if teacher[q].any():
            recall[q] = (teacher[q] & student[q]).sum() / teacher[q].sum()
        if pairs[q].any():
            chance[q] = student[q].sum() / pairs[q].sum()
    full = slice(sinks + window + budget, length)
    queries = max(0, length - (sinks + window + budget))
    return {
        "queries": queries,
        "mean": float(recall[full].mean()) if queries else 1.0,
        "chance_mean": float(chance[full].mean()) if queries else 1.0,
        "last": float(recall[-1]) if length else 1.0,
        "chance_last": float(chance[-1]) if length else 1.0,
    }
