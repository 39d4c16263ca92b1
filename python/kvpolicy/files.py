"""Files of trained scorers and their policies: safetensors, the format of docs/training/files.md."""

import functools
import math

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from kvpolicy.policy import (
    DMS,
    LTE,
    SPKV,
    WGKV,
    Decay,
    KVpop,
    Policy,
    Sink,
    StreamingLLM,
    ThresholdGate,
    TopKBudget,
    Window,
)
from kvpolicy.scorers import (
    ConvScorer,
    LinearScorer,
    MLPScorer,
    Rope,
    UtilityPredictor,
    WriteGateScorer,
    mLSTMScorer,
)
from kvpolicy.whole_file import whole_path

_FORMAT = "kvpolicy-scorers-1"
# The names of the widths of keys and values in a file.
_KEY_WIDTH, _VALUE_WIDTH = "dim_k", "dim_v"
_CLASSES = {
    scorer.kind: scorer
    for scorer in (LinearScorer, MLPScorer, mLSTMScorer, WriteGateScorer, ConvScorer, UtilityPredictor)
}
_NO_SCORER = "none"  # the kind of a file without scorers
_MOST = 1 << 16  # of a size in a file
# The frequencies of a Rope, if it has some.
_FREQUENCIES = "rope_frequencies"
# What "norm" of a file says of an mLSTM.
_NORMS = {"0": False, "1": "rms", "layer": "layer"}


# The systems of a file, and their names for people.
SYSTEMS = {
    "kvpop": "KVpop",
    "spkv": "SP-KV",
    "wgkv": "WG-KV",
    "lte": "LTE",
    "dms": "DMS",
    "streaming": "StreamLLM+",
}
# Those whose gate has a threshold of its own.
_THRESHOLDS = ("spkv", "wgkv")
_DEFAULT_DECAY = (0.999, 0.999999)


