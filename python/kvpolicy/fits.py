"""Whether the scorers of a file fit a model of transformers: layers, KV heads, and the rotation of keys."""

import math

import torch

from kvpolicy.scorers import Rope

# Models of transformers whose pairs are neighbors, and those whose full layers do not rotate their keys.
_INTERLEAVED = ("cohere", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium")
_WINDOWS_ROTATE = ("cohere2", "cohere2_moe", "exaone4", "exaone_moe")


def kv_heads_of(config):
    """KV heads of a text model's config."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_dim_of(config):
    """Numbers of a head's query and key."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rope_of(config):
    """How a model rotates the keys of its layers of full attention, for scorers that look at keys before
    RoPE; Rope(None) for a model without RoPE. Raises NotImplementedError for a rotation whose frequencies
    depend on the length, and for layers of full attention of which some rotate their keys and some do not."""
    config = config.get_text_config(decoder=True)
    skips = 0 in (getattr(config, "no_rope_layers", None) or ()) or config.model_type in _WINDOWS_ROTATE
    if skips:
        raise NotImplementedError(
            f"model_type: {config.model_type!r} is not allowed; all layers must rotate their keys"
        )
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    found = found.get("full_attention", found)  # by type of layer
    if not found and getattr(config, "rope_theta", None) is None:
        return Rope(None)
    kind = found.get("rope_type", "default")
    if kind != "default":
        raise NotImplementedError(f"rope_type: {kind!r} is not allowed; it must be 'default'")
    base = found.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
    share = found.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    layout = "interleaved" if config.model_type in _INTERLEAVED else "half_split"
    # int() as the models of transformers count it: the numbers that they rotate, whatever a share rounds to.
    return Rope(layout, float(base), 0 if share == 1.0 else int(head_dim_of(config) * share))


def check_fits(scorers, config, path):
    """Raises ValueError, in a sentence with the file's `path`, where the Scorers are of other layers or KV
    heads than a model's config, or undo another rotation of keys. A rotation is compared where a scorer
    undoes one; one by frequencies of its own only with a model whose frequencies are powers of a base."""
    if not scorers.layers:
        return
    config = config.get_text_config(decoder=True)
    found = len(scorers.layers), scorers.heads
    wanted = config.num_hidden_layers, kv_heads_of(config)
    if found != wanted:
        raise ValueError(
            f"{path}: scorers of {found[0]} layers, {found[1]} heads are not allowed; the model has "
            f"{wanted[0]} layers, {wanted[1]} KV heads"
        )
    rope = getattr(scorers.layers[0], "rope", None)
    if rope is None or rope.layout is None:
        return
    try:
        model_rope = rope_of(config)
    except NotImplementedError as error:
        if rope.frequencies is not None:
            return
        raise ValueError(f"{path}: scorers for {_rotated(rope, scorers)} are not allowed: {error}") from None
    if not _same_rotation(rope, model_rope, scorers.layers[0].head_dim):
        raise ValueError(
            f"{path}: scorers for {_rotated(rope, scorers)} are not allowed; the model has "
            f"{_rotated(model_rope, scorers)}"
        )


def _rotated(rope, scorers):
    if rope.layout is None:
        return "keys without RoPE"
    rates = f"theta {rope.base:g}" if rope.frequencies is None else "frequencies of its own"
    return f"keys with RoPE {rope.layout}, {rates}, {rope.dims or scorers.layers[0].head_dim} numbers"


def _same_rotation(rope, other, head_dim):
    """Whether `rope` is the rotation `other`, which has a base."""
    dims = rope.dims or head_dim
    if rope.layout != other.layout or dims != (other.dims or head_dim):
        return False
    if rope.frequencies is None:
        return math.isclose(rope.base, other.base, rel_tol=1e-8)  # a file has nine digits
    exact = other.base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    # Of float32: the frequency is rounded, and before it its exponent, of at most log(base).
    error = (2 + abs(math.log(other.base))) * 2.0**-23
    return bool(((rope.frequencies.cpu().double() - exact).abs() <= error * exact).all())
