"""kvpolicy.training on models that differ from Llama: how they rotate keys, windows of their own."""

import pytest
import torch
import transformers
from kvpolicy.training import attend_with, attention_modules, rope_of
from training_cases import run

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2}
LOCAL = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


def model_of(family, **changes):
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(family, **SIZES | changes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


ROTATIONS = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "cohere": {},
    "glm": {"partial_rotary_factor": 0.5},
    "helium": {},
    "ernie4_5": {},
    "gemma2": {},
    "gemma3_text": LOCAL,
}


@pytest.mark.parametrize("family", ROTATIONS)
def test_keys_before_rope(family):
    """Undoing rope_of's rotation gives the keys of position 0 wherever a token stands."""
    model, seen = model_of(family, **ROTATIONS[family]), {}

    def attend(inputs):
        seen[inputs.layer] = inputs.k
        return torch.zeros_like(inputs.q)

    ids = torch.full((1, 9), 7)
    with torch.no_grad(), attend_with(model, attend):
        model(ids, use_cache=False)
    k = seen[1]
    assert not torch.allclose(k[:, :, :1].expand_as(k), k, atol=1e-3)
    found = rope_of(model.config).undo(k, torch.arange(9)[None])
    torch.testing.assert_close(found, k[:, :, :1].expand_as(k), rtol=1e-4, atol=1e-5)


def test_models_without_one_rotation():
    config = transformers.OPTConfig(num_hidden_layers=1)
    assert rope_of(config).layout is None
    for family in ("smollm3", "cohere2", "exaone4"):
        config = transformers.AutoConfig.for_model(family, **SIZES | {"num_hidden_layers": 4})
        with pytest.raises(NotImplementedError, match=f"model_type: '{family}' is not allowed"):
            rope_of(config)


METHODS = {
    ("SPKV", "spkv"): ["--window", "8"],
    ("WGKV", "wgkv"): ["--window", "8", "--hidden", "8"],
    ("LTE", "lte"): ["--window", "16", "--cap", "8"],
    ("DMS", "dms"): ["--window", "8"],
    ("KVpop", "kvpop"): ["--window", "8", "--budgets", "32", "--hidden", "8"],
    ("StreamingLLM", "streaming_llm"): ["--budgets", "32"],
}
RUN = ["--tokens", "64", "--task", "recall", "--batch", "1", "--steps", "1", "--evaluate-samples", "1"]
RUN += ["--device", "cpu"]


@pytest.mark.parametrize("method", METHODS)
def test_methods_leave_windows_of_layers_alone(method, tmp_path):
    """Each method trains beside local layers, in which it is the model's own attention."""
    model_of("gemma2", **LOCAL, attn_logit_softcapping=5.0).save_pretrained(tmp_path / "model")
    trainer, _ = run(*method, tmp_path / "out", *RUN, *METHODS[method], "--model", str(tmp_path / "model"))
    method = trainer.method
    assert trainer.step == 1 and method.windowed == {0} and set(method.parts) <= {1}
    seen, ids = [], trainer.batch(trainer.train_data, 0)[0]
    attend = method.attend

    def watch(inputs):
        seen.append(inputs.layer)
        return attend(inputs)

    method.attend = watch
    method(ids, torch.ones(1, 64))
    assert set(seen) == {1}


def test_models_without_full_layers_are_refused(tmp_path):
    model_of("mistral", sliding_window=5).save_pretrained(tmp_path / "model")
    for number, (method, options) in enumerate(METHODS.items()):
        with pytest.raises(SystemExit, match="--model: .*each of its layers has a window of its own"):
            run(*method, tmp_path / f"{number}", *RUN, *options, "--model", str(tmp_path / "model"))


def test_attention_modules_need_a_key_projection():
    with pytest.raises(ValueError, match="model: GPTNeoXForCausalLM is not allowed"):
        attention_modules(
            transformers.GPTNeoXForCausalLM(
                transformers.GPTNeoXConfig(
                    vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
                )
            )
        )
