"""Losses of gates, their gradients and counts against the formulas."""

import pytest
import reference
import torch

import kvpolicy as kvp

B, H, S = 2, 3, 40
POLICY = kvp.Policy(kvp.Sink(2), kvp.Window(5))
WEIGHTS = torch.tensor([0.5, 1.0, 0.0])

LOSSES = {
    "sparsity": (
        lambda z, **o: kvp.gate_sparsity(POLICY, z, **o),
        reference.gate_sparsity,
    ),
    "density": (lambda z, **o: kvp.gate_density(POLICY, z, **o), reference.gate_density),
    "retention": (
        lambda z, **o: kvp.retention_penalty(POLICY, z, WEIGHTS.to(z.device), **o),
        lambda z, keys: reference.retention_penalty(z, keys, WEIGHTS.double()),
    ),
    "compression": (
        lambda z, **o: kvp.compression_loss(POLICY, kvp.DmsGate(0.5, noise=False), z, 0.9, **o),
        lambda z, keys: reference.compression(z, keys, 0.5, 0.9),
    ),
    "decisions": (
        lambda z, **o: kvp.compression_loss(
            POLICY, kvp.DmsGate(0.5, noise=False), z, 0.9, straight_through=True, **o
        ),
        lambda z, keys: reference.compression(z, keys, 0.5, 0.9, hard=True),
    ),
}