class Scorers(nn.Module):
    """One scorer per layer, with the policy that they are trained for.

    layers        a sequence of scorers of one kind and size; empty for system "streaming", which has none
    window, sinks of the policy
    system        "kvpop" (the best of the long-range keys), "spkv" or "wgkv" (keys with sigmoid(score) >=
                  threshold), "lte" (keys with sigmoid(score) > 0.5, of which `budget` at most), "dms" (keys
                  with sigmoid(score) <= 0.5: the score is the logit of the eviction; a LinearScorer or an
                  MLPScorer of [k; v], or a UtilityPredictor, stands for the neuron of the paper), "streaming"
                  (StreamLLM+: weights trained under sinks and a window)
    threshold     tau of spkv and wgkv, a probability in [0, 1]; 0.5 for the others
    budget        long-range keys per KV head, without sinks and window; None: no cap, or that of policy().
                  LTE's cap b is budget + sinks. None for dms and streaming
    gamma_range   (gamma_min, gamma_max): log gamma = log(gamma_min) + sigmoid(alpha) * (log(gamma_max) -
                  log(gamma_min)) with the parameter alpha [layers, heads] (KVpop, eq. 21); None: no decay.
                  Of kvpop alone, where the default is the paper's range

    alpha starts at 0, in the middle, and has some units to go: give it a rate some 30 times the scorers' in a
    parameter group of its own, as parameter_groups does. Raises ValueError with one sentence for an argument
    that its system does not have.
    """

    def __init__(
        self,
        layers,
        *,
        window,
        sinks=0,
        system="kvpop",
        threshold=0.5,
        budget=None,
        gamma_range=_DEFAULT_DECAY,
    ):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        _check_system(system, self.layers, threshold, budget)
        if system != "kvpop" and gamma_range is _DEFAULT_DECAY:
            gamma_range = None
        self.window, self.sinks, self.gamma_range = window, sinks, gamma_range
        self.system, self.threshold, self.budget = system, threshold, budget
        if gamma_range is None:
            self.register_parameter("alpha", None)
        else:
            if system != "kvpop" or not 0.0 < gamma_range[0] <= gamma_range[1] <= 1.0:
                allowed = (
                    "0 < gamma_min <= gamma_max <= 1" if system == "kvpop" else "None: KVpop has a decay"
                )
                raise ValueError(f"gamma_range: {gamma_range} is not allowed; it must be {allowed}")
            self.alpha = nn.Parameter(torch.zeros(len(self.layers), self.layers[0].heads))
        self.training_notes, self.score_quantiles = {}, None

    def parameter_groups(self, rate, decay_rate=30.0, weight_decay=1e-4):
        """Groups for an optimizer of torch.optim with the learning rate `rate`: matrices, with weight decay;
        the rest; and alpha, with `decay_rate` times the rate and no weight decay. train_scorer does the
        same."""
        if not decay_rate >= 0:
            raise ValueError(f"decay_rate: {decay_rate} is not allowed; it must be 0 or more")
        named = [(name, p) for name, p in self.named_parameters() if name != "alpha" and p.requires_grad]
        matrices = [p for _, p in named if p.dim() >= 3]
        others = [p for _, p in named if p.dim() < 3]
        groups = [
            {"params": matrices, "lr": rate, "weight_decay": weight_decay},
            {"params": others, "lr": rate, "weight_decay": 0.0},
        ]
        if self.alpha is not None and self.alpha.requires_grad:
            groups.append({"params": [self.alpha], "lr": rate * decay_rate, "weight_decay": 0.0})
        return [group for group in groups if group["params"]]

    @property
    def reads_hidden(self):
        """Whether scores are those of hidden states."""
        return len(self.layers) > 0 and isinstance(self.layers[0], UtilityPredictor)

    @property
    def heads(self):
        """KV heads of the scorers; None without scorers."""
        return self.layers[0].heads if self.layers else None

    def log_gamma(self, layer):
        """[heads], or None without a decay; a function of alpha."""
        if self.alpha is None:
            return None
        low, high = map(math.log, self.gamma_range)
        return low + torch.sigmoid(self.alpha[layer]) * (high - low)

    def policy(self, layer, budget=None):
        """The policy of one layer: SPKV, WGKV, LTE, DMS, KVpop or StreamingLLM with these numbers and the
        layer's scorer. `budget`: long-range keys per KV head in place of the file's; beside a gate without a
        cap it is one. StreamingLLM's window is wider by it."""
        budget = self.budget if budget is None else budget
        if self.system == "streaming":
            return StreamingLLM(self.sinks, self.window + (budget or 0))
        scorer = self.layers[layer]
        if self.system == "dms":
            if budget is not None:
                raise ValueError(f"budget: {budget} is not allowed for dms; its scores rank no keys")
            return DMS(self.window, Sink(self.sinks), scorer)
        if self.system == "kvpop":
            if budget is None:
                raise ValueError("budget: None is not allowed for kvpop; it must be a number of keys")
            log_gamma = self.log_gamma(layer)
            decay = () if log_gamma is None else (Decay(log_gamma=log_gamma),)
            return KVpop(self.sinks, self.window, budget, *decay, scorer)
        if self.system == "lte" and budget is not None:
            return LTE(self.sinks, self.window, budget, scorer)
        if self.system == "lte":
            return Policy(Sink(self.sinks), Window(self.window), ThresholdGate(strict=True), scorer)
        cap = () if budget is None else (TopKBudget(budget),)
        make = SPKV if self.system == "spkv" else WGKV
        return make(self.window, Sink(self.sinks), *cap, scorer, tau=self.threshold)

    def save(self, path, *, small=False):
        """Writes a file that load and the example programs read (docs/training/files.md has the format).
        Tensors are float32; bfloat16 for parameters of that dtype, and with `small` for a scorer's matrices,
        which halves the file. With parameters that FSDP2 has sharded every rank calls it, and rank 0
        writes."""
        low, high = self.gamma_range or (1.0, 1.0)
        metadata = {f"training.{key}": value for key, value in self.training_notes.items()}
        metadata |= {
            "format": _FORMAT,
            "kind": self.layers[0].kind if self.layers else _NO_SCORER,
            "policy": self.system,
            "layers": len(self.layers),
            "sinks": self.sinks,
            "window": self.window,
            "gamma_min": f"{low:.9g}",
            "gamma_max": f"{high:.9g}",
        }
        if self.system not in ("kvpop", "streaming"):
            metadata["threshold"] = f"{self.threshold:.9g}"
        if self.budget is not None:
            metadata["budget"] = self.budget
        if self.layers:
            metadata |= _metadata_of(self.layers[0])
        tensors = {
            f"layers.{layer}.{name}": parameter
            for layer, scorer in enumerate(self.layers)
            for name, parameter in scorer.named_parameters()
        }
        if self.alpha is not None:
            tensors["alpha"] = self.alpha
        rope = getattr(self.layers[0], "rope", None) if self.layers else None
        if rope is not None and rope.frequencies is not None:
            tensors[_FREQUENCIES] = rope.frequencies
        if self.score_quantiles is not None:
            tensors["score_quantiles"] = self.score_quantiles
        least = 2 if self.reads_hidden else 3  # dimensions of a matrix; most scorers have one per head
        for name, tensor in tensors.items():
            halved = small and name.startswith("layers.") and tensor.dim() >= least
            kept = torch.bfloat16 if halved or tensor.dtype == torch.bfloat16 else torch.float32
            tensors[name] = _whole(tensor.detach()).to("cpu", kept).contiguous()
        sharded = any(hasattr(parameter, "full_tensor") for parameter in self.parameters())
        if sharded and torch.distributed.get_rank() != 0:
            return
        with whole_path(path) as part:
            save_file(tensors, part, metadata={key: str(value) for key, value in metadata.items()})

    def share(self, first, last):
        """The scorers of KV heads `first` up to but not including `last`, with their decay: of one rank that
        holds these. Parameters are copies."""
        part = Scorers(
            [scorer.share(first, last) for scorer in self.layers],
            window=self.window,
            sinks=self.sinks,
            system=self.system,
            threshold=self.threshold,
            budget=self.budget,
            gamma_range=self.gamma_range,
        )
        if self.alpha is not None:
            part.alpha = nn.Parameter(self.alpha[:, first:last].detach().clone(), self.alpha.requires_grad)
        if self.score_quantiles is not None:
            part.score_quantiles = self.score_quantiles[:, first:last]
        part.training_notes = dict(self.training_notes)
        return part

    @classmethod
    def load(cls, path):
        """Reads such a file; parameters become float32 on the CPU. Raises ValueError with the file and what
        it lacks."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise ValueError(f"{path}: is not allowed; it must be whole safetensors: {error}") from None
        if metadata.get("norm", "0") not in _NORMS:
            raise ValueError(
                f"{path}: norm {metadata['norm']} is not allowed; it must be one of {', '.join(_NORMS)}"
            )
        kinds = (*_CLASSES, _NO_SCORER)
        if metadata.get("format") != _FORMAT or metadata.get("kind") not in kinds:
            raise ValueError(
                f"{path}: format {metadata.get('format')}, kind {metadata.get('kind')} is not allowed; "
                f"it must be {_FORMAT} of kind {', '.join(kinds)}"
            )
        try:
            scorers = cls._from_metadata(metadata, tensors)
        except KeyError as error:
            raise ValueError(f"{path}: no {error} in the metadata is not allowed; it must be there") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        scorers.score_quantiles = tensors.pop("score_quantiles", None)
        prefix = "training."
        scorers.training_notes = {
            key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)
        }
        wanted = {name: tuple(p.shape) for name, p in scorers.named_parameters()}
        found = {name: tuple(t.shape) for name, t in tensors.items()}
        if wanted != found:
            name = min(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
            raise ValueError(
                f"{path}: {name} of shape {found.get(name)} is not allowed; it must be {wanted.get(name)}"
            )
        scorers.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
        return scorers

    @classmethod
    def _from_metadata(cls, metadata, tensors):
        """Scorers with the numbers of a file's metadata. Files without a "policy" are KVpop's."""
        frequencies = tensors.pop(_FREQUENCIES, None)
        number = functools.partial(_number_of, metadata)
        count = number("layers", least=1, most=len(tensors)) if metadata["kind"] != _NO_SCORER else 0
        has_threshold = "threshold" in metadata or metadata.get("policy") in _THRESHOLDS
        gammas = (number("gamma_min", float), number("gamma_max", float))
        with torch.device("meta"):  # parameters are the file's
            return cls(
                [_scorer_of(metadata, frequencies) for _ in range(count)],
                window=number("window", least=1),
                sinks=number("sinks"),
                system=metadata.get("policy", "kvpop"),
                threshold=number("threshold", float) if has_threshold else 0.5,
                budget=number("budget") if "budget" in metadata else None,
                gamma_range=gammas if "alpha" in tensors else None,
            )


def _number_of(metadata, key, kind=int, *, least=0, most=2**31 - 1):
    """A number of a file's metadata, from `least` to `most`."""
    try:
        found = kind(metadata[key])
    except ValueError:
        allowed = "a whole number" if kind is int else "a number"
        raise ValueError(f"{key}: {metadata[key]!r} is not allowed; it must be {allowed}") from None
    if not least <= found <= most:
        raise ValueError(f"{key}: {metadata[key]} is not allowed; it must be {least} to {most}")
    return found


