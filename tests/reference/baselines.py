"""Published policies in float64, from the papers' formulas: H2O, TOVA and SnapKV on attention, DMS, random
keys.

Observed policies. Per KV head a set of kept keys; a prompt comes in blocks [a, b), what is decoded in blocks
of one. The queries of a block see the kept keys and the block's own up to themselves, and pay p_q,g(t) =
softmax over what they see; mass_q(t) = mean (or max) over the group's query heads. After the block:

    H2O      score(t) += sum_{q in block} mass_q(t). Keep the r most recent keys and the B - r others with
             the largest scores (Zhang et al., 2023: heavy hitters and recent keys, after every token).
    TOVA     score(t) = mass of the block's last query, mean over all heads of the layer (or of the KV head
             alone). Keep the B largest, whatever their age (Oren et al., 2024).
    SnapKV   score(t) = sum over the block's last w queries, pooled over neighboring keys (mean, zeros beyond
             the ends, or max) among the keys older than the w most recent. Keep these w and the B - w
             largest. At the end of a prompt's block only; keys decoded afterwards are kept (Li et al., 2024).

Ties go to the older key. A key evicted after the block [a, b) has expiry b. Each case says its smallest
margin: the least distance, relative to the larger number, between the worst key kept and the best key evicted
of a choice, ties apart.

DMS (Lancucki et al., 2025). alpha = sigmoid((z + noise) / tau) is the decision to evict, noise = log(u) -
log(1 - u) or 0 (Gumbel-sigmoid); the bias of a key that is out of the window is log(1 - alpha). Loss over
keys: max(0, target - mean alpha), the paper's max(target L H T - sum alpha, 0) over L H T.

Random keys. score(t) = unit(seed, layer * 2^32 + head, query at which t leaves): splitmix64 at a
place; top k of these.

baselines.kvpv (see vectors.py for the container)
    cases            int32 [cases, 15]    the columns of COLUMNS; q, k drawn as in attention.py, one sequence
                                          each
    levels           float32 [cases, 2]   scale, soft_cap
    margins          float64 [cases]
    offsets, expiry  int32                [kv_heads, length] of case i, clamped to length
    mass             float64              the same places: masses of dense attention from the last `window`
                                          queries (all for H2O), head for head
    sparse_mass      float64              of all queries through the expiry, head for head
    gates            float32 [n]          z;   gate_levels float32 [4] tau, target, scale; gate_seed int32
    gate_bias, gate_slope, loss_slope     float64 [2, n]: without and with noise, stream 3; loss float64 [2]
    random_cases     int32 [cases, 6]     seed, layer, head, length, window, budget; random_offsets,
                                          random_expiry int32
"""

import numpy as np

import attention
import lifetimes

KINDS = ["h2o", "tova", "snapkv"]
COLUMNS = ["seed", "kind", "kv_heads", "group", "length", "dim", "budget", "window", "prompt", "chunk",
           "pool", "pool_max", "group_max", "whole_layer", "flat"]
WORD = (1 << 64) - 1


def weights(queries, keys, scale, soft_cap):
    """softmax of queries [n, D] over keys [m, D]: [n, m]."""
    logits = scale * (queries @ keys.T)
    if soft_cap > 0:
        logits = soft_cap * np.tanh(logits / soft_cap)
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def blocks_of(prompt, chunk, length):
    """(a, b, is prompt) of every block."""
    prompt = min(prompt, length)
    step = chunk if chunk > 0 else max(prompt, 1)
    edges = list(range(0, prompt, step)) + list(range(prompt, length)) + [length]
    return [(a, b, a < prompt) for a, b in zip(edges, edges[1:])]


def pooled(values, width, largest):
    reach = width // 2
    padded = np.concatenate([np.zeros(reach), values, np.zeros(reach)])
    windows = np.stack([padded[i : i + len(values)] for i in range(width)])
    return windows.max(axis=0) if largest else windows.mean(axis=0)


