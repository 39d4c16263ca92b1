"""A bounded cache, one KV head, stepped in the order of design, section 2, with nothing clever in it.

At step q: (1) append (k_q, v_q); (2) a stateful scorer absorbs x_q (here scores are given instead); (3) the
key u = q - w, if u >= s, leaves the window and with its score competes for the long-range places; (4) the G
query heads attend to sinks, window and long-range keys. A key that loses at (3) is already invisible to q.
"""

import numpy as np

from lifetimes import rank_value


def attend(queries, keys, values, scale, soft_cap):
    """Attention of G queries [G, D] over rows [n, D], [n, Dv] in float64: (out[G, Dv], lse[G]).

    logit = scale <q, k>, then soft_cap * tanh(logit / soft_cap) where soft_cap > 0. LSE is the natural log;
    with no row to see the output is 0 and the LSE -inf.
    """
    queries, keys, values = (np.asarray(x, dtype=np.float64) for x in (queries, keys, values))
    if len(keys) == 0:
        return np.zeros((len(queries), values.shape[1])), np.full(len(queries), -np.inf)
    logits = scale * (queries @ keys.T)
    if soft_cap > 0:
        logits = soft_cap * np.tanh(logits / soft_cap)
    top = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=1, keepdims=True)
    return (weights / total) @ values, (top + np.log(total))[:, 0]


class NaiveCache:
    """The rows of one KV head: {position: (key, value)}, and the scores of its long-range keys."""

    def __init__(self, rule, scale, soft_cap=0.0):
        self.rule = rule
        self.scale = scale
        self.soft_cap = soft_cap
        self.length = 0
        self.rows = {}
        self.long_range = {}  # position -> raw score

    def step(self, queries, key, value, score_of):
        """One token. score_of(u) is asked for the raw score of u when u competes, and only then."""
        q = self.length
        self.length += 1
        self.rows[q] = (key, value)

        u = q - self.rule.window
        if u >= 0 and not self.rule.keeps(u):
            self.update_top_k(u, q, score_of)

        positions = sorted(self.rows)
        keys = np.array([self.rows[t][0] for t in positions])
        values = np.array([self.rows[t][1] for t in positions])
        return attend(queries, keys, values, self.scale, self.soft_cap)

    def update_top_k(self, u, q, score_of):
        """u enters a free place, or the place of the worst key if strictly better (ties go to the
        older key), or goes.

        The worst key has the smallest rank value at q and among equals the largest position.
        """
        if self.rule.places == 0 or not self.rule.opens(score_of(u)):
            del self.rows[u]
            return
        if len(self.long_range) < self.rule.places:
            self.long_range[u] = score_of(u)
            return

        def value(t, score):
            return rank_value(self.rule, score, t, q)

        worst = min(self.long_range, key=lambda t: (value(t, self.long_range[t]), -t))
        if value(u, score_of(u)) > value(worst, self.long_range[worst]):
            del self.rows[worst], self.long_range[worst]
            self.long_range[u] = score_of(u)
        else:
            del self.rows[u]

    def retained(self):
        """The positions held after the last step, oldest first."""
        return sorted(self.rows)


def run(rules, scores, q, k, v, scale, soft_cap=0.0):
    """Steps every KV head through a sequence. q[Hq, S, D], k[Hkv, S, D], v[Hkv, S, Dv], scores[Hkv, S];
    query head i reads KV head i // G. Returns out[Hq, S, Dv], lse[Hq, S] and retained[Hkv][S], the positions
    after each step."""
    heads, length = k.shape[0], k.shape[1]
    group = q.shape[0] // heads
    out = np.zeros((q.shape[0], length, v.shape[2]))
    lse = np.zeros((q.shape[0], length))
    retained = []
    for h, rule in enumerate(rules):
        cache = NaiveCache(rule, scale, soft_cap)
        mine = slice(h * group, (h + 1) * group)
        history = []
        for t in range(length):
            out[mine, t], lse[mine, t] = cache.step(q[mine, t], k[h, t], v[h, t], lambda u: scores[h, u])
            history.append(cache.retained())
        retained.append(history)
    return out, lse, retained
