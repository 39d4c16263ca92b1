"""Scores of linear, MLP and mLSTM scorers in float64, written from the papers' equations (KVpop, appendix E).

Nothing here is recurrent or chunked. The mLSTM's read is the sum that its recurrences stand for: with

    D[q][j] = log i_j + sum_{l = j+1 .. q} log f_l      the logarithm of token j's weight in the state at q

    h_u|q = sum_{j <= q} exp(D[q][j]) (q~_u . k~_j) v~_j  /  sum_{j <= q} exp(D[q][j]) (q~_u . k~_j)    (41)

where numerator and divisor are both scaled by exp(-m_q), m_q = max_j D[q][j] (the stabilized frame), and the
scaled divisor is at least 1e-30.

Inputs and weights are not stored but drawn, here and in the tests, from one small generator:
draw(stream, count, scale) is scale * u_n rounded to float32, with u_n in [-1, 1) from 24 bits of
splitmix64 at 2^32 * stream + n.

scorers.kvpv (see vectors.py for the container)
    mlstm_cases      int32 [cases, 14]    the columns of MLSTM_COLUMNS
    mlstm_levels     float32 [cases, 7]   the columns of MLSTM_LEVELS
    mlstm_offsets, mlstm_scores           float64; scores[offsets[i] : offsets[i + 1]] is [heads, length] of
                                          case i, NaN where a key never leaves
    mlstm_cu_offsets, mlstm_cu            int32; packed segments of case i: none, or the edges 0 .. length
    mlp_cases        int32 [cases, 8]     the columns of MLP_COLUMNS (activation: 0 none, a linear scorer;
                                          1 SiLU; 2 GELU)
    mlp_offsets, mlp_scores               the same
"""

import math

import numpy as np

MLSTM_COLUMNS = ["hedgehog", "projected", "head_dim_qk", "head_dim_vo", "d_qk", "d_v", "heads", "length",
                 "delay", "norm", "skip", "biases", "seed", "reserved"]
MLSTM_LEVELS = ["soft_cap", "weight_scale", "input_scale", "input_bias", "forget_scale", "forget_bias",
                "value_scale"]
MLP_COLUMNS = ["activation", "head_dim_qk", "head_dim_vo", "hidden", "heads", "length", "biases", "seed"]
# Streams of a case with seed s: STREAMS * s + the place in this list.
NAMES = ["k", "v", "w_q", "w_k", "w_v", "w_i", "b_i", "w_f", "b_f", "norm_gain", "readout", "readout_bias",
         "skip", "w1", "b1", "w2", "b2", "w3", "b3"]
STREAMS = 32
CLAMP = 1e-30
NORM_EPSILON = 1e-6
LAYER_NORM = 2  # in the column "norm"; 1 is an RMS norm


