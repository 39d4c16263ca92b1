"""Trains gates and scorers through a transformers model: the attention of its layers by a function of yours.

    with attend_with(model, attend):
        logits = model(ids).logits

calls attend(inputs) in each layer, with what a gate reads and what attention reads; the result is the layer's
attention. It is differentiable wherever `attend` is. docs/training/wgkv.md has a short program,
examples/training has whole ones.
"""

import contextlib
import dataclasses
from typing import Optional

import torch

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ImportError("kvpolicy.training needs transformers: pip install transformers") from error

from kvpolicy.fits import rope_of

__all__ = ["LayerInputs", "attend_with", "attention_modules", "rope_of"]

NAME = "kvpolicy_training"
_SOFT_CAP = "softcap"  # transformers' argument


@dataclasses.dataclass
class LayerInputs:
    """What the attention of one layer reads.

    layer            number of the layer
    states           [B, S, width], the hidden states that the layer's projections read
    q, k, v          [B, Hq, S, Dk], [B, Hkv, S, Dk], [B, Hkv, S, Dv], q and k after RoPE, in the dtype of the
                     projections, or under autocast in its dtype
    sm_scale         factor of the logits
    logits_soft_cap  soft cap of the logits, 0 without one
    window           the layer's own sliding window, None for full attention
    """

    layer: int
    states: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sm_scale: float
    logits_soft_cap: float
    window: Optional[int]

    @property
    def numbers(self):
        """The arguments of attend, causal_lse and future_mass."""
        return {"sm_scale": self.sm_scale, "logits_soft_cap": self.logits_soft_cap}


def attention_modules(model):
    """The attention modules of a model, in the order of layers: those with a layer_idx and a key projection.
    Raises ValueError for a model without them."""
    found = {
        module.layer_idx: module
        for module in model.modules()
        if getattr(module, "layer_idx", None) is not None and hasattr(module, "k_proj")
    }
    if not found or sorted(found) != list(range(len(found))):
        raise ValueError(
            f"model: {type(model).__name__} is not allowed; it must be a decoder of transformers whose "
            "layers all have an attention module with k_proj"
        )
    return [found[layer] for layer in range(len(found))]


@contextlib.contextmanager
def attend_with(model, attend):
    """A context in which each attention layer of `model`, a decoder of transformers, is attend(LayerInputs),
    which returns [B, Hq, S, Dv]. Forward passes take whole samples, without a cache and without padding:
    others raise NotImplementedError, as dropout and learned sinks do. Within such a context a second one of
    the same model raises RuntimeError. torch.compile traces `attend` with the layers, without graph breaks
    where `attend` has none: model.base_model.compile(). With activation checkpointing the backward pass calls
    `attend` again, and must be within the context."""
    config = model.config.get_text_config(decoder=True)
    modules = attention_modules(model)
    if any(hasattr(module, "_kvpolicy_attend") for module in modules):
        raise RuntimeError("attend_with: within another of the same model is not allowed; end that one first")
    before, hooks = config._attn_implementation, []
    config._attn_implementation = NAME
    try:
        for module in modules:
            module._kvpolicy_attend = attend
            hooks.append(module.register_forward_pre_hook(_keep_states, with_kwargs=True))
        yield
    finally:
        config._attn_implementation = before
        for hook in hooks:
            hook.remove()
        for module in modules:
            module.__dict__.pop("_kvpolicy_attend", None)
            module.__dict__.pop("_kvpolicy_states", None)


def _keep_states(module, arguments, named):
    module.__dict__["_kvpolicy_states"] = named["hidden_states"] if "hidden_states" in named else arguments[0]


def _attention(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, **rest
):
    """The attention function of AttentionInterface."""
    for name, refused in (
        ("a model outside attend_with", not hasattr(module, "_kvpolicy_attend")),
        ("dropout", bool(dropout)),
        ("a cache", key.shape[2] != query.shape[2]),
        ("learned sinks", rest.get("s_aux") is not None),
        ("an attention that is not causal", not getattr(module, "is_causal", True)),
    ):
        if refused:
            raise NotImplementedError(f"{name} is not allowed in training through kvpolicy; leave it out")
    rows = [query, key, value]
    if torch.is_autocast_enabled(query.device.type):
        rows = [x.to(torch.get_autocast_dtype(query.device.type)) for x in rows]
    inputs = LayerInputs(
        module.layer_idx,
        module._kvpolicy_states,
        *rows,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        rest.get(_SOFT_CAP) or 0.0,
        sliding_window or None,
    )
    return module._kvpolicy_attend(inputs).transpose(1, 2), None


def _mask(**arguments):
    """The mask function of AttentionMaskInterface: causal, so none."""
    padding = arguments.get("attention_mask")
    if padding is not None and not padding.bool().all():
        raise NotImplementedError(
            "padding is not allowed in training through kvpolicy; cut samples to one length"
        )


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
