"""The papers' formulas in plain PyTorch and float64, by definition rather than by a fast algorithm."""

import math
from fractions import Fraction

import torch

NEVER = 2**31 - 1


def effective(scores, t, q, log_gamma):
    """r_t(q) = r_t + (q - t) log gamma (KVpop, eq. 5)."""
    return float(scores[t]) + (q - t) * log_gamma


def best(scores, keys, count, q, log_gamma):
    """The `count` best of the keys at query q; ties go to the older key."""
    return set(sorted(keys, key=lambda t: (-effective(scores, t, q, log_gamma), t))[:count])


def expiry_of(scores, sinks, window, budget=None, log_gamma=0.0, is_open=None):
    """expiry = max(sink, window, min(gate, budget)) of one head: for each key the first query that no longer
    sees it. A visible key at q: t < s, or q - t < w, or among the `budget` best open keys that have left the
    window."""
    length = len(scores)
    out = []
    for t in range(length):
        expiry = NEVER
        for q in range(t, length):
            seen = t < sinks or q - t < window
            if not seen and (budget is not None or is_open is not None):
                left = [
                    u for u in range(sinks, q - window + 1) if is_open is None or is_open(float(scores[u]))
                ]
                seen = t in (left if budget is None else best(scores, left, budget, q, log_gamma))
            if not seen:
                expiry = q
                break
        out.append(expiry)
    return out


def clamp(expiry):
    """Any expiry of the length or more means never."""
    length = expiry.shape[-1]
    return torch.where(expiry >= length, torch.full_like(expiry, NEVER), expiry)


def logits_of(q, k, soft_cap=0.0):
    """[B, Hq, S, Skv], query heads h G to h G + G - 1 on KV head h."""
    group = q.shape[1] // k.shape[1]
    # The library's scale is a float32.
    scale = torch.tensor(1 / math.sqrt(q.shape[-1]), dtype=torch.float32).item()
    logits = scale * (q @ k.repeat_interleave(group, 1).transpose(-1, -2))
    return soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits


def attention(q, k, v, expiry=None, log_bias=None, bias_from=None, starts=None, soft_cap=0.0, segments=None):
    """Softmax over visible keys, and its logarithmic normalizer."""
    group = q.shape[1] // k.shape[1]
    length, keys = q.shape[2], k.shape[2]
    logits = logits_of(q, k, soft_cap)
    at = torch.arange(length)[None, None, :, None]
    if starts is not None:
        at = at + starts.long()[:, None, None, None]
    t = torch.arange(keys)[None, None, None, :]
    seen = (t <= at).expand(logits.shape).clone()
    if expiry is not None:
        seen &= at < expiry.repeat_interleave(group, 1)[:, :, None, :]
    if segments is not None:
        of = torch.bucketize(torch.arange(keys), segments[1:].long(), right=True)
        seen &= (of[:length, None] == of[None, :])[None, None]
    if log_bias is not None:
        start = torch.zeros(k.shape[1]) if bias_from is None else bias_from
        old = at - t >= start.long().repeat_interleave(group)[None, :, None, None]
        logits = logits + torch.where(old, log_bias.repeat_interleave(group, 1)[:, :, None, :], 0.0)
    logits = logits.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - torch.where(torch.isinf(lse), 0.0, lse)[..., None])
    return weights @ v.repeat_interleave(group, 1), lse


def future_mass(q, k, window, look_ahead=None, normalize=True, mean=False, epsilon=1e-8, beta=1.0):
    """KVpop, eq. 2, 3 and 8."""
    length, heads = q.shape[2], k.shape[1]
    at = torch.arange(length)
    logits = logits_of(q, k).masked_fill(at[:, None] < at[None, :], -math.inf)
    p = torch.softmax(logits, -1)
    first = at + window
    last = torch.full_like(first, length - 1) if look_ahead is None else first + look_ahead
    counts = (at[:, None] >= first[None, :]) & (at[:, None] <= last[None, :])
    p = torch.where(counts, p, 0.0)
    number = (length - first).clamp(min=1)
    if look_ahead is not None:
        number = number.clamp(max=look_ahead + 1)
    number = number if normalize else torch.ones_like(number)
    mass = p.amax(2) if math.isinf(beta) else ((p**beta).sum(2) / number) ** (1 / beta)
    mass = mass.reshape(q.shape[0], heads, -1, length)
    return torch.log(epsilon + mass.mean(2)) if mean else torch.log(epsilon + mass).amax(2)


def linear(k, v, weight, bias=None):
    scores = torch.einsum("bhsx,hx->bhs", torch.cat((k, v), -1), weight)
    return scores if bias is None else scores + bias[:, None]


