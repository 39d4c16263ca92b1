"""KVpop's algorithm 1, StreamLLM+ and the workshop's phases: chains, formulas, both devices, runs."""

import copy
import math

import pytest
import reference
import torch
from safetensors import safe_open
from training_cases import directional, program, run, small_method

import kvpolicy as kvp
from kvpolicy.training import attend_with

SINKS, WINDOW, ENTRIES, TOP = 2, 4, 16, 12
POLICY = ["--sinks", str(SINKS), "--window", str(WINDOW), "--budgets", str(ENTRIES)]
SMALL = [*POLICY, "--hidden", "8", "--positions", "0", "--top", str(TOP), "--gamma-range", "0.9", "0.99"]


def kvpop(*arguments, dtype=torch.float64):
    """A small method whose scorers rank keys; its teacher is another model."""
    method, ids, weights = small_method("KVpop", "kvpop", *SMALL, *arguments, dtype=dtype)
    with torch.no_grad():
        for parameter in method.scorers.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        for parameter in method.teacher.parameters() if method.teacher is not None else ():
            parameter += 0.05 * torch.randn_like(parameter)
    return method, ids, weights


# ---- one step, in plain PyTorch ----------------------------------------------------------------------------


def seen(scores, log_gamma):
    """[B, H, S, S]: what each query sees, from the top k of the keys that left its window (C.1)."""
    length = scores.shape[-1]
    q, t = torch.arange(length)[:, None], torch.arange(length)[None, :]
    eligible = (t >= SINKS) & (t <= q - WINDOW)
    effective = scores.detach()[:, :, None, :] + (q - t) * log_gamma[None, :, None, None]  # eq. 5
    effective = effective.masked_fill(~eligible, -math.inf)
    best = effective.topk(ENTRIES - SINKS - WINDOW, -1).indices
    chosen = torch.zeros(effective.shape, dtype=torch.bool).scatter(-1, best, True) & eligible
    return (t <= q) & ((t < SINKS) | (q - t < WINDOW) | chosen)


def future(logits, lse, heads):
    """Equations 2, 3 and 8 with the normalizer lse [B, Hq, S]."""
    length = logits.shape[-1]
    q, t = torch.arange(length)[:, None], torch.arange(length)[None, :]
    mass = torch.where(q >= t + WINDOW, torch.exp(logits - lse[..., None]), 0.0).sum(2)
    mass = mass / (length - torch.arange(length) - WINDOW).clamp(min=1)
    return torch.log(1e-8 + mass.reshape(mass.shape[0], heads, -1, length)).amax(2)


def plain_loss(method, ids):
    """Algorithm 1 by definition: (KL, boundary loss)."""
    options, losses = method.options, []

    def attend(inputs):
        q, k, v = inputs.q, inputs.k, inputs.v
        scorer = method.scorers.layers[inputs.layer]
        parameters = [getattr(scorer, name) for name in scorer.names]
        rows = k.detach(), v.detach()
        if options.scorer == "mlp":
            scores = reference.mlp(*rows, *parameters)
        else:
            scores = reference.mlstm(*rows, scorer.delay, scorer.gate_softcap, scorer.norm, *parameters)
        log_gamma = method.scorers.log_gamma(inputs.layer)
        group = q.shape[1] // k.shape[1]
        mask = seen(scores, log_gamma.detach()).repeat_interleave(group, 1)
        logits = reference.logits_of(q, k)
        causal = torch.ones(logits.shape[-2:]).tril().bool()
        hidden = logits.masked_fill(~mask, -math.inf)
        normalizer = logits.masked_fill(~causal, -math.inf) if options.dense_normalizer else hidden
        target = future(logits.detach(), normalizer.detach().logsumexp(-1), k.shape[1])
        numbers = SINKS, WINDOW, ENTRIES - SINKS - WINDOW, log_gamma
        losses.append(reference.boundary_loss(scores, target, *numbers)[0])
        return torch.softmax(hidden, -1) @ v.repeat_interleave(group, 1)

    with attend_with(method.model, attend):
        student = method.model(input_ids=ids, use_cache=False).logits
    teacher = method.dense_logits(ids)
    over = "all" if options.full_softmax else "top"
    kl = reference.top_distillation(teacher, student, TOP, 1.0, student_softmax=over)
    return kl, torch.stack(losses).mean()


