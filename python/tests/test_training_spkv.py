"""SP-KV's training: each phase against the paper's formulas, differences, files, the probe."""

import json

import pytest
import torch
from training_cases import directional, program, run, small_method

import kvpolicy as kvp

WINDOW, TAU, LONG = 6, 0.6, 2**31 - 1
OPEN = ["--window", str(WINDOW), "--hidden", "8", "--tau", str(TAU), "--bias", "0.5", "--spread", "3"]
# Arguments, the step of 8, and whether predictors are trained in it.
PHASES = {
    "soft": ([], 0, True),
    "density": (["--density", "0.7"], 0, True),
    "linear": (["--predictor", "linear"], 0, True),
    "bidirectional": (["--predictor", "bidirectional", "--window", "33"], 0, True),
    "sinks": (["--sinks", "3"], 0, True),
    "bernoulli": (["--gate", "bernoulli", "--clip-probability", "0.1"], 0, True),
    "annealed": (["--steps", "8", "--anneal", "2"], 7, False),
    "hard": (["--steps", "8"], 7, False),
}
TINY = ["--model", "scratch", "--scratch-size", "32", "2", "2", "--kv-heads", "1", "--task", "recall"]
TINY += ["--tokens", "64", "--batch", "2", "--warmup", "1", "--window", "8", "--evaluate-samples", "1"]
TINY += ["--pairs", "4", "--device", "cpu", "--hidden", "8", "--rate", "0.05"]


def method_in(phase, dtype=torch.float64, seed=3):
    """(method in a step of the phase, ids, weights, the parameters that are trained in it)"""
    arguments, step, predictors = PHASES[phase]
    method, ids, weights = small_method("SPKV", "spkv", *OPEN, *arguments, dtype=dtype, seed=seed)
    method.begin_step(step, 8)
    trained = list(method.model.parameters()) + (method.own_parameters() if predictors else [])
    return method, ids, weights, trained


# ---- formulas ----------------------------------------------------------------------------------------------


def plain_scores(method, inputs):
    """Scores [B, Hkv, S] by eq. 1, by C.2 and C.4."""
    p, x = dict(method.scorers[inputs.layer].named_parameters()), inputs.states
    if method.options.predictor == "linear":
        return (x @ p["weight"].T + p["bias"]).mT
    if method.options.predictor == "mlp":
        inner = x @ p["w1"].T + p["b1"]
        return ((inner * torch.sigmoid(inner)) @ p["w2"].T + p["b2"]).mT
    inner = torch.nn.functional.pad(x @ p["first.weight"].T + p["first.bias"], (0, 0, 32, 32))
    mixed = sum(inner[:, j : j + x.shape[1]] @ p["mix.weight"][:, :, j].T for j in range(65)) + p["mix.bias"]
    return ((mixed * torch.sigmoid(mixed)) @ p["second.weight"].T + p["second.bias"]).mT


def plain_gate(phase, method, u, drawn):
    """The log-gate of every key: eq. 6, 7, 11, 3."""
    closed = torch.tensor(float("-inf"), dtype=u.dtype)
    if phase == "bernoulli":
        return torch.where(drawn, 0.0, closed) + torch.log(u) - torch.log(u).detach()
    if phase == "hard":
        return torch.where(u >= TAU, 0.0, closed)
    if phase == "annealed":
        alpha = method.hard_step() / method.options.anneal
        return torch.log((1 - alpha) * u + alpha * (u >= TAU).to(u.dtype))
    return torch.log(u)