@pytest.mark.parametrize("scope", ["all", "decided"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_the_formula(name, dtype, scope, device, compiled):
    compiled(dtype, "scorer")
    loss_of, formula = LOSSES[name]
    scores = torch.randn(B, H, S, device=device).to(dtype).requires_grad_()
    loss = loss_of(scores, scale=0.5, scope=scope)
    exact = scores.detach().cpu().double().requires_grad_()
    keys = torch.ones_like(exact, dtype=torch.bool)
    if scope == "decided":
        keys = reference.decided(exact, 2, 5)
    want = 0.5 * formula(exact, keys)
    # Terms are float64 and sums exact; numbers of the loss (target, scale, weights) are float32. A result is
    # rounded to float32, or the gradient to the scores' dtype.
    torch.testing.assert_close(loss.detach().cpu().double(), want.detach(), rtol=2**-22, atol=2**-24)
    (2 * loss).backward()
    (2 * want).backward()
    rounding = {torch.bfloat16: 2**-8}.get(dtype, 2**-22)
    torch.testing.assert_close(scores.grad.cpu().double(), exact.grad, rtol=rounding, atol=2**-30)


def test_gradients_in_double():
    scores = torch.randn(1, H, 12, dtype=torch.float64, requires_grad=True)
    for name in ("sparsity", "density", "compression"):
        assert torch.autograd.gradcheck(LOSSES[name][0], scores, eps=1e-6, atol=1e-8)


def test_layers_add_up(device):
    """With the sums of all layers each layer's value is the whole loss, and gradients are those of one
    mean."""
    gate = kvp.DmsGate(0.5, noise=False)
    layers = [torch.randn(B, H, S, device=device, requires_grad=True) for _ in range(2)]
    sums = [kvp.eviction_sums(POLICY, gate, z) for z in layers]
    total = [sum(part) for part in zip(*sums)]
    assert total[1].item() == 2 * B * H * S
    losses = [kvp.compression_loss(POLICY, gate, z, 0.9, total=total) for z in layers]
    exact = torch.cat([z.detach().cpu().double() for z in layers]).requires_grad_()
    want = reference.compression(exact, torch.ones_like(exact, dtype=torch.bool), 0.5, 0.9)
    want.backward()
    for loss, z, theirs in zip(losses, layers, exact.grad.split(B)):
        torch.testing.assert_close(loss.detach().cpu().double(), want.detach(), rtol=2**-22, atol=2**-24)
        loss.backward()
        torch.testing.assert_close(z.grad.cpu().double(), theirs, rtol=2**-22, atol=2**-30)
    assert kvp.eviction_target(150, 4.0) == 1 - 1 / 2.5 and kvp.eviction_target(10**6, 4.0) == 0.75


def test_lengths(device):
    scores = torch.randn(B, H, S, device=device, requires_grad=True)
    lengths = torch.tensor([S, 9], dtype=torch.int32, device=device)
    kvp.gate_sparsity(POLICY, scores, lengths=lengths).backward()
    assert (scores.grad[1, :, 9:] == 0).all() and (scores.grad[1, :, :9] != 0).all()
    for scope in ("all", "decided"):
        counts = kvp.retention_counts(POLICY, scores, scope=scope, lengths=lengths)
        kept = reference.retained(scores[:1].cpu(), 2, 5, scope)
        kept += reference.retained(scores[1:, :, :9].cpu(), 2, 5, scope)
        assert torch.equal(counts.cpu(), kept / 2)


@pytest.mark.parametrize("every", [1, 4, 32])
def test_controller_is_the_algorithm(every):
    torch.manual_seed(every)
    counts = [torch.tensor([float(i), 40.0, 5.0]) for i in range(200)]
    controller = kvp.LambdaController(3, cap=50.0, every=every, least=1e-3)
    assert torch.allclose(controller.weights, torch.full((3,), 1e-3))
    found = []
    for step, count in enumerate(counts, 1):
        controller.observe(count)
        if controller.due(step):
            controller.update()
        found.append(controller.weights.clone())
    for head in range(3):
        want = reference.controller([c[head].item() for c in counts], 50.0, 0.95, 1.2, 1e-3, every)
        # float32 products of at most 200 factors.
        torch.testing.assert_close(
            torch.stack(found)[:, head].double(), torch.tensor(want).double(), rtol=200 * 2**-23, atol=0
        )
    again = kvp.LambdaController(3)
    again.load_state_dict(controller.state_dict())
    assert torch.equal(again.weights, controller.weights)


def controller_after(device, averages, **numbers):
    controller = kvp.LambdaController(1, **numbers).to(device)
    for average in averages:
        controller.average.fill_(average)
        controller.update()
    return controller.weights.item()


@pytest.mark.parametrize("factor", [1.5, 1.2, 1.1, 1.01, 1.0001, 2.0])
def test_controller_returns_to_its_least_weight(factor, device):
    """As many steps down as up: line 12 of algorithm 1 leaves `least`, and one more step is 0."""
    least = torch.tensor(1e-9).item()
    there_and_back = [600.0, 600.0, 1.0, 1.0]
    assert controller_after(device, there_and_back, factor=factor) == least
    assert controller_after(device, [*there_and_back, 1.0], factor=factor) == 0
    assert controller_after(device, [*there_and_back, 1.0, 600.0], factor=factor) == least


def test_controller_and_cap_count_the_sinks(device):
    """A cap of 512 keys is 4 sinks and a budget of 508, for the controller as for LTE(4, 768, 508)."""
    for opened in (508, 509, 511):
        scores = torch.full((1, 1, 4 + 600 + 768), -1.0, device=device)
        scores[..., 4 : 4 + opened] = 1
        mask = kvp.build_mask(kvp.LTE(4, 768, 508), scores).expiry.cpu()
        held = (mask[0, 0, : 4 + 600] == torch.iinfo(torch.int32).max).sum().item()
        assert held == min(opened + 4, 512)
        for scope in ("all", "decided"):
            count = kvp.retention_counts(kvp.LTE(4, 768, 508), scores, scope=scope)
            assert count.item() == opened + 4
            raised = controller_after(device, [count.item()], cap=512.0) > 1.1e-9
            assert raised == (held < count.item())


def test_lte_starts_open_and_reads_no_missing_score(device, compiled):
    compiled(torch.float32, "scorer")
    k, v = torch.randn(2, 1, 1, 96, 16, device=device).unbind()
    policy = kvp.Policy(kvp.Sink(4), kvp.Window(16), kvp.ThresholdGate(strict=True))
    weights = torch.ones(1, device=device)
    for delay in (6, 16):
        scorer = kvp.ConvScorer(1, 16, delay=delay, rope=kvp.Rope()).to(device)
        with torch.no_grad():
            scores = scorer(k, v)
            assert (scores[..., : 96 - delay] == 1).all() and (scores[..., 96 - delay :] == -torch.inf).all()
            assert (kvp.build_mask(policy, scores).expiry[..., 4:80] > 96).all()
            for r, want in ((0.27, 0.0), (0.88, (96 - delay) * 0.38)):
                scorer.readout_bias.fill_(torch.tensor(r).logit())
                penalty = kvp.retention_penalty(policy, scorer(k, v), weights)
                assert penalty.item() == pytest.approx(want, abs=1e-4)


def test_lte_equations_are_about_the_same_keys(device, compiled):
    """Key 20 of 32 has not left a window of 16: eq. 6, eq. 7 and c have it, unless the scope is "decided"."""
    compiled(torch.float32, "scorer")
    policy = kvp.Policy(kvp.Sink(4), kvp.Window(16))
    v = torch.ones(1, 1, 32, 8, device=device, requires_grad=True)
    for scope, inside in (("all", range(32)), ("decided", range(4, 16))):
        scores = torch.full((1, 1, 32), 0.88, device=device).logit().requires_grad_()
        passed = kvp.straight_through(policy, scores, v, scope=scope)
        (through,) = torch.autograd.grad((passed * (-1.53314 / 8)).sum(), scores)
        penalty = kvp.retention_penalty(policy, scores, torch.ones(1, device=device), scope=scope)
        (of_penalty,) = torch.autograd.grad(penalty, scores)
        keys = torch.tensor([t in inside for t in range(32)], device=device)
        torch.testing.assert_close(through[0, 0], torch.where(keys, -0.1619, 0.0), rtol=1e-4, atol=0)
        torch.testing.assert_close(of_penalty[0, 0], torch.where(keys, 0.1056, 0.0), rtol=1e-4, atol=0)
        count = kvp.retention_counts(policy, scores, scope=scope).item()
        assert count == (32 if scope == "all" else 16)


@pytest.mark.parametrize("scope", ["all", "decided"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_straight_through_is_the_product(dtype, scope, device, compiled):
    """The gradient of u v, with v's own as if u were 1 (LTE, eq. 6)."""
    compiled(dtype, "scorer")
    scores = torch.randn(B, H, S, device=device, requires_grad=True)
    v = torch.randn(B, H, S, 16, device=device).to(dtype).requires_grad_()
    passed = kvp.straight_through(POLICY, scores, v, scope=scope)
    assert torch.equal(passed, v)
    weights = torch.randn_like(v)
    (passed * weights).sum().backward()
    assert torch.equal(v.grad, weights)
    z, exact, d_v = (x.detach().cpu().double() for x in (scores, v, weights))
    keys = reference.decided(z, 2, 5) if scope == "decided" else torch.ones_like(z, dtype=torch.bool)
    want = reference.straight_through(z, keys, exact, d_v)
    # Sums of 16 products of float32, for float64 of float64; the scores' gradient is float32.
    torch.testing.assert_close(scores.grad.cpu().double(), want, rtol=1e-5, atol=1e-5)


def test_refusals():
    scores = torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="scope: 'some' is not allowed"):
        kvp.gate_sparsity(POLICY, scores, scope="some")
    with pytest.raises(ValueError, match="scope: 'some' is not allowed"):
        kvp.retention_counts(POLICY, scores, scope="some")
    with pytest.raises(ValueError, match="scope: None is not allowed"):
        kvp.straight_through(POLICY, scores, torch.zeros(1, 2, 8, 4), scope=None)
    with pytest.raises(ValueError, match="NaN"):
        kvp.gate_density(POLICY, scores * float("nan"))
    with pytest.raises(ValueError, match="weights.numel"):
        kvp.retention_penalty(POLICY, scores, torch.zeros(3))
    with pytest.raises(ValueError, match="target"):
        kvp.compression_loss(POLICY, kvp.DmsGate(), scores, 1.5)
    with pytest.raises(ValueError, match="factor: 1.0 is not allowed"):
        kvp.LambdaController(2, factor=1.0)
    with pytest.raises(ValueError, match="compression"):
        kvp.eviction_target(0, 0.5)
    for v in (torch.zeros(1, 2, 7, 4), torch.zeros(1, 1, 8, 4), torch.zeros(2, 2, 8, 4)):
        with pytest.raises(ValueError, match=r"scores.shape: \(1, 2, 8\) is not allowed"):
            kvp.straight_through(POLICY, scores, v)
    for gate in (kvp.DmsGate(seed=-1), kvp.BernoulliGate(seed=2**63), kvp.BernoulliGate(seed=0.5)):
        with pytest.raises(ValueError, match="seed: .* is not allowed"):
            kvp.build_log_bias(POLICY, gate, scores)
    top_k = kvp.KVpop(1, 2, 2)
    with pytest.raises(ValueError, match="seed: -1 is not allowed"):
        kvp.boundary_loss(top_k, scores, scores, count=1, seed=-1)
    with pytest.raises(ValueError, match="count: -1 is not allowed"):
        kvp.top_logits(scores, -1)
    scorer = kvp.ConvScorer(2, 8)
    scorer.dropout, scorer.dropout_seed = 0.5, 2**31
    with pytest.raises(ValueError, match="dropout_seed: 2147483648 is not allowed"):
        scorer(torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8, 8))
    v = torch.randn(1, 2, 8, 4, requires_grad=True)
    (d_z,) = torch.autograd.grad(
        kvp.straight_through(POLICY, scores.requires_grad_(), v).square().sum(), scores, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="second derivative"):
        d_z.sum().backward()
