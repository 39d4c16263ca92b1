"""Scores of LTE's convolution in float64, written from LTE, 3.1.1 and appendix A: token by token, with
nothing shared between tokens.

    y_0    = [k before RoPE; v]
    y_l[t] = SiLU(b_l + sum over j = -1, 0, 1 of W_l[j] y_{l-1}[t + 2 j])
    r_t    = readout . y_3[t] + bias

Six zeros stand before the first token of the raw input; y_1 and y_2 there are computed. Drawn as
scorers.py draws.

conv.kvpv (see vectors.py for the container)
    cases            int32 [cases, 9]     the columns of COLUMNS (layout: 0 none, 1 interleaved, 2 half-split)
    bases            float32 [cases]      of the RoPE
    offsets, scores                       float64; scores[offsets[i] : offsets[i + 1]] is [heads, length] of
                                          case i, NaN where a key never leaves its window of `delay`
    cu_offsets, cu                        int32; packed segments of case i: none, or the edges 0 .. length
"""

import numpy as np

from scorers import drawer, offsets, silu

COLUMNS = ["head_dim_qk", "head_dim_vo", "heads", "length", "delay", "layout", "dims", "biases", "seed"]
REACH = 6


def frequencies(base, dims):
    half = dims // 2
    return np.array([np.float32(np.float64(base) ** (-i / half)) for i in range(half)], dtype=np.float64)


def unrotated(key, t, layout, dims, base):
    """The key of position t before RoPE: pairs turned back by t f_i."""
    x = key.copy()
    if layout == 0:
        return x
    angle = t * frequencies(base, dims)
    first = np.arange(0, dims, 2) if layout == 1 else np.arange(dims // 2)
    second = first + 1 if layout == 1 else first + dims // 2
    a, b = key[first], key[second]
    x[first] = a * np.cos(angle) + b * np.sin(angle)
    x[second] = b * np.cos(angle) - a * np.sin(angle)
    return x


def conv_scores(case, base, cu):
    """[heads, length] with NaN for keys that never leave their window."""
    c = dict(zip(COLUMNS, case))
    take = drawer(c["seed"])
    heads, length = c["heads"], c["length"]
    width = [c["head_dim_qk"] + c["head_dim_vo"]]
    for _ in range(3):
        width.append(width[-1] // 2)
    dims = c["dims"] or c["head_dim_qk"]
    k = take("k", (heads, length, c["head_dim_qk"]), 2.0)
    v = take("v", (heads, length, c["head_dim_vo"]), 2.0)
    weights = [take(f"w{l}", (heads, width[l], 3, width[l - 1]), 0.5) for l in (1, 2, 3)]
    biases = [take(f"b{l}", (heads, width[l]), 1.0) * c["biases"] for l in (1, 2, 3)]
    readout = take("readout", (heads, width[3]), 1.0)
    readout_bias = take("readout_bias", heads, 1.0) * c["biases"]

    scores = np.full((heads, length), np.nan)
    edges = list(cu) if len(cu) else [0, length]
    for head in range(heads):
        for begin, end in zip(edges[:-1], edges[1:]):
            def y(level, t):
                """Level `level` at token t of this segment."""
                if level == 0:
                    if t < 0:
                        return np.zeros(width[0])
                    key = unrotated(k[head, begin + t], t, c["layout"], dims, base)
                    return np.concatenate([key, v[head, begin + t]])
                total = biases[level - 1][head].copy()
                for tap in (-1, 0, 1):
                    total += weights[level - 1][head, :, tap + 1] @ y(level - 1, t + 2 * tap)
                return silu(total)

            for t in range(end - begin - c["delay"]):
                scores[head, begin + t] = readout[head] @ y(3, t) + readout_bias[head]
    return scores


def cases():
    all_cases = []

    def add(dim, heads, length, delay, layout=0, dims=0, biases=1, base=10000.0, cu=()):
        all_cases.append(([*dim, heads, length, delay, layout, dims, biases, 700 + len(all_cases)], base,
                          list(cu)))

    for layout in (0, 1, 2):
        add((16, 16), 2, 40, 13, layout)
        add((8, 8), 1, 150, 20, layout, base=500000.0)
    add((16, 8), 2, 40, 15, 1, dims=6)
    add((12, 9), 2, 40, 15, 2, dims=8, biases=0)
    add((5, 3), 2, 30, 14)
    for length in (13, 14, 15, 77, 78, 79):
        add((8, 8), 1, length, 13, 2)
    add((8, 8), 1, 30, 30)
    add((8, 8), 2, 90, 13, 2, cu=[0, 0, 5, 19, 19, 60, 90])
    add((8, 8), 1, 120, 40, 1, cu=[0, 100, 120])
    return all_cases


def make():
    """The arrays of conv.kvpv."""
    found = cases()
    scores = [conv_scores(*one).ravel() for one in found]
    cu = [np.array(edges, dtype=np.int32) for _, _, edges in found]
    return {
        "cases": np.array([case for case, _, _ in found], dtype=np.int32),
        "bases": np.array([base for _, base, _ in found], dtype=np.float32),
        "offsets": offsets(scores), "scores": np.concatenate(scores),
        "cu_offsets": offsets(cu), "cu": np.concatenate(cu).astype(np.int32),
    }
