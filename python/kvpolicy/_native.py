"""Calls of the extension modules: _host for CPU tensors, _cuda for CUDA tensors."""

import functools
import importlib
import importlib.util

import torch
from torch.utils.dlpack import to_dlpack


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


def _argument(value):
    """Tensors become DLPack capsules, also within tuples and lists."""
    if isinstance(value, torch.Tensor):
        # Tensors that need a gradient have no capsule, and the call below autograd needs none.
        return to_dlpack(value.detach())
    if isinstance(value, (tuple, list)):
        return type(value)(map(_argument, value))
    return value


def _context(device):
    """The two numbers that stand for a context: threads, or stream and device."""
    if device.type == "cuda":
        return torch.cuda.current_stream(device).cuda_stream, device.index
    return torch.get_num_threads(), -1


def call(name, device, *arguments):
    """Runs a function of the module of `device`, on the current stream of a GPU, with a workspace of
    torch's allocator. Arguments are checked before anything is written."""
    function = getattr(_module(device.type), name)
    context = _context(device)
    size = function(*context, *_argument(arguments), None)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    function(*context, *_argument(arguments), to_dlpack(workspace))


def rows(tensor):
    """A tensor of one number per token whose last dimension is contiguous: a copy if need be."""
    if tensor is None or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


def define(name, schema):
    """Registers the decorated function as operator kvpolicy::name, for CPU and CUDA."""

    def register(function):
        torch.library.define(f"kvpolicy::{name}", schema)
        torch.library.impl(f"kvpolicy::{name}", ("cpu", "cuda"), function)
        return function

    return register


def refuse_gradient(name, what):
    """The backward pass of an operator that has none."""

    def backward(_ctx, *_gradients):
        raise NotImplementedError(f"{name}: a gradient through {what} is not there; pass detached tensors")

    def setup(ctx, inputs, output):
        pass

    torch.library.register_autograd(f"kvpolicy::{name}", backward, setup_context=setup)