def best(keys, values, count):
    """The `count` keys with the largest values, ties to the older, and the margin of the choice."""
    order = sorted(range(len(keys)), key=lambda i: (-values[i], keys[i]))
    if count >= len(keys):
        return list(keys), np.inf
    margin = np.inf
    if count > 0:
        inside, outside = values[order[count - 1]], values[order[count]]
        margin = np.inf if inside == outside else (inside - outside) / inside
    return [keys[i] for i in order[:count]], margin


def observed(q, k, case, scale, soft_cap):
    """Expiry [Hkv, S] and the smallest margin."""
    heads, group, length = case["kv_heads"], case["group"], case["length"]
    budget, window = case["budget"], case["window"]
    kind = KINDS[case["kind"]]
    expiry = np.full((heads, length), length)
    kept = [[] for _ in range(heads)]
    score = np.zeros((heads, length))
    smallest = np.inf
    for a, b, is_prompt in blocks_of(case["prompt"], case["chunk"], length):
        if kind == "snapkv" and not is_prompt:
            break
        count = {"h2o": b - a, "tova": 1, "snapkv": window}[kind]
        mass = np.zeros((heads, length))
        for h in range(heads):
            for i in range(max(a, b - count), b):
                seen = kept[h] + list(range(a, i + 1))
                p = np.concatenate([weights(q[h * group + g][i : i + 1], k[h][seen], scale, soft_cap)
                                    for g in range(group)])
                mass[h, seen] += p.max(axis=0) if case["group_max"] else p.mean(axis=0)
        if case["whole_layer"]:
            mass[:] = mass.mean(axis=0)
        score = score + mass if kind == "h2o" else mass
        for h in range(heads):
            kept[h] = kept[h] + list(range(a, b))
            recent = {"h2o": window, "tova": 0, "snapkv": window}[kind]
            fixed = [t for t in kept[h] if t >= b - recent]
            others = [t for t in kept[h] if t < b - recent]
            values = score[h][others]
            if len(others) > budget - recent:
                values = pooled(values, case["pool"], case["pool_max"])
            chosen, margin = best(others, values, budget - recent)
            smallest = min(smallest, margin)
            for t in set(others) - set(chosen):
                expiry[h, t] = b
            kept[h] = sorted(chosen + fixed)
    return expiry, smallest


def masses(q, k, expiry, scale, soft_cap, group_max, count):
    """What the keys [Hkv, S] receive from the last `count` queries through a mask."""
    heads, length = len(k), k.shape[1]
    group = len(q) // heads
    result = np.zeros((heads, length))
    for h in range(heads):
        for i in range(max(0, length - count), length):
            seen = [t for t in range(i + 1) if i < expiry[h, t]]
            p = np.concatenate([weights(q[h * group + g][i : i + 1], k[h][seen], scale, soft_cap)
                                for g in range(group)])
            result[h, seen] += p.max(axis=0) if group_max else p.mean(axis=0)
    return result


def random_unit(seed, stream, index):
    """core/random.hpp, from its definition."""

    def mix(x):
        x = (x + 0x9E3779B97F4A7C15) & WORD
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
        return x ^ (x >> 31)

    return (mix((mix(mix(seed) ^ stream) + index) & WORD) >> 11) * 2.0**-53


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def gates(random):
    z = np.concatenate([random.uniform(-8, 8, 40), [0.0, -0.0, 30.0, -30.0, 90.0, -90.0]]).astype(np.float32)
    tau, target, scale, seed, stream = np.float32(0.5), np.float32(0.75), np.float32(2.0), 11, 3
    x = z.astype(np.float64)
    bias, slope, loss, loss_slope = [], [], [], []
    for noisy in [False, True]:
        u = np.array([random_unit(seed, stream, t) for t in range(len(z))])
        y = (x + (np.log(u) - np.log1p(-u) if noisy else 0.0)) / float(tau)
        alpha = sigmoid(y)
        bias.append(-np.logaddexp(0.0, y))  # log(1 - alpha)
        slope.append(-alpha / float(tau))
        missing = float(target) - alpha.mean()
        loss.append(float(scale) * max(0.0, missing))
        active = 1.0 if missing > 0 else 0.0
        loss_slope.append(-active * float(scale) / len(z) * alpha * sigmoid(-y) / float(tau))
    return {"gates": z, "gate_levels": np.array([tau, target, scale, 0], np.float32),
            "gate_seed": np.array([seed, stream], np.int32), "gate_bias": np.array(bias),
            "gate_slope": np.array(slope), "loss": np.array(loss), "loss_slope": np.array(loss_slope)}