def plain_attention(phase, method, inputs, drawn):
    """Listing 1: dense softmax under an explicit mask [B, Hq, S, S]."""
    utility = torch.sigmoid(plain_scores(method, inputs))
    group = inputs.q.shape[1] // inputs.k.shape[1]
    if phase == "annealed" or phase == "hard":  # a frozen predictor; its input is not
        assert not method.own_parameters()[0].requires_grad
    method.scores[inputs.layer] = utility
    gate = plain_gate(phase, method, utility, drawn).repeat_interleave(group, 1)[:, :, None]
    age = torch.arange(gate.shape[-1])[:, None] - torch.arange(gate.shape[-1])
    local = (age < method.options.window) | (torch.arange(gate.shape[-1]) < method.options.sinks)
    mask = torch.where(age < 0, float("-inf"), torch.where(local, 0.0, gate))
    k, v = (x.repeat_interleave(group, 1) for x in (inputs.k, inputs.v))
    return torch.softmax(inputs.q @ k.mT * inputs.sm_scale + mask, -1) @ v


def plain_loss(phase, method, ids, weights, drawn):
    """The loss of a batch by PyTorch alone."""
    method.scores = {}
    logits = method.logits(ids, lambda inputs: plain_attention(phase, method, inputs, drawn[inputs.layer]))
    log_p = torch.log_softmax(logits[:, :-1], -1)
    nll = -log_p.gather(2, ids[:, 1:, None])[..., 0]
    loss = (nll * weights[:, 1:]).sum() / weights[:, 1:].sum()
    return loss - method.options.density * torch.stack(list(method.scores.values())).mean()


@pytest.mark.parametrize("phase", PHASES)
def test_one_step_is_the_formulas(phase):
    """Loss, gradients and weights after a step of AdamW. Log-biases and lse are float32, at most 8 in size,
    so weights of attention have relative errors of 2^-20; gradients are sums of them over two layers."""
    method, ids, weights, trained = method_in(phase)
    plain, _, _, theirs = method_in(phase)
    ours = method(ids, weights)
    drawn = [method.parts[layer].expiry == LONG for layer in range(2)]
    if phase in ("annealed", "hard"):
        for parameter in plain.own_parameters():
            parameter.requires_grad_(False)
    want = plain_loss(phase, plain, ids, weights, drawn)
    torch.testing.assert_close(ours["loss"], want, rtol=2**-20, atol=0)
    if phase != "bernoulli":  # some gates are open, some closed
        assert 0.1 < ours["density"] < 0.9
    gradients = []
    for loss, parameters, owner in ((ours["loss"], trained, method), (want, theirs, plain)):
        optimizer = torch.optim.AdamW(owner.parameter_groups(), betas=(0.9, 0.95), weight_decay=0.0)
        loss.backward()
        gradients.append([p.grad.clone() for p in parameters])
        optimizer.step()
    before = small_method("SPKV", "spkv", *OPEN, *PHASES[phase][0])[0]
    rates = {id(p): group["lr"] for group in method.parameter_groups() for p in group["params"]}
    for p, q, g, h in zip(trained, theirs, *gradients):
        error = 2**-17 * h.norm()
        assert (g - h).norm() <= error + 1e-12
        # The first step is rate g / (|g| + 1e-8).
        bound = rates[id(p)] * 2 * (error + 1e-12) / (h.abs() + 1e-8)
        assert ((p - q).abs() <= bound + 1e-12).all()
    changed = [
        name for name, p in before.named_parameters() if not torch.equal(p, method.get_parameter(name))
    ]
    assert any(name.startswith("model.") for name in changed)
    assert any(name.startswith("scorers.") for name in changed) == PHASES[phase][2]


# ---- the chain ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "bernoulli"])
def test_the_chain(phase):
    """Loss -> gate -> log-bias or mask -> attention -> hidden states -> predictor, by differences along a
    direction of all weights that are trained. A bias b is rounded by 2^-24 |b|: that is noise in the loss, of
    which differences of order 4 take 1.5 / step. Under hard gates the step is so small that no gate flips,
    and the loss is double."""
    method, ids, weights, trained = method_in(phase)
    noise, step = 0.0, 1e-4
    if phase == "hard":
        step = 1e-7
        noise = 1e-15  # of a loss near 4
    else:
        loss = method(ids, weights)["loss"]
        biases = [mask.log_bias for mask in method.parts.values()]
        slopes = torch.autograd.grad(loss, biases)
        noise = 2**-24 * sum((b * d).abs().sum().item() for b, d in zip(biases, slopes))
    exact, near, better = directional(method, ids, weights, trained, step=step)
    bound = abs(near - better) + 1.5 * noise / step + 2**-17 * abs(exact)
    assert abs(exact - better) <= bound
    assert bound < 0.02 * abs(exact)


