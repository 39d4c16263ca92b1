"""Decode steps of a model of transformers as one CUDA graph, for KVPolicyCache.

A step of one token through Python launches about 40 kernels per layer, which takes longer than they run. The
graph is captured from the model's own forward, at its second step, and serves all later steps: entries,
lengths and policies are in device memory, and the library's grids depend on capacities alone.

Why no torch.compile: generate() compiles the forward for a cache that says is_compileable. Dynamo would then
trace KVPolicyCache, whose lengths and order of layers are numbers of Python, recompile where they change, and
take a minute per model and batch; the hooks differ between transformers 4.57 and 5. The forward of a model is
the same contract in all of them, and in a loop of one's own. So the forward of the model's class is replaced
by one that asks the cache that it is given. (A forward of the model alone would be a cycle of references,
which keeps its weights until the garbage collector runs, and replicas would call the original's.)
"""

import contextlib
import functools
import inspect
import itertools
import warnings

import torch
from transformers import PreTrainedModel

from kvpolicy.policy import CppPart, ObservedScorer
from kvpolicy.scorers import Scorer, UtilityPredictor

_CACHE_NAMES = ("past_key_values", "cache")  # until 5.40, and from 5.24 on
_POSITIONS = {"position_ids": (1, 1), "cache_position": (1,)}  # their shapes in a step; the second until 4.57
_TENSORS = ("input_ids", "attention_mask", *_POSITIONS)
_PLAIN = (bool, int, float, str)


def serve(model):
    """Makes the forward of the model's class ask its cache for a graph. Returns whether it does: that of a
    decoder for text, which takes positions, and which nobody else has replaced."""
    if not isinstance(model, PreTrainedModel) or "forward" in vars(model):
        return False
    if model.config.get_text_config(decoder=True) is not model.config:
        return False
    own = type(model).forward
    if hasattr(own, "asks_for_graph") and "forward" in vars(type(model)):
        return True
    names = list(inspect.signature(own).parameters)[1:]
    if names[0] != "input_ids" or "position_ids" not in names:
        return False
    positions = [name for name in _POSITIONS if name in names]

    @functools.wraps(own)
    def forward(self, *args, **kwargs):
        cache = next((kwargs[name] for name in _CACHE_NAMES if kwargs.get(name) is not None), None)
        graph = getattr(cache, "decode_graph", None)
        inherited = type(self).forward is not forward
        if graph is None or inherited or len(args) > 1 or torch.compiler.is_compiling():
            return own(self, *args, **kwargs)
        return graph(self, functools.partial(own, self), cache, dict(zip(names, args), **kwargs), positions)

    forward.asks_for_graph = True
    type(model).forward = forward
    return True


