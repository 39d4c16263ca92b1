"""The boundary loss against its formula."""

import math

import pytest
import reference
import torch

import kvpolicy as kvp

B, H, S = 2, 2, 36
OPTIONS = [
    {},
    {"temperature": 0.5, "omega_min": 0.25, "margin_temperature": 2.0},
    {"balance": None},
    {"balance": (0.9, 1.1)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_loss_and_gradients_are_the_formula(options, dtype, device):
    if dtype == torch.float64 and device.type == "cuda":
        pytest.skip("the CUDA module reads scores as float32")
    scores = torch.randn(B, H, S, device=device).to(dtype).requires_grad_()
    target = torch.randn(B, H, S, device=device).round(decimals=1)
    log_gamma = torch.tensor([-0.05, -0.3], device=device, requires_grad=True)
    policy = kvp.KVpop(2, 4, 6, kvp.Decay(log_gamma=log_gamma))
    given = dict(options)
    if "balance" in given:
        limits = given.pop("balance")
        given |= {"balance": False} if limits is None else {"balance_limits": limits}
    result = kvp.boundary_loss(policy, scores, target, **given)
    exact = scores.detach().cpu().double().requires_grad_()
    gamma = log_gamma.detach().cpu().double().requires_grad_()
    want, number = reference.boundary_loss(exact, target.cpu(), 2, 4, 6, gamma, **options)
    assert result.loss.dtype == dtype and result.counts[0].item() == number
    assert result.counts[1].item() == B * H * (S - 12)
    bound = 1e-6 if dtype == torch.float32 else 1e-7  # log gamma and the numbers of the loss are float32
    torch.testing.assert_close(
        result.loss.detach().cpu().double(), want.detach(), rtol=10 * bound, atol=bound
    )
    (3 * result.loss).backward()
    (3 * want).backward()
    torch.testing.assert_close(scores.grad.cpu().double(), exact.grad, rtol=1e-5, atol=bound)
    torch.testing.assert_close(log_gamma.grad.cpu().double(), gamma.grad, rtol=1e-5, atol=10 * bound)


def test_without_decay_and_with_draws(device):
    scores = torch.randn(B, H, S, device=device, requires_grad=True)
    target = torch.randn(B, H, S, device=device)
    policy = kvp.KVpop(1, 3, 5)
    want, _ = reference.boundary_loss(scores.detach().cpu().double(), target.cpu(), 1, 3, 5, torch.zeros(H))
    loss = kvp.boundary_loss(policy, scores, target).loss
    torch.testing.assert_close(loss.detach().cpu().double(), want, rtol=1e-5, atol=1e-6)
    draws = [kvp.boundary_loss(policy, scores, target, count=9, seed=seed) for seed in (1, 1, 2)]
    assert all(d.counts[1].item() == 9 * B * H for d in draws)
    assert torch.equal(draws[0].loss, draws[1].loss) and not torch.equal(draws[0].loss, draws[2].loss)
    short = kvp.boundary_loss(policy, scores[..., :9], target[..., :9])
    assert short.loss.item() == 0 and short.counts.tolist() == [0, 0, 0, 0]
    short.loss.backward()
    assert (scores.grad == 0).all()


def test_gradient_in_double():
    scores = torch.randn(1, 2, 20, dtype=torch.float64, requires_grad=True)
    target = torch.randn(1, 2, 20)
    policy = kvp.KVpop(1, 2, 3, kvp.Decay(0.9))
    assert torch.autograd.gradcheck(
        lambda x: kvp.boundary_loss(policy, x, target).loss, scores, eps=1e-6, atol=1e-8
    )


def test_a_scorer_learns():
    """Keys with a large first element draw attention; the loss falls by more than half."""
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 2, 256, 8), torch.randn(1, 1, 256, 8), torch.randn(1, 1, 256, 8)
    q[..., 0] = 4
    scorers = kvp.Scorers([kvp.MLPScorer(1, 8, 16)], window=8, sinks=2, gamma_range=(0.99, 1.0))
    target = kvp.future_mass(q, k, 8, beta=2.0)
    optimizer = torch.optim.AdamW(scorers.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss = kvp.boundary_loss(scorers.policy(0, 22), scorers.layers[0](k, v), target).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0] and scorers.alpha.grad.abs().sum() > 0


def test_refusals():
    scores, target = torch.randn(1, 2, 20), torch.randn(1, 2, 20)
    policy = kvp.KVpop(1, 2, 3)
    with pytest.raises(NotImplementedError, match="it takes|takes Sink"):
        kvp.boundary_loss(kvp.SPKV(4), scores, target)
    with pytest.raises(ValueError, match="temperature"):
        kvp.boundary_loss(policy, scores, target, temperature=0.0)
    with pytest.raises(ValueError, match="target"):
        kvp.boundary_loss(policy, scores, target[:, :1])
    with pytest.raises(ValueError, match=r"scores\[0\]\[1\]\[4\]: inf is not allowed"):
        bad = scores.clone()
        bad[0, 1, 4] = math.inf
        kvp.boundary_loss(policy, bad, target)