@pytest.mark.parametrize("scorer", ["mlp", "mlstm", "mlstm --immediate --norm layer --skip"])
@pytest.mark.parametrize("others", ["", "--dense-normalizer --full-softmax"])
def test_a_step_is_the_formula(scorer, others):
    method, ids, weights = kvpop("--train-model", "--scorer", *scorer.split(), *others.split())
    parameters = [p for group in method.parameter_groups() for p in group["params"]]
    kl, boundary = plain_loss(method, ids)
    found = method(ids, weights)
    # The library's lse, target and log gamma are float32, hence the weights by margin; so is its sm_scale.
    torch.testing.assert_close(found["kl"], kl, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found["boundary"], boundary, rtol=1e-5, atol=1e-7)
    wanted = torch.autograd.grad(kl + boundary, parameters)
    for gradient, want in zip(torch.autograd.grad(found["loss"], parameters), wanted):
        # The boundary loss is of differences, so the gradient of a last bias is 0 up to rounding.
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-5 * want.abs().max().item() + 1e-15)


def test_scorers_alone_have_the_same_gradient():
    """With a frozen model the student's states are the same, and no KL is computed."""
    both, ids, weights = kvpop("--train-model")
    alone, _, _ = kvpop()
    alone.load_state_dict({k: v for k, v in both.state_dict().items() if not k.startswith("teacher.")})
    found, want = alone(ids, weights), both(ids, weights)
    assert "kl" not in found and not any(p.requires_grad for p in alone.model.parameters())
    assert found["boundary"].item() == want["boundary"].item()
    pairs = zip(alone.own_parameters(), both.own_parameters())
    for p, other in pairs:
        (got,) = torch.autograd.grad(found["loss"], p, retain_graph=True)
        (wanted,) = torch.autograd.grad(want["loss"], other, retain_graph=True)
        assert torch.equal(got, wanted)


def test_options_of_the_kl(monkeypatch):
    """What top_distillation gets; test_distillation.py has its formulas."""
    given = {}
    monkeypatch.setattr(kvp, "top_distillation", lambda teacher, student, **rest: given.update(rest) or 0.0)
    options = ["--full-softmax", "--reverse-kl", "--kl-temperature", "2"]
    method, ids, weights = kvpop("--train-model", *options)
    method(ids, weights)
    assert given == {"top": TOP, "temperature": 2.0, "reverse": True, "student_softmax": "all"}


@pytest.mark.parametrize("scorer", ["mlp", "mlstm"])
def test_scorers_start_on_standardized_inputs(scorer):
    """The first weights give what the same weights would give of rows with mean 0 (MLP) and variance 1."""
    method, ids, weights = kvpop("--scorer", scorer, dtype=torch.float32)
    before = copy.deepcopy(method.scorers.layers)
    rows = {}

    def keep(inputs):
        rows[inputs.layer] = inputs.k, inputs.v
        return method.dense(inputs)

    method.begin(ids[:1], weights[:1])
    with torch.no_grad():
        method.logits(ids[:1], keep)
        for layer, after in enumerate(method.scorers.layers):
            standard = [
                (x - (x.mean((0, 2), keepdim=True) if scorer == "mlp" else 0))
                / (x.std((0, 2), keepdim=True) + 1e-3)
                for x in rows[layer]
            ]
            want = before[layer](*(x.contiguous() for x in standard))
            torch.testing.assert_close(after(*rows[layer]), want, rtol=1e-4, atol=1e-4)


# ---- chains ------------------------------------------------------------------------------------------------


def close(exact, near, better):
    """A derivative against central differences, whose own error is below their distance."""
    assert abs(exact) > 1e-5
    assert abs(exact - better) < 10 * abs(near - better) + 1e-4 * abs(exact)


@pytest.mark.parametrize("scorer", ["mlp", "mlstm"])
def test_the_chain_to_scorers(scorer):
    """Boundary loss -> scores -> scorer. Weights by margin are constants, as masks are."""
    method, ids, weights = kvpop("--scorer", scorer)
    close(*directional(method, ids, weights, list(method.scorers.layers.parameters()), step=1e-5))


def test_the_chain_to_the_decay():
    """Through dense states, so that no key changes sides; log gamma is float32, hence the step."""
    method, ids, weights = kvpop("--dense-states", "--omega-min", "1")
    exact, near, better = directional(method, ids, weights, [method.scorers.alpha], step=1e-2)
    assert abs(exact) > 1e-5 and abs(exact - better) < 10 * abs(near - better) + 2e-3 * abs(exact)


