"""Writes the committed test vectors for lifetimes, cutoffs, metrics, caches, scorers and attention
into tests/vectors.

    python3 make_vectors.py            write the files
    python3 make_vectors.py --check    compare with the files that are there

Everything comes from fixed seeds of a frozen generator (RandomState), so the integers are the same
everywhere; attention outputs may differ in the last bits between math libraries, and --check allows
1e-12 for float64.

lifetimes.kvpv (see vectors.py for the container)
    scores          float32 [patterns, 300]  raw scores; a case takes the first `length` of its pattern
    cases           int32 [cases, 11]        the columns of COLUMNS
    levels          float32 [cases, 2]       tau (a logit), log_gamma
    cu_offsets, cu  int32                    cu[cu_offsets[i] : cu_offsets[i + 1]] are the packed segments of
                                             case i: none, or the edges 0 .. length, everything starting anew
                                             at each
    offsets, expiry int32                    expiry[offsets[i] : offsets[i + 1]], clamped to `length` (a
                                             segment's end)
    budget k = 2^31 - 1 is infinity; has_budget = 0 leaves the budget out of the policy; gate is 0 none,
    1 at_least, 2 above; keep_every m > 0 adds a keep part for t % m == 0.

cutoff.kvpv         the same columns for n = 1 under the default base, and by query or key
    rank, cutoff    int32                    rank(t) among all tokens; rank of the k-th best eligible key,
                                             INT32_MAX, -1
    boundary        int32                    position of that key, -1 where there is none
    competing_rank, competing_cutoff         the same with ranks among the keys that compete within the
                                             sequence only, INT32_MAX for the others; independent of scores
                                             that no rule may read

metrics.kvpv        scores [pairs, 2, S]     teacher and student under one rule; expiry [pairs, 2, S] clamped
                                             to S
    numbers         float64 [pairs, 9]       density and evict ratio of the student; oracle recall mean, its
                                             chance, last, its chance, queries in the mean; density and evict
                                             ratio of the teacher
    live            int32 [pairs, S]         keys that each query of the student sees

cache.kvpv          q [6, S, 64], k, v [2, S, 64]  float32, exact in bf16 and fp16; query head i reads KV head
                                                   i // 3
    rules, levels   [cases, 2, 11], [cases, 2, 2]  one rule per KV head; attention [cases, 2] holds scale and
                                                   soft_cap
    scores, expiry  [cases, 2, S]
    retained        int32 [cases, 2, S, words]     after step q, bit t % 32 of word t / 32 says that key t is
                                                   held
    out_queries     int32 [n]                      the queries whose outputs are stored
    out, lse        float64 [cases, 6, n, 64], [cases, 6, S]

scorers.kvpv        see scorers.py
attention.kvpv      see attention.py
baselines.kvpv      see baselines.py
shared.kvpv         see shared.py
"""

import pathlib
import sys

import numpy as np

import attention
import baselines
import cache
import conv
import cutoff
import inputs
import lifetimes
import metrics
import scorers
import selection
import shared
import vectors
from lifetimes import REBASE_LIMIT, UNLIMITED, Rule

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "vectors"
LONGEST = 300
COLUMNS = ["pattern", "length", "sinks", "window", "gate", "has_budget", "budget", "decay_step", "keep_every",
           "rebase_limit", "reserved"]
COUNTED = ["cases", "rules", "mlstm_cases"]
GATES = ["none", "at_least", "above"]
f32 = np.float32