def _size_of(metadata, key):
    return _number_of(metadata, key, least=1, most=_MOST)


def _check_system(system, layers, threshold, budget):
    if system not in SYSTEMS:
        raise ValueError(f"system: {system!r} is not allowed; it must be one of {', '.join(SYSTEMS)}")
    if system == "streaming":
        if layers:
            raise ValueError(f"layers: {len(layers)} scorers are not allowed for streaming; it has none")
    elif not layers or any(type(s) is not type(layers[0]) for s in layers):
        raise ValueError("layers: scorers of several kinds are not allowed; they must be of one")
    if system in _THRESHOLDS:
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold: {threshold} is not allowed; it must be a probability in [0, 1]")
    elif threshold != 0.5:
        raise ValueError(f"threshold: {threshold} is not allowed for {system}; it must be 0.5")
    if budget is not None and (system in ("dms", "streaming") or budget < 0):
        allowed = "None" if system in ("dms", "streaming") else "0 or more, or None"
        raise ValueError(f"budget: {budget} is not allowed for {system}; it must be {allowed}")


def _whole(tensor):
    """All of a parameter, which FSDP2 may have sharded; every rank calls it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _metadata_of(scorer):
    """The sizes and numbers of a scorer, as a file has them."""
    if isinstance(scorer, UtilityPredictor):
        return {"heads": scorer.heads, "width": scorer.width, "hidden": scorer.hidden}
    hidden, d_qk, d_v, delay = scorer.sizes()
    metadata = {
        "heads": scorer.heads,
        _KEY_WIDTH: scorer.head_dim,
        _VALUE_WIDTH: scorer.value_dim,
        # Sizes that the kind lacks; readers want numbers above 0.
        "hidden": hidden or 128,
        "d_qk": d_qk or scorer.head_dim,
        "d_v": d_v or max(1, scorer.value_dim // 2),
        "delay": delay,
        "gate_softcap": f"{scorer.gate_softcap:g}",
        "norm": next(text for text, norm in _NORMS.items() if norm == scorer.norm),
        "skip": int(getattr(scorer, "skip", None) is not None),
    }
    if scorer.rope is not None and scorer.rope.layout is not None:
        metadata |= {
            "rope_layout": scorer.rope.layout,
            "rope_base": f"{scorer.rope.base:.9g}",
            "rope_dims": scorer.rope.dims,
        }
    return metadata


def _scorer_of(metadata, frequencies):
    """A scorer with the sizes that a file's metadata gives."""
    kind = metadata["kind"]
    if kind == "utility":
        return UtilityPredictor(*(_size_of(metadata, key) for key in ("heads", "width", "hidden")))
    sizes = ("heads", _KEY_WIDTH, _VALUE_WIDTH, "hidden", "d_qk", "d_v")
    number = {key: _size_of(metadata, key) for key in sizes}
    number["delay"] = _number_of(metadata, "delay")
    sizes, value_dim = (number["heads"], number[_KEY_WIDTH]), number[_VALUE_WIDTH]
    rope = None
    if "rope_layout" in metadata:
        rope = Rope(
            metadata["rope_layout"],
            _number_of(metadata, "rope_base", float, least=1e-6),
            _number_of(metadata, "rope_dims", most=number[_KEY_WIDTH]),
            frequencies,
        )
    if kind == "linear":
        return LinearScorer(*sizes, value_dim)
    if kind == "mlp":
        return MLPScorer(*sizes, number["hidden"], value_dim)
    if kind == "write_gate":
        return WriteGateScorer(*sizes, number["hidden"], value_dim, rope=rope)
    if kind == "conv":
        return ConvScorer(*sizes, value_dim, delay=number["delay"], rope=rope)
    return mLSTMScorer(
        *sizes,
        value_dim,
        delay=number["delay"],
        d_qk=number["d_qk"],
        d_v=number["d_v"],
        gate_softcap=_number_of(metadata, "gate_softcap", float),
        norm=_NORMS[metadata["norm"]],
        skip=metadata["skip"] == "1",
    )
