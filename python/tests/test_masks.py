"""build_mask and build_log_bias against the definition."""

import math

import pytest
import reference
import torch

import kvpolicy as kvp

B, H, S = 2, 3, 40


def scores_with_ties(device):
    """A few values only, so that ties are common, with -0."""
    scores = torch.randint(-3, 4, (B, H, S), device=device).float()
    return torch.where(scores == 0, -scores, scores)


def expected(scores, rule):
    rows = [[rule(scores[b, h].cpu(), h) for h in range(H)] for b in range(B)]
    return torch.tensor(rows, dtype=torch.int32)


POLICIES = {
    "streaming": (
        lambda: kvp.StreamingLLM(2, 5),
        lambda r, h: reference.expiry_of(r, 2, 5),
    ),
    "window": (lambda: kvp.Policy(kvp.Window(3)), lambda r, h: reference.expiry_of(r, 0, 3)),
    "top_k": (
        lambda: kvp.KVpop(2, 5, 7),
        lambda r, h: reference.expiry_of(r, 2, 5, 7),
    ),
    "no_budget": (
        lambda: kvp.KVpop(1, 4, 0),
        lambda r, h: reference.expiry_of(r, 1, 4, 0),
    ),
    "unlimited": (
        lambda: kvp.KVpop(1, 4, kvp.UNLIMITED),
        lambda r, h: [reference.NEVER] * S,
    ),
    "decay": (
        lambda: kvp.KVpop(2, 5, 7, kvp.Decay(math.exp(-0.25))),
        lambda r, h: reference.expiry_of(r, 2, 5, 7, -0.25),
    ),
    "per_head": (
        lambda: kvp.Policy(
            kvp.TopKBudget([0, 3, 9]),
            kvp.Sink([0, 1, 2]),
            kvp.Window((1, 2, 6)),
            kvp.Decay(log_gamma=torch.tensor([0.0, -0.5, -2.0])),
        ),
        lambda r, h: reference.expiry_of(r, [0, 1, 2][h], [1, 2, 6][h], [0, 3, 9][h], [0.0, -0.5, -2.0][h]),
    ),
    "gate": (
        lambda: kvp.SPKV(4, tau=0.5),
        lambda r, h: reference.expiry_of(r, 0, 4, is_open=lambda z: z >= 0),
    ),
    "capped": (
        lambda: kvp.LTE(2, 4, 5),
        lambda r, h: reference.expiry_of(r, 2, 4, 5, is_open=lambda z: z > 0),
    ),
    "dms": (
        lambda: kvp.DMS(4),
        lambda r, h: reference.expiry_of(r, 0, 4, is_open=lambda z: z <= 0),
    ),
    "thresholds": (
        lambda: kvp.Policy(kvp.Window(3), kvp.ThresholdGate([-1.0, 0.5, math.inf])),
        lambda r, h: reference.expiry_of(r, 0, 3, is_open=lambda z: z >= [-1.0, 0.5, math.inf][h]),
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_expiry_is_the_definition(name, device):
    policy, rule = POLICIES[name]
    scores = scores_with_ties(device)
    mask = kvp.build_mask(policy(), scores)
    assert mask.expiry.dtype == torch.int32 and mask.log_bias is None
    assert torch.equal(reference.clamp(mask.expiry.cpu()), expected(scores, rule))


def test_lengths_and_segments_start_anew(device):
    policy = kvp.KVpop(2, 3, 4)
    scores = scores_with_ties(device)
    lengths = torch.tensor([S, 11], dtype=torch.int32, device=device)
    mask = kvp.build_mask(policy, scores, lengths=lengths)
    alone = kvp.build_mask(policy, scores[1:, :, :11].contiguous())
    assert torch.equal(mask.expiry[1:, :, :11], alone.expiry)
    assert (mask.expiry[1, :, 11:] == -1).all()
    edges = torch.tensor([0, 13, 14, S], dtype=torch.int32, device=device)
    packed = kvp.build_mask(policy, scores, cu_seqlens=edges).expiry.cpu()
    for first, last in ((0, 13), (13, 14), (14, S)):
        alone = kvp.build_mask(policy, scores[:, :, first:last].contiguous()).expiry.cpu().long()
        assert torch.equal(packed[:, :, first:last].long(), (alone + first).clamp(max=last))


def test_other_dtypes_and_layouts_rank_the_same(device):
    policy = kvp.KVpop(2, 5, 7)
    scores = scores_with_ties(device)
    plain = kvp.build_mask(policy, scores).expiry
    assert torch.equal(kvp.build_mask(policy, scores.bfloat16()).expiry, plain)
    assert torch.equal(kvp.build_mask(policy, scores.double()).expiry, plain)
    swapped = scores.transpose(1, 2).contiguous().transpose(1, 2)
    assert swapped.stride(-1) != 1
    assert torch.equal(kvp.build_mask(policy, swapped).expiry, plain)
    assert not kvp.build_mask(policy, scores.requires_grad_()).expiry.requires_grad


def log_u(z):
    return torch.nn.functional.logsigmoid(z)


GATES = {
    "soft": (kvp.SoftGate(), log_u),
    "soft_write": (kvp.SoftWriteGate(1e-3), lambda z: torch.log(torch.sigmoid(z) + 1e-3)),
    "annealed": (
        kvp.AnnealedGate(0.25, 0.5),
        lambda z: torch.log(0.75 * torch.sigmoid(z) + 0.25 * (z >= 0)),
    ),
    "threshold_soft": (kvp.ThresholdSoftGate(0.5), log_u),
    "dms": (kvp.DmsGate(0.5, noise=False), lambda z: log_u(-z / 0.5)),
}


@pytest.mark.parametrize("name", GATES)
def test_log_bias_is_the_formula(name, device):
    gate, formula = GATES[name]
    policy = kvp.Policy(kvp.Sink(2), kvp.Window([3, 4, 5]))
    scores = torch.randn(B, H, S, device=device, requires_grad=True)
    mask = kvp.build_log_bias(policy, gate, scores)
    t = torch.arange(S, device=device)
    window = torch.tensor([3, 4, 5], device=device)
    gated = (t >= 2) & (t[None, :] + window[:, None] < S)
    closed = gated & (scores < 0) if name == "threshold_soft" else torch.zeros_like(scores, dtype=torch.bool)
    biased = gated & ~closed
    z = scores.detach().double().requires_grad_()
    expected = torch.where(biased, formula(z), 0.0)
    # fp32's rounding of the result.
    torch.testing.assert_close(mask.log_bias, expected.float(), rtol=1e-6, atol=1e-7)
    assert torch.equal(mask.expiry == t + window[:, None], closed)
    assert mask.bias_from.tolist() == [3, 4, 5]
    weights = torch.randn(B, H, S, device=device)
    (mask.log_bias * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(scores.grad, z.grad.float(), rtol=1e-6, atol=1e-7)


def test_bernoulli_draws_by_its_seed(device):
    policy = kvp.Policy(kvp.Window(2))
    scores = torch.full((1, 1, 4096), math.log(3.0), device=device, requires_grad=True)
    first, again, other = (
        kvp.build_log_bias(policy, kvp.BernoulliGate(0.1, seed), scores) for seed in (1, 1, 2)
    )
    assert torch.equal(first.expiry, again.expiry) and not torch.equal(first.expiry, other.expiry)
    # Open with probability 3/4: 4094 draws have a standard deviation of 0.0068.
    assert abs((first.expiry > 4096).float().mean().item() - 0.75) < 0.03
    assert (first.log_bias == 0).all()
    first.log_bias.sum().backward()
    torch.testing.assert_close(scores.grad[..., :-2], torch.full_like(scores.grad[..., :-2], 0.25))
    assert (scores.grad[..., -2:] == 0).all()


@pytest.mark.parametrize("batch, length", [(0, 5), (2, 0), (0, 0)])
def test_no_batch_entries_or_tokens(batch, length, device):
    scores = torch.zeros(batch, 2, length, device=device, requires_grad=True)
    for policy in (kvp.KVpop(1, 2, 3), kvp.StreamingLLM(1, 2), kvp.SPKV(2, tau=0.5)):
        assert kvp.build_mask(policy, scores).expiry.shape == scores.shape
    lengths = torch.zeros(batch, dtype=torch.int32, device=device)
    assert kvp.build_mask(kvp.KVpop(1, 2, 3), scores, lengths=lengths).expiry.shape == scores.shape
    mask = kvp.build_log_bias(kvp.Policy(kvp.Window(2)), kvp.SoftGate(), scores)
    assert mask.expiry.shape == mask.log_bias.shape == scores.shape
    mask.log_bias.sum().backward()
    assert scores.grad.shape == scores.shape
    q, k = (torch.zeros(batch, heads, length, 16, device=device) for heads in (4, 2))
    assert kvp.build_observed_mask(kvp.H2O(2, 2), q, k).expiry.shape == scores.shape


def test_gradient_in_double():
    """log_bias is float32, so the step is 2^-7: the rounding of a difference is below 2^-22 * 5 / 2^-6, the
    error of the formula below 2^-14 / 6."""
    policy = kvp.Policy(kvp.Sink(1), kvp.Window(2))
    scores = torch.randn(1, 2, 6, dtype=torch.float64, requires_grad=True)
    for gate in (kvp.SoftGate(), kvp.SoftWriteGate(1e-3), kvp.DmsGate(1.0, True, 3)):
        assert torch.autograd.gradcheck(
            lambda z, gate=gate: kvp.build_log_bias(policy, gate, z).log_bias.double(),
            scores,
            eps=2**-7,
            atol=1e-4,
            rtol=1e-4,
        )


def test_refusals():
    scores = torch.zeros(1, 2, 8)
    policy = kvp.KVpop(1, 2, 3)
    with pytest.raises(ValueError, match="NaN"):
        kvp.build_mask(policy, scores.fill_(math.nan))
    scores = torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="dim"):
        kvp.build_mask(policy, scores[0])
    with pytest.raises(ValueError, match="1 or at least"):
        kvp.build_mask(kvp.KVpop(1, 2, [3, 4, 5]), torch.zeros(1, 4, 8))
    with pytest.raises(ValueError, match="lengths"):
        kvp.build_mask(policy, scores, lengths=torch.tensor([9], dtype=torch.int32))
    with pytest.raises(TypeError, match="lengths: int64 is not allowed; it must be int32"):
        kvp.build_mask(policy, scores, lengths=torch.tensor([8]))
    with pytest.raises(ValueError, match="log gamma"):
        kvp.build_mask(kvp.KVpop(1, 2, 3, kvp.Decay(log_gamma=torch.tensor([0.5]))), scores)
    with pytest.raises(ValueError, match="TopKBudget"):
        kvp.build_log_bias(policy, kvp.SoftGate(), scores)
    with pytest.raises(ValueError, match="AnnealedGate.alpha"):
        kvp.build_log_bias(kvp.Policy(kvp.Window(2)), kvp.AnnealedGate(2.0), scores)
    with pytest.raises(NotImplementedError, match="meta"):
        kvp._native.call("build_mask", torch.empty(0, device="meta"))