def mlp(k, v, w1, b1, w2, b2):
    """KVpop, eq. 35."""
    hidden = torch.einsum("bhsx,hyx->bhsy", torch.cat((k, v), -1), w1) + b1[:, None]
    return torch.einsum("bhsy,hy->bhs", torch.nn.functional.silu(hidden), w2) + b2[:, None]


def mlstm(k, v, delay, cap, norm, w_q, w_k, w_v, w_i, b_i, w_f, b_f, norm_gain, readout, readout_bias, skip):
    """KVpop, eq. 37 to 42, one token after another. The frame is not stabilized: for short sequences."""
    x = torch.cat((k, v), -1)
    length = x.shape[2]

    def project(weights):
        return torch.einsum("bhsx,hyx->bhsy", x, weights)

    def features(weights):
        y = project(weights)
        return torch.cat((torch.softmax(y, -1), torch.softmax(-y, -1)), -1)

    def gate(weights, bias):
        a = torch.einsum("bhsx,hx->bhs", x, weights) + bias[:, None]
        return cap * torch.tanh(a / cap) if cap else a

    query, key, value = features(w_q), features(w_k), project(w_v)
    i, f = torch.exp(gate(w_i, b_i)), torch.sigmoid(gate(w_f, b_f))
    c = x.new_zeros(*x.shape[:2], key.shape[-1], value.shape[-1])
    z = x.new_zeros(*x.shape[:2], key.shape[-1])
    scores = []
    for at in range(length):
        c = (
            f[:, :, at, None, None] * c
            + i[:, :, at, None, None] * key[:, :, at, :, None] * value[:, :, at, None]
        )
        z = f[:, :, at, None] * z + i[:, :, at, None] * key[:, :, at]
        u = at - delay
        if u < 0:
            continue
        h = torch.einsum("bhk,bhkv->bhv", query[:, :, u], c) / (query[:, :, u] * z).sum(-1, keepdim=True)
        if norm == "layer":
            h = h - h.mean(-1, keepdim=True)
        if norm_gain is not None:
            h = h / torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-6) * norm_gain
        r = (torch.nn.functional.silu(h) * readout).sum(-1) + readout_bias
        scores.append(r if skip is None else r + (x[:, :, u] * skip).sum(-1))
    scores += [torch.zeros_like(scores[0])] * (length - len(scores))
    return torch.stack(scores, -1)


def boundary_loss(
    scores,
    target,
    sinks,
    window,
    budget,
    log_gamma,
    temperature=1.0,
    omega_min=0.0,
    margin_temperature=1.0,
    balance=(0.25, 4.0),
):
    """KVpop, eq. 7 and B.4 to B.6, at all positions. log_gamma [Hkv] is a tensor. Returns loss and number of
    examples."""
    terms, number = [], 0
    for h in range(scores.shape[1]):
        gamma = float(log_gamma[h].detach())
        examples = []
        for b in range(scores.shape[0]):
            goal = target[b, h]
            for q in range(sinks + window + budget, scores.shape[2]):
                new = q - window
                held = best(goal, range(sinks, new + 1), budget, q, gamma)
                bound = min(held, key=lambda t: (effective(goal, t, q, gamma), -t))
                if bound != new:
                    margin = effective(goal, new, q, gamma) - effective(goal, bound, q, gamma)
                    examples.append((b, new, bound, new in held, abs(margin)))
        share = sum(e[3] for e in examples) / max(1, len(examples))
        weights = {True: 1.0, False: 1.0}
        if balance is not None and 0 < share < 1:
            weights = {
                True: min(max(1 / (2 * share), balance[0]), balance[1]),
                False: min(max(1 / (2 * (1 - share)), balance[0]), balance[1]),
            }
            average = sum(weights[e[3]] for e in examples) / len(examples)
            weights = {keep: weight / average for keep, weight in weights.items()}
        for b, new, bound, keeps, margin in examples:
            sigmoid = 1 / (1 + math.exp(-margin / margin_temperature))
            omega = omega_min + (1 - omega_min) * sigmoid
            delta = scores[b, h, new] - scores[b, h, bound] + (bound - new) * log_gamma[h]
            y = 1.0 if keeps else -1.0
            terms.append(omega * weights[keeps] * torch.nn.functional.softplus(-y * delta / temperature))
        number += len(examples)
    return torch.stack(terms).mean(), number


# ---- gates -------------------------------------------------------------------------------------------------


