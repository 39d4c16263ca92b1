"""WG-KV's training: the chain from the distance of hidden states to a write gate, one step against the
paper's formulas, the grid of lambdas."""

import json

import kvpolicy as kvp
import pytest
import reference
import torch
from kvpolicy.training import attend_with
from training_cases import directional, drawn, gradients_on, program, run, small_method

ARGUMENTS = ("--window", "6", "--sinks", "1", "--hidden", "8", "--sparsity-weight", "0.5")
SMALL = ["--model", "scratch", "--scratch-size", "32", "2", "2", "--kv-heads", "1", "--task", "recall"]
SMALL += ["--tokens", "64", "--batch", "2", "--steps", "4", "--window", "8", "--hidden", "8"]
SMALL += ["--evaluate-samples", "1", "--warmup", "1", "--device", "cpu"]


def method_of(*arguments, **sizes):
    """A method whose gates differ from key to key."""
    method, ids, weights = small_method("WGKV", "wgkv", *ARGUMENTS, *arguments, **sizes)
    drawn(method.scorers, {"w2": 1.0, "b1": 0.5, "b2": 0.5})
    return method, ids, weights


@pytest.mark.parametrize("scope", ["all", "decided"])
def test_the_chain_of_write_gates(scope):
    method, ids, weights = method_of("--scope", scope)
    # Scorers read parameters as float32, so p is off by up to 2^-25 |p|. That moves the loss by at most 2^-25
    # sum |p dL/dp|, which is 2.3 here, and float32 log-biases by less; a difference by that over the step.
    exact, near, better = directional(method, ids, weights, list(method.scorers.parameters()), step=2**-8)
    assert abs(exact) > 0.1
    assert abs(exact - better) < 2 * abs(near - better) + 2**-24 * 2.3 * 2**8


def test_one_step_is_the_paper():
    method, ids, weights = method_of()
    loss = method(ids, weights)["loss"]
    ours = torch.autograd.grad(loss, list(method.scorers.parameters()))

    # 3.2 and 3.3 in plain PyTorch: the library's part is the model's.
    log_gates, window, sinks = {}, 6, 1

    def attend(inputs):
        gate = dict(method.scorers[inputs.layer].named_parameters())
        rope = {"base": method.rope.base, "real": torch.float64}
        scores = log_gates[inputs.layer] = reference.write_gate(inputs.k, inputs.v, **gate, **rope)
        log_bias = torch.log(torch.sigmoid(scores) + method.options.epsilon)
        log_bias = torch.where(torch.arange(scores.shape[-1]) < sinks, 0.0, log_bias)
        start = torch.full((inputs.k.shape[1],), window)
        return reference.attention(inputs.q, inputs.k, inputs.v, log_bias=log_bias, bias_from=start)[0]

    def states(by):
        with attend_with(method.model, by):
            return method.model.base_model(input_ids=ids, use_cache=False).last_hidden_state

    with torch.no_grad():
        teacher = states(lambda inputs: reference.attention(inputs.q, inputs.k, inputs.v)[0])
    distance = ((states(attend) - teacher) ** 2).mean()
    gates = torch.sigmoid(torch.stack([log_gates[layer] for layer in range(method.layers)]))
    want = distance + 0.5 * (gates + gates * (1 - gates)).mean()
    theirs = torch.autograd.grad(want, list(method.scorers.parameters()))
    # Log-biases and the reference's RoPE angles agree to float32.
    torch.testing.assert_close(loss, want, rtol=2**-20, atol=0)
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 * other.abs().max().item())

    optimizer = torch.optim.AdamW(method.parameter_groups())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01]


def test_the_teacher_is_dense_and_the_model_frozen():
    method, ids, weights = method_of()
    with torch.no_grad():
        for scorer in method.scorers:
            scorer.b2.fill_(40.0)  # gates of 1: the student is the teacher, but for log(1 + epsilon)
    found = method(ids, weights)
    assert found["l2"] < 1e-6 and abs(found["gate"] - 1) < 1e-9
    found["loss"].backward()
    assert all(p.grad is None for p in method.model.parameters())


def test_a_window_of_one():
    method, ids, weights = method_of("--window", "1", "--sinks", "0")
    method(ids, weights)["loss"].backward()
    # Every key but the last is behind some query's window.
    assert all(p.grad.abs().sum() > 0 for p in method.scorers.parameters())
    found = method.evaluate(ids, weights)
    shares = [(z >= kvp.ThresholdGate.probability(0.1).threshold[0]) for z in method.scores.values()]
    assert 0 < found["cached"] < 1
    held = torch.stack(shares)[..., :-1].sum() + torch.stack(shares)[..., -1].numel()
    assert abs(found["cached"] - held / torch.stack(shares).numel()) < 1e-6


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_training_on_cuda_is_that_of_the_host(device):
    host, cuda = (gradients_on(name, lambda: method_of(dtype=torch.float32)) for name in ("cpu", device))
    for mine, other in zip(cuda, host):
        assert (mine - other).norm() < 1e-4 * other.norm()


def test_the_grid_of_lambdas(tmp_path):
    """A folder per lambda, one table, and files that a cache reads; an interrupted grid goes on."""
    train_grid = program("wgkv").train_grid
    arguments = [*SMALL, "--sparsity-weight", "0.1", "0.4", "--frontier", "0.3", "0.6"]
    assert train_grid([*arguments, "--out", str(tmp_path), "--seconds", "1e-9"]) == []
    rows = train_grid([*arguments, "--out", str(tmp_path), "--resume"])
    assert [(row["lambda"], row["tau"]) for row in rows] == [(0.1, 0.3), (0.1, 0.6), (0.4, 0.3), (0.4, 0.6)]
    assert json.loads((tmp_path / "frontier.json").read_text()) == rows
    assert all(row["cached"] <= 1 and row["l2"] >= 0 for row in rows)
    scorers = kvp.Scorers.load(tmp_path / "lambda-0.4" / "wgkv.safetensors")
    assert (scorers.system, scorers.threshold, scorers.window) == ("wgkv", 0.1, 8)
    assert scorers.training_notes["sparsity_weight"] == "0.4"
    whole, _ = run("WGKV", "wgkv", tmp_path / "whole", *SMALL, "--sparsity-weight", "0.1")
    for mine, other in zip(scorers.layers, whole.method.scorers):
        assert mine.w1.shape == other.w1.shape
    parts = kvp.Scorers.load(tmp_path / "lambda-0.1" / "wgkv.safetensors")
    for mine, other in zip(parts.layers.parameters(), whole.method.scorers.parameters()):
        assert torch.equal(mine, other)