def score_patterns(random):
    """Adversarial raw scores, {name: float32 [LONGEST]}."""
    t = np.arange(LONGEST)
    tau = f32(0.5)
    edge = np.array([tau, np.nextafter(tau, f32(1)), np.nextafter(tau, f32(0)), -tau, 0.0, -0.0], dtype=f32)
    spread = np.array([3.4e38, -3.4e38, 1e30, 1e16, -1e16, 1e9, 1.0, 1e-30, -1e-45, 0.0], dtype=f32)
    return {
        "equal": np.full(LONGEST, 0.5),
        "improving": 0.125 * t,
        "worsening": -0.125 * t,
        "alternating": np.where(t % 2 == 0, 1.0, -1.0),
        "signed zeros": np.where(random.randint(0, 2, LONGEST) == 0, 0.0, -0.0),
        "infinities": random.choice([np.inf, -np.inf, 0.0, -0.0, 1.0], LONGEST),
        "all minus infinity": np.full(LONGEST, -np.inf),
        "normal": random.standard_normal(LONGEST),
        "uniform": random.uniform(-3.0, 3.0, LONGEST),
        "few values": random.choice([-1.0, 0.0, 0.5, 1.0], LONGEST),
        "threshold edge": random.choice(edge, LONGEST),
        # 2^53 and above: a decay of a few units is rounded away or to an even neighbor, so priorities tie.
        "huge equal": np.full(LONGEST, 2.0**53),
        "huge few": random.choice([2.0**53, 2.0**54, 2.0**53 + 2.0**30, -(2.0**53)], LONGEST),
        "huge spread": random.choice(spread, LONGEST),
        # Raw scores that cancel a log_gamma of -0.25 exactly: all priorities are equal.
        "balanced": -0.25 * t,
        "sawtooth": (t * 37 % 64) / 16.0,
    }


def numbers_of(rule, pattern, length):
    """A rule as a row of COLUMNS, and (tau, log_gamma)."""
    has_budget = rule.budget is not None
    row = [pattern, length, rule.sinks, rule.window, GATES.index(rule.gate), int(has_budget),
           rule.budget or 0, rule.decay_step, rule.keep_every, rule.rebase_limit, 0]
    return row, [rule.tau, rule.log_gamma]


SHAPES = [(4, 16, 12), (0, 1, 1), (1, 5, 7), (0, 8, 20), (4, 1, 3), (3, 64, 5), (0, 1, 40), (2, 16, 0),
          (0, 3, UNLIMITED)]  # s, w, k
SLOPES = [f32(x) for x in (-0.01, -0.25, 0.0, -0.7, -3.0, -0.03, -1e-40, -100.0)]
LEVELS = [f32(x) for x in (0.5, 0.0, -0.0, -0.5, np.inf, -np.inf)]


