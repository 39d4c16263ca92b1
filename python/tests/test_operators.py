"""What PyTorch asks of operators: schemas, fake tensors, autograd, torch.compile without graph breaks, and on
a GPU streams and graphs."""

import subprocess
import sys

import pytest
import torch

import kvpolicy as kvp

S = 24


def train_step(q, k, v, scorer, scores):
    """Every differentiable operator once."""
    policy = kvp.KVpop(1, 3, 4, kvp.Decay(0.95))
    learned = scorer(k, v)
    mask = kvp.build_mask(policy, learned)
    soft = kvp.build_log_bias(kvp.Policy(kvp.Sink(1), kvp.Window(3)), kvp.SoftGate(), scores)
    out = kvp.attend(q, k, v, kvp.Mask(mask.expiry, soft.log_bias, soft.bias_from))
    target = kvp.future_mass(q.detach(), k.detach(), 3)
    return out.square().mean() + kvp.boundary_loss(policy, learned, target).loss


def inputs(device, length=S):
    q, k, v = (torch.randn(2, h, length, 64, device=device).requires_grad_() for h in (4, 2, 2))
    scores = torch.randn(2, 2, length, device=device).requires_grad_()
    scorer = kvp.mLSTMScorer(2, 64, delay=3).to(device)
    torch.nn.init.normal_(scorer.readout)
    return q, k, v, scorer, scores


def gradients(step, q, k, v, scorer, scores):
    leaves = [q, k, v, scores, *scorer.parameters()]
    return torch.autograd.grad(step(q, k, v, scorer, scores), leaves)


def test_compile_has_no_graph_breaks(device):
    arguments = inputs(device)
    compiled = torch.compile(train_step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), train_step(*arguments))
    for mine, theirs in zip(gradients(compiled, *arguments), gradients(train_step, *arguments)):
        torch.testing.assert_close(mine, theirs)


def train_gates(q, k, v, scores, logits):
    """Losses of gates and distillation, and what has no gradient."""
    policy = kvp.Policy(kvp.Sink(1), kvp.Window(3))
    mask = kvp.build_observed_mask(kvp.TOVA(5), q, k)
    loss = kvp.gate_sparsity(policy, scores) + kvp.straight_through(policy, scores, v).square().sum()
    loss = loss + kvp.top_distillation(logits.detach() * 2, logits) + kvp.density(mask).sum()
    return loss + kvp.received_mass(q, k).sum() + kvp.retention_map(mask, 3).sum()


def test_compile_of_gate_losses(device):
    q, k, v, _, scores = inputs(device)
    logits = torch.randn(2, 5, 9, device=device, requires_grad=True)
    arguments = (q, k, v, scores, logits)
    compiled = torch.compile(train_gates, fullgraph=True, backend="aot_eager")
    wanted, found = (
        torch.autograd.grad(step(*arguments), (v, scores, logits)) for step in (train_gates, compiled)
    )
    for mine, theirs in zip(found, wanted):
        torch.testing.assert_close(mine, theirs)


