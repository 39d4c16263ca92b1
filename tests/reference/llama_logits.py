#!/usr/bin/env python3
"""A Llama's logits in NumPy, written from the architecture's description and sharing nothing
with the C++ engine.

    llama_logits.py small  OUT.json              vectors from small random models that a test can rebuild
    llama_logits.py model FOLDER TOKENS OUT.json vectors from a converted model; TOKENS is a JSON list of ids

Logits are float64 throughout. Beside them stands fp32_error: how far the same formulas stray when NumPy
computes them in float32, which puts the C++ engine's error in proportion.
"""
import json
import pathlib
import sys

import numpy as np


def load_safetensors(path, dtype=np.float64):
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    header_bytes = int(raw[:8].view("<u8")[0])
    header = json.loads(bytes(raw[8:8 + header_bytes]))
    data = raw[8 + header_bytes:]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        piece = bytes(data[begin:end])
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(piece, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(piece, {"F32": "<f4", "F16": "<f2"}[entry["dtype"]])
        tensors[name] = values.astype(dtype).reshape(entry["shape"])
    return tensors


def load_model(folder, dtype=np.float64):
    folder = pathlib.Path(folder)
    config = json.loads((folder / "config.json").read_text())
    return config, load_safetensors(folder / "model.safetensors", dtype)


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(x, positions, theta):
    """x is [T, heads, D]; element i turns with element i + D/2."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions, np.float64)[:, None] * float(theta) ** (-np.arange(half) / half)
    turn = (np.cos(angles) + 1j * np.sin(angles))[:, None, :]
    turn = turn.astype(np.complex64 if x.dtype == np.float32 else complex)
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


def logits(config, weights, tokens):
    """[T, vocab], in the dtype of the weights."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    eps, theta = config["rms_norm_eps"], config["rope_theta"]
    count = len(tokens)
    positions = np.arange(count)
    hidden = weights["model.embed_tokens.weight"][np.asarray(tokens)]
    future = np.triu(np.ones((count, count), bool), 1)
    for layer in range(config["num_hidden_layers"]):
        def w(name):
            return weights[f"model.layers.{layer}.{name}.weight"]
        x = rms_norm(hidden, w("input_layernorm"), eps)
        q = rope((x @ w("self_attn.q_proj").T).reshape(count, heads, dim), positions, theta)
        k = rope((x @ w("self_attn.k_proj").T).reshape(count, kv_heads, dim), positions, theta)
        v = (x @ w("self_attn.v_proj").T).reshape(count, kv_heads, dim)
        k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
        score = np.einsum("qhd,khd->hqk", q, k) / np.asarray(np.sqrt(dim), q.dtype)
        score[:, future] = -np.inf
        score = np.exp(score - score.max(-1, keepdims=True))
        score /= score.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", score, v).reshape(count, heads * dim)
        hidden = hidden + attended @ w("self_attn.o_proj").T
        x = rms_norm(hidden, w("post_attention_layernorm"), eps)
        gate = x @ w("mlp.gate_proj").T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (x @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
    hidden = rms_norm(hidden, weights["model.norm.weight"], eps)
    output = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return hidden @ weights[output].T


# --- small random models, the same in tests/examples/test_llama_engine.cpp ---

def splitmix64(count):
    """The generator's first `count` outputs from state 0."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def shapes(config):
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "self_attn.q_proj.weight", (q, hidden)
        yield layer + "self_attn.k_proj.weight", (kv, hidden)
        yield layer + "self_attn.v_proj.weight", (kv, hidden)
        yield layer + "self_attn.o_proj.weight", (hidden, q)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        yield layer + "mlp.gate_proj.weight", (inner, hidden)
        yield layer + "mlp.up_proj.weight", (inner, hidden)
        yield layer + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def small_model(config):
    """Every weight has at most 8 significant bits, so BF16, F16 and F32 all hold it exactly: v = n / 128 with
    n = -128..127 from the generator's top byte, v / 4 in a projection, 1 + v in a norm (1 for n = -128)."""
    names = dict(shapes(config))
    total = sum(int(np.prod(shape)) for shape in names.values())
    values = ((splitmix64(total) >> np.uint64(56)).astype(np.int64) - 128) / 128.0
    weights, at = {}, 0
    for name, shape in names.items():
        v = values[at:at + int(np.prod(shape))].reshape(shape)
        at += v.size
        weights[name] = np.where(v == -1, 1.0, 1 + v) if "norm" in name else v / 4 if "proj" in name else v
    return weights


SMALL = [
    dict(vocab_size=61, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
         num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0,
         tie_word_embeddings=False),
    dict(vocab_size=61, hidden_size=40, intermediate_size=96, num_hidden_layers=2, num_attention_heads=5,
         num_key_value_heads=1, head_dim=8, rms_norm_eps=1e-6, rope_theta=100000.0, tie_word_embeddings=True),
]


def case(config, weights, tokens, rows, columns):
    exact = logits(config, weights, tokens)
    rough = logits(config, {name: w.astype(np.float32) for name, w in weights.items()}, tokens)
    assert exact.dtype == np.float64 and rough.dtype == np.float32
    return dict(config=config, tokens=list(map(int, tokens)), rows=rows, columns=columns,
                fp32_error=float(np.abs(rough - exact).max()), largest=float(np.abs(exact).max()),
                logits=[[float(f"{exact[r, c]:.10g}") for c in columns] for r in rows])


def main(arguments):
    if len(arguments) == 2 and arguments[0] == "small":
        cases = []
        for config in SMALL:
            config = dict(model_type="llama", max_position_embeddings=64, **config)
            tokens = [(7 * i * i + 3 * i + 5) % config["vocab_size"] for i in range(24)]
            cases.append(case(config, small_model(config), tokens, list(range(0, 24, 3)) + [23],
                              list(range(config["vocab_size"]))))
    elif len(arguments) == 4 and arguments[0] == "model":
        config, weights = load_model(arguments[1])
        tokens = json.loads(arguments[2])
        rows = sorted({0, len(tokens) // 2, len(tokens) - 1})
        cases = [case(config, weights, tokens, rows, list(range(0, config["vocab_size"], 151)))]
    else:
        sys.exit(__doc__)
    pathlib.Path(arguments[-1]).write_text(json.dumps(cases).replace("], [", "],\n[") + "\n")
    for c in cases:
        print(f"largest logit {c['largest']:.4g}, fp32 error {c['fp32_error']:.3g}")


if __name__ == "__main__":
    main(sys.argv[1:])
