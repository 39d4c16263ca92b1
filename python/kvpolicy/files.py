"""Files of trained scorers: safetensors, the format of train_scorer (docs/training.md)."""

import math

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from kvpolicy.policy import Decay, KVpop
from kvpolicy.scorers import (
    ConvScorer,
    LinearScorer,
    MLPScorer,
    Rope,
    UtilityPredictor,
    WriteGateScorer,
    mLSTMScorer,
)

_FORMAT = "kvpolicy-scorers-1"
# The names of the widths of keys and values in a file.
_KEY_WIDTH, _VALUE_WIDTH = "dim_k", "dim_v"
_CLASSES = {
    scorer.kind: scorer
    for scorer in (LinearScorer, MLPScorer, mLSTMScorer, WriteGateScorer, ConvScorer, UtilityPredictor)
}
# The frequencies of a Rope, if it has some.
_FREQUENCIES = "rope_frequencies"
# What "norm" of a file says of an mLSTM.
_NORMS = {"0": False, "1": "rms", "layer": "layer"}


class Scorers(nn.Module):
    """One scorer per layer, with the decay of each KV head.

    layers        a sequence of scorers of one kind and size
    window, sinks of the policy that they are trained for
    gamma_range   (gamma_min, gamma_max): log gamma = log(gamma_min) + sigmoid(alpha) * (log(gamma_max) -
                  log(gamma_min)) with the parameter alpha [layers, heads] (KVpop, eq. 21; the default is the
                  paper's range); None: no decay

    alpha starts at 0, in the middle, and has some units to go: give it a rate some 30 times the scorers' in a
    parameter group of its own, as parameter_groups does.
    """

    def __init__(self, layers, *, window, sinks=0, gamma_range=(0.999, 0.999999)):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        if not self.layers or any(type(s) is not type(self.layers[0]) for s in self.layers):
            raise ValueError("layers: scorers of several kinds are not allowed; they must be of one")
        self.window, self.sinks, self.gamma_range = window, sinks, gamma_range
        if gamma_range is None:
            self.register_parameter("alpha", None)
        else:
            if not 0.0 < gamma_range[0] <= gamma_range[1] <= 1.0:
                raise ValueError(
                    f"gamma_range: {gamma_range} is not allowed; it must be 0 < gamma_min <= gamma_max <= 1"
                )
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

    def log_gamma(self, layer):
        """[heads], or None without a decay; a function of alpha."""
        if self.alpha is None:
            return None
        low, high = map(math.log, self.gamma_range)
        return low + torch.sigmoid(self.alpha[layer]) * (high - low)

    def policy(self, layer, budget):
        """KVpop's policy of one layer with a long-range budget per KV head."""
        log_gamma = self.log_gamma(layer)
        decay = () if log_gamma is None else (Decay(log_gamma=log_gamma),)
        return KVpop(self.sinks, self.window, budget, *decay, self.layers[layer])

    def save(self, path):
        """Writes a file that load reads; train_scorer and the example engine read those of mlp and mlstm.
        Tensors are float32; bfloat16 for parameters of that dtype. With parameters that FSDP2 has sharded
        every rank calls it, and rank 0 writes."""
        first = self.layers[0]
        low, high = self.gamma_range or (1.0, 1.0)
        metadata = {f"training.{key}": value for key, value in self.training_notes.items()}
        metadata |= {
            "format": _FORMAT,
            "kind": first.kind,
            "layers": len(self.layers),
            "sinks": self.sinks,
            "window": self.window,
            "gamma_min": f"{low:.9g}",
            "gamma_max": f"{high:.9g}",
        }
        metadata |= _metadata_of(first)
        tensors = {
            f"layers.{layer}.{name}": parameter
            for layer, scorer in enumerate(self.layers)
            for name, parameter in scorer.named_parameters()
        }
        if self.alpha is not None:
            tensors["alpha"] = self.alpha
        rope = getattr(first, "rope", None)
        if rope is not None and rope.frequencies is not None:
            tensors[_FREQUENCIES] = rope.frequencies
        if self.score_quantiles is not None:
            tensors["score_quantiles"] = self.score_quantiles
        for name, tensor in tensors.items():
            kept = tensor.dtype if tensor.dtype == torch.bfloat16 else torch.float32
            tensors[name] = _whole(tensor.detach()).to("cpu", kept).contiguous()
        sharded = any(hasattr(parameter, "full_tensor") for parameter in self.parameters())
        if sharded and torch.distributed.get_rank() != 0:
            return
        save_file(tensors, path, metadata={key: str(value) for key, value in metadata.items()})

    def share(self, first, last):
        """The scorers of KV heads `first` up to but not including `last`, with their decay: of one rank that
        holds these. Parameters are copies."""
        layers = [scorer.share(first, last) for scorer in self.layers]
        part = Scorers(layers, window=self.window, sinks=self.sinks, gamma_range=self.gamma_range)
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
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if metadata.get("norm", "0") not in _NORMS:
            raise ValueError(
                f"{path}: norm {metadata['norm']} is not allowed; it must be one of {', '.join(_NORMS)}"
            )
        if metadata.get("format") != _FORMAT or metadata.get("kind") not in _CLASSES:
            raise ValueError(
                f"{path}: format {metadata.get('format')}, kind {metadata.get('kind')} is not allowed; "
                f"it must be {_FORMAT} of kind {', '.join(_CLASSES)}"
            )
        frequencies = tensors.pop(_FREQUENCIES, None)
        try:
            layers = [_scorer_of(metadata, frequencies) for _ in range(int(metadata["layers"]))]
            gammas = (float(metadata["gamma_min"]), float(metadata["gamma_max"]))
            scorers = cls(
                layers,
                window=int(metadata["window"]),
                sinks=int(metadata["sinks"]),
                gamma_range=gammas if "alpha" in tensors else None,
            )
        except KeyError as error:
            raise ValueError(f"{path}: no {error} in the metadata is not allowed; it must be there") from None
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
        scorers.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        return scorers


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
    if scorer.rope is not None:
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
        return UtilityPredictor(*(int(metadata[key]) for key in ("heads", "width", "hidden")))
    number = {
        key: int(metadata[key])
        for key in ("heads", _KEY_WIDTH, _VALUE_WIDTH, "hidden", "d_qk", "d_v", "delay")
    }
    sizes, value_dim = (number["heads"], number[_KEY_WIDTH]), number[_VALUE_WIDTH]
    rope = None
    if "rope_layout" in metadata:
        rope = Rope(
            metadata["rope_layout"], float(metadata["rope_base"]), int(metadata["rope_dims"]), frequencies
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
        gate_softcap=float(metadata["gate_softcap"]),
        norm=_NORMS[metadata["norm"]],
        skip=metadata["skip"] == "1",
    )
