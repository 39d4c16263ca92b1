"""The models of the training programs: the byte model, a folder of transformers, or a small one from
scratch."""

import hashlib
import pathlib

import torch
from kvpolicy import evaluation
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = {
    "byte": ROOT / "examples" / "models" / "byte-llama",
    "smollm2": ROOT / "models" / "smollm2-135m",
}


def load(name, *, dtype=torch.float32, device="cpu"):
    """(model, tokenizer). `name`: "byte", "smollm2" (tools/get_smollm2), or a folder. The tokenizer is
    None where tokens are bytes."""
    folder = pathlib.Path(FOLDERS.get(name, name))
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"model: {name} is not allowed; it must be byte, smollm2 (after tools/get_smollm2), scratch, or "
            "a folder of transformers"
        )
    return evaluation.load(folder, dtype=dtype, device=device)


def from_scratch(*, vocabulary=256, width=128, layers=4, heads=4, kv_heads=2, length=4096, device="cpu"):
    """A small Llama with random weights, drawn from torch's generator."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=max(16, width // heads),
        max_position_embeddings=length,
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).to(device)


# What of a config says how the weights are used.
CONFIG = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "intermediate_size", "hidden_act", "rms_norm_eps", "tie_word_embeddings"),
    *("rope_parameters", "rope_theta", "rope_scaling", "sliding_window", "layer_types"),
)


@torch.no_grad()
def fingerprint(model, *, weights=True):
    """A hash of the config and the weights, by which a checkpoint knows the model that its run started from.
    Weights count as bfloat16, so that a model in float32 is the same as on a GPU; every number counts."""
    config = model.config.to_dict()
    found = hashlib.sha256(repr([config.get(name) for name in CONFIG]).encode())
    for name, parameter in sorted(model.named_parameters()) if weights else ():
        found.update(f"{name} {tuple(parameter.shape)} {_checksum(parameter)}".encode())
    return found.hexdigest()[:16]


def _checksum(tensor, *, part=1 << 22):
    """Sum over i of (2 i + 1) (bits of number i), modulo 2^64: the same on all devices. In parts, each with
    64 bits per number of it."""
    total, bits = 0, tensor.detach().flatten()
    for at in range(0, len(bits), part):
        some = bits[at : at + part].to(torch.bfloat16).view(torch.int16).long()
        places = torch.arange(at, at + len(some), device=some.device)
        total += ((2 * places + 1) * some).sum().item()
    return total % (1 << 64)
