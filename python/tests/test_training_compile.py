"""torch.compile of the models of the training programs: a compiled step is the eager one."""

import kvpolicy as kvp
import pytest
import torch
from training_cases import run, small_method

BUDGETS = ("--window", "8", "--budgets", "32", "24", "--train-model")
METHODS = {
    "spkv": ("SPKV", "spkv", "--window", "8", "--hidden", "16"),
    "bernoulli": ("SPKV", "spkv", "--window", "8", "--hidden", "16", "--gate", "bernoulli"),
    "annealed": ("SPKV", "spkv", "--window", "8", "--hidden", "16", "--first-phase", "0.25", "--anneal", "4"),
    "wgkv": ("WGKV", "wgkv", "--window", "8", "--hidden", "16"),
    "dms": ("DMS", "dms", "--window", "8"),
    "lte": ("LTE", "lte", "--window", "14", "--cap", "8"),
    "kvpop-mlp": ("KVpop", "kvpop", *BUDGETS, "--hidden", "8", "--positions", "8"),
    "kvpop-mlstm": ("KVpop", "kvpop", *BUDGETS, "--scorer", "mlstm", "--positions", "0"),
    "streaming": ("StreamingLLM", "streaming_llm", "--budgets", "32"),
}
STEPS = 8


def losses_and_gradients(method, ids, weights):
    parameters = {name: p for name, p in method.named_parameters() if p.requires_grad}
    losses = method(ids, weights)
    found = torch.autograd.grad(losses["loss"], list(parameters.values()), allow_unused=True)
    losses = {name: torch.as_tensor(value).detach() for name, value in losses.items()}
    return losses, dict(zip(parameters, found))


def compare(method, ids, weights, steps, tolerance, **options):
    """Losses and gradients of `steps`, from Python and by the compiled layers of the model."""
    torch.compiler.reset()
    layers = method.model.base_model
    layers.compile(**options)
    compiled = layers._compiled_call_impl
    for step in steps:
        method.begin_step(step, STEPS)
        layers._compiled_call_impl = None
        losses, gradients = losses_and_gradients(method, ids, weights)
        layers._compiled_call_impl = compiled
        found, found_gradients = losses_and_gradients(method, ids, weights)
        for name, value in losses.items():
            torch.testing.assert_close(found[name], value, **tolerance, msg=lambda text: f"{name}: {text}")
        for name, value in gradients.items():
            if value is None:
                assert found_gradients[name] is None, name
                continue
            scale = value.abs().max().item() + 1e-30
            torch.testing.assert_close(
                found_gradients[name] / scale, value / scale, **tolerance, msg=lambda text: f"{name}: {text}"
            )


@pytest.mark.parametrize("name", METHODS)
def test_a_compiled_step_is_the_eager_one(name):
    """In one graph, whatever a step decides in Python: its budget, gate, alpha and seeds."""
    method, ids, weights = small_method(*METHODS[name])
    with torch.no_grad():
        for parameter in method.own_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    compare(
        method,
        ids,
        weights,
        (0, 1, 2, 3, 7),
        {"rtol": 1e-9, "atol": 1e-9},
        backend="aot_eager",
        fullgraph=True,
    )


on_cuda = pytest.mark.skipif(
    not (torch.cuda.is_available() and kvp.has_cuda()), reason="needs a GPU and the CUDA module"
)


@on_cuda
def test_a_step_of_inductor_is_the_eager_one():
    """Its kernels round and sum in an order of their own."""
    method, ids, weights = small_method(*METHODS["spkv"], dtype=torch.float32)
    method.cuda()
    compare(method, ids.cuda(), weights.cuda(), (0, 7), {"rtol": 1e-3, "atol": 1e-4})


@pytest.mark.parametrize(
    "device, backend", [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=on_cuda)]
)
def test_a_compiled_run(device, backend, tmp_path):
    """--compile: the log of a run from Python, and files of the same names."""
    arguments = (
        "--model scratch --scratch-size 32 2 2 --kv-heads 1 --task recall --tokens 64 --batch 2 --steps 4 "
    )
    arguments += "--window 8 --evaluate-samples 1 --fp32 --log-every 1 --workers 0"
    arguments = [*arguments.split(), "--device", device]
    plain, _ = run("SPKV", "spkv", tmp_path / "plain", *arguments)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled, _ = run("SPKV", "spkv", tmp_path / "compiled", *arguments, "--compile", backend)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= 4  # soft steps and hard ones, of a step's number as constant and variable; no evaluation
    assert list(dict(compiled.method.named_parameters())) == list(dict(plain.method.named_parameters()))
    assert len(plain.log) == len(compiled.log)
    for one, other in zip(plain.log, compiled.log):
        assert other["nll"] == pytest.approx(one["nll"], rel=1e-3)
    files = [
        sorted(p.name for p in (tmp_path / name).rglob("*.safetensors")) for name in ("plain", "compiled")
    ]
    assert files[0] == files[1]
