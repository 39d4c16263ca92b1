"""Writes tests/vectors/gates: a tiny Llama, a file of gates for each system (kvp.Scorers.save), and what the
model's KVPolicyCache answers and holds with each. tests/examples/test_gates.cpp compares the engine of
examples/llama. Run it with the package of python/ installed; the files are committed.

    python3 tests/reference/make_gates.py
"""

import json
import pathlib

import kvpolicy as kvp
import torch
import transformers
from safetensors.torch import save_file

FOLDER = pathlib.Path(__file__).parents[1] / "vectors" / "gates"
LENGTH, STEPS, WINDOW, SINKS = 72, 12, 14, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float32",
}
ROPE = kvp.Rope("half_split", 100.0)
# The frequencies of the base, as an array of the file.
RATES = kvp.Rope("half_split", 1.0, frequencies=100.0 ** (-torch.arange(0, 8, 2) / 8))
KINDS = {
    "spkv": ("spkv", lambda: kvp.UtilityPredictor(2, 32, 6), {"threshold": 0.4}),
    "wgkv": ("wgkv", lambda: kvp.WriteGateScorer(2, 8, 6, rope=ROPE), {"threshold": 0.45}),
    "wgkv-capped": ("wgkv", lambda: kvp.WriteGateScorer(2, 8, 6, rope=RATES), {"budget": 11}),
    "lte": ("lte", lambda: kvp.ConvScorer(2, 8, delay=WINDOW, rope=ROPE), {"budget": 9}),
    "lte-mlp": ("lte", lambda: kvp.MLPScorer(2, 8, 5), {"budget": 9}),
    "dms-linear": ("dms", lambda: kvp.LinearScorer(2, 8), {}),
    "dms-mlp": ("dms", lambda: kvp.MLPScorer(2, 8, 5), {}),
    "dms-hidden": ("dms", lambda: kvp.UtilityPredictor(2, 32, 6), {}),
    "kvpop-linear": ("kvpop", lambda: kvp.LinearScorer(2, 8), {"budget": 12}),
    "streaming": ("streaming", None, {}),
}


def make_model():
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.mul_(20)  # attention that matters
        elif "norm" not in name:
            parameter.mul_(8)
    tensors = {name: x.contiguous() for name, x in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, FOLDER / "model.safetensors", metadata={"format": "pt"})
    (FOLDER / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    return model


def make_scorers(system, make, options, seed):
    torch.manual_seed(seed)
    layers = [make() for _ in range(2)] if make else []
    for layer in layers:
        for name, parameter in layer.named_parameters():
            torch.nn.init.normal_(parameter, std=0.1 if parameter.dim() < 2 or name == "b1" else 0.6)
    scorers = kvp.Scorers(layers, window=WINDOW, sinks=SINKS, system=system, gamma_range=None, **options)
    scorers.training_notes = {"model": "tests/vectors/gates", "recipe": "random weights", "seed": str(seed)}
    return scorers


def ask(model, path, ids):
    """The logits of the prompt's last token and of STEPS greedy ones after it, these tokens, the positions
    that each head holds after the last, and how far the best two logits are apart at least."""
    cache = kvp.KVPolicyCache.from_pretrained(path, model, max_draft_tokens=0)
    logits, given = [model(ids, past_key_values=cache).logits[0, -1]], []
    for _ in range(STEPS):
        given.append(logits[-1].argmax().item())
        logits.append(model(torch.tensor([given[-1:]]), past_key_values=cache).logits[0, -1])
    held = [sorted(cache.cache.retained(layer, 0, head)) for layer in range(2) for head in range(2)]
    margin = min((x.topk(2).values[0] - x.topk(2).values[1]).item() for x in logits)
    return torch.stack(logits), given, held, margin


def main():
    FOLDER.mkdir(exist_ok=True)
    model = make_model()
    ids = torch.randint(1, 48, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    found = {"prompt": ids[0].tolist(), "files": {}}
    for name, (system, make, options) in KINDS.items():
        path = FOLDER / f"{name}.safetensors"
        for seed in range(1, 200):  # one whose text has no near-ties, and whose gates are not all alike
            make_scorers(system, make, options, seed).save(path)
            logits, given, held, margin = ask(model, path, ids)
            beyond = [len(one) - WINDOW - SINKS for one in held]
            alike = system != "streaming" and (min(beyond) < 3 or max(beyond) > 62)
            if system == "streaming" or (margin > 0.02 and not alike):
                break
        found["files"][name] = {
            "text": given,
            "held": held,
            "logits": [[round(x, 4) for x in row] for row in logits.tolist()],
        }
        print(f"{name}: seed {seed}, entries beyond {beyond}, margin {margin:.3f}")
    (FOLDER / "expected.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
