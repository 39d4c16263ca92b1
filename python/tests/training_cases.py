"""What the tests of the training programs share: a small model in double, derivatives along directions,
runs."""

import contextlib
import importlib
import io
import pathlib
import sys

import torch

PROGRAMS = pathlib.Path(__file__).resolve().parents[2] / "examples" / "training"


def program(name):
    """A module of examples/training."""
    if str(PROGRAMS) not in sys.path:
        sys.path.insert(0, str(PROGRAMS))
    return importlib.import_module(name)


def small_method(class_name, module, *arguments, seed=3, vocabulary=64, tokens=48, dtype=torch.float64):
    """A method of a training program on a model of 2 layers with random weights, in double: (method, ids,
    weights). transformers computes its norms in float32, so those are torch's here."""
    method_class = getattr(program(module), class_name)
    base = ["--out", "unused", "--model", "scratch", "--task", "recall", "--tokens", str(tokens)]
    options = program("loop").parser_of(method_class).parse_args([*base, *arguments])
    torch.manual_seed(seed)
    sizes = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2}
    model = program("models").from_scratch(vocabulary=vocabulary, **sizes, length=tokens)
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that attention differs from a mean
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    _wide_norms(model)
    method = method_class(model, options)
    method.to(dtype)
    ids = torch.randint(0, vocabulary, (2, tokens))
    return method, ids, torch.rand(2, tokens) + 0.5


def _wide_norms(module):
    for name, child in module.named_children():
        if type(child).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
            norm.weight = child.weight
            setattr(module, name, norm)
        else:
            _wide_norms(child)


def directional(method, ids, weights, parameters, *, step=1e-4, seed=5):
    """(derivative by autograd, by central differences of orders 2 and 4) of the loss along a random direction
    of the parameters. Their distance from each other bounds the error of the differences."""
    loss = method(ids, weights)["loss"]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    generator = torch.Generator().manual_seed(seed)
    along = [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for p in parameters]
    exact = sum((g * d).sum().item() for g, d in zip(gradients, along) if g is not None)
    start = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def at(distance):
        for p, value, d in zip(parameters, start, along):
            p.copy_(value + distance * d)
        return method(ids, weights)["loss"].item()

    near = (at(step) - at(-step)) / (2 * step)
    far = (at(2 * step) - at(-2 * step)) / (4 * step)
    at(0.0)
    return exact, near, (4 * near - far) / 3


def run(class_name, module, out, *arguments):
    """Runs a training program in this process; returns (its Trainer, what it printed)."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer = program("loop").train(getattr(program(module), class_name), ["--out", str(out), *arguments])
    return trainer, printed.getvalue()


@torch.no_grad()
def drawn(module, spreads, *, noise=0.0, seed=7):
    """Draws the parameters whose last name is in `spreads` from normals of those spreads, and adds `noise`
    to the others."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        spread = spreads.get(name.rpartition(".")[2])
        normal = torch.randn(p.shape, generator=generator).to(p)
        p.copy_(p + noise * normal if spread is None else spread * normal)


def gradients_on(device, make):
    """The loss of a method on a device and its gradients, on the CPU. make() returns (method, ids,
    weights)."""
    method, ids, weights = make()
    method.to(device)
    parameters = [p for p in method.parameters() if p.requires_grad]
    loss = method(ids.to(device), weights.to(device))["loss"]
    return [loss.detach().cpu(), *(g.cpu() for g in torch.autograd.grad(loss, parameters))]