def lifetime_cases(names, random):
    """(rule, pattern, length, cu_seqlens) of every case."""
    cases = []

    def pick(values):
        return values[random.randint(len(values))]

    def add(pattern, length, cu=(), **numbers):
        slope = f32(-0.25) if names[pattern] == "balanced" else numbers.pop("log_gamma", pick(SLOPES))
        numbers.pop("log_gamma", None)
        rule = Rule(tau=numbers.pop("tau", pick(LEVELS)), log_gamma=slope, **numbers)
        cases.append((rule, pattern, length, list(cu)))

    def shaped(shape):
        return dict(sinks=shape[0], window=shape[1], budget=shape[2])

    # Every budgeted composition on every pattern, n = 1 (under several bases), 3 and 64, with and
    # without a keep part.
    for gate in GATES:
        for keep in (0, 1):
            for pattern in range(len(names)):
                for step, limit in ((1, REBASE_LIMIT), (1, 32), (3, REBASE_LIMIT), (64, REBASE_LIMIT)):
                    if limit == 32:
                        limit = pick([32, 32, 5, 1, 100])
                    longer = step == 64 or limit != REBASE_LIMIT
                    length = pick([LONGEST, 200, 120, 90]) if longer else pick([150, 120, 90])
                    tau = f32(0.5) if names[pattern] == "threshold edge" else pick(LEVELS[:4])
                    add(pattern, length, gate=gate, decay_step=step, keep_every=keep * pick([3, 16, 50]),
                        tau=tau, rebase_limit=limit, **shaped(pick(SHAPES[:7])))
    # Decay steps on hard roundings: an order that is static within t mod n in exact arithmetic is
    # not so in float64.
    for pattern in [names.index(name)
                    for name in ("huge equal", "huge few", "huge spread", "normal", "infinities")]:
        for step in (1, 2, 3, 64):
            for slope in (-0.7, -3.0, -100.0):
                for limit in (REBASE_LIMIT, 32):
                    add(pattern, pick([150, 200]), decay_step=step, log_gamma=f32(slope), rebase_limit=limit,
                        **shaped(pick(SHAPES[:4])))
    # Gates without a cap, full-attention heads and k = 0.
    for gate in GATES:
        for keep in (0, 7):
            for pattern in range(len(names)):
                if gate != "none":
                    tau = f32(0.5) if names[pattern] == "threshold edge" else pick(LEVELS)
                    add(pattern, pick([60, 100]), gate=gate, tau=tau, keep_every=keep, sinks=pick([0, 4]),
                        window=pick([1, 2, 16]))
        for shape in SHAPES[7:]:
            add(names.index("normal"), 80, gate=gate, **shaped(shape))
    # Sinks, window, sinks + window, with and without a keep part.
    for sinks in (0, 1, 4, 70):
        for window in (1, 2, 16, 70):
            for keep in (0, 5):
                add(names.index("normal"), 50, sinks=sinks, window=window, keep_every=keep)
    # Lengths at every edge.
    for gate in GATES:
        for shape in ((4, 16, 12), (0, 1, 1), (1, 5, 7), (0, 8, 0), (3, 4, 2), None):
            s, w, k = shape or (2, 6, 0)
            edges = {0, 1, 2, w - 1, w, w + 1, s, s + w - 1, s + w, s + w + 1, s + w + k - 1, s + w + k,
                     s + w + k + 1}
            for length in sorted(n for n in edges if n >= 0):
                numbers = shaped(shape) if shape else dict(sinks=s, window=w)
                add(pick(range(len(names))), length, gate=gate, tau=LEVELS[1], decay_step=pick([1, 3]),
                    **numbers)
    # Packed segments, empty ones and ones shorter than the window among them.
    for gate in GATES:
        for keep in (0, 3):
            for step, limit in ((1, REBASE_LIMIT), (1, 32), (3, REBASE_LIMIT)):
                for cu in ([0, 90], [0, 40, 41, 41, 90], [0, 0, 3, 64, 90, 90], list(range(0, 91, 10))):
                    add(pick(range(len(names))), 90, cu, gate=gate, tau=LEVELS[1], keep_every=keep,
                        decay_step=step, rebase_limit=limit, **shaped(pick(SHAPES[:5])))
    for cu in ([0, 40, 90], [0, 1, 2, 90]):
        add(names.index("normal"), 90, cu, sinks=4, window=16)
        add(names.index("normal"), 90, cu, sinks=4, window=16, gate="above", tau=LEVELS[0])
    return cases


def offsets(parts):
    """The running sums of the parts' lengths, with a leading 0."""
    return np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int32)


def joined(parts):
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


def lifetime_file(patterns, random):
    names, scores = list(patterns), np.array(list(patterns.values())).astype(f32)
    cases = lifetime_cases(names, random)
    expiry = []
    for rule, pattern, length, cu in cases:
        mine = scores[pattern, :length]
        found = lifetimes.packed_lifetimes(mine, rule, cu) if cu else lifetimes.lifetimes(mine, rule)
        expiry.append(lifetimes.clamped(found, length))
    rows = [numbers_of(rule, pattern, length) for rule, pattern, length, _ in cases]
    segments = [cu for _, _, _, cu in cases]
    return {
        "scores": scores,
        "cases": np.array([row for row, _ in rows]),
        "levels": np.array([levels for _, levels in rows], dtype=f32),
        "cu_offsets": offsets(segments),
        "cu": joined(segments),
        "offsets": offsets(expiry),
        "expiry": joined(expiry),
    }