def draw(stream, shape, scale):
    """float32 numbers that the C++ tests draw too, as float64."""
    count = int(np.prod(shape))
    with np.errstate(over="ignore"):
        x = np.arange(count, dtype=np.uint64) + (np.uint64(stream) << np.uint64(32))
        x = x * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    unit = (x >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0
    return (np.float64(np.float32(scale)) * unit).astype(np.float32).astype(np.float64).reshape(shape)


def drawer(seed):
    return lambda name, shape, scale: draw(STREAMS * seed + NAMES.index(name), shape, scale)


def silu(y):
    return y / (1.0 + np.exp(-y))


def gelu(y):
    return 0.5 * y * (1.0 + np.vectorize(math.erf)(y / math.sqrt(2.0)))


def softmax(y):
    e = np.exp(y - y.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def features(y, hedgehog):
    return np.concatenate([softmax(y), softmax(-y)], axis=-1) if hedgehog else softmax(y)


def log_sigmoid(y):
    return -np.logaddexp(0.0, -y)


def mlstm_scores(case, level, cu):
    """[heads, length] with NaN for keys that never leave their window."""
    c = dict(zip(MLSTM_COLUMNS, case))
    g = dict(zip(MLSTM_LEVELS, level))
    take = drawer(c["seed"])
    heads, length, delay = c["heads"], c["length"], c["delay"]
    inputs = c["head_dim_qk"] + c["head_dim_vo"]
    rows = c["d_qk"] // 2 if c["hedgehog"] else c["d_qk"]
    k = take("k", (heads, length, c["head_dim_qk"]), g["value_scale"])
    v = take("v", (heads, length, c["head_dim_vo"]), g["value_scale"])
    w_q = take("w_q", (heads, rows, inputs), g["weight_scale"])
    w_k = take("w_k", (heads, rows, inputs), g["weight_scale"])
    w_v = take("w_v", (heads, c["d_v"], inputs), 0.5)
    w_i = take("w_i", (heads, inputs), g["input_scale"])
    w_f = take("w_f", (heads, inputs), g["forget_scale"])
    b_i = np.float64(np.float32(g["input_bias"])) + 0.0 * take("b_i", heads, 1.0)
    b_f = np.float64(np.float32(g["forget_bias"])) + 0.0 * take("b_f", heads, 1.0)
    gain = 1.0 + take("norm_gain", (heads, c["d_v"]), 0.5)
    gain = gain.astype(np.float32).astype(np.float64)
    readout = take("readout", (heads, c["d_v"]), 1.0)
    readout_bias = take("readout_bias", heads, 1.0)
    skip = take("skip", (heads, inputs), 0.25)
    cap = np.float64(np.float32(g["soft_cap"]))

    scores = np.full((heads, length), np.nan)
    edges = list(cu) if len(cu) else [0, length]
    for head in range(heads):
        x = np.concatenate([k[head], v[head]], axis=1)  # (35)
        q_features = features(x @ w_q[head].T, c["hedgehog"])  # (37)
        k_features = features(x @ w_k[head].T, c["hedgehog"])
        values = x @ w_v[head].T if c["projected"] else v[head]
        log_i = x @ w_i[head] + (b_i[head] if c["biases"] else 0.0)  # (40)
        a_f = x @ w_f[head] + (b_f[head] if c["biases"] else 0.0)
        if cap > 0.0:
            log_i = cap * np.tanh(log_i / cap)
            a_f = cap * np.tanh(a_f / cap)
        log_f = log_sigmoid(a_f)
        for begin, end in zip(edges[:-1], edges[1:]):
            for q in range(begin + delay, end):
                u = q - delay
                # sum_{l = j+1 .. q} log f_l, summed from the near end.
                forgotten = np.concatenate([np.cumsum(log_f[begin + 1 : q + 1][::-1])[::-1], [0.0]])
                weight = log_i[begin : q + 1] + forgotten  # D[q][j]
                weight = np.exp(weight - weight.max()) * (k_features[begin : q + 1] @ q_features[u])
                h = weight @ values[begin : q + 1] / max(weight.sum(), CLAMP)  # (41)
                if c["norm"] == LAYER_NORM:
                    h = h - np.mean(h)
                if c["norm"]:
                    h = gain[head] * h / np.sqrt(np.mean(h * h) + NORM_EPSILON)
                # (42)
                scores[head, u] = readout[head] @ silu(h) + (readout_bias[head] if c["biases"] else 0.0)
                if c["skip"]:
                    scores[head, u] += skip[head] @ x[u]
    return scores


def mlp_scores(case):
    c = dict(zip(MLP_COLUMNS, case))
    take = drawer(c["seed"])
    heads, length, hidden = c["heads"], c["length"], c["hidden"]
    inputs = c["head_dim_qk"] + c["head_dim_vo"]
    k = take("k", (heads, length, c["head_dim_qk"]), 2.0)
    v = take("v", (heads, length, c["head_dim_vo"]), 2.0)
    w1 = take("w1", (heads, hidden, inputs), 0.5)
    b1 = take("b1", (heads, hidden), 1.0)
    w2 = take("w2", (heads, hidden if c["activation"] else inputs), 1.0)
    b2 = take("b2", heads, 1.0)
    scores = np.empty((heads, length))
    for head in range(heads):
        x = np.concatenate([k[head], v[head]], axis=1)
        if c["activation"]:
            y = x @ w1[head].T + (b1[head] if c["biases"] else 0.0)
            x = silu(y) if c["activation"] == 1 else gelu(y)
        scores[head] = x @ w2[head] + (b2[head] if c["biases"] else 0.0)
    return scores


def mlstm_cases():
    cases = []

    def add(length, delay, cu=(), hedgehog=1, projected=1, dim=(16, 16), d_qk=None, d_v=None, norm=0, skip=0,
            biases=1, soft_cap=0.0, weight_scale=1.0, input_scale=0.5, input_bias=0.0, forget_scale=0.5,
            forget_bias=3.0, value_scale=1.0, heads=2):
        d_qk = d_qk or dim[0]
        d_v = d_v or (dim[1] // 2 if projected else dim[1])
        seed = 100 + len(cases)
        cases.append(([hedgehog, projected, dim[0], dim[1], d_qk, d_v, heads, length, delay, norm, skip,
                       biases, seed, 0],
                      [soft_cap, weight_scale, input_scale, input_bias, forget_scale, forget_bias,
                       value_scale], list(cu)))

    # Structure: both feature maps, both value paths, with and without norm, skip and biases.
    for hedgehog in (0, 1):
        for projected in (0, 1):
            for norm in (0, 1):
                add(80, 16, hedgehog=hedgehog, projected=projected, norm=norm, skip=norm ^ projected,
                    biases=norm)
    # Widths that are no multiple of a vector, keys and values of different widths, one feature, one value.
    add(70, 5, dim=(13, 9), d_qk=10, d_v=7, norm=1)
    add(70, 5, dim=(9, 20), d_qk=11, hedgehog=0, projected=0, skip=1)
    add(40, 3, dim=(4, 4), d_qk=1, d_v=1, hedgehog=0)
    add(40, 3, dim=(3, 1), d_qk=2, d_v=3)
    add(66, 9, dim=(24, 24), d_qk=40, d_v=33)
    # Delays: none, one, a window, beyond the end; chunk edges.
    for delay in (0, 1, 63, 64, 65, 127, 149):
        add(150, delay, heads=1)
    add(30, 30)
    add(30, 1000)
    for length in (1, 63, 64, 65, 128, 129):
        add(length, 2, heads=1, hedgehog=length % 2)
        add(length, 0, heads=1)
    # Gates: nothing forgotten, nothing kept, both by turns; input gates of +-30 and more; softcaps.
    for soft_cap in (0.0, 15.0):
        add(140, 20, forget_scale=0.01, forget_bias=18.0, soft_cap=soft_cap)
        add(140, 20, forget_scale=0.01, forget_bias=-20.0, soft_cap=soft_cap)
        add(140, 20, forget_scale=8.0, forget_bias=0.0, soft_cap=soft_cap)
        add(140, 20, input_scale=9.0, soft_cap=soft_cap)
        add(140, 20, input_scale=9.0, forget_scale=8.0, forget_bias=0.0, soft_cap=soft_cap, norm=1)
        add(140, 20, input_bias=30.0, soft_cap=soft_cap)
        add(140, 20, input_bias=-30.0, soft_cap=soft_cap)
    # Features so sharp that q~ is orthogonal to nearly every k~; with 40 the clamp decides.
    add(140, 7, weight_scale=12.0, hedgehog=0)
    add(140, 7, weight_scale=40.0)
    add(140, 7, weight_scale=12.0, hedgehog=0, input_scale=9.0, forget_scale=8.0, norm=1)
    # Packed segments, empty ones and ones shorter than the delay among them.
    add(150, 8, cu=[0, 150])
    add(150, 8, cu=[0, 70, 71, 71, 150])
    add(150, 0, cu=[0, 0, 64, 129, 150, 150])
    add(150, 20, cu=list(range(0, 151, 15)), hedgehog=0)
    # LayerNorms, of one value among them.
    add(140, 16, norm=LAYER_NORM)
    add(140, 16, norm=LAYER_NORM, hedgehog=0, projected=0, skip=1)
    add(70, 5, norm=LAYER_NORM, dim=(13, 9), d_qk=10, d_v=7)
    add(40, 3, norm=LAYER_NORM, dim=(4, 4), d_qk=1, d_v=1, hedgehog=0)
    return cases


def mlp_cases():
    cases = []
    for activation in (0, 1, 2):
        for dims in ((16, 16, 32), (13, 9, 7), (1, 3, 1), (64, 64, 40)):
            for biases in (0, 1):
                cases.append([activation, *dims, 2, 70 if dims[0] == 13 else 9, biases, 500 + len(cases)])
    return cases


def offsets(parts):
    return np.cumsum([0] + [len(part) for part in parts]).astype(np.int32)


def make():
    """The arrays of scorers.kvpv."""
    recurrent = mlstm_cases()
    stateless = mlp_cases()
    mlstm = [mlstm_scores(*case).ravel() for case in recurrent]
    mlp = [mlp_scores(case).ravel() for case in stateless]
    cu = [np.array(edges, dtype=np.int32) for _, _, edges in recurrent]
    return {
        "mlstm_cases": np.array([case for case, _, _ in recurrent], dtype=np.int32),
        "mlstm_levels": np.array([level for _, level, _ in recurrent], dtype=np.float32),
        "mlstm_offsets": offsets(mlstm), "mlstm_scores": np.concatenate(mlstm),
        "mlstm_cu_offsets": offsets(cu), "mlstm_cu": np.concatenate(cu).astype(np.int32),
        "mlp_cases": np.array(stateless, dtype=np.int32),
        "mlp_offsets": offsets(mlp), "mlp_scores": np.concatenate(mlp),
    }