def test_the_chain_to_the_weights():
    """KL -> logits -> hidden states -> sparse attention -> q, k, v, at fixed masks."""
    method, ids, weights = kvpop("--train-model", "--score-weight", "0")
    close(*directional(method, ids, weights, list(method.model.parameters()), step=1e-6))


def test_what_is_detached():
    """The boundary loss trains scorers and decay alone, the KL the model alone (3.3)."""
    method, ids, weights = kvpop("--train-model")
    found, model = method(ids, weights), list(method.model.parameters())
    own = method.own_parameters()
    for loss, reaches, others in (("boundary", own, model), ("kl", model, own)):
        gradients = torch.autograd.grad(found[loss], reaches + others, allow_unused=True, retain_graph=True)
        assert all(g is not None and g.abs().sum() > 0 for g in gradients[: len(reaches)])
        assert all(g is None for g in gradients[len(reaches) :])


@pytest.mark.parametrize("scorer", ["mlp", "mlstm"])
def test_cuda_is_the_host(scorer):
    if not (torch.cuda.is_available() and kvp.has_cuda()):
        pytest.skip("no GPU, or no CUDA module")
    host, ids, weights = kvpop("--train-model", "--scorer", scorer, dtype=torch.float32)
    device = copy.deepcopy(host).cuda()
    found, want = device(ids.cuda(), weights.cuda()), host(ids, weights)
    for name, value in want.items():
        torch.testing.assert_close(found[name].cpu(), value, rtol=1e-4, atol=1e-5)
    parameters = [list(m.model.parameters()) + m.own_parameters() for m in (device, host)]
    gradients = [torch.autograd.grad(x["loss"], p) for x, p in zip((found, want), parameters)]
    for got, wanted in zip(*gradients):
        # Of a last bias, whose gradient is 0, there are roundings of the others alone.
        bound = 1e-4 * wanted.abs().max().item() + 1e-7
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-3, atol=bound)


# ---- StreamLLM+ --------------------------------------------------------------------------------------------


def test_streaming_is_the_formula():
    arguments = ["--sinks", str(SINKS), "--budgets", str(ENTRIES), "--top", str(TOP)]
    method, ids, weights = small_method("StreamingLLM", "streaming_llm", *arguments)
    with torch.no_grad():
        for parameter in method.teacher.parameters():
            parameter += 0.05 * torch.randn_like(parameter)

    def attend(inputs):
        length = inputs.q.shape[2]
        q, t = torch.arange(length)[:, None], torch.arange(length)[None, :]
        mask = (t <= q) & ((t < SINKS) | (q - t < ENTRIES - SINKS))
        logits = reference.logits_of(inputs.q, inputs.k).masked_fill(~mask, -math.inf)
        return torch.softmax(logits, -1) @ inputs.v.repeat_interleave(2, 1)

    with attend_with(method.model, attend):
        student = method.model(input_ids=ids, use_cache=False).logits
    want = reference.top_distillation(method.dense_logits(ids), student, TOP, 1.0)
    loss, parameters = method(ids, weights)["loss"], list(method.model.parameters())
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-8)
    for got, wanted in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(want, parameters)):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6 * wanted.abs().max().item())
    close(*directional(method, ids, weights, parameters, step=1e-4))


# ---- runs --------------------------------------------------------------------------------------------------

RUN = ["--model", "scratch", "--scratch-size", "32", "2", "2", "--kv-heads", "1", "--task", "recall"]
RUN += ["--tokens", "64", "--batch", "2", "--steps", "3", "--warmup", "1", "--evaluate-samples", "1"]
RUN += ["--device", "cpu", "--sinks", "2", "--budgets", "16", "32", "--rate", "0.01"]


def same(parts, whole):
    others = dict(parts.method.named_parameters())
    for name, parameter in whole.method.named_parameters():
        assert torch.equal(parameter, others[name]), name


@pytest.mark.parametrize("mode", ["", "--train-model --scorer mlstm"])
def test_a_resumed_run_has_the_same_weights(mode, tmp_path):
    """With budgets that alternate, positions that are drawn by step, a teacher and two learning rates."""
    arguments = [*RUN, "--window", "4", "--positions", "8", *mode.split()]
    whole, printed = run("KVpop", "kvpop", tmp_path / "whole", *arguments)
    run("KVpop", "kvpop", tmp_path / "parts", *arguments, "--seconds", "1e-9")
    for _ in range(2):
        parts, _ = run("KVpop", "kvpop", tmp_path / "parts", *arguments, "--seconds", "1e-9", "--resume")
    assert parts.step == whole.step == 3
    same(parts, whole)
    assert "recall_16" in printed and "kl_32" in printed
    scorers = kvp.Scorers.load(tmp_path / "whole" / "kvpop.safetensors")
    assert scorers.training_notes["beta"] == "1"
    assert scorers.system == "kvpop" and scorers.gamma_range == (0.999, 0.999999)
    assert torch.equal(scorers.alpha, whole.method.scorers.alpha) and scorers.alpha.abs().min() > 0
    assert scorers.policy(1).budgets == (16 - 2 - 4,)
    assert (tmp_path / "whole" / "model").is_dir() == ("--train-model" in mode)