def test_compile_takes_dynamic_shapes():
    compiled = torch.compile(train_step, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (S, 31, 50):
        arguments = inputs("cpu", length)
        torch.testing.assert_close(compiled(*arguments), train_step(*arguments))


def cases():
    q, k, v, scorer, scores = inputs("cpu")
    ops = torch.ops.kvpolicy
    numbers = ("top_k", [1], [3], [4], [0.0])
    window = ("window", [1], [3], [0], [0.0])
    gate = ("soft", [0.0] * 4 + [1.0], False, 0)
    bias = torch.randn(2, 2, S).requires_grad_()
    expiry = torch.full((2, 2, S), S, dtype=torch.int32)
    weights = [getattr(scorer, n) for n in scorer.names]
    weights = [torch.empty(0) if w is None else w for w in weights]
    score = (weights, "mlstm", *scorer.call_numbers(), None, None)
    lse = torch.zeros(2, 4, S)
    log_gamma = torch.tensor([-0.1, -0.2], requires_grad=True)
    boundary = (1.0, 0.0, 1.0, True, 0.25, 4.0, 2**31 - 1, 0.5, 1.0, 0, None)
    logits, top = torch.randn(2, 6, 9), torch.arange(4, dtype=torch.int32).expand(2, 6, 4).contiguous()
    lambdas, total = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    return {
        "gate_loss": (
            ops.gate_loss,
            (scores, lambdas, "retention", *window, *gate, 1.0, True, 0.5, False, None, None, None),
        ),
        "compression": (
            ops.gate_loss,
            (scores, None, "compression", *window, *gate, 1.0, False, 0.5, True, total, None, None),
        ),
        "eviction_sums": (
            ops.eviction_sums,
            (scores.detach(), *window, *gate, False, False, None, None),
        ),
        "retention_counts": (ops.retention_counts, (scores.detach(), *window, False, None, None)),
        "straight_through_values": (
            ops.straight_through_values,
            (v.detach(), torch.randn_like(v), scores.detach(), *window, True, None, None),
        ),
        "top_logits": (ops.top_logits, (logits, 4, None)),
        "distill": (
            ops.distill,
            (logits[..., :4].clone().requires_grad_(), logits[..., :4].clone(), None, "l2", 1, 1.0, False)
            + (1.0, False, None),
        ),
        "distill_stored": (
            ops.distill,
            (logits.clone().requires_grad_(), logits[..., :4].clone(), top, "top", 4, 2.0, False)
            + (1.0, True, None),
        ),
        "metric": (ops.metric, (expiry, expiry, "recall", *numbers, None)),
        "observed_mask": (
            ops.observed_mask,
            (q.detach(), k.detach(), "snapkv", [0], [3], [4], [0.0], 8, False, False, 3, True, 20)
            + (0.0, 0.0, None),
        ),
        "received_mass": (ops.received_mass, (q.detach(), k.detach(), expiry, 5, True, 0.0, 0.0, None)),
        "build_mask": (ops.build_mask, (scores.detach(), *numbers, log_gamma.detach(), None, None)),
        "build_log_bias": (ops.build_log_bias, (scores, *window, *gate, None, None)),
        "log_bias_backward": (
            ops.log_bias_backward,
            (scores.detach(), bias.detach(), *window, *gate, None, None),
        ),
        "attend": (ops.attend, (q, k, v, expiry, bias, None, None, None, None, 0.0, 0.0)),
        "causal_lse": (ops.causal_lse, (q.detach(), k.detach(), None, 0.0, 0.0)),
        "future_mass": (
            ops.future_mass,
            (q.detach(), k.detach(), lse, None, 0.0, 0.0, [3], 9, True, False, 1e-8, 1.0),
        ),
        "score": (ops.score, (k, v, *score)),
        "boundary_loss": (
            ops.boundary_loss,
            (scores, log_gamma, torch.randn(2, 2, S), *numbers, *boundary),
        ),
    }


@pytest.mark.parametrize("name", list(cases()))
def test_opcheck(name):
    operator, arguments = cases()[name]
    torch.library.opcheck(operator.default, arguments)


def test_no_gradient_of_a_gradient():
    q, k, v, _, _ = inputs("cpu")
    (d_q,) = torch.autograd.grad(kvp.attend(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        d_q.sum().backward()


def test_threads_give_the_same_bits():
    arguments = inputs("cpu")
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(gradients(train_step, *arguments))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_a_call_of_plain_tensors_is_short():
    """Calls of Python functions, and of torch's, in one attend."""
    q, k, v, _, scores = (x.detach() if isinstance(x, torch.Tensor) else x for x in inputs("cpu"))
    mask = kvp.build_mask(kvp.KVpop(1, 3, 4), scores)
    seen = []

    def note(frame, event, argument):
        if event in ("call", "c_call"):
            seen.append(frame.f_code.co_name if event == "call" else argument.__name__)

    kvp.attend(q, k, v, mask)
    sys.setprofile(note)
    try:
        kvp.attend(q, k, v, mask)
    finally:
        sys.setprofile(None)
    assert seen.count("empty") == 2, seen
    assert len(seen) <= 24, seen


def test_inputs_of_a_gradient_in_any_number():
    q, k, v, scorer, scores = inputs("cpu")
    bias = torch.randn(2, 2, S)
    for wanted in ((q,), (k, v), (bias.requires_grad_(),)):
        for x in (q, k, v, bias):
            x.requires_grad_(any(x is y for y in wanted))
        mask = kvp.Mask(None, bias)
        out = kvp.attend(q, k, v, mask).square().sum()
        through = torch.ops.kvpolicy.attend(q, k, v, *mask, None, None, None, 0.0, 0.0)[0].square().sum()
        for mine, theirs in zip(torch.autograd.grad(out, wanted), torch.autograd.grad(through, wanted)):
            torch.testing.assert_close(mine, theirs)
    scorer.requires_grad_(False)
    k.requires_grad_(True)
    assert torch.autograd.grad(scorer(k, v).square().sum(), k)[0].abs().sum() > 0
    scorer.readout.requires_grad_(True)
    assert torch.autograd.grad(scorer(k, v).square().sum(), scorer.readout)[0].abs().sum() > 0


_WITHOUT_A_TABLE = """
import torch
torch.Tensor.__dlpack_c_exchange_api__ = None
import kvpolicy as kvp
q, k, v = torch.randn(3, 1, 2, 40, 16)
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(kvp.attend(q, k, v), want)
mask = kvp.build_mask(kvp.KVpop(1, 3, 4), torch.randn(1, 2, 40))
torch.testing.assert_close(kvp.attend(q[..., :4, :], k[..., :4, :], v[..., :4, :]), want[..., :4, :])
assert int((mask.expiry > 39).sum()) == 2 * 8
"""


def test_versions_of_torch_without_dlpack_functions():
    """Before 2.10 tensors are read by their attributes."""
    subprocess.run([sys.executable, "-c", _WITHOUT_A_TABLE], check=True)


needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and kvp.has_cuda()), reason="no GPU, or no CUDA module"
)


@needs_gpu
def test_tensors_of_two_devices_are_refused():
    q, k, v, _, _ = inputs("cuda")
    with pytest.raises(ValueError, match="k.device: cpu is not allowed"):
        kvp.attend(q, k.cpu(), v)


@needs_gpu
def test_any_stream_and_a_graph():
    q, k, v, scorer, scores = (x.detach() if isinstance(x, torch.Tensor) else x for x in inputs("cuda"))
    policy = kvp.KVpop(1, 3, 4)

    def forward():
        learned = scorer(k, v)
        return kvp.attend(q, k, v, kvp.build_mask(policy, learned)), kvp.future_mass(q, k, 3)

    with torch.no_grad():
        want = forward()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for mine, theirs in zip(forward(), want):
                torch.testing.assert_close(mine, theirs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = forward()
        q.copy_(torch.randn_like(q))
        graph.replay()
        for mine, theirs in zip(captured, forward()):
            torch.testing.assert_close(mine, theirs)


@needs_gpu
def test_a_graph_of_a_training_step():
    """The capture has the forward pass, and no older graph of the leaves is alive: torch runs a backward pass
    on the streams of its forward pass and of the leaves."""
    for name in kvp._native.types("cuda"):
        q, k, v = (x.detach().to(getattr(torch, name)).requires_grad_() for x in inputs("cuda")[:3])
        mask = kvp.build_mask(kvp.KVpop(1, 3, 4), torch.randn(2, 2, S, device="cuda"))

        def step():
            return torch.autograd.grad(kvp.attend(q, k, v, mask).square().sum(), (q, k, v))

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            q.copy_(torch.randn_like(q))
        graph.replay()
        for mine, theirs in zip(captured, step()):
            torch.testing.assert_close(mine, theirs)
