"""DMS's training: the chain from distillation and compression to a decision's logit, one step against the
formulas, the schedule."""

import kvpolicy as kvp
import pytest
import reference
import torch
from kvpolicy.training import attend_with
from training_cases import directional, drawn, gradients_on, run, small_method

ARGUMENTS = ("--window", "6", "--temperature", "0.7", "--compression-weight", "0.5", "--top", "16")
SMALL = ["--model", "scratch", "--scratch-size", "32", "2", "2", "--kv-heads", "1", "--task", "recall"]
SMALL += ["--tokens", "64", "--batch", "2", "--steps", "6", "--window", "8", "--steps-per-unit", "2"]
SMALL += ["--evaluate-samples", "1", "--warmup", "1", "--device", "cpu", "--start", "-1", "--rate", "0.1"]
STEP = 150  # of the schedule: a ratio of 2.5


def method_of(*arguments, **sizes):
    """A method in the middle of its schedule, with decisions on both sides."""
    method, ids, weights = small_method("DMS", "dms", *ARGUMENTS, *arguments, **sizes)
    drawn(method.scorers, {"weight": 0.5, "bias": 0.5})
    method.begin_step(STEP, 300)
    return method, ids, weights


@pytest.mark.parametrize("options", [(), ("--divergence", "forward"), ("--all-weights",)], ids=str)
def test_the_chain_of_decisions(options):
    method, ids, weights = method_of(*options)
    if options == ("--all-weights",):  # away from the teacher, where the divergence has no gradient
        drawn(method.model, {}, noise=0.02)
    parameters = [p for p in method.parameters() if p.requires_grad]
    assert len(parameters) > 4 or options != ("--all-weights",)
    # Rounding to float32, as in test_training_wgkv.py; sum |p dL/dp| is below 1 here.
    exact, near, better = directional(method, ids, weights, parameters, step=2**-8)
    assert abs(exact) > 5e-3 and method.compression(0.6)[0] > 0
    assert abs(exact - better) < 2 * abs(near - better) + 2**-24 * 2**8


@pytest.mark.parametrize("count", ["alphas", "decisions"])
def test_one_step_is_the_formula(count):
    method, ids, weights = method_of("--no-noise", "--count", count)
    found = method(ids, weights)
    ours = torch.autograd.grad(found["loss"], list(method.scorers.parameters()))

    scores = {}

    def attend(inputs):
        scorer = method.scorers[inputs.layer]
        z = reference.linear(inputs.k, inputs.v, scorer.weight, scorer.bias)
        scores[inputs.layer] = z
        log_bias = torch.nn.functional.logsigmoid(-z / 0.7)
        start = torch.full((inputs.k.shape[1],), 6)
        return reference.attention(inputs.q, inputs.k, inputs.v, log_bias=log_bias, bias_from=start)[0]

    def logits(by):
        with attend_with(method.model, by):
            return method.model(input_ids=ids, use_cache=False).logits

    with torch.no_grad():
        teacher = logits(lambda inputs: reference.attention(inputs.q, inputs.k, inputs.v)[0])
    divergence = reference.top_distillation(teacher, logits(attend), 16, 1.0, reverse=True)
    z = torch.cat([scores[layer] for layer in range(method.layers)])
    target, every = 1 - 1 / 2.5, torch.ones_like(z, dtype=torch.bool)
    want = divergence + 0.5 * reference.compression(z, every, 0.7, target, hard=count == "decisions")
    theirs = torch.autograd.grad(want, list(method.scorers.parameters()))
    # The temperature, the target and log-biases are float32.
    torch.testing.assert_close(found["loss"], want, rtol=2**-20, atol=2**-22)
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 * other.abs().max().item())
    assert abs(found["target"] - target) < 1e-6
    assert abs(found["evicted"] - (z > 0).double().mean()) < 1e-6


def test_nothing_is_evicted_at_first():
    method, ids, weights = small_method("DMS", "dms", "--window", "6", "--no-noise")
    found = method(ids, weights)
    assert found["compression"] == 0 and found["target"] == 0 and found["kl"] < 1e-12
    found = method.evaluate(ids, weights)
    assert found["evicted"] == 0 and found["cached"] == 1 and found["nll"] == found["nll_dense"]


def test_noise_differs_by_step_and_layer():
    method, ids, weights = method_of()
    first = method(ids, weights)["alpha"]
    assert method(ids, weights)["alpha"] == first
    assert method.gate(0).seed != method.gate(1).seed
    method.begin_step(STEP + 1, 300)
    assert method(ids, weights)["alpha"] != first


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_training_on_cuda_is_that_of_the_host(device):
    host, cuda = (gradients_on(name, lambda: method_of(dtype=torch.float32)) for name in ("cpu", device))
    for mine, other in zip(cuda, host):
        assert (mine - other).norm() < 1e-4 * other.norm()


@pytest.mark.parametrize("options", [(), ("--all-weights",)], ids=str)
def test_a_resumed_schedule_has_the_same_weights(options, tmp_path):
    whole, _ = run("DMS", "dms", tmp_path / "whole", *SMALL, *options)
    run("DMS", "dms", tmp_path / "parts", *SMALL, *options, "--seconds", "1e-9")
    for _ in range(5):
        parts, _ = run("DMS", "dms", tmp_path / "parts", *SMALL, *options, "--seconds", "1e-9", "--resume")
    assert parts.step == whole.step == 6
    for name, parameter in whole.method.named_parameters():
        assert torch.equal(parameter, dict(parts.method.named_parameters())[name]), name
    steps = [row["target"] for row in whole.log if row["kind"] == "step"]
    assert steps[-1] == pytest.approx(kvp.eviction_target(5, 4.0, 2))
    scorers = kvp.Scorers.load(tmp_path / "parts" / "dms.safetensors")
    assert (scorers.system, scorers.window) == ("dms", 8)
    assert (tmp_path / "parts" / "model").exists() == bool(options)