def cutoff_file(patterns, random):
    names, scores = list(patterns), np.array(list(patterns.values())).astype(f32)
    rows, ranks, limits, boundaries, competing, competing_limits = [], [], [], [], [], []
    for pattern in range(len(names)):
        for number, (s, w, k) in enumerate(SHAPES):
            slope = f32(-0.25) if names[pattern] == "balanced" else SLOPES[random.randint(len(SLOPES))]
            gate = GATES[(pattern + number) % 3 if number > 3 else 0]
            rule = Rule(sinks=s, window=w, budget=k, tau=LEVELS[0], gate=gate, log_gamma=slope)
            length = [80, 64, 33, s + w, 1][random.randint(5) if number > 3 else 0]
            mine = scores[pattern, :length]
            rows.append(numbers_of(rule, pattern, length))
            ranks.append(cutoff.ranks(mine, rule))
            limit, boundary = cutoff.cutoffs(mine, rule)
            limits.append(limit)
            boundaries.append(boundary)
            competing.append(cutoff.competing_ranks(mine, rule))
            competing_limits.append(cutoff.cutoffs(mine, rule, competing[-1])[0])
    return {
        "scores": scores[:, :80],
        "cases": np.array([row for row, _ in rows]),
        "levels": np.array([levels for _, levels in rows], dtype=f32),
        "offsets": offsets(ranks),
        "rank": joined(ranks),
        "cutoff": joined(limits),
        "boundary": joined(boundaries),
        "competing_rank": joined(competing),
        "competing_cutoff": joined(competing_limits),
    }


def metrics_file(random):
    length = 96
    rows, scores, expiries, numbers, live = [], [], [], [], []
    for s, w, k in ((4, 16, 12), (0, 1, 1), (1, 5, 7), (0, 8, 0), (4, 64, 40), (2, 100, 8),
                    (0, 8, UNLIMITED)):
        for noise in (0.0, 0.5, 3.0):
            rule = Rule(sinks=s, window=w, budget=k, log_gamma=f32(-0.01))
            teacher = random.standard_normal(length).astype(f32)
            student = (teacher + noise * random.standard_normal(length)).astype(f32)
            found = [lifetimes.clamped(lifetimes.lifetimes(r, rule), length) for r in (teacher, student)]
            recall = metrics.oracle_recall(*found, length, s, w, k)
            rows.append(numbers_of(rule, 0, length))
            scores.append([teacher, student])
            expiries.append(found)
            live.append(metrics.live_keys(found[1], length))
            numbers.append([
                metrics.density(found[1], length), metrics.evict_ratio(found[1], length, s, w),
                recall["mean"], recall["chance_mean"], recall["last"], recall["chance_last"],
                recall["queries"],
                metrics.density(found[0], length), metrics.evict_ratio(found[0], length, s, w),
            ])
    return {
        "scores": np.array(scores, dtype=f32),
        "cases": np.array([row for row, _ in rows]),
        "levels": np.array([levels for _, levels in rows], dtype=f32),
        "expiry": np.array(expiries),
        "numbers": np.array(numbers, dtype=np.float64),
        "live": np.array(live),
    }