def decided(scores, sinks, window):
    """Keys out of the window before the end that are no sinks."""
    t = torch.arange(scores.shape[-1])
    return ((t >= sinks) & (t + window < scores.shape[-1])).expand(scores.shape)


def gate_sparsity(scores, keys):
    """WG-KV, 3.3: the mean of g + g (1 - g)."""
    g = torch.sigmoid(scores)
    return (g + g * (1 - g))[keys].sum() / keys.sum()


def gate_density(scores, keys):
    """SP-KV, eq. 13: minus the mean of u."""
    return -torch.sigmoid(scores)[keys].sum() / keys.sum()


def retention_penalty(scores, keys, weights):
    """LTE, eq. 7: the sum of lambda relu(r - 0.5), per sequence."""
    terms = weights[None, :, None] * torch.relu(torch.sigmoid(scores) - 0.5)
    return terms[keys].sum() / scores.shape[0]


def compression(scores, keys, temperature, target, hard=False):
    """DMS: max(0, target - mean of alpha); `hard` counts alpha > 0.5 with the gradient of alpha."""
    alpha = torch.sigmoid(scores / temperature)
    if hard:
        alpha = (alpha > 0.5).double() + (alpha - alpha.detach())
    return torch.relu(target - alpha[keys].sum() / keys.sum())


def controller(counts, cap, slack, factor, least, every):
    """LTE, algorithm 1, of one head: counts by step, the weights after each, in exact arithmetic."""
    least, factor = Fraction(least), Fraction(factor)
    weight, average, weights = least, None, []
    for step, count in enumerate(counts, 1):
        a = min(1.0, 2 / (1 + every / 2))
        average = count if average is None else (1 - a) * average + a * count
        if step % every == 0:
            up, down = average > cap, average < slack * cap
            weight = min(weight * factor ** (up - down), Fraction(1))
            if weight < least:
                weight = least if up else Fraction(0)
        weights.append(float(weight))
    return weights


def straight_through(scores, keys, v, d_v):
    """LTE, eq. 6, for the logit: d r = <v, d v>."""
    r = torch.sigmoid(scores)
    return torch.where(keys, r * (1 - r) * (v * d_v).sum(-1), 0.0)


def retained(scores, sinks, window, scope):
    """LTE's c: keys with r > 0.5 and sinks (eq. 5), of all keys or of those out of the window before the end;
    the mean over sequences."""
    t = torch.arange(scores.shape[-1])
    keys = (scores > 0) | (t < sinks)
    if scope == "decided":
        keys = keys & (t + window < scores.shape[-1])
    return keys.double().sum((0, 2)) / scores.shape[0]


# ---- distillation ------------------------------------------------------------------------------------------


def top_distillation(teacher, student, top, temperature, reverse=False, student_softmax="top"):
    """KL over the teacher's largest logits, both sides renormalized (KVpop, F), or the teacher alone."""
    values, at = torch.topk(teacher / temperature, min(top, teacher.shape[-1]), -1)
    p = torch.log_softmax(values, -1)
    s = torch.log_softmax(torch.gather(student / temperature, -1, at), -1)
    if student_softmax == "all":
        s = torch.gather(torch.log_softmax(student / temperature, -1), -1, at)
    if reverse:
        p, s = s, p
    return (p.exp() * (p - s)).sum(-1).mean()


# ---- metrics -----------------------------------------------------------------------------------------------


def visible(expiry):
    """[..., S, S]: query by key."""
    t = torch.arange(expiry.shape[-1])
    return (t[None, :] <= t[:, None]) & (t[:, None] < expiry[..., None, :])


def long_range(length, sinks, window):
    """E(q) = {t : s <= t <= q - w}, query by key."""
    t = torch.arange(length)
    return (t[None, :] >= sinks) & (t[None, :] <= t[:, None] - window)


# ---- observed policies -------------------------------------------------------------------------------------


def received_mass(q, k, expiry=None, queries=None, largest=False):
    group, length = q.shape[1] // k.shape[1], q.shape[2]
    t = torch.arange(length)
    seen = (t[None, :] <= t[:, None])[None, None].expand(q.shape[0], k.shape[1], length, length)
    if expiry is not None:
        seen = visible(expiry)
    logits = logits_of(q, k).masked_fill(~seen.repeat_interleave(group, 1), -math.inf)
    p = torch.nan_to_num(torch.softmax(logits, -1)).reshape(q.shape[0], k.shape[1], group, length, length)
    p = p.amax(2) if largest else p.mean(2)
    return p[:, :, (0 if queries is None else max(0, length - queries)) :].sum(2)