def test_steps_that_differ_are_no_graph():
    """A CUDA graph replays soft steps, or hard ones; numbers of the others change by step."""
    keys = {phase: method_in(phase)[0].graph_key() for phase in ("soft", "hard", "annealed", "bernoulli")}
    assert keys["annealed"] is None and keys["bernoulli"] is None
    assert keys["soft"] != keys["hard"] and None not in (keys["soft"], keys["hard"])


def test_bernoulli_gates_are_drawn_by_step():
    method, ids, weights, _ = method_in("bernoulli")

    def draws(step):
        method.begin_step(step, 8)
        method(ids, weights)
        return torch.stack([method.parts[layer].expiry for layer in range(2)])

    first, second = draws(0), draws(1)
    assert torch.equal(first, draws(0)) and not torch.equal(first, second)
    assert not torch.equal(first[0] == LONG, first[1] == LONG)


@pytest.mark.parametrize("phase", ["soft", "annealed", "bernoulli", "hard"])
def test_devices_agree(phase, device):
    """float32 on the device against double on the CPU."""
    exact, ids, weights, theirs = method_in(phase)
    method, _, _, trained = method_in(phase, torch.float32)
    method.to(device)
    losses = [m(ids.to(d), weights.to(d))["loss"] for m, d in ((exact, "cpu"), (method, device))]
    torch.testing.assert_close(losses[1].double().cpu(), losses[0], rtol=1e-5, atol=0)
    for loss in losses:
        loss.backward()
    for p, q in zip(trained, theirs):
        assert (p.grad.cpu().double() - q.grad).norm() <= 1e-4 * q.grad.norm() + 1e-8


# ---- runs --------------------------------------------------------------------------------------------------


def test_a_resumed_run_passes_the_phases(tmp_path):
    """Drawn gates, one annealed step, and hard gates."""
    arguments = [*TINY, "--steps", "6", "--gate", "bernoulli", "--first-phase", "0.5", "--anneal", "1"]
    whole, _ = run("SPKV", "spkv", tmp_path / "whole", *arguments)
    for step in range(1, 7):
        resume = ["--resume"] if step > 1 else []
        parts, _ = run("SPKV", "spkv", tmp_path / "parts", *arguments, "--seconds", "1e-9", *resume)
        if step == 3:
            boundary = [p.detach().clone() for p in parts.method.own_parameters()]
    assert parts.step == whole.step == 6
    for name, parameter in whole.method.named_parameters():
        assert torch.equal(parameter, parts.method.get_parameter(name)), name
    for kept, parameter in zip(boundary, whole.method.own_parameters()):
        assert torch.equal(kept, parameter)  # the second phase froze them


