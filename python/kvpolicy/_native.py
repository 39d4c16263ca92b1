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


@functools.cache
def _function(name, kind):
    return getattr(_module(kind), name)


def call(name, like, *arguments):
    """Runs a function of the module of the device of `like`, a tensor, on the current stream of a GPU.
    Arguments are checked before anything is written."""
    if like.is_cuda:
        index = like.get_device()
        _function(name, "cuda")(torch._C._cuda_getCurrentRawStream(index), index, *arguments)
    else:
        _function(name, like.device.type)(torch.get_num_threads(), -1, *arguments)


def check_seed(name, seed, most=2**63 - 1):
    """Raises ValueError for a seed that the library cannot read."""
    if not 0 <= seed <= most or seed != int(seed):
        raise ValueError(f"{name}: {seed} is not allowed; it must be a whole number, 0 to {most}")


def rows(tensor):
    """A tensor of one number per token whose last dimension is contiguous: a copy if need be."""
    if tensor is None:
        return None
    if tensor.numel() == 0:  # contiguous for torch whatever its strides, those of an expanded number too
        return empty_like(tensor)
    return tensor if tensor.is_contiguous() or tensor.stride(-1) == 1 else tensor.contiguous()


def rows32(tensor):
    """As rows, in float32."""
    return rows(tensor if tensor is None or tensor.dtype == torch.float32 else tensor.float())


def outputs_of(lengths):
    """What makes a result: tokens beyond a sequence's length are not written. Give it sizes one by one; torch
    takes longer to read a tuple of them than to allocate."""
    return torch.empty if lengths is None else torch.zeros


def empty_like(tensor, dtype=None):
    """An uninitialized tensor of that shape, contiguous."""
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


# ---- operators ---------------------------------------------------------------------------------------------

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_PLAIN = _TENSORS | {type(None), int, float, bool, str, list, tuple}

_compiled = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transformed = torch._C._are_functorch_transforms_active
_tracing_state = torch._C._get_tracing_state


def _traced():
    """Whether somebody looks at operators: torch.compile, a dispatch mode, a transform, a tracer."""
    return _compiled() or _dispatch_modes() > 0 or _transformed() or _tracing_state() is not None


class Operator:
    """The operator kvpolicy::`name` for CPU and CUDA: `run` writes results, `fake` makes their shapes.
    setup(ctx, inputs, output) keeps for the gradient what torch.library lets it keep, and backward(ctx,
    *gradients) returns the gradients of the arguments `of`, numbers of arguments. Without them a gradient is
    refused, which `refusal` names. A list of tensors, if any, is the argument `at_list`, the last of `of`.

    A call with plain tensors goes straight to `run`, under a torch.autograd.Function where a gradient is
    wanted: the dispatcher's way through Python takes longer than a short kernel. Other calls, those of
    torch.compile among them, take torch.ops."""

    def __init__(self, name, schema, run, fake, backward=None, setup=None, of=(), refusal="", at_list=None):
        qualified = f"kvpolicy::{name}"
        torch.library.define(qualified, schema)
        torch.library.impl(qualified, ("cpu", "cuda"), run)
        torch.library.register_fake(qualified)(fake)
        self.overload = getattr(torch.ops.kvpolicy, name).default
        self.run, self.of, self.at_list = run, of, at_list
        self.apply = None
        if backward is None:
            gradients, setup = _refuse(name, refusal), _keep_nothing
        else:
            self.apply = _apply(name, run, backward, setup, at_list is not None)
            gradients = _of_all(backward, of, len(self.overload._schema.arguments))
        torch.library.register_autograd(qualified, gradients, setup_context=setup)

    def __call__(self, *arguments):
        if _traced():
            return self.overload(*arguments)
        at = self.at_list
        flat = arguments if at is None else (*arguments[:at], *arguments[at], *arguments[at + 1 :])
        if not _PLAIN.issuperset(map(type, flat)):
            return self.overload(*arguments)
        if not (torch.is_grad_enabled() and _wants_gradient(flat)):
            return self.run(*arguments)
        if self.apply is None:
            return self.overload(*arguments)
        inputs = [arguments[i] for i in self.of]
        if at is not None:
            inputs[-1:] = arguments[at]
        return self.apply(*inputs, arguments)


def _wants_gradient(arguments):
    for argument in arguments:
        if type(argument) in _TENSORS and argument.requires_grad:
            return True
    return False


def _refuse(name, what):
    def backward(_ctx, *_gradients):
        raise NotImplementedError(f"{name}: a gradient through {what} is not there; pass detached tensors")

    return backward


def _keep_nothing(ctx, inputs, output):
    pass


def _of_all(backward, of, count):
    """The gradients of all `count` arguments, as torch.library takes them."""

    def gradients(ctx, *outputs):
        found = dict(zip(of, backward(ctx, *outputs)))
        return tuple(found.get(i) for i in range(count))

    return gradients


def _apply(name, run, backward, setup, has_list):
    """apply of an autograd function whose inputs are those with a gradient, and then all arguments as one
    tuple: torch takes a microsecond per input. forward calls setup itself: with a setup_context torch binds
    the signature at every call, which takes 20."""

    def forward(ctx, *inputs):
        arguments = inputs[-1]
        output = run(*arguments)
        setup(ctx, arguments, output)
        return output

    def gradients(ctx, *outputs):
        found = backward(ctx, *outputs)
        if has_list and found[-1] is not None:
            found = (*found[:-1], *found[-1])
        return *found, None

    members = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
    return type(name, (torch.autograd.Function,), members).apply