def observed_mask(q, k, kind, window, budget, chunk=None, prompt=None, pool=1, pool_largest=False):
    """Expiries of H2O, TOVA (whole layer) or SnapKV, by simulating a cache of one sequence: q [Hq, S, D], k
    [Hkv, S, D]. After a block of queries a head keeps the newest w - 1 keys of the next query's window (all w
    of SnapKV's) and the `budget` best of the others."""
    heads, length = k.shape[0], k.shape[1]
    group = q.shape[0] // heads
    prompt = length if prompt is None else prompt
    edges = (
        list(range(0, prompt, prompt if chunk is None else chunk)) + list(range(prompt, length)) + [length]
    )
    expiry = torch.full((heads, length), NEVER, dtype=torch.int64)
    total = torch.zeros(heads, length, dtype=torch.float64)
    logits = logits_of(q[None], k[None])[0].reshape(heads, group, length, length)
    for first, end in zip(edges, edges[1:]):
        t = torch.arange(length)
        at = torch.arange(first, end)
        seen = (t[None, :] <= at[:, None])[None] & (at[:, None] < expiry[:, None, :])
        p = torch.softmax(logits[:, :, first:end].masked_fill(~seen[:, None], -math.inf), -1).mean(1)
        if kind == "snapkv" and first >= prompt:
            continue
        if kind == "h2o":
            total += p.sum(1)
            score = total
        elif kind == "tova":
            score = p[:, -1].mean(0).expand(heads, length)
        else:
            score = p[:, max(0, p.shape[1] - window) :].sum(1)
        # Keys that have left the window of the last query; of H2O and TOVA, of the next one.
        free = end - window + (0 if kind == "snapkv" else 1)
        for h in range(heads):
            keys = [u for u in range(free) if expiry[h, u] > end - 1]
            marks = score[h]
            if pool > 1 and keys:
                line = torch.nn.functional.pad(score[h][keys], (pool // 2, pool // 2)).unfold(0, pool, 1)
                marks = marks.clone()
                marks[keys] = line.amax(-1) if pool_largest else line.mean(-1)
            for u in set(keys) - best(marks, keys, budget, end, 0.0):
                expiry[h, u] = end
    return expiry


# ---- scorers of other papers -------------------------------------------------------------------------------


def before_rope(k, layout="half_split", base=10000.0, dims=0, real=torch.float32):
    """Keys [..., S, D] turned back: pair i of the key at t by -t base^(-2 i / dims)."""
    dims = dims or k.shape[-1]
    t = torch.arange(k.shape[-2])
    # The library's frequencies are float32, and angles up to position 2^24 products in the type of scores.
    rates = (base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)).float()
    angle = (t.to(real)[:, None] * rates.to(real)).double()
    turned = k[..., :dims]
    half = dims // 2
    if layout == "half_split":
        a, b = turned[..., :half], turned[..., half:]
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
    a, b = a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()
    turned = torch.cat((a, b), -1) if layout == "half_split" else torch.stack((a, b), -1).flatten(-2)
    return torch.cat((turned, k[..., dims:]), -1)


def write_gate(k, v, w1, b1, w2, b2, **rope):
    """WG-KV, 3.2."""
    both = (before_rope(k, **rope), k)
    x = torch.cat([y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-6) for y in both], -1)
    hidden = torch.einsum("bhsx,hyx->bhsy", x, w1) + b1[:, None]
    return torch.einsum("bhsy,hy->bhs", torch.nn.functional.gelu(hidden), w2) + b2[:, None]


def conv(k, v, delay, w1, b1, w2, b2, w3, b3, readout, readout_bias, stored=torch.float64, **rope):
    """LTE, 3.1.1: taps at -2, 0, 2, zeros before the first token. Factors of the layers' products, and
    backwards their gradients, are rounded to `stored`."""
    y = torch.cat((before_rope(k, **rope) if rope else k, v), -1)
    length = y.shape[2]
    y = torch.nn.functional.pad(y, (0, 0, 6, 6))
    for weight, bias in ((w1, b1), (w2, b2), (w3, b3)):
        count = y.shape[2] - 4
        y, weight = (x.to(stored).to(x.dtype) for x in (y, weight))
        taps = torch.stack([y[:, :, j : j + count] for j in (0, 2, 4)], 3)
        y = torch.nn.functional.silu(torch.einsum("bhsjx,hyjx->bhsy", taps, weight) + bias[:, None])
    scores = torch.einsum("bhsy,hy->bhs", y, readout) + readout_bias[:, None]
    # The last keys have no score: r = 0.
    return torch.where(torch.arange(length) + delay < length, scores, -torch.inf)