def test_a_run_is_measured_and_probed(tmp_path):
    trainer, printed = run("SPKV", "spkv", tmp_path, *TINY, "--steps", "8", "--bias", "0", "--spread", "4")
    rows = json.loads((tmp_path / "metrics.json").read_text())["measures"]["by_tau"]
    assert [row["tau"] for row in rows] == list(program("spkv").TAUS)
    first_layer = torch.tensor([row["density_by_head"][0] for row in rows])
    assert (first_layer.diff(dim=0) <= 0).all() and 0 < first_layer[4] < 1
    assert rows[0]["density"] == rows[0]["visible"] == 1 and rows[-1]["density"] == 0
    evaluated = trainer.evaluate()
    assert rows[0]["nll"] == pytest.approx(evaluated["nll_dense"], rel=1e-5)
    (at_tau,) = (row for row in rows if row["tau"] == 0.5)
    for name in ("nll", "density", "visible"):
        assert at_tau[name] == pytest.approx(evaluated[name], rel=1e-6)
    assert f"tau 0.5  density {at_tau['density']:.4g}" in printed

    scorers = kvp.Scorers.load(tmp_path / "spkv.safetensors")
    assert (scorers.system, scorers.threshold, scorers.window) == ("spkv", 0.5, 8)
    assert scorers.training_notes["held_out_density"] == f"{evaluated['density']:.6g}"

    record = program("spkv_probe").main(["--out", str(tmp_path), *TINY, "--every", "2"])
    found = {row["layout"]: row for row in record["layouts"]}
    assert record["density_by_head"] == at_tau["density_by_head"]
    assert found["full attention"]["nll"] == pytest.approx(evaluated["nll_dense"], rel=1e-5)
    assert found["SP-KV"]["nll"] == pytest.approx(evaluated["nll"], rel=1e-5)
    assert found["windows"]["nll"] == pytest.approx(rows[-1]["nll"], rel=1e-5)
    assert found["A"]["coverage"] == 1 and found["A"]["global_heads"] == 2
    local = sum(min(query + 1, 8) for query in range(64)) / (64 * 65 / 2)
    assert found["B"]["visible"] == pytest.approx((1 + local) / 2)
    assert found["D, gated"]["visible"] == pytest.approx(found["SP-KV"]["visible"])
    with pytest.raises(SystemExit, match="global-heads: 9"):
        program("spkv_probe").main(["--out", str(tmp_path), *TINY, "--global-heads", "9"])


def test_layouts_of_figure_4():
    """21 layers of 3 KV heads, 18 global ones."""
    density = torch.rand(21, 3, dtype=torch.float64)
    chosen = program("spkv_probe").layouts(density, 4, 0, 1)
    assert [int(heads.sum()) for heads in chosen.values()] == [18] * 4
    assert chosen["A"][:, 0].nonzero().flatten().tolist() == [0, 4, 8, 12, 16, 20]
    assert chosen["B"][:, 2].nonzero().flatten().tolist() == [3, 7, 11, 15, 19, 20]
    assert density[chosen["D"]].min() >= density[~chosen["D"]].max()


def test_files_of_predictors(tmp_path):
    linear, *_ = method_in("linear")
    linear.float()
    states = torch.randn(2, 9, 32)
    linear.scorer_file({}).save(tmp_path / "spkv.safetensors")
    again = kvp.Scorers.load(tmp_path / "spkv.safetensors")
    # SiLU(y) - SiLU(-y) rounds at the size of y.
    torch.testing.assert_close(again.layers[0](states), linear.scorers[0](states), rtol=1e-5, atol=1e-5)
    assert again.threshold == TAU and again.policy(0).windows == (WINDOW,)

    ahead, *_ = method_in("bidirectional")
    ahead.float()
    with pytest.raises(NotImplementedError, match="--predictor: bidirectional is not allowed"):
        ahead.scorer_file({})
    ahead.save(tmp_path / "ahead.safetensors", {})
    other, *_ = method_in("bidirectional", torch.float32, seed=4)
    assert not torch.equal(other.scorers[0](states), ahead.scorers[0](states))
    other.load(tmp_path)
    assert torch.equal(other.scorers[0](states), ahead.scorers[0](states))
    with pytest.raises(ValueError, match="format"):
        kvp.Scorers.load(tmp_path / "bidirectional.safetensors")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mode", "frozen"],
        ["--first-phase", "0"],
        ["--anneal", "3", "--steps", "8"],
        ["--predictor", "bidirectional", "--window", "32"],
        ["--tau", "1.5"],
        ["--clip-probability", "0.6"],
        ["--sinks", "-1"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_numbers_are_refused(arguments, tmp_path):
    with pytest.raises(SystemExit, match=r"^--.* is not allowed; it must be .*"):
        run("SPKV", "spkv", tmp_path, *TINY, *arguments)