class DecodeGraph:
    """The captured step of one KVPolicyCache.

    A forward that a graph cannot serve runs as it is: a prompt, drafts, gradients, autocast, arguments other
    than ids, mask and positions, outputs other than logits, hooks of the caller, weights on several devices,
    and a step that waits for the GPU or whose capture fails. The first step of a kind runs as it is too.
    Weights of model and scorers are read where they lay at the capture, and settings of modules are those of
    the capture: a forward that is no step makes the next one compare. The logits of a step are a copy.
    """

    def __init__(self):
        self._refused = set()  # kinds of steps that no graph serves
        self._compared = False
        self._drop()

    def _drop(self):
        self._warm = self._output = self._fields = None
        self._graph = self._kind = self._static = self._logits = self._memory = self._state = None

    def __call__(self, model, run, cache, arguments, positions):
        """run(**arguments), the model's own forward; `positions` are those of _POSITIONS that it takes."""
        step = _step_of(model, cache, arguments, positions)
        if step is None:
            self._compared = False
            return run(**arguments)
        kind, tensors = step
        if kind in self._refused or not cache.reserve_step():
            return run(**arguments)
        if self._graph is not None and not self._serves(model, cache, kind):
            self._drop()
        if self._graph is None:
            if self._warm != kind:
                return self._warm_up(run, cache, kind, arguments)
            if not self._capture(model, run, cache, kind, tensors, arguments):
                return run(**arguments)
        with torch.cuda.device(cache.device):
            for name, tensor in tensors.items():
                self._static[name].copy_(tensor)
            self._graph.replay()
            logits = self._logits.clone()
        cache.count_step()
        return self._output(logits=logits, **dict.fromkeys(self._fields, cache))

    def _serves(self, model, cache, kind):
        if kind != self._kind or any(a is not b for a, b in zip(self._memory, cache.step_memory())):
            return False
        if not self._compared:
            self._compared = _state_of(model, cache) == self._state
        return self._compared

    def _warm_up(self, run, cache, kind, arguments):
        """A step as it is: loads kernels, and shows whether a graph can serve the next."""
        self._drop()
        waits = []
        with _watched(waits):
            output = run(**arguments)
        items = output.items() if hasattr(output, "items") else ()
        fields = [name for name, value in items if value is cache]
        if waits or not items or {name for name, _ in items} != {"logits", *fields}:
            self._refused.add(kind)
        else:
            self._warm, self._fields, self._output = kind, fields, type(output)
        return output

    def _capture(self, model, run, cache, kind, tensors, arguments):
        state, marks = _state_of(model, cache), cache.marks()
        if state is None:
            self._refused.add(kind)
            return False
        with torch.inference_mode(False):  # later steps write them in any mode
            static = {name: tensor.clone() for name, tensor in tensors.items()}
        others = {name: value for name, value in arguments.items() if name not in static}
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(cache.device)
        random = torch.cuda.default_generators[cache.device.index]
        random_state = random.clone_state()
        try:
            with (
                torch.cuda.device(cache.device),
                torch.cuda.stream(torch.cuda.current_stream(cache.device)),  # after a failure, too
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                logits = run(**others, **static).logits
        except Exception as error:
            random.graphsafe_set_state(random_state)  # a failed capture leaves the generator capturing
            self._refused.add(kind)
            warnings.warn(f"KVPolicyCache: decode steps run without a CUDA graph: {error}", stacklevel=2)
            return False
        finally:
            cache.rewind(marks)  # the capture has run nothing
        self._graph, self._kind, self._static, self._logits = graph, kind, static, logits
        self._memory, self._state, self._compared = cache.step_memory(), state, True
        return True


def _step_of(model, cache, arguments, positions):
    """Of a decode step that a graph may serve its kind, which a graph is for, and its tensors; else None."""
    ids = arguments.get("input_ids")
    if not torch.is_tensor(ids) or not ids.is_cuda or ids.dim() != 2 or ids.shape[1] != 1:
        return None
    if (
        not cache.takes_steps(ids.shape[0], ids.device)
        or model.training
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cuda")
        or torch.cuda.is_current_stream_capturing()
    ):
        return None
    tensors, plain = {}, []
    for name, value in arguments.items():
        if torch.is_tensor(value):
            if name not in _TENSORS or value.device != ids.device:
                return None
            tensors[name] = value
        elif isinstance(value, _PLAIN):
            plain.append((name, value))
        elif value is not None and value is not cache:
            return None
    mask = tensors.get("attention_mask")
    if mask is not None:
        # Without positions a model may count those of the mask (OPT), of which the graph sees one column.
        if mask.dim() != 2 or not any(name in tensors for name in _POSITIONS):
            return None
        tensors["attention_mask"] = mask[:, -1:]  # the new token's: it keeps its shape
    # What a model would make of the cache's length, a number of Python.
    for name in positions:
        if name not in tensors:
            tensors[name] = ids.new_full(_POSITIONS[name], cache.get_seq_length())
    shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    return (*sorted(plain, key=lambda pair: pair[0]), *sorted(shapes, key=lambda shape: shape[0])), tensors


def _state_of(model, cache):
    """What a graph of a step has of the model and of the cache's scorers: addresses of weights, and settings
    of modules (adapters in use, factors). None where no graph may read them."""
    found = []
    for module in model.modules():
        for hook in itertools.chain(module._forward_hooks.values(), module._forward_pre_hooks.values()):
            if not str(getattr(hook, "__module__", "")).startswith(("transformers.", "kvpolicy.")):
                return None
        settings = (
            (name, _plain(value))
            for name, value in vars(module).items()
            if name not in _TENSORS_OF_MODULES and "hooks" not in name
        )
        found.append([setting for setting in settings if setting[1] is not None])
    scorers = [policy.scorer for policy in cache.policies]
    scorers = [one for one in scorers if one is not None and not isinstance(one, (ObservedScorer, CppPart))]
    if not all(isinstance(scorer, (Scorer, UtilityPredictor)) for scorer in scorers):
        return None  # one of the caller's may have a state in Python
    for module in (model, *scorers):
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            if tensor.device != model.device:
                return None
            found.append(getattr(tensor, "_local_tensor", tensor).data_ptr())  # of a DTensor its shard
    return found


_TENSORS_OF_MODULES = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))


def _plain(value):
    """A copy of a setting that is a number, a text, or a container of such; None for all else."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return tuple((key, _plain(one)) for key, one in value.items() if isinstance(key, _PLAIN))
    return None


@contextlib.contextmanager
def _watched(waits):
    """Appends to `waits` the operations that wait for the GPU, as far as torch sees them."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for one in seen:
        text = str(one.message)
        if "synchronizing CUDA operation" in text:
            waits.append(text)
        elif "debug mode is a prototype" not in text:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
