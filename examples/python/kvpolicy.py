"""kvpolicy from Python, by ctypes: masks, targets and the boundary loss (kvpolicy_c.cpp) for tensors in
host memory.

    g++ -std=c++20 -O2 -shared -fPIC -fvisibility=hidden -pthread -I include \\
        examples/python/kvpolicy_c.cpp -o libkvpolicy_c.so
    python3 examples/python/train.py ./libkvpolicy_c.so

A tensor is whatever has a data_ptr(), as PyTorch's on the CPU have, or a buffer, as NumPy's arrays and
array.array have: fp32 (expiries int32, gradients of log gamma fp64), contiguous; buffers writable and not
empty, inputs too. Nothing is copied.
"""

import collections
import ctypes

Rule = collections.namedtuple("Rule", "sinks window budget")  # KV entries per head: their sum

_INT, _TENSOR = ctypes.c_int32, ctypes.c_void_p
_ARGUMENTS = {
    "kvp_build_mask": [_TENSOR] + [_INT] * 6 + [_TENSOR] * 2,
    "kvp_future_mass": [_TENSOR] * 2 + [_INT] * 6 + [ctypes.c_float, _TENSOR],
    "kvp_boundary_loss": [_TENSOR] * 2 + [_INT] * 6 + [_TENSOR] * 4,
}


_TYPES = {"f": "float32", "i": "int32", "d": "float64"}  # by the buffers' letters


def _pointer(name, tensor, numbers, letter="f"):
    """The address of so many numbers of a type; refuses a tensor that is not that."""
    if tensor is None:
        return None
    if hasattr(tensor, "data_ptr"):
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"{name}: on {tensor.device.type}, or with gaps, is not allowed; "
                             "it must be contiguous, on the CPU")
        address, has, kind = tensor.data_ptr(), tensor.numel(), str(tensor.dtype).removeprefix("torch.")
    else:
        view = memoryview(tensor)
        if not view.c_contiguous:
            raise ValueError(f"{name}: with gaps is not allowed; it must be contiguous")
        has, kind = view.nbytes // view.itemsize, _TYPES.get(view.format.lstrip("@=<"), view.format)
        address = ctypes.addressof(ctypes.c_char.from_buffer(tensor))
    if has != numbers or kind != _TYPES[letter]:
        raise ValueError(f"{name}: {has} numbers of {kind} is not allowed; "
                         f"it must be {numbers} of {_TYPES[letter]}")
    return address


class Library:
    """The functions of libkvpolicy_c.so. Shapes are (batch, heads, length), and
    (..., dim) for q and k."""

    def __init__(self, path):
        self._functions = ctypes.CDLL(path)
        self._functions.kvp_error.restype = ctypes.c_char_p
        for name, arguments in _ARGUMENTS.items():
            getattr(self._functions, name).argtypes = arguments

    def _call(self, name, *arguments):
        if getattr(self._functions, name)(*arguments) != 0:
            raise ValueError(self._functions.kvp_error().decode())

    def build_mask(self, scores, shape, rule, expiry, log_gamma=None):
        """expiry <- what the policy makes of scores: query q sees key t where t <= q < expiry[t].
        log_gamma [heads]."""
        batch, heads, length = shape
        count = batch * heads * length
        self._call("kvp_build_mask", _pointer("scores", scores, count), *shape, *rule,
                   _pointer("log_gamma", log_gamma, heads), _pointer("expiry", expiry, count, "i"))

    def future_mass(self, q, k, shape, query_heads, dim, window, target, beta=1.0):
        """target <- the logarithm of the attention that each key gets once it has left the window. q has
        query_heads heads."""
        batch, heads, length = shape
        self._call("kvp_future_mass", _pointer("q", q, batch * query_heads * length * dim),
                   _pointer("k", k, batch * heads * length * dim), batch, query_heads, heads, length, dim,
                   window, beta, _pointer("target", target, batch * heads * length))

    def boundary_loss(self, scores, target, shape, rule, d_scores, log_gamma=None, d_log_gamma=None):
        """The loss; d_scores <- its gradient, and d_log_gamma [heads] (fp64) where it is given."""
        batch, heads, length = shape
        count = batch * heads * length
        value = ctypes.c_double()
        self._call("kvp_boundary_loss", _pointer("scores", scores, count), _pointer("target", target, count),
                   *shape, *rule, _pointer("log_gamma", log_gamma, heads), ctypes.addressof(value),
                   _pointer("d_scores", d_scores, count), _pointer("d_log_gamma", d_log_gamma, heads, "d"))
        return value.value


def boundary_loss_of(library, rule):
    """The boundary loss for PyTorch's autograd: loss(scores, target), both [batch, heads, length]
    fp32 on the CPU."""
    import torch

    class BoundaryLoss(torch.autograd.Function):
        @staticmethod
        def forward(context, scores, target):
            scores = scores.contiguous()
            d_scores = torch.empty_like(scores)
            value = library.boundary_loss(scores, target.contiguous(), tuple(scores.shape), rule, d_scores)
            context.save_for_backward(d_scores)
            return scores.new_tensor(value)

        @staticmethod
        def backward(context, d_loss):
            (d_scores,) = context.saved_tensors
            return d_loss * d_scores, None

    return BoundaryLoss.apply
