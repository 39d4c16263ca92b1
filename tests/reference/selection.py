"""Selection at the read (Quest: Tang et al., 2024, algorithm 1) and SnapKV's rule under a global budget
(WG-KV, appendix K) in float64, over a cache that admits keys by a gate. One sequence is stepped, row by row,
with nothing kept between steps that could be computed.

A head's rows are [sinks | ring | long-range], token t of the window in ring row (t - s) mod w
(docs/architecture.md); Quest's pages are rows 0 .. P-1, P .. 2P-1 and so on of those in use. At a step the
page of the newest token and the best others by sum_d max(q_d min_d, q_d max_d) are read (the largest over the
query heads of a KV head, or their mean). After a step, while the rows of all layers and heads are more than
average * layers * heads, every head drops the lowest floor(share N), at least 1, of its N rows that are
neither sinks nor in the window, by max-pooled sums over the last queries of the largest softmax weight of the
group (or the mean).

Inputs are drawn as scorers.py draws: q, k, v of stream STREAMS * seed + (0, 1, 2), scores of + 3.

selection.kvpv (see vectors.py for the container)
    cases            int32 [cases, 15]    the columns of COLUMNS
    shares           float32 [cases]
    held             int32                for every case, layer, head and step: bits of the positions held
                                          after it, in words of 32
    lse              float64              for every case, step, layer and query head, of what it reads
    out              float64              the outputs of every fifth step, likewise, then over the dims
    rounds           int32                for every case and step: rounds of eviction
"""

import numpy as np

from scorers import STREAMS, draw

COLUMNS = ["sinks", "window", "gated", "page", "pages", "mean", "average", "observing", "pool", "layers",
           "heads", "group", "dim", "length", "seed"]


class Head:
    def __init__(self, c, q, k, v, scores):
        self.c, self.q, self.k, self.v, self.scores = c, q, k, v, scores
        self.long = []
        self.length = 0

    def rows(self):
        """The position in each row in use."""
        s, w = self.c["sinks"], self.c["window"]
        ring = {}
        for t in range(max(s, self.length - w), self.length):
            ring[(t - s) % w] = t
        return list(range(min(s, self.length))) + [ring[r] for r in sorted(ring)] + self.long

    def append(self):
        t, u = self.length, self.length - self.c["window"]
        if u >= self.c["sinks"] and (not self.c["gated"] or self.scores[u] >= 0.0):
            self.long.append(u)
        self.length = t + 1

    def read(self):
        """The positions that the newest query reads."""
        rows, size, pages = self.rows(), self.c["page"], self.c["pages"]
        count = -(-len(rows) // size)
        if pages == 0 or count <= pages:
            return rows
        query = self.q[:, self.length - 1]
        newest = rows.index(self.length - 1) // size
        bounds = []
        for page in range(count):
            keys = self.k[rows[page * size : (page + 1) * size]]
            each = np.maximum(query * keys.min(axis=0), query * keys.max(axis=0)).sum(axis=1)
            bounds.append(each.mean() if self.c["mean"] else each.max())
        order = sorted(range(count), key=lambda page: (page != newest, -bounds[page], page))
        return [t for page in sorted(order[:pages]) for t in rows[page * size : (page + 1) * size]]

    def attend(self):
        read = self.read()
        logits = self.q[:, self.length - 1] @ self.k[read].T / np.sqrt(self.c["dim"])
        top = logits.max(axis=1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(axis=1, keepdims=True)
        return weights @ self.v[read] / total, (top + np.log(total))[:, 0]

    def evict(self, share):
        held = sorted(self.rows())
        mass = np.zeros(len(held))
        for i in range(max(0, self.length - self.c["observing"]), self.length):
            seen = [j for j, t in enumerate(held) if t <= i]
            if not seen:
                continue
            logits = self.q[:, i] @ self.k[[held[j] for j in seen]].T / np.sqrt(self.c["dim"])
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            shares = weights / weights.sum(axis=1, keepdims=True)
            mass[seen] += shares.mean(axis=0) if self.c["mean"] else shares.max(axis=0)
        reach = self.c["pool"] // 2
        pooled = [mass[max(0, j - reach) : j + reach + 1].max() for j in range(len(held))]
        candidates = sorted((pooled[j], -t) for j, t in enumerate(held) if t in self.long)
        wanted = round(float(share) * 10**6) * len(held) // 10**6  # of the share as it was written
        drop = min(len(candidates), max(1, wanted))
        lost = {-t for _, t in candidates[:drop]}
        self.long = [t for t in self.long if t not in lost]
        return drop


def run(case, share):
    c = dict(zip(COLUMNS, case))
    shape = (c["layers"], c["heads"])
    base = STREAMS * c["seed"]
    q = draw(base, (*shape, c["group"], c["length"], c["dim"]), 2.0)
    k = draw(base + 1, (*shape, c["length"], c["dim"]), 2.0)
    v = draw(base + 2, (*shape, c["length"], c["dim"]), 2.0)
    scores = draw(base + 3, (*shape, c["length"]), 1.0)
    heads = [[Head(c, q[l, h], k[l, h], v[l, h], scores[l, h]) for h in range(c["heads"])]
             for l in range(c["layers"])]
    flat = [head for layer in heads for head in layer]
    held, lse, out, rounds = [], [], [], []
    for step in range(c["length"]):
        for head in flat:
            head.append()
            o, s = head.attend()
            lse.append(s)
            if step % 5 == 0:
                out.append(o.ravel())
        done = 0
        while c["average"] and sum(len(head.rows()) for head in flat) > c["average"] * len(flat):
            if sum(head.evict(np.float32(share)) for head in flat) == 0:
                break
            done += 1
        rounds.append(done)
        for head in flat:
            words = np.zeros(-(-c["length"] // 32), dtype=np.uint32)
            for t in head.rows():
                words[t // 32] |= np.uint32(1 << (t % 32))
            held.append(words.view(np.int32))
    return np.concatenate(held), np.concatenate(lse), np.concatenate(out), np.array(rounds)


def cases():
    found = []

    def add(sinks=0, window=4, gated=0, page=4, pages=0, mean=0, average=0, observing=16, pool=5, layers=1,
            heads=2, group=2, dim=8, length=90, share=0.1):
        found.append(([sinks, window, gated, page, pages, mean, average, observing, pool, layers, heads,
                       group, dim, length, 1200 + len(found)], share))

    add(pages=3)                                                        # Quest
    add(pages=1, group=1)
    add(sinks=3, window=6, gated=1, page=2, pages=5, mean=1, group=3)
    add(sinks=1, window=1, page=1, pages=7)
    add(gated=1, average=14, layers=2)                                   # appendix K
    add(sinks=2, window=5, average=20, observing=7, pool=1, layers=2, heads=3, group=1, share=0.25)
    add(window=9, average=12, pool=3, observing=256)
    add(window=6, mean=1, average=13, observing=24, group=3)             # the mean over the group
    add(sinks=4, window=8, average=5)                                    # nothing may be dropped in the end
    # admission, eviction, selection
    add(sinks=2, window=6, gated=1, page=4, pages=4, average=18, layers=2, length=120)
    return found


def make():
    """The arrays of selection.kvpv."""
    found = cases()
    results = [run(*one) for one in found]
    joined = [np.concatenate([result[i] for result in results]) for i in range(4)]
    return {
        "cases": np.array([case for case, _ in found], dtype=np.int32),
        "shares": np.array([share for _, share in found], dtype=np.float32),
        "held": joined[0], "lse": joined[1], "out": joined[2], "rounds": joined[3].astype(np.int32),
    }
