"""Caches against the mask of the same policy, and against the rules of H2O, TOVA and SnapKV."""

import pytest
import reference
import torch

import kvpolicy as kvp

TOLERANCE = {
    torch.float64: 1e-6,  # scores and log-sum-exps are float32
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
HEADS, KV_HEADS, DIM = 4, 2, 16


def rows(tokens, batch=2, dtype=torch.float32, device="cpu", dim=DIM):
    shapes = ((batch, heads, tokens, dim) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def cache_of(policies, device="cpu", dtype=torch.float32, sequences=2, **options):
    options = {"query_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM} | options
    return kvp.Cache(policies, sequences=sequences, dtype=dtype, device=device, **options)


def run(cache, q, k, v, cuts, layer=0, scores=None):
    """Outputs of the tokens in chunks of the lengths `cuts`; 1 is a step."""
    out, at = [], 0
    for n in cuts:
        part = slice(at, at + n)
        call = cache.step if n == 1 else cache.prefill
        given = None if scores is None else scores[:, :, part]
        out.append(call(layer, q[:, :, part], k[:, :, part], v[:, :, part], scores=given))
        cache.advance()
        at += n
    assert at == q.shape[2]
    return torch.cat(out, 2)


def expected(policy, q, k, v, scores, **options):
    """Attention through the policy's mask, by the formula in float64."""
    expiry = kvp.build_mask(policy, scores.cpu()).expiry
    return reference.attention(*(x.cpu().double() for x in (q, k, v)), expiry, **options)[0], expiry


def close(got, want, dtype=torch.float32):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=tolerance)


CUTS = [[40], [1] * 40, [7, 1, 20, 1, 1, 10]]
POLICIES = {
    "window": kvp.StreamingLLM(2, 5),
    "top_k": kvp.KVpop(2, 5, 6, kvp.Decay(0.9)),
    "by head": kvp.KVpop([0, 3], [4, 6], [9, 2]),
    "capped gate": kvp.LTE(1, 4, 5),
    "gate": kvp.SPKV(4),
    "evicting gate": kvp.DMS(3),
    "one head full": kvp.KVpop(2, 5, [kvp.UNLIMITED, 3]),
    "full": kvp.FULL,
}


@pytest.mark.parametrize("cuts", CUTS, ids=["chunk", "steps", "both"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_cache_is_the_mask(policy, cuts, device):
    q, k, v = rows(40, device=device)
    scores = torch.randn(2, KV_HEADS, 40, device=device)
    given = scores if policy.ranked and policy is not kvp.FULL else None
    cache = cache_of(policy, device)
    got = run(cache, q, k, v, cuts, scores=given)
    want, expiry = expected(policy, q, k, v, scores)
    close(got, want)
    assert cache.lengths() == [40, 40]
    held = (expiry > 39).sum(-1)
    for sequence in range(2):
        for head in range(KV_HEADS):
            assert cache.usage(0, sequence, head).size == held[sequence, head]
            if device.type == "cpu":
                kept = (expiry[sequence, head] > 39).nonzero().flatten().tolist()
                assert sorted(cache.retained(0, sequence, head)) == kept


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("policy", [kvp.KVpop(2, 8, 6), kvp.SPKV(8)], ids=["fixed", "dual"])
def test_types_widths_and_soft_cap(policy, dtype, device, compiled):
    compiled(dtype, "scorer")
    q, k, v = rows(30, dtype=dtype, device=device, dim=64)
    scores = torch.randn(2, KV_HEADS, 30, device=device)
    cache = cache_of(policy, device, dtype, head_dim=64, logits_soft_cap=2.0)
    got = run(cache, q, k, v, [20] + [1] * 10, scores=scores)
    close(got, expected(policy, q, k, v, scores, soft_cap=2.0)[0], dtype)


def scorers():
    torch.manual_seed(3)
    made = {
        "linear": kvp.LinearScorer(KV_HEADS, DIM),
        "mlp": kvp.MLPScorer(KV_HEADS, DIM, hidden=8),
        "mlstm": kvp.mLSTMScorer(KV_HEADS, DIM, delay=5, norm="layer", skip=True),
    }
    for scorer in made.values():
        for parameter in scorer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return made


@pytest.mark.parametrize("cuts", CUTS, ids=["chunk", "steps", "both"])
@pytest.mark.parametrize("kind", ["linear", "mlp", "mlstm"])
@pytest.mark.parametrize("gated", [False, True], ids=["top_k", "gate"])
def test_scorers(kind, gated, cuts, device):
    scores = scorers()[kind]
    scorer = scorers()[kind].to(device)
    policy = kvp.SPKV(5, scorer) if gated else kvp.KVpop(2, 5, 6, kvp.Decay(0.95), scorer)
    q, k, v = rows(40, device=device)
    got = run(cache_of(policy, device), q, k, v, cuts)
    close(got, expected(policy, q, k, v, scores(k.cpu(), v.cpu()))[0])


def test_caches_of_both_devices_in_one_process(device):
    """The modules of the CPU and of CUDA have classes of one name."""
    policy, (q, k, v) = kvp.Quest(2), rows(40)
    outs = [
        run(cache_of(policy, where), *(x.to(where) for x in (q, k, v)), [30] + [1] * 10)
        for where in ("cpu", device, "cpu")
    ]
    close(outs[1], outs[0].double())
    assert torch.equal(outs[0], outs[2])


def test_layers_of_different_policies(device):
    policies = [kvp.StreamingLLM(1, 4), kvp.FULL, kvp.KVpop(0, 3, 5), kvp.SPKV(6)]
    cache = cache_of(policies, device)
    layers = [rows(24, device=device) for _ in policies]
    scores = torch.randn(2, KV_HEADS, 24, device=device)
    for start, stop in ((0, 20), *((i, i + 1) for i in range(20, 24))):
        for layer, (policy, qkv) in enumerate(zip(policies, layers)):
            part = [x[:, :, start:stop] for x in qkv]
            given = scores[:, :, start:stop] if layer >= 2 else None
            out = cache.prefill(layer, *part, scores=given)
            close(out, expected(policy, *qkv, scores)[0][:, :, start:stop])
        cache.advance()
    assert cache.usage(1, 0, 0).size == 24 and cache.usage(0, 0, 0).size == 5


def test_ragged_entries(device):
    policy = kvp.StreamingLLM(1, 4)
    q, k, v = rows(9, batch=3, device=device)
    cache = cache_of(policy, device, sequences=4)
    lengths = torch.tensor([9, 0, 4], dtype=torch.int32, device=device)
    names = torch.tensor([3, 0, 1], dtype=torch.int32, device=device)
    out, lse = cache.prefill(0, q, k, v, q_len=lengths, seq_ids=names, return_lse=True)
    cache.advance()
    assert cache.lengths() == [0, 4, 0, 9]
    assert (out[1] == 0).all() and (out[2, :, 4:] == 0).all() and torch.isinf(lse[1]).all()
    close(out[2:, :, :4], expected(policy, *(x[2:, :, :4] for x in (q, k, v)), k[2:, :, :4, 0])[0])


@pytest.mark.parametrize("policy", [kvp.KVpop(1, 4, 3), kvp.SPKV(4)], ids=["fixed", "dual"])
@pytest.mark.parametrize("accepted", [0, 2, 5])
def test_drafts(policy, accepted, device):
    q, k, v = rows(30, device=device)
    scores = torch.randn(2, KV_HEADS, 30, device=device)
    cache = cache_of(policy, device, max_draft_tokens=5)
    run(cache, *(x[:, :, :20] for x in (q, k, v)), [20], scores=scores[:, :, :20])
    draft = slice(20, 25)
    out = cache.append_draft(0, q[:, :, draft], k[:, :, draft], v[:, :, draft], scores=scores[:, :, draft])
    close(out, expected(policy, q, k, v, scores)[0][:, :, draft])
    cache.accept(0, accepted)
    cache.advance()
    assert cache.lengths() == [20 + accepted] * 2
    # The tokens after it go on from there.
    rest = [torch.cat((x[:, :, : 20 + accepted], x[:, :, 25:]), 2) for x in (q, k, v)]
    given = torch.cat((scores[:, :, : 20 + accepted], scores[:, :, 25:]), 2)
    got = run(cache, *(x[:, :, -5:] for x in rest), [1] * 5, scores=given[:, :, -5:])
    close(got, expected(policy, *rest, given)[0][:, :, -5:])


@pytest.mark.parametrize("policy", [kvp.KVpop(1, 4, 3), kvp.SPKV(4)], ids=["fixed", "dual"])
def test_sequences_are_copied(policy, device):
    q, k, v = rows(600, batch=3, device=device)
    scores = torch.randn(3, KV_HEADS, 600, device=device)
    cache = cache_of(policy, device, sequences=3)
    run(cache, *(x[:, :, :590] for x in (q, k, v)), [590], scores=scores[:, :, :590])

    def go_on(sources):
        """The next token, where sequence i has the history of sources[i]."""
        history = [torch.cat((x[sources, :, :590], x[:, :, 590:591]), 2) for x in (q, k, v)]
        ranks = torch.cat((scores[sources, :, :590], scores[:, :, 590:591]), 2)
        want = expected(policy, *history, ranks)[0][:, :, -1:]
        close(cache.prefill(0, *(x[:, :, 590:591] for x in (q, k, v)), scores=scores[:, :, 590:591]), want)

    blobs = [cache.snapshot(sequence) for sequence in range(3)]
    cache.reorder([2, 2, 0])
    cache.fork(2, 1)
    go_on([2, 0, 0])
    cache.advance()
    for sequence, blob in enumerate(blobs):
        cache.restore(sequence, blob)
    q1 = q[:, :, 589:590]
    before = cache.attend(0, q1)
    close(before, expected(policy, *(x[:, :, :590] for x in (q, k, v)), scores[:, :, :590])[0][:, :, -1:])
    go_on([0, 1, 2])
    cache.advance()
    cache.clear(1)
    assert cache.lengths() == [591, 0, 591]


def test_memory_is_bounded(device):
    q, k, v = rows(500, device=device)
    fixed = cache_of(kvp.StreamingLLM(2, 14), device)
    size = fixed.memory_bytes()
    run(fixed, q, k, v, [490] + [1] * 10)
    assert fixed.memory_bytes() == size < 2 * KV_HEADS * 16 * DIM * 4 * 2 * 2
    open_gates, shut = (cache_of(kvp.SPKV(8), device) for _ in range(2))
    run(open_gates, q, k, v, [500], scores=torch.ones(2, KV_HEADS, 500, device=device))
    run(shut, q, k, v, [500], scores=-torch.ones(2, KV_HEADS, 500, device=device))
    assert shut.memory_bytes() < open_gates.memory_bytes()


def masses(q, keys):
    """[KV heads, keys]: the mean softmax weight of one query over its group of heads. q [Hq, D], keys [Hkv,
    n, D]."""
    group = q.shape[0] // keys.shape[0]
    logits = torch.einsum("hgd,hnd->hgn", q.view(keys.shape[0], group, -1), keys) / q.shape[-1] ** 0.5
    return torch.softmax(logits, -1).mean(1)


def by_steps(q, k, window, budget, add):
    """The positions that each KV head holds at the end: decide by the masses up to q - 1, then attend."""
    kept = [[] for _ in range(k.shape[0])]
    mass = torch.zeros(k.shape[0], k.shape[1], dtype=torch.float64)
    for at in range(k.shape[1]):
        for head, held in enumerate(kept):
            held.append(at)
            old = [t for t in held if t <= at - window]
            if len(old) > budget:
                held.remove(min(old, key=lambda t: (float(mass[head, t]), -t)))
        for head, held in enumerate(kept):
            group = q.shape[0] // k.shape[0]
            now = masses(q[head * group : (head + 1) * group, at], k[head : head + 1, held])[0]
            mass[head, held] = now + (mass[head, held] if add else 0)
    return kept


@pytest.mark.parametrize("add", [True, False], ids=["h2o", "tova"])
def test_received_attention(add):
    q, k, v = rows(30, batch=1)
    policy = kvp.H2O(5, 3) if add else kvp.TOVA(5, whole_layer=False)
    cache = cache_of(policy, sequences=1)
    run(cache, q, k, v, [1] * 30)
    want = by_steps(q[0].double(), k[0].double(), 4 if add else 1, 5, add)
    assert [sorted(cache.retained(0, 0, head)) for head in range(KV_HEADS)] == want
    again = cache_of(
        kvp.H2O(5, 3, prefill=1) if add else kvp.TOVA(5, whole_layer=False, prefill=1), sequences=1
    )
    run(again, q, k, v, [30])
    assert [sorted(again.retained(0, 0, head)) for head in range(KV_HEADS)] == want


def test_snapkv_keeps_the_best_of_a_prompt_and_what_is_decoded():
    q, k, v = rows(40, batch=1)
    cache = cache_of(kvp.SnapKV(6, window=4, pool=1), sequences=1)
    out = run(cache, q, k, v, [36, 1, 1, 1, 1])
    exact = [x.double() for x in (q, k, v)]
    close(out[:, :, :36], reference.attention(*(x[:, :, :36] for x in exact))[0])
    received = torch.zeros(KV_HEADS, 32, dtype=torch.float64)
    for at in range(32, 36):
        received += masses(exact[0][0, :, at], exact[1][0, :, : at + 1])[:, :32]
    for head in range(KV_HEADS):
        best = received[head].topk(6).indices.tolist()
        assert sorted(cache.retained(0, 0, head)) == sorted(best) + list(range(32, 40))


OBSERVED = {
    "h2o": kvp.H2O(5, 3),
    "h2o in chunks": kvp.H2O(5, 3, prefill=8, aggregate="max"),
    "tova": kvp.TOVA(7),
    "snapkv": kvp.SnapKV(6, window=4),
    "snapkv pooled": kvp.SnapKV(6, window=5, pool=3, pool_largest=True),
}


@pytest.mark.parametrize("policy", OBSERVED.values(), ids=OBSERVED)
def test_received_attention_is_the_mask(policy, device):
    q, k, v = rows(40, device=device)
    cache = cache_of(policy, device)
    got = run(cache, q, k, v, [28] + [1] * 12)
    expiry = kvp.build_observed_mask(policy, q.cpu(), k.cpu(), prompt=28).expiry
    close(got, reference.attention(*(x.cpu().double() for x in (q, k, v)), expiry)[0])
    for sequence in range(2):
        for head in range(KV_HEADS):
            assert cache.usage(0, sequence, head).size == (expiry[sequence, head] > 40).sum()


def test_refusals(device):
    q, k, v = rows(3, device=device)
    with pytest.raises(ValueError, match="scores: None is not allowed"):
        cache_of(kvp.KVpop(1, 2, 3), device).prefill(0, q, k, v)
    with pytest.raises(ValueError, match="layer: 1 is not allowed"):
        cache_of(kvp.FULL, device).prefill(1, q, k, v)
    cache = cache_of(kvp.StreamingLLM(1, 4), device)
    with pytest.raises(ValueError, match="must be 1 in a step"):
        cache.step(0, q, k, v)
    with pytest.raises(TypeError, match="q: float64 is not allowed"):
        cache.prefill(0, q.double(), k, v)
    with pytest.raises(ValueError, match="k"):
        cache.prefill(0, q, k[:, :1], v)
    assert cache.lengths() == [0, 0]
    with pytest.raises(NotImplementedError, match="draft tokens under a policy"):
        cache_of(kvp.H2O(4, 4), device, max_draft_tokens=2)
    with pytest.raises(NotImplementedError, match="delay: 3 is not allowed"):
        cache_of(kvp.KVpop(1, 2, 3, kvp.mLSTMScorer(KV_HEADS, DIM, delay=3)), device)
    with pytest.raises(ValueError, match="scorer of 1 heads"):
        cache_of(kvp.KVpop(1, 2, 3, kvp.mLSTMScorer(1, DIM, delay=2)), device)
    with pytest.raises(NotImplementedError, match="delay: 17 is not allowed"):
        cache_of(kvp.KVpop(1, 16, 3, kvp.ConvScorer(KV_HEADS, DIM, delay=17)), device)
    with pytest.raises(TypeError, match="policies"):
        cache_of([4], device)
    with pytest.raises(ValueError, match="one per KV head"):
        cache_of(kvp.StreamingLLM([1, 2, 3], 4), device)
    with pytest.raises(ValueError, match="blob"):
        cache.restore(0, b"12345678")
    if device.type == "cpu":
        scores = torch.full((2, KV_HEADS, 3), torch.nan)
        with pytest.raises(ValueError, match="NaN"):
            cache_of(kvp.KVpop(0, 1, 1), device).prefill(0, q, k, v, scores=scores)


def test_refused_lengths(device):
    q, k, v = rows(5, device=device)
    cache = cache_of([kvp.StreamingLLM(1, 4), kvp.FULL], device, max_draft_tokens=3)
    with pytest.raises(ValueError, match="k.size.2.: 5 is not allowed; it must be 3"):
        cache.prefill(0, q[:, :, 2:], k, v)
    cache.prefill(0, q, k, v)
    with pytest.raises(ValueError, match="every layer takes the same tokens"):
        cache.advance()
    cache.prefill(1, q, k, v)
    cache.advance()
    with pytest.raises(ValueError, match="layer: 0 is not allowed"):
        cache.advance(0)
    for layer in range(2):
        cache.append_draft(layer, *(x[:, :, :3] for x in (q, k, v)))
    with pytest.raises(ValueError, match="tokens: 4 is not allowed"):
        cache.accept(1, 4)
    with pytest.raises(ValueError, match="tokens: shape .1,. is not allowed; it must be .2."):
        cache.accept(1, torch.ones(1, dtype=torch.int32, device=device))


def test_a_damaged_snapshot_changes_nothing(device):
    q, k, v = rows(5, device=device)
    cache = cache_of([kvp.StreamingLLM(1, 4), kvp.FULL], device)
    for tokens in (5, 3):
        for layer in range(2):
            cache.prefill(layer, *(x[:, :, :tokens] for x in (q, k, v)))
        cache.advance()
    blob = bytearray(cache.snapshot(0))
    cache.clear(1)
    blob[-1] ^= 1
    with pytest.raises(ValueError, match="blob"):
        cache.restore(1, bytes(blob))
    assert cache.lengths(0) == cache.lengths(1) == [8, 0]


@pytest.mark.parametrize("budget", [2, kvp.UNLIMITED], ids=["fixed", "pages"])
def test_padding_may_hold_anything(budget, device):
    q, k, v = rows(4, device=device)
    scores = torch.randn(2, KV_HEADS, 4, device=device)
    lengths = torch.tensor([4, 2], dtype=torch.int32, device=device)
    outs = []
    for filler in (0.0, torch.nan):
        padded = scores.clone()
        padded[1, :, 2:] = filler
        cache = cache_of(kvp.KVpop(1, 2, budget), device)
        outs.append(cache.prefill(0, q, k, v, scores=padded, q_len=lengths))
    assert torch.equal(*outs)


def test_sequences_of_different_calls_in_one_round(device):
    """A short call after a long one: pages are counted for the long one."""
    cache = cache_of(kvp.FULL, device, max_length=600)
    first, second = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    for _ in range(14):
        cache.prefill(0, *rows(32, 1, device=device), seq_ids=first)
        cache.step(0, *rows(1, 1, device=device), seq_ids=second)
        cache.advance()
    assert cache.lengths() == [448, 14] and cache.usage(0, 0, 0).size == 448


def test_threads_may_change():
    q, k, v = rows(1)
    cache, threads = cache_of(kvp.FULL), torch.get_num_threads()
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            cache.step(0, q, k, v)
            cache.advance()
    finally:
        torch.set_num_threads(threads)


# ---- Quest -------------------------------------------------------------------------------------------------


def selected(q, k, v, pages, page_size, mean):
    """Outputs of tokens that are decoded one after another, of one sequence: q [Hq, S, D], k and v [Hkv, S,
    D]. A KV head's newest `page_size` keys are always read; of the others the pages - 1 pages, of neighbors
    from the first key on, with the largest bound."""
    group = q.shape[0] // k.shape[0]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for at in range(q.shape[1]):
        for head in range(k.shape[0]):
            heads = slice(head * group, (head + 1) * group)
            query, old = q[heads, at].double(), max(0, at + 1 - page_size)
            bounds = []
            for first in range(0, old, page_size):
                keys = k[head, first : min(first + page_size, old)].double()
                largest = torch.maximum(query * keys.amin(0), query * keys.amax(0)).sum(-1)
                bounds.append((largest.mean() if mean else largest.max()).item())
            best = sorted(range(len(bounds)), key=lambda i: (-bounds[i], i))[: pages - 1]
            read = [t for i in sorted(best) for t in range(i * page_size, min((i + 1) * page_size, old))]
            read += range(old, at + 1)
            logits = query @ k[head, read].double().T / q.shape[-1] ** 0.5
            out[heads, at] = torch.softmax(logits, -1) @ v[head, read].double()
    return out


@pytest.mark.parametrize("mean", [False, True], ids=["max", "mean"])
@pytest.mark.parametrize("pages,page_size", [(1, 16), (3, 16), (2, 32)])
def test_quest_reads_the_best_pages(pages, page_size, mean, device):
    q, k, v = rows(130, device=device)
    policy = kvp.Quest(pages, page_size, aggregate="mean" if mean else "max")
    cache = cache_of(policy, device)
    got = run(cache, q, k, v, [1] * 130)
    want = torch.stack(
        [selected(*(x[i].cpu() for x in (q, k, v)), pages, page_size, mean) for i in range(2)]
    )
    close(got, want)
    dense = reference.attention(*(x.cpu().double() for x in (q, k, v)))[0]
    assert (want - dense).abs().max() > 0.1
    assert cache.usage(0, 0, 0).size == 130
    # A chunk reads all; a step after it selects.
    cache = cache_of(policy, device)
    got = run(cache, q, k, v, [100] + [1] * 30)
    close(got[:, :, :100], dense[:, :, :100])
    close(got[:, :, 100:], want[:, :, 100:])


def test_quest_of_layers_and_policies(device):
    """Pages by layer and head; all pages are full attention; beside a budget selection is of its keys."""
    q, k, v = rows(90, device=device)
    policies = [kvp.Quest(kvp.UNLIMITED), kvp.Quest([2, kvp.UNLIMITED]), kvp.Quest(2)]
    cache, outs = cache_of(policies, device), []
    assert len(cache._groups) == 1
    for at in range(90):
        part = [x[:, :, at : at + 1] for x in (q, k, v)]
        outs.append([cache.step(layer, *part) for layer in range(3)])
        cache.advance()
    full, mixed, two = (torch.cat([one[layer] for one in outs], 2) for layer in range(3))
    close(full, expected(kvp.FULL, q, k, v, k[..., 0])[0])
    torch.testing.assert_close(mixed[:, : HEADS // 2], two[:, : HEADS // 2])
    torch.testing.assert_close(mixed[:, HEADS // 2 :], full[:, HEADS // 2 :])
    scores = torch.randn(2, KV_HEADS, 90, device=device)
    capped = kvp.Policy(kvp.Sink(16), kvp.Window(16), kvp.TopKBudget(20), kvp.QuestPages(100))
    want, expiry = expected(kvp.KVpop(16, 16, 20), q, k, v, scores)
    close(run(cache_of(capped, device), q, k, v, [50] + [1] * 40, scores=scores), want)
    assert torch.equal(kvp.build_mask(capped, scores.cpu()).expiry, expiry)
    with pytest.raises(ValueError, match="aggregate: 'sum' is not allowed"):
        kvp.QuestPages(4, aggregate="sum")
    with pytest.raises(ValueError, match="QuestPages: 0 is not allowed"):
        kvp.Quest(0)
    with pytest.raises(ValueError, match="QuestPages is not allowed"):
        kvp.Policy(kvp.TopKBudget(3), kvp.AccumulatedMass(), kvp.QuestPages(4))


def test_a_restored_sequence_goes_on_after_a_call_that_failed():
    q, k, v = rows(6, batch=1)
    cache = cache_of([kvp.StreamingLLM(1, 5), kvp.FULL], sequences=1)
    for layer in range(2):
        cache.prefill(layer, q, k, v)
    cache.advance()
    blob = cache.snapshot(0)
    cache.prefill(0, q, k, v)  # and no layer 1
    cache.restore(0, blob)
    for layer in range(2):
        cache.step(layer, q[:, :, :1], k[:, :, :1], v[:, :, :1])
    cache.advance()
    assert cache.lengths(0) == cache.lengths(1) == [7]


def test_marks_are_a_copy():
    q, k, v = rows(1, batch=1)
    cache = cache_of([kvp.FULL, kvp.FULL], sequences=1)
    for layer in range(2):
        cache.step(layer, q, k, v)
    cache.advance()
    marks = cache.marks()
    cache.step(0, q, k, v)
    cache.rewind(marks)
    with pytest.raises(ValueError, match="advance"):
        cache.step(0, q, k, v)
        cache.advance()
