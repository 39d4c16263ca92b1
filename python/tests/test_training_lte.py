"""LTE's training: a step against the paper's formulas, differences, the controller of several runs."""

import json
import os
import subprocess
import sys

import pytest
import reference
import torch
from safetensors.torch import load_file
from training_cases import PROGRAMS, directional, program, run, small_method

import kvpolicy as kvp

SINKS, WINDOW, CAP = 2, 13, 14
OPTIONS = ["--sinks", str(SINKS), "--window", str(WINDOW), "--cap", str(CAP), "--dropout", "0"]
TINY = ["--model", "scratch", "--scratch-size", "32", "2", "2", "--kv-heads", "2", "--task", "recall"]
TINY += ["--tokens", "64", "--pairs", "4", "--batch", "2", "--warmup", "1", "--evaluate-samples", "2"]
TINY += ["--window", "16", "--cap", "20", "--steps", "6", "--every", "2", "--factor", "2", "--device", "cpu"]


def mixed_method(*arguments, seed=3, **options):
    """A method some of whose gates are open, with penalties; weights of scorers are float32 numbers."""
    method, ids, weights = small_method("LTE", "lte", *OPTIONS, *arguments, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in method.own_parameters():
            draws = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            width = parameter[0, 0].numel() / 2 if parameter.dim() > 2 else 1
            parameter.copy_((draws * width**-0.5 * 4096).round() / 4096)
        method.controller.weights.copy_(torch.tensor([0.25, 0.0, 0.0625, 0.5]))
    return method, ids, weights


# ---- formulas ----------------------------------------------------------------------------------------------


def plain_scores(method, inputs):
    """Scores [B, Hkv, S] of float64: 3.1.1, or the MLP of a key alone."""
    scorer = method.scorers[inputs.layer]
    parameters = [getattr(scorer, name) for name in scorer.names]
    if method.options.scorer == "mlp":
        return reference.mlp(inputs.k, inputs.v, *parameters)
    rope = {"layout": scorer.rope.layout, "base": scorer.rope.base, "real": torch.float64}
    return reference.conv(inputs.k, inputs.v, 6, *parameters, **rope)


def plain_loss(method, ids, weights, scope):
    """The loss of a batch by PyTorch alone: eq. 5 to 7 and the gradient of m for r."""
    lambdas = method.controller.weights.view(2, 2, 1)
    t = torch.arange(ids.shape[1])
    in_scope = (t >= SINKS) & (t + WINDOW < len(t)) if scope == "decided" else t >= 0
    penalties = []

    def attend(inputs):
        r = torch.sigmoid(plain_scores(method, inputs))
        method.scores[inputs.layer] = r
        penalties.append((lambdas[inputs.layer] * torch.relu(r - 0.5) * in_scope).sum() / len(ids))
        surrogate = torch.where(in_scope, r, r.detach())
        values = inputs.v * (1 + surrogate - surrogate.detach())[..., None]
        age = t[:, None] - t
        kept = (age < WINDOW) | (t < SINKS) | (r > 0.5)[:, :, None]
        group = inputs.q.shape[1] // inputs.k.shape[1]
        seen = (kept & (age >= 0)).repeat_interleave(group, 1)
        k, v = (x.repeat_interleave(group, 1) for x in (inputs.k, values))
        logits = torch.where(seen, inputs.q @ k.mT * inputs.sm_scale, -torch.inf)
        return torch.softmax(logits, -1) @ v

    log_p = torch.log_softmax(method.logits(ids, attend)[:, :-1], -1)
    nll = -log_p.gather(2, ids[:, 1:, None])[..., 0]
    return (nll * weights[:, 1:]).sum() / weights[:, 1:].sum() + sum(penalties)


@pytest.mark.parametrize(
    "arguments", [[], ["--scope", "decided"], ["--scorer", "mlp"]], ids=["conv", "decided", "mlp"]
)
def test_one_step_is_the_formulas(arguments):
    """Loss, gradients and counts. Numbers are float64, weights of scorers are float32 numbers. Only the lse
    that attention's backward pass reads, below 8, is float32: weights of attention have relative errors of
    2^-22, and gradients are sums of them over two layers."""
    method, ids, weights = mixed_method(*arguments)
    ours = method(ids, weights)
    ours["loss"].backward()
    plain = mixed_method(*arguments)[0]
    want = plain_loss(plain, ids, weights, method.options.scope)
    want.backward()
    torch.testing.assert_close(ours["loss"], want, rtol=1e-12, atol=0)
    for (name, p), q in zip(method.named_parameters(), plain.parameters()):
        assert (p.grad - q.grad).norm() <= 2**-18 * q.grad.norm(), name
    assert method.scorers[0].readout.grad.norm() > 0 if not arguments else True
    scores = [torch.logit(plain.scores[layer]) for layer in range(2)]
    counts = torch.cat([reference.retained(z, SINKS, WINDOW, method.options.scope) for z in scores])
    assert torch.equal(method.retained, counts)
    assert 0.1 < counts.mean() / ids.shape[1] < 0.9


def test_the_chain():
    """Loss -> mask -> attention -> hidden states -> scorer, by differences along a direction of all weights.
    Decisions stay those of the start, and values are multiplied by 1 + r - r_start: eq. 6 is the gradient of
    this function. Scorers read a weight below 4 as float32, rounded by 2^-23 at most, of a step of 2^-12
    times a normal number."""
    method, ids, weights = mixed_method()
    loss = method(ids, weights)["loss"]
    parameters = list(method.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    start = {layer: torch.sigmoid(z.detach()) for layer, z in method.scores.items()}
    masks = {layer: kvp.build_mask(method.gates(), z) for layer, z in method.scores.items()}

    def relaxed(inputs):
        scores = method.scores[inputs.layer] = method.score(inputs)
        factor = 1 + torch.sigmoid(scores) - start[inputs.layer]
        values = inputs.v * factor[..., None]
        return kvp.attend(inputs.q, inputs.k, values, masks[inputs.layer], **inputs.numbers)

    method.attend = relaxed
    exact, near, better = directional(method, ids, weights, parameters, step=2**-12)
    generator = torch.Generator().manual_seed(5)
    along = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
    assert exact == pytest.approx(sum((g * d).sum().item() for g, d in zip(gradients, along)), rel=2**-18)
    bound = abs(near - better) + 2**-12 * abs(exact)
    assert abs(exact - better) <= bound
    assert bound < 0.02 * abs(exact)


def test_gates_start_open():
    for scorer in ("conv", "mlp"):
        method, ids, weights = small_method("LTE", "lte", *OPTIONS, "--scorer", scorer)
        method(ids, weights)
        unscored = 6 if scorer == "conv" else 0
        assert (method.retained == ids.shape[1] - unscored).all()


def test_cuda_is_the_host():
    """A step in float32 on CUDA against float64 on the host. Gates within 1e-4 of 0 may differ: there are
    none."""
    if not (torch.cuda.is_available() and kvp.has_cuda()):
        pytest.skip("no GPU, or no CUDA module")
    host, ids, weights = mixed_method()
    device = mixed_method(dtype=torch.float32)[0].cuda()
    ours, want = device(ids.cuda(), weights.cuda()), host(ids, weights)
    assert min(z[z.isfinite()].abs().min() for z in host.scores.values()) > 1e-4
    torch.testing.assert_close(ours["loss"].cpu().double(), want["loss"], rtol=1e-5, atol=0)
    assert torch.equal(device.retained.cpu(), host.retained)
    ours["loss"].backward()
    want["loss"].backward()
    for (name, p), q in zip(device.named_parameters(), host.parameters()):
        assert (p.grad.cpu().double() - q.grad).norm() <= 2e-2 * q.grad.norm() + 1e-9, name


# ---- runs --------------------------------------------------------------------------------------------------


def test_a_resumed_run_has_the_same_weights(tmp_path):
    """Scorers, with their dropout, and the controller."""
    whole, printed = run("LTE", "lte", tmp_path / "whole", *TINY)
    run("LTE", "lte", tmp_path / "parts", *TINY, "--seconds", "1e-9")
    for _ in range(5):
        parts, _ = run("LTE", "lte", tmp_path / "parts", *TINY, "--seconds", "1e-9", "--resume")
    state, again = whole.method.state_dict(), parts.method.state_dict()
    assert parts.step == whole.step == 6 and state.keys() == again.keys()
    for name, value in state.items():
        assert torch.equal(value, again[name]), name
    # All keys but the last 6 are retained, more than the cap: updates after steps 0, 2 and 4.
    torch.testing.assert_close(whole.method.controller.weights, torch.full((4,), 8e-9))
    assert (whole.method.controller.average == 58).all()
    assert "largest_lambda 8e-09" in printed
    measures = json.loads((tmp_path / "whole" / "metrics.json").read_text())["measures"]
    assert torch.tensor(measures["retention"]).shape == torch.tensor(measures["lambda"]).shape == (2, 2)
    saved = kvp.Scorers.load(tmp_path / "whole" / "lte.safetensors")
    assert (saved.system, saved.window, saved.sinks, saved.budget) == ("lte", 16, 4, 16)


def test_two_processes_have_the_weights_of_one(tmp_path):
    """Gradients are sums of the same terms in another order; the rate is small, so that Adam's first steps,
    rate g / (|g| + eps), stay near each other where g is near 0."""
    arguments = [*TINY, "--steps", "3", "--dropout", "0", "--batch", "4"]
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(PROGRAMS / "lte.py"), "--out", str(tmp_path / "two"), *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    run("LTE", "lte", tmp_path / "one", *arguments)
    for name in ("lte.safetensors", "model/model.safetensors"):
        one, two = (load_file(tmp_path / which / name) for which in ("one", "two"))
        assert one.keys() == two.keys()
        for key, value in one.items():
            assert (value - two[key]).norm() <= 1e-3 * value.norm() + 1e-5, key
    one, two = (json.loads((tmp_path / which / "metrics.json").read_text()) for which in ("one", "two"))
    assert one["measures"]["lambda"] == two["measures"]["lambda"]


def test_a_penalty_closes_gates(tmp_path):
    """With a weight of 1 from the start the count falls below the cap, and the weight falls."""
    arguments = [*TINY, "--steps", "30", "--least", "1", "--rate", "0.05", "--dropout", "0"]
    trainer, _ = run("LTE", "lte", tmp_path, *arguments)
    retained = [line["retained"] for line in trainer.log if line["kind"] == "evaluate"]
    assert retained[0] > 20 > retained[-1]
    assert (trainer.method.controller.weights < 1).all()


def test_what_is_refused(tmp_path):
    for argument, value in (("--window", "12"), ("--cap", "3")):
        with pytest.raises(SystemExit, match=f"{argument[2:]}: {value} is not allowed"):
            run("LTE", "lte", tmp_path, *TINY, argument, value)
    with pytest.raises(SystemExit, match="dropout.rate: 1 is not allowed"):
        run("LTE", "lte", tmp_path, *TINY, "--dropout", "1")
    assert program("lte").LTE.name == "lte"


def test_an_evaluation_leaves_the_model_in_its_mode():
    """A model from a folder is in evaluation mode: in training mode its dropout would be refused."""
    method, ids, weights = small_method("LTE", "lte", "--window", "13", "--cap", "8", dtype=torch.float32)
    method.model.eval()
    method.evaluate(ids, weights)
    assert not any(module.training for module in method.model.modules())
    assert all(scorer.training for scorer in method.scorers)
