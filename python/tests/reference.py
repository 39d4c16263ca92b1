"""The papers' formulas in plain PyTorch and float64, by definition rather than by a fast algorithm."""

import math

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


def mlstm(k, v, delay, cap, w_q, w_k, w_v, w_i, b_i, w_f, b_f, norm_gain, readout, readout_bias, skip):
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
