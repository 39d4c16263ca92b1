"""Attention through a mask in float64, written from its definition: a query sees the keys that begin
and not expired.

    seen(t)  =  pos(t) <= p  and  p < expiry[h][t],      p = start + i
    logit(t) =  cap(scale <q, k_t>) + (log_bias[h][t] where p - pos(t) >= bias_from[h], else 0)
    out      =  softmax over the seen keys, times their values
    lse      =  log sum exp(logit), the natural logarithm

A query that sees nothing gives 0 and -inf.

Inputs are not stored but drawn, here and in the tests (draw() of scorers.py, streams 3 seed, 3 seed + 1 and 3
seed + 2 for q, k and v), as multiples of 1/64 within [-2, 2), which bf16, fp16 and fp32 hold exactly.

attention.kvpv (see vectors.py for the container)
    cases            int32 [cases, 10]    the columns of COLUMNS; one sequence each
    levels           float32 [cases, 2]   scale, soft_cap
    bias_from        int32 [cases, 2]     by KV head
    plane_offsets    int32 [cases + 1]
    expiry, position int32, log_bias float32   [offsets[i] : offsets[i + 1]] is [kv_heads, rows] of case i
    out_offsets, out float64              [query heads, queries, columns], columns 0, 9, 18, ... of
        head_dim_vo
    lse_offsets, lse float64              [query heads, queries]
"""

import numpy as np

import scorers

COLUMNS = ["seed", "kv_heads", "group", "queries", "rows", "head_dim_qk", "head_dim_vo", "start", "masked",
           "biased"]
STEP = 9
NEVER = 2**31 - 1


def drawn(stream, shape):
    return np.floor(scorers.draw(stream, shape, 2.0) * 64.0) / 64.0


def attention(q, k, v, position, expiry, log_bias, bias_from, start, scale, soft_cap):
    """q [Hq, S, Dk], k and v [Hkv, n, D], planes [Hkv, n]: out [Hq, S, Dv], lse [Hq, S]."""
    group = len(q) // len(k)
    p = start + np.arange(q.shape[1])[:, None]
    out, lse = [], []
    for head, queries in enumerate(q):
        h = head // group
        logits = scale * (queries @ k[h].T)
        if soft_cap > 0:
            logits = soft_cap * np.tanh(logits / soft_cap)
        age = p - position[h][None, :]
        logits = logits + np.where(age >= bias_from[h], log_bias[h][None, :].astype(np.float64), 0.0)
        logits = np.where((age >= 0) & (p < expiry[h][None, :]), logits, -np.inf)
        top = logits.max(axis=1, keepdims=True)
        weights = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
        total = weights.sum(axis=1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse.append(np.where(total[:, 0] > 0, top[:, 0] + np.log(total[:, 0]), -np.inf))
        out.append(np.where(total > 0, weights @ v[h] / np.where(total > 0, total, 1.0), 0.0))
    return np.array(out), np.array(lse)


def planes(random, case):
    """Positions (a permutation where the mask is on), lifetimes and biases of one case."""
    heads, rows = case["kv_heads"], case["rows"]
    position = np.tile(np.arange(rows), (heads, 1))
    expiry = np.full((heads, rows), NEVER)
    log_bias = np.zeros((heads, rows), np.float32)
    if case["masked"]:
        position = np.array([random.permutation(rows) for _ in range(heads)])
        life = random.choice([1, 4, 30, 200, NEVER], size=(heads, rows))
        expiry = np.where(life == NEVER, NEVER, position + life)
    if case["biased"]:
        log_bias = random.choice(np.array([0, -0.5, -3, -100, -np.inf], np.float32), size=(heads, rows))
    return position, expiry, log_bias


def make():
    random = np.random.RandomState(16)
    sizes = [
        # kv_heads, group, queries, rows, head_dim_qk, head_dim_vo, start, masked, biased, scale, soft_cap
        (2, 1, 1, 130, 64, 64, 129, 0, 0, 0.125, 0.0),
        (1, 3, 1, 130, 64, 64, 129, 1, 0, 0.125, 0.0),
        (1, 4, 1, 100, 128, 128, 99, 1, 1, 0.0884, 0.0),
        (2, 3, 20, 90, 64, 64, 70, 0, 0, 0.125, 0.0),
        (2, 3, 20, 90, 64, 64, 70, 1, 0, 0.125, 0.0),
        (1, 5, 20, 90, 80, 80, 70, 1, 1, 0.1, 0.0),
        (1, 6, 17, 60, 96, 64, 30, 1, 1, 0.3, 20.0),
        (1, 7, 9, 5, 64, 72, -3, 0, 0, 0.125, 0.0),
        (1, 2, 70, 70, 64, 64, 0, 0, 1, 0.125, 50.0),
        (1, 1, 100, 100, 256, 64, 0, 1, 0, 1.0, 0.0),
        (1, 16, 3, 40, 64, 64, 200, 1, 0, 0.125, 0.0),
    ]
    arrays = {name: []
              for name in ["cases", "levels", "bias_from", "expiry", "position", "log_bias", "out", "lse"]}
    for seed, (*numbers, scale, soft_cap) in enumerate(sizes, start=1):
        case = dict(zip(COLUMNS, [seed, *numbers]))
        heads, rows = case["kv_heads"], case["rows"]
        q = drawn(3 * seed, (heads * case["group"], case["queries"], case["head_dim_qk"]))
        k = drawn(3 * seed + 1, (heads, rows, case["head_dim_qk"]))
        v = drawn(3 * seed + 2, (heads, rows, case["head_dim_vo"]))
        position, expiry, log_bias = planes(random, case)
        bias_from = np.array([7, 0][:heads] + [0] * (2 - heads), np.int32)
        level = np.array([scale, soft_cap], np.float32)
        out, lse = attention(q, k, v, position, expiry, log_bias, bias_from, case["start"], float(level[0]),
                             float(level[1]))
        arrays["cases"].append([case[name] for name in COLUMNS])
        arrays["levels"].append(level)
        arrays["bias_from"].append(bias_from)
        for name, value in [("expiry", expiry), ("position", position), ("log_bias", log_bias)]:
            arrays[name].append(value.ravel())
        arrays["out"].append(out[:, :, ::STEP].ravel())
        arrays["lse"].append(lse.ravel())

    def offsets(parts):
        return np.cumsum([0] + [len(part) for part in parts]).astype(np.int32)

    return {
        "cases": np.array(arrays["cases"], np.int32), "levels": np.array(arrays["levels"]),
        "bias_from": np.array(arrays["bias_from"]), "plane_offsets": offsets(arrays["expiry"]),
        "expiry": np.concatenate(arrays["expiry"]).astype(np.int32),
        "position": np.concatenate(arrays["position"]).astype(np.int32),
        "log_bias": np.concatenate(arrays["log_bias"]),
        "out_offsets": offsets(arrays["out"]), "out": np.concatenate(arrays["out"]),
        "lse_offsets": offsets(arrays["lse"]), "lse": np.concatenate(arrays["lse"]),
    }