def cache_file(patterns, random):
    heads, group, length, dim = 2, 3, 72, 64
    words = (length + 31) // 32

    def values(*shape):
        return (random.randint(-96, 97, shape) / 32.0).astype(f32)

    q, k, v = values(heads * group, length, dim), values(heads, length, dim), values(heads, length, dim)
    base = dict(sinks=4, window=8, budget=12)
    cases = [  # pattern, the rules of the two heads, soft_cap
        ("normal", [Rule(**base), Rule(sinks=0, window=1, budget=1)], 0.0),
        ("equal", [Rule(**base), Rule(sinks=1, window=5, budget=7, log_gamma=f32(-0.03))], 0.0),
        ("improving", [Rule(**base), Rule(sinks=2, window=100, budget=3)], 0.0),
        ("few values", [Rule(**base, log_gamma=f32(-0.25), decay_step=3),
                        Rule(window=4, budget=9, log_gamma=f32(-0.01), decay_step=64)], 30.0),
        ("huge few", [Rule(**base, log_gamma=f32(-0.7), rebase_limit=16),
                      Rule(window=4, budget=9, log_gamma=f32(-0.7), rebase_limit=16)], 0.0),
        ("normal", [Rule(sinks=4, window=8), Rule(sinks=0, window=1)], 0.0),
        ("uniform", [Rule(**base, gate="above"), Rule(window=6, budget=5, gate="above", tau=f32(1.0))], 0.0),
        ("uniform", [Rule(window=8, budget=30, gate="at_least"),
                     Rule(sinks=1, window=2, budget=70, gate="at_least", tau=f32(-1.0))], 0.0),
        ("worsening", [Rule(**base, keep_every=16), Rule(sinks=0, window=3, budget=0, keep_every=16)], 0.0),
    ]
    queries = sorted(set(range(0, length, 9)) | {1, length - 1})
    rules, levels, scores, expiry, retained, out, lse, attention = [], [], [], [], [], [], [], []
    scale = float(f32(1.0 / np.sqrt(dim)))
    for name, pair, soft_cap in cases:
        mine = np.array([patterns[name][:length], patterns[name][length : 2 * length]]).astype(f32)
        outputs, sums, held = cache.run(pair, mine, q, k, v, scale, soft_cap)
        found = [lifetimes.lifetimes(mine[h], pair[h]) for h in range(heads)]
        bits = np.zeros((heads, length, words), dtype=np.uint32)
        for h in range(heads):
            for step in range(length):
                # The theorem of design, section 1: the cache holds what the mask says is visible.
                assert held[h][step] == [t for t in range(step + 1) if step < found[h][t]]
                for t in held[h][step]:
                    bits[h, step, t // 32] |= np.uint32(1 << (t % 32))
        rows = [numbers_of(rule, 0, length) for rule in pair]
        rules.append([row for row, _ in rows])
        levels.append([level for _, level in rows])
        scores.append(mine)
        expiry.append([lifetimes.clamped(e, length) for e in found])
        retained.append(bits.view(np.int32))
        out.append(outputs[:, queries])
        lse.append(sums)
        attention.append([scale, soft_cap])
    return {
        "q": q, "k": k, "v": v,
        "rules": np.array(rules), "levels": np.array(levels, dtype=f32),
        "attention": np.array(attention, dtype=f32),
        "scores": np.array(scores), "expiry": np.array(expiry), "retained": np.array(retained),
        "out_queries": np.array(queries), "out": np.array(out), "lse": np.array(lse),
    }


def make():
    """{file name: arrays}; every file has its own seed, so that one can grow without changing the others."""
    patterns = score_patterns(np.random.RandomState(11))
    return {
        "lifetimes.kvpv": lifetime_file(patterns, np.random.RandomState(12)),
        "cutoff.kvpv": cutoff_file(patterns, np.random.RandomState(13)),
        "metrics.kvpv": metrics_file(np.random.RandomState(14)),
        "cache.kvpv": cache_file(patterns, np.random.RandomState(15)),
        "scorers.kvpv": scorers.make(),
        "conv.kvpv": conv.make(),
        "inputs.kvpv": inputs.make(),
        "selection.kvpv": selection.make(),
        "attention.kvpv": attention.make(),
        "baselines.kvpv": baselines.make(),
        "shared.kvpv": shared.make(patterns),
    }


def same(a, b):
    """Equal names, types and shapes; equal bytes, except that float64 may differ in its last digits."""
    if list(a) != list(b):
        return False
    for name in a:
        if a[name].dtype != b[name].dtype or a[name].shape != b[name].shape:
            return False
        if a[name].dtype == np.float64:
            if not np.allclose(a[name], b[name], rtol=1e-12, atol=1e-12, equal_nan=True):
                return False
        elif a[name].tobytes() != b[name].tobytes():
            return False
    return True


def main(arguments):
    if arguments not in ([], ["--check"]):
        return "usage: python3 make_vectors.py [--check]"
    for name, arrays in make().items():
        path = FOLDER / name
        data = vectors.dumps(arrays)
        if arguments:
            if not path.exists() or not same(vectors.load(path), vectors.loads(data)):
                return f"{name}: the committed file is not what make_vectors.py makes"
            print(f"{name}: as made")
        else:
            path.write_bytes(data)
            cases = max(len(a) for n, a in arrays.items() if n in COUNTED)
            print(f"{name}: {len(data)} bytes, {cases} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
