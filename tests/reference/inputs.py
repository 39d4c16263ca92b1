"""Scores of WG-KV's write gate (WG-KV, 3.2) and SP-KV's utility predictor (SP-KV, 2.1 and listing 1) in
float64. Raw logits: no sigmoid.

    gate        r = w2 . GELU(W1 [RMSNorm(k before RoPE); RMSNorm(k after RoPE)] + b1) + b2, headwise, erf
                GELU, norms without gains
    predictor   r_h = w2_h . SiLU(W1 x + b1) + b2_h of a hidden state x, one hidden layer for all heads

inputs.kvpv (see vectors.py for the container)
    cases            int32 [cases, 8]     the columns of COLUMNS (hidden_state: 1 for the predictor, 0 for the
                                          gate)
    offsets, scores                       float64; scores[offsets[i] : offsets[i + 1]] is [heads, length] of
                                          case i
    cu_offsets, cu                        int32; packed segments, in which positions begin again: none, or the
                                          edges 0 .. length
"""

import numpy as np

from conv import unrotated
from scorers import drawer, gelu, offsets, silu

COLUMNS = ["hidden_state", "dim", "hidden", "heads", "length", "layout", "dims", "seed"]
EPSILON = np.float64(np.float32(1e-6))


def rms_norm(y):
    return y / np.sqrt(np.mean(y * y) + EPSILON)


def input_scores(case, cu):
    c = dict(zip(COLUMNS, case))
    take = drawer(c["seed"])
    heads, length, hidden, dim = c["heads"], c["length"], c["hidden"], c["dim"]
    layers, inputs = (1, dim) if c["hidden_state"] else (heads, 2 * dim)
    k = take("k", (layers, length, dim), 2.0)
    w1 = take("w1", (layers, hidden, inputs), 0.5)
    b1 = take("b1", (layers, hidden), 1.0)
    w2 = take("w2", (heads, hidden), 1.0)
    b2 = take("b2", heads, 1.0)
    begins = np.zeros(length, dtype=int)
    for begin in cu[:-1]:
        begins[begin:] = begin
    scores = np.empty((heads, length))
    for head in range(heads):
        for t in range(length):
            if c["hidden_state"]:
                y = silu(w1[0] @ k[0, t] + b1[0])
            else:
                before = unrotated(k[head, t], t - begins[t], c["layout"], c["dims"] or dim, 10000.0)
                y = gelu(w1[head] @ np.concatenate([rms_norm(before), rms_norm(k[head, t])]) + b1[head])
            scores[head, t] = w2[head] @ y + b2[head]
    return scores


def cases():
    found = []

    def add(hidden_state, dim, hidden, heads, length, layout=0, dims=0, cu=()):
        found.append(([hidden_state, dim, hidden, heads, length, layout, dims, 900 + len(found)], list(cu)))

    add(1, 12, 7, 2, 20)
    add(1, 64, 33, 5, 70)
    add(1, 1, 1, 1, 3)
    add(0, 16, 11, 2, 30, 1)
    add(0, 16, 11, 2, 30, 2)
    add(0, 8, 5, 3, 100, 2, dims=6)
    add(0, 8, 20, 1, 40, 1, dims=4, cu=[0, 3, 3, 31, 40])
    add(0, 8, 4, 2, 90, 2, cu=[0, 80, 90])
    return found


def make():
    """The arrays of inputs.kvpv."""
    found = cases()
    scores = [input_scores(*one).ravel() for one in found]
    cu = [np.array(edges, dtype=np.int32) for _, edges in found]
    return {
        "cases": np.array([case for case, _ in found], dtype=np.int32),
        "offsets": offsets(scores), "scores": np.concatenate(scores),
        "cu_offsets": offsets(cu), "cu": np.concatenate(cu).astype(np.int32),
    }