def random_keys():
    cases = [(1, 0, 0, 60, 4, 9), (2, 3, 1, 60, 1, 5), (123456789, 7, 5, 90, 10, 30), (1, 0, 0, 12, 20, 3),
             (5, 1, 0, 40, 2, 0)]
    offsets, expiry = [0], []
    for seed, layer, head, length, window, budget in cases:
        stream = (layer << 32) + head
        scores = np.array([random_unit(seed, stream, t + window) for t in range(length)]).astype(np.float32)
        found = lifetimes.lifetimes(scores, lifetimes.Rule(window=window, budget=budget))
        expiry.append(lifetimes.clamped(found, length))
        offsets.append(offsets[-1] + length)
    return {"random_cases": np.array(cases, np.int32), "random_offsets": np.array(offsets, np.int32),
            "random_expiry": np.concatenate(expiry).astype(np.int32)}


def make():
    whole = 10**6
    sizes = [
        # kind, kv_heads, group, length, dim, budget, window (r, or SnapKV's w), prompt, chunk, pool, max,
        # group_max, layer, flat
        (0, 1, 1, 60, 16, 12, 6, 0, 0, 1, 0, 0, 0, 0),  # H2O in steps
        (0, 2, 3, 72, 64, 16, 8, 0, 0, 1, 0, 0, 0, 0),
        (0, 2, 4, 72, 64, 16, 8, 32, 0, 1, 0, 0, 0, 0),  # a prompt twice the budget, dense, then steps
        (0, 2, 3, 70, 64, 16, 8, 40, 7, 1, 0, 0, 0, 0),  # in chunks that do not divide it
        (0, 1, 3, 64, 64, 12, 0, 64, 16, 1, 0, 1, 0, 0),  # nothing exempt; max over the group
        (0, 1, 3, 40, 64, 10, 10, 20, 0, 1, 0, 0, 0, 0),  # no heavy hitters: a window
        (0, 1, 1, 1, 64, 4, 2, 1, 0, 1, 0, 0, 0, 0),  # T = 1
        (0, 1, 2, 30, 64, 0, 0, 0, 0, 1, 0, 0, 0, 0),  # no budget at all
        (0, 1, 2, 30, 64, 0, 0, 20, 0, 1, 0, 0, 0, 0),
        (0, 1, 2, 24, 64, 100, 20, 12, 0, 1, 0, 0, 0, 0),  # a budget that is never used up
        (0, 1, 3, 50, 64, 9, 3, 0, 0, 1, 0, 0, 0, 1),  # equal keys: equal weights
        (1, 1, 1, 60, 16, 12, 0, 0, 0, 1, 0, 0, 1, 0),  # TOVA in steps
        (1, 2, 3, 72, 64, 16, 0, 0, 0, 1, 0, 0, 1, 0),
        (1, 2, 3, 72, 64, 16, 0, 0, 0, 1, 0, 0, 0, 0),  # head by head
        (1, 2, 4, 72, 64, 16, 0, 32, 0, 1, 0, 0, 1, 0),
        (1, 3, 1, 70, 64, 16, 0, 45, 8, 1, 0, 0, 1, 0),
        (1, 1, 1, 1, 64, 4, 0, 0, 0, 1, 0, 0, 1, 0),
        (1, 2, 1, 20, 64, 0, 0, 10, 4, 1, 0, 0, 1, 0),
        (1, 2, 2, 50, 64, 9, 0, 0, 0, 1, 0, 0, 1, 1),
        (1, 2, 2, 50, 64, 9, 0, 30, 0, 1, 0, 0, 1, 1),
        (2, 1, 1, 80, 16, 24, 8, 60, 0, 5, 0, 0, 0, 0),  # SnapKV: the prompt once, then growth
        (2, 2, 3, 96, 64, 32, 8, whole, 0, 5, 0, 0, 0, 0),
        (2, 2, 4, 96, 64, 32, 8, 64, 0, 7, 1, 0, 0, 0),  # a prompt twice the budget; max-pooling
        (2, 2, 3, 100, 64, 32, 8, 90, 16, 5, 0, 0, 0, 0),  # in chunks
        (2, 1, 3, 100, 64, 32, 12, 100, 8, 3, 1, 1, 0, 0),  # chunks shorter than the observation window
        (2, 1, 4, 80, 64, 20, 8, 60, 0, 1, 0, 1, 0, 0),  # without pooling
        (2, 1, 2, 30, 64, 64, 16, 30, 0, 5, 0, 0, 0, 0),  # shorter than the budget
        (2, 1, 1, 1, 64, 8, 4, 1, 0, 5, 0, 0, 0, 0),
        (2, 1, 2, 40, 64, 12, 12, 32, 0, 5, 0, 0, 0, 0),  # the window is the budget
        (2, 1, 2, 60, 64, 16, 4, 48, 0, 5, 1, 0, 0, 1),
        (2, 1, 2, 60, 64, 16, 4, 49, 16, 5, 0, 0, 0, 0),  # a last chunk of one token
    ]
    names = ["cases", "levels", "margins", "expiry", "mass", "sparse_mass"]
    arrays = {name: [] for name in names}
    for place, numbers in enumerate(sizes, start=1):
        case = dict(zip(COLUMNS, [place, *numbers]))
        soft_cap = 4.0 if place % 5 == 0 else 0.0
        level = np.array([0.3, soft_cap], np.float32)
        # A seed whose decisions do not hang on rounding: the tests run in fp32 too.
        for case["seed"] in range(1000 * place, 1000 * place + 200):
            q = attention.drawn(3 * case["seed"],
                                (case["kv_heads"] * case["group"], case["length"], case["dim"]))
            k = attention.drawn(3 * case["seed"] + 1, (case["kv_heads"], case["length"], case["dim"]))
            if case["flat"]:
                k = np.broadcast_to(k[:, :1], k.shape)
            expiry, margin = observed(q, k, case, float(level[0]), float(level[1]))
            if margin > 1e-4:
                break
        else:
            raise ValueError(f"case {place}: no seed with clear decisions")
        dense = np.full_like(expiry, attention.NEVER)
        count = {0: case["length"], 1: 1, 2: case["window"]}[case["kind"]]
        arrays["cases"].append([case[name] for name in COLUMNS])
        arrays["levels"].append(level)
        arrays["margins"].append(margin)
        arrays["expiry"].append(expiry.ravel())
        for name, mask, queries in [("mass", dense, count), ("sparse_mass", expiry, case["length"])]:
            found = masses(q, k, mask, float(level[0]), float(level[1]), case["group_max"], queries)
            arrays[name].append(found.ravel())
    offsets = np.cumsum([0] + [len(part) for part in arrays["expiry"]]).astype(np.int32)
    return {
        "cases": np.array(arrays["cases"], np.int32), "levels": np.array(arrays["levels"]),
        "margins": np.array(arrays["margins"]), "offsets": offsets,
        "expiry": np.concatenate(arrays["expiry"]).astype(np.int32),
        "mass": np.concatenate(arrays["mass"]), "sparse_mass": np.concatenate(arrays["sparse_mass"]),
        **gates(np.random.RandomState(17)), **random_keys(),
    }
