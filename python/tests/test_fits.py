"""Files of scorers that do not fit a model: layers, heads, and the rotation of keys that a scorer undoes."""

import re

import pytest
import torch

import kvpolicy as kvp

transformers = pytest.importorskip("transformers", minversion="5.0")
policies = pytest.importorskip("kvpolicy.evaluation.policies")

SIZES = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}


def model_of(**changes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | changes)).eval()


def loaders(path, model):
    """Both readers of a file for a model."""
    return {
        "cache": lambda: kvp.KVPolicyCache.from_pretrained(path, model),
        "evaluation": lambda: policies.trained(path, 16, model),
    }


def rotated(rope, model, kind="wgkv"):
    make = {
        "wgkv": lambda: kvp.WriteGateScorer(2, 16, 8, rope=rope),
        "lte": lambda: kvp.ConvScorer(2, 16, delay=16, rope=rope),
    }[kind]
    layers = [make() for _ in range(model.config.num_hidden_layers)]
    return kvp.Scorers(layers, window=16, system=kind)


@pytest.mark.parametrize("loader", ["cache", "evaluation"])
@pytest.mark.parametrize("kind", ["wgkv", "lte"])
def test_scorers_of_another_rotation_are_refused(tmp_path, kind, loader):
    """theta, layout and the rotated numbers of a key; frequencies in place of theta are compared, too."""
    path, base = tmp_path / "a.safetensors", {"rope_type": "default", "rope_theta": 500.0}
    model = model_of(rope_parameters=base)
    rates = 500.0 ** (-torch.arange(0, 16, 2) / 16)
    bent = rates.clone()
    bent[3] *= 1.0001
    theirs = "the model has keys with RoPE half_split, theta 500, 16 numbers"
    for rope, text in (
        (kvp.Rope("half_split", 500.0), None),
        (kvp.Rope("half_split", 500.0, 16), None),
        (kvp.Rope("half_split", 1.0, frequencies=rates), None),
        (kvp.Rope("half_split", 10000.0), "half_split, theta 10000, 16 numbers"),
        (kvp.Rope("half_split", 500.001), "half_split, theta 500.001, 16 numbers"),
        (kvp.Rope("interleaved", 500.0), "interleaved, theta 500, 16 numbers"),
        (kvp.Rope("half_split", 500.0, 8), "half_split, theta 500, 8 numbers"),
        (kvp.Rope("half_split", 500.0, frequencies=bent), "half_split, frequencies of its own, 16 numbers"),
    ):
        rotated(rope, model, kind).save(path)
        load = loaders(path, model)[loader]
        if text is None:
            load()
            continue
        sentence = f"{path}: scorers for keys with RoPE {text} are not allowed; {theirs}"
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            load()
    scaled = model_of(rope_parameters=base | {"rope_type": "linear", "factor": 2.0})
    rotated(kvp.Rope("half_split", 500.0), scaled, kind).save(path)
    with pytest.raises(ValueError, match="theta 500.* are not allowed: rope_type: 'linear' is not allowed"):
        loaders(path, scaled)[loader]()
    rotated(kvp.Rope("half_split", 500.0, frequencies=rates / 2), scaled, kind).save(path)
    loaders(path, scaled)[loader]()  # of frequencies that no config says


def test_scorers_without_a_rotation_fit_any(tmp_path):
    model, path = model_of(rope_parameters={"rope_type": "default", "rope_theta": 500.0}), tmp_path / "a"
    rotated(None, model, "lte").save(path)
    for load in loaders(path, model).values():
        load()


def test_scorers_of_other_sizes_are_refused(tmp_path):
    model, path = model_of(), tmp_path / "a.safetensors"
    layers = [kvp.UtilityPredictor(2, 64, 4) for _ in range(3)]
    kvp.Scorers(layers, window=16, system="spkv").save(path)
    for load in loaders(path, model).values():
        with pytest.raises(
            ValueError, match="a.safetensors: scorers of 3 layers, 2 heads are not allowed; the "
        ):
            load()