@pytest.mark.skipif(
    not (torch.cuda.is_available() and kvp.has_cuda()), reason="needs a GPU and the CUDA module"
)
@pytest.mark.parametrize("mode", ["", "--train-model --scorer mlstm"])
def test_steps_as_a_cuda_graph_are_the_steps(mode, tmp_path):
    """Of one budget and all positions, which no step's number changes."""
    arguments = [*RUN, "--window", "4", "--budgets", "16", "--positions", "0", "--steps", "10", *mode.split()]
    arguments += ["--device", "cuda", "--fp32"]
    plain, _ = run("KVpop", "kvpop", tmp_path / "plain", *arguments)
    graph, _ = run("KVpop", "kvpop", tmp_path / "graph", *arguments, "--cuda-graph")
    assert graph.graph.graph is not None
    found = dict(graph.method.named_parameters())
    for name, parameter in plain.method.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=1e-3, atol=1e-4, msg=name)


def test_learning_rates():
    """Table 3: warm-up and a cosine to 8e-5 for scorers, a constant for the model, the decay's own."""
    method, _, _ = kvpop("--train-model", "--warmup", "10", "--steps", "110")
    optimizer = torch.optim.AdamW(method.parameter_groups())
    schedule = method.schedule(optimizer)
    rates = []
    for _ in range(111):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    scorers, decay, model, norms = zip(*rates)
    assert scorers[0] == 0 and max(scorers) == scorers[10] == 1e-3
    assert scorers[60] == pytest.approx((1e-3 + 8e-5) / 2) and scorers[110] == pytest.approx(8e-5)
    assert decay[10] == 2e-2 and set(model) == set(norms) == {8e-5}


def test_the_workshops_phases(tmp_path):
    arguments = [*RUN, "--window", "4"]
    first, _ = run("Workshop", "kvpop_workshop", tmp_path / "1", *arguments, "--phase", "1")
    assert first.log[-1]["nll"] < first.log[0]["nll"]
    model = ["--model", str(tmp_path / "1" / "model")]
    second, printed = run("Workshop", "kvpop_workshop", tmp_path / "2", *arguments, *model, "--phase", "2")
    start = second.log[0]
    assert start["nll_dense"] == pytest.approx(first.log[-1]["nll"], rel=1e-5)
    step = second.log[-2]
    want = 0.9 * step["nll"] + 0.1 * step["kl"] + step["boundary"]
    assert step["loss"] == pytest.approx(want, rel=1e-5)
    with safe_open(tmp_path / "2" / "kvpop_workshop.safetensors", "pt") as file:
        assert file.metadata()["kind"] == "mlstm" and file.metadata()["delay"] == "4"
    assert not (tmp_path / "1" / "kvpop_workshop.safetensors").exists()


def test_streaming_runs(tmp_path):
    trainer, _ = run("StreamingLLM", "streaming_llm", tmp_path, *RUN)
    assert trainer.log[-1]["kl_16"] >= 0 and (tmp_path / "model").is_dir()
    policy = kvp.Scorers.load(tmp_path / "streaming_llm.safetensors").policy(0)
    assert (policy.sinks, policy.windows) == ((2,), (14,))


def test_refusals(tmp_path):
    with pytest.raises(program("loop").Refused, match="--budgets: 6 is not allowed; it must be above 6"):
        run("KVpop", "kvpop", tmp_path, *RUN, "--window", "4", "--budgets", "6")
    with pytest.raises(program("loop").Refused, match="--budgets: 64 is not allowed.*below --tokens 64"):
        run("StreamingLLM", "streaming_llm", tmp_path, *RUN, "--budgets", "64")
    method, ids, weights = kvpop()
    with torch.no_grad():
        method.scorers.layers[1].w2[1] = math.nan
    with pytest.raises(ValueError):
        method(ids, weights)
    assert method.broken() == "the scores of layer 1, head 1 are not finite"
