"""Operators of torch.library over calls of the extension modules: _host for CPU tensors, _cuda for CUDA
tensors."""

import functools
import importlib
import importlib.util

import torch


@functools.cache
def _module(kind):
    if kind == "cpu":
        return importlib.import_module("kvpolicy._host")
    if kind == "cuda":
        try:
            return importlib.import_module("kvpolicy._cuda")
        except ImportError as error:
            raise NotImplementedError(
                "tensors on cuda are not allowed; this build of kvpolicy has no CUDA module: install it "
                "where nvcc is"
            ) from error
    raise NotImplementedError(f"tensors on {kind} are not allowed; they must be on cpu or cuda")


def has_cuda():
    """Whether this build of the package has the CUDA module."""
    return importlib.util.find_spec("kvpolicy._cuda") is not None


def types(kind, operation="attention"):
    """The names of the dtypes of rows that the module for `kind` (cpu, cuda) is compiled for, for `operation`
    (attention, scorer)."""
    return getattr(_module(kind), f"{operation}_types")


def call(name, device, *arguments):
    """Runs a function of the module of `device`, on the current stream of a GPU, with a workspace of
    torch's allocator. Arguments are checked before anything is written."""
    function = getattr(_module(device.type), name)
    if device.type == "cuda":
        context = torch._C._cuda_getCurrentRawStream(device.index), device.index
    else:
        context = torch.get_num_threads(), -1
    function(*context, *arguments, lambda size: torch.empty(size, dtype=torch.uint8, device=device))


def rows(tensor):
    """A tensor of one number per token whose last dimension is contiguous: a copy if need be."""
    if tensor is None or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


def outputs_of(lengths):
    """What makes a result: tokens beyond a sequence's length are not written."""
    return torch.empty if lengths is None else torch.zeros


# ---- operators ---------------------------------------------------------------------------------------------

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_OTHERS = frozenset((type(None), int, float, bool, str, list, tuple))


def _traced():
    """Whether somebody looks at operators: torch.compile, a dispatch mode, a transform, a tracer."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


class Operator:
    """The operator kvpolicy::`name` for CPU and CUDA: `run` writes results, `fake` makes their shapes, and
    backward(ctx, *gradients) with setup(ctx, inputs, output) is its gradient as torch.library takes it;
    without them a gradient is refused, which `refusal` names.

    A call with plain tensors goes straight to `run`, under a torch.autograd.Function where a gradient is
    wanted: the dispatcher's way through Python takes longer than a short kernel. Other calls, those of
    torch.compile among them, take torch.ops. A list of tensors, if any, is the argument `at_list`."""

    def __init__(self, name, schema, run, fake, backward=None, setup=None, refusal="", at_list=None):
        qualified = f"kvpolicy::{name}"
        torch.library.define(qualified, schema)
        torch.library.impl(qualified, ("cpu", "cuda"), run)
        torch.library.register_fake(qualified)(fake)
        self.overload = getattr(torch.ops.kvpolicy, name).default
        self.run, self.at_list = run, at_list
        self.function = None
        if backward is None:
            backward, setup = _refuse(name, refusal), _keep_nothing
        else:
            self.function = _function(name, run, backward, setup, at_list)
        torch.library.register_autograd(qualified, backward, setup_context=setup)

    def __call__(self, *arguments):
        at = self.at_list
        flat = arguments if at is None else (*arguments[:at], *arguments[at], *arguments[at + 1 :])
        if _traced():
            return self.overload(*arguments)
        wanted = False
        for argument in flat:
            kind = type(argument)
            if kind in _TENSORS:
                wanted = wanted or argument.requires_grad
            elif kind not in _OTHERS:
                return self.overload(*arguments)
        if not (wanted and torch.is_grad_enabled()):
            return self.run(*arguments)
        if self.function is None:
            return self.overload(*arguments)
        if at is None:
            return self.function.apply(*arguments)
        return self.function.apply(*flat, len(arguments[at]))


def _refuse(name, what):
    def backward(_ctx, *_gradients):
        raise NotImplementedError(f"{name}: a gradient through {what} is not there; pass detached tensors")

    return backward


def _keep_nothing(ctx, inputs, output):
    pass


def _function(name, run, backward, setup, at_list):
    """The autograd function of an operator. With a list of tensors its last argument is their number. forward
    calls setup itself: with a setup_context torch binds the signature at every call, which takes 20 us."""

    def whole(arguments):
        if at_list is None:
            return arguments
        *rest, number = arguments
        end = at_list + number
        return (*rest[:at_list], list(rest[at_list:end]), *rest[end:])

    def forward(ctx, *arguments):
        inputs = whole(arguments)
        output = run(*inputs)
        setup(ctx, inputs, output)
        return output

    def gradients(ctx, *outputs):
        found = backward(ctx, *outputs)
        if at_list is None:
            return found
        return (*found[:at_list], *found[at_list], *found[at_list + 1 :], None)

    members = {"forward": forward, "backward": gradients}
    return type(name, (torch.autograd.Function,), {key: staticmethod(f) for key, f in members.items()})
