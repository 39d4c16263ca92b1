"""KVPolicyCache in tiny random models of transformers: the models themselves where every key stays, and the
mask of the policy in plain PyTorch where not. SmolLM2-135M where tools/get_smollm2 has written it."""

import pathlib

import pytest
import torch

import kvpolicy as kvp

transformers = pytest.importorskip("transformers", minversion="5.0")
hf = pytest.importorskip("kvpolicy.transformers")

# The name that transformers 5 had from the start, and 5.24 calls `cache`.
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
ROOT = pathlib.Path(__file__).parents[2]
SMALL = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 60,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "layer_types": MIXED},
    "qwen3": {},
    "mistral": {"sliding_window": 9},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "gemma2": {"sliding_window": 9, "layer_types": MIXED, "attn_logit_softcapping": 3.0},
    "gpt_oss": {"sliding_window": 9, "layer_types": MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
}
FULL_FAMILIES = ["llama", "qwen3", "smollm3"]


def model_of(family, **changes):
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(family, **SMALL | FAMILIES[family] | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Attention that matters: large logits, and sinks that take a part of it.
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(12)
            if name.endswith("sinks"):
                parameter.normal_()
    return model


def tokens(length, batch=1, seed=5):
    return torch.randint(1, 60, (batch, length), generator=torch.Generator().manual_seed(seed))


def scorers_of(model, kind="mlstm", window=6, sinks=2):
    """One random scorer per layer."""
    config = model.config
    heads, dim = config.num_key_value_heads, config.head_dim
    layers = []
    torch.manual_seed(9)
    for _ in range(config.num_hidden_layers):
        made = {
            "linear": lambda: kvp.LinearScorer(heads, dim),
            "mlp": lambda: kvp.MLPScorer(heads, dim, hidden=8),
            "mlstm": lambda: kvp.mLSTMScorer(heads, dim, delay=window),
        }[kind]()
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        layers.append(made)
    return kvp.Scorers(layers, window=window, sinks=sinks)


SYSTEMS = ("spkv", "wgkv", "lte", "lte-uncapped", "dms", "dms-hidden", "wgkv-capped")


def gates_of(model, system, window=14, sinks=2):
    """Random gates of a system, about half of them open."""
    config = model.config
    heads, dim, width = config.num_key_value_heads, config.head_dim, config.hidden_size
    rope = kvp.Rope("half_split", config.rope_parameters["rope_theta"])
    system, _, kind = system.partition("-")
    options = {"lte": {"budget": 9}, "wgkv": {"threshold": 0.45}}.get(system, {})
    options |= {"uncapped": {"budget": None}, "capped": {"budget": 7}}.get(kind, {})
    torch.manual_seed(9)
    layers = []
    for _ in range(config.num_hidden_layers):
        made = {
            "spkv": lambda: kvp.UtilityPredictor(heads, width, 8),
            "wgkv": lambda: kvp.WriteGateScorer(heads, dim, 8, rope=rope),
            "lte": lambda: kvp.ConvScorer(heads, dim, delay=window, rope=rope),
            "dms": lambda: kvp.UtilityPredictor(heads, width, 8) if kind else kvp.LinearScorer(heads, dim),
        }[system]()
        for name, parameter in made.named_parameters():
            torch.nn.init.normal_(parameter, std=0.1 if name in ("b1", "b2", "readout_bias") else 0.5)
        layers.append(made)
    return kvp.Scorers(layers, window=window, sinks=sinks, system=system, gamma_range=None, **options)


# ---- the reference: attention through the mask of build_mask ----------------------------------------------


def masked(policies):
    """An attention function for whole sequences without a cache."""

    def function(module, query, key, value, mask, dropout=0.0, scaling=None, s_aux=None, **kwargs):
        policy = policies[module.layer_idx]
        k, v = key.detach(), value.detach()
        scores = torch.zeros(k.shape[:3])
        if isinstance(policy.scorer, kvp.UtilityPredictor):
            scores = policy.scorer(module.input_of_attention.detach())
        elif policy.scorer is not None:
            scores = policy.scorer(k, v)
        expiry = kvp.build_mask(policy, scores).expiry
        module.entries = (expiry[0] >= k.shape[2]).sum(-1)  # that the last query sees, by head
        at = torch.arange(k.shape[2])
        groups = query.shape[1] // k.shape[1]
        expiry = expiry.repeat_interleave(groups, 1)[:, :, None]
        seen = (at[None, :] <= at[:, None]) & (at[:, None] < expiry)
        logits = query @ k.repeat_interleave(groups, 1).transpose(-1, -2) * scaling
        if soft_cap := kwargs.get(hf._SOFT_CAP):
            logits = soft_cap * torch.tanh(logits / soft_cap)
        logits = logits.masked_fill(~seen, -torch.inf)
        if s_aux is not None:
            logits = torch.cat((logits, s_aux[None, :, None, None].expand(*logits.shape[:3], 1)), -1)
        weights = torch.softmax(logits, -1)[..., : k.shape[2]]
        return (weights @ v.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None

    return function


@torch.no_grad()
def reference(model, policies, ids):
    transformers.AttentionInterface.register("reference", masked(policies))
    implementation = model.config._attn_implementation
    model.config._attn_implementation = "reference"
    hooks = [
        layer.self_attn.register_forward_pre_hook(_remember_input, with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        return model(ids, use_cache=False).logits
    finally:
        model.config._attn_implementation = implementation
        for hook in hooks:
            hook.remove()


def _remember_input(module, arguments, options):
    module.input_of_attention = options["hidden_states"]


@torch.no_grad()
def forward(model, cache, ids, cuts, mask=None):
    """Logits of all tokens, given in chunks of the lengths `cuts`."""
    logits, at = [], 0
    for n in cuts:
        given = None if mask is None else mask[:, : at + n]
        positions = None
        if mask is not None:
            positions = (given.cumsum(-1) - 1).clamp(min=0)[:, at:]
        out = model(
            ids[:, at : at + n],
            attention_mask=given,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        logits.append(out.logits)
        at += n
    return torch.cat(logits, 1)


def generate(model, ids, cache=None, **options):
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None} | options
    torch.manual_seed(11)
    return model.generate(ids, past_key_values=cache, **options)


# ---- tests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_bound_it_is_the_model(family):
    model = model_of(family)
    ids = tokens(30)
    with torch.no_grad():
        want = model(ids).logits
    plain = generate(model, ids)
    cache = hf.KVPolicyCache(model, kvp.FULL)
    torch.testing.assert_close(forward(model, cache, ids, [13, 1, 16]), want, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 30
    cache.reset()
    assert torch.equal(generate(model, ids, cache), plain)
    # Our attention function without our cache is the model too.
    assert torch.equal(generate(model, ids), plain)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cuts", [[40], [1] * 40, [11, 1, 1, 20, 7]], ids=["whole", "steps", "chunks"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bounded_is_the_mask(family, cuts):
    model = model_of(family)
    scorers = scorers_of(model, "mlp")
    cache = hf.KVPolicyCache(model, lambda layer: scorers.policy(layer, 5))
    ids = tokens(40, batch=2)
    got = forward(model, cache, ids, cuts)
    torch.testing.assert_close(got, reference(model, cache.policies, ids), rtol=1e-4, atol=1e-4)
    unbounded = reference(model, [kvp.FULL] * 3, ids)
    assert (got - unbounded).abs().max() > 100 * (got - reference(model, cache.policies, ids)).abs().max()
    for layer, window in enumerate(cache.windows):
        assert cache.cache.usage(layer, 0, 0).size == (13 if window is None else window)


@pytest.mark.parametrize("family", FULL_FAMILIES)
@pytest.mark.parametrize("policy", ["linear", "mlstm", "gate", "window", "hybrid", "per layer"])
def test_policies(family, policy):
    model = model_of(family)
    options = {}
    if policy in ("linear", "mlstm", "hybrid"):
        scorers = scorers_of(model, "mlstm" if policy == "hybrid" else policy)
        given = [scorers.policy(layer, 4) for layer in range(3)]
        options = {"full_layers": [1]} if policy == "hybrid" else {}
    elif policy == "gate":
        given = [kvp.SPKV(5, scorer) for scorer in scorers_of(model, "mlp").layers]
    else:
        given = (
            kvp.StreamingLLM(2, 6)
            if policy == "window"
            else [kvp.StreamingLLM(1, 3), None, kvp.StreamingLLM(0, 8)]
        )
    cache = hf.KVPolicyCache(model, given, **options)
    assert policy not in ("hybrid", "per layer") or cache.policies[1] is kvp.FULL
    ids = tokens(40)
    got = forward(model, cache, ids, [20, 1, 1, 18])
    torch.testing.assert_close(got, reference(model, cache.policies, ids), rtol=1e-4, atol=1e-4)


def test_received_attention_runs():
    model = model_of("llama")
    ids = tokens(40)
    for policy in (kvp.H2O(6, 4), kvp.TOVA(8)):
        cache = hf.KVPolicyCache(model, policy)
        assert generate(model, ids, cache).shape == (1, 60)
        assert cache.cache.usage(0, 0, 0).size == policy.budgets[0] + policy.windows[0]
        assert cache.get_seq_length() == 59
    cache = hf.KVPolicyCache(model, kvp.SnapKV(6, window=4))
    logits = generate(model, ids, cache, output_logits=True, return_dict_in_generate=True).logits
    assert cache.cache.usage(0, 0, 0).size == 6 + 4 + 19
    # A prompt is dense under SnapKV.
    torch.testing.assert_close(logits[0], model(ids).logits[:, -1], rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match="assisted decoding"):
        generate(model, ids, hf.KVPolicyCache(model, kvp.H2O(6, 4)), prompt_lookup_num_tokens=3)


def test_pages_are_selected():
    """Quest reads all of a prompt, and the best pages of it in steps."""
    model, ids = model_of("llama"), tokens(60)
    plain = generate(model, ids)
    assert torch.equal(generate(model, ids, hf.KVPolicyCache(model, kvp.Quest(kvp.UNLIMITED))), plain)
    cache = hf.KVPolicyCache(model, kvp.Quest(2))
    got = forward(model, cache, ids, [59, 1])
    with torch.no_grad():
        want = model(ids).logits
    torch.testing.assert_close(got[:, :59], want[:, :59], rtol=1e-4, atol=1e-4)
    assert (got[:, 59] - want[:, 59]).abs().max() > 1e-2
    assert cache.cache.usage(0, 0, 0).size == 60


def bounded(model, **options):
    scorers = scorers_of(model)
    return hf.KVPolicyCache(model, lambda layer: scorers.policy(layer, 6), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_in_every_way(family):
    model = model_of(family)
    ids = tokens(30)
    plain = generate(model, ids, bounded(model))
    logits = reference(model, bounded(model).policies, plain[:, :-1])[:, 29:]
    assert torch.equal(logits.argmax(-1), plain[:, 30:])
    assert torch.equal(generate(model, ids, bounded(model), prefill_chunk_size=7), plain)
    # Assisted decoding writes the same text.
    assert torch.equal(generate(model, ids, bounded(model), prompt_lookup_num_tokens=4), plain)
    assistant = model_of(family, num_hidden_layers=3)
    cache = bounded(model)
    assert torch.equal(generate(model, ids, cache, assistant_model=assistant), plain)
    assert cache.cache.lengths() == [cache.get_seq_length()] == [49]


@pytest.mark.parametrize("drafts", [1, 3, 64])
def test_drafts_beyond_the_spare_entries(drafts):
    """The last tokens of a forward are drafts, as many as the cache has entries for."""
    model = model_of("llama")
    ids = tokens(30)
    cache = bounded(model, max_draft_tokens=drafts)
    cache.activate_past_recording()
    forward(model, cache, ids, [20])
    for take, back in ((3, 1), (1, 0), (4, 1)):
        at = cache.get_seq_length()
        got = forward(model, cache, ids[:, at:], [take])
        want = reference(model, cache.policies, ids[:, : at + take])[:, at:]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        cache.crop(-back)
        assert cache.get_seq_length() == at + take - back
    if drafts < 64:
        forward(model, cache, ids[:, cache.get_seq_length() :], [4])
        with pytest.raises(ValueError, match=f"it must be at most {drafts}"):
            cache.crop(-4)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_beams_and_samples(family):
    """The same beams as an independent cache: one that is filled anew for each step."""
    model = model_of(family)
    ids = tokens(20, batch=2)
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 12}
    full = hf.KVPolicyCache(model, kvp.FULL)
    assert torch.equal(generate(model, ids, full, **options), generate(model, ids, **options))
    cache = bounded(model)
    beams = generate(model, ids, cache, output_scores=True, return_dict_in_generate=True, **options)
    policies = cache.policies
    logits = torch.log_softmax(reference(model, policies, beams.sequences[:, :-1])[:, 19:], -1)
    sums = logits.gather(-1, beams.sequences[:, 20:, None]).sum((1, 2))
    torch.testing.assert_close(beams.sequences_scores, sums / 12, rtol=1e-3, atol=1e-3)
    sampled = {"do_sample": True, "temperature": 1.3, "top_k": 20, "num_return_sequences": 2}
    full = hf.KVPolicyCache(model, kvp.FULL)
    assert torch.equal(generate(model, ids, full, **sampled), generate(model, ids, **sampled))
    assert generate(model, ids, bounded(model), **sampled).shape == (4, 40)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuts", [[24], [5, 1, 18], [1] * 24], ids=["whole", "chunks", "steps"])
def test_padding_on_the_left(family, cuts):
    model = model_of(family)
    lengths = (24, 3, 15)
    mask = torch.stack([(torch.arange(24) >= 24 - n).long() for n in lengths])
    ids = tokens(24, batch=3) * mask
    cache = bounded(model)
    got = forward(model, cache, ids, cuts, mask)
    assert cache.cache.lengths() == list(lengths) and cache.get_seq_length() == 24
    for row, n in enumerate(lengths):
        alone = reference(model, cache.policies, ids[row : row + 1, -n:])
        torch.testing.assert_close(got[row : row + 1, -n:], alone, rtol=1e-4, atol=1e-4)
    together = generate(model, ids, bounded(model), attention_mask=mask)
    for row, n in enumerate(lengths):
        alone = generate(model, ids[row : row + 1, -n:], bounded(model))
        assert torch.equal(together[row, 24:], alone[0, n:])


def test_sequences_are_selected():
    model = model_of("llama")
    ids = tokens(20, batch=3)
    cache = bounded(model)
    forward(model, cache, ids, [19])
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    last = ids[[2, 2, 0, 0], 19:]
    with torch.no_grad():
        got = model(last, past_key_values=cache, use_cache=True).logits
    want = reference(model, cache.policies, ids)[[2, 2, 0, 0], -1:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    model = model_of("llama").to(dtype)
    ids = tokens(30)
    with torch.no_grad():
        want = model(ids).logits
    got = forward(model, hf.KVPolicyCache(model, kvp.FULL), ids, [29, 1])
    torch.testing.assert_close(got, want, rtol=0.1, atol=0.1)


def test_a_file_of_scorers(tmp_path):
    model = model_of("llama")
    scorers_of(model).save(tmp_path / "scorers.safetensors")
    cache = hf.KVPolicyCache.from_pretrained(tmp_path / "scorers.safetensors", model, budget=12)
    ids = tokens(60)
    got = forward(model, cache, ids, [30, 30])
    torch.testing.assert_close(got, reference(model, cache.policies, ids), rtol=1e-4, atol=1e-4)
    assert cache.cache.usage(2, 0, 1).size == 12
    size = cache.memory_bytes()
    forward(model, cache, tokens(100), [100])
    assert cache.memory_bytes() == size
    with pytest.raises(ValueError, match="budget: 7 is not allowed; it must be at least sinks"):
        hf.KVPolicyCache.from_pretrained(tmp_path / "scorers.safetensors", model, budget=7)
    other = model_of("llama", num_hidden_layers=2)
    with pytest.raises(ValueError, match="the model has 2 layers"):
        hf.KVPolicyCache.from_pretrained(tmp_path / "scorers.safetensors", other)


def test_refusals():
    model = model_of("llama")
    ids = tokens(10)
    with pytest.raises(ValueError, match="it ranks keys, so it needs a scorer"):
        hf.KVPolicyCache(model, kvp.KVpop(1, 2, 3))
    with pytest.raises(ValueError, match="2 policies are not allowed"):
        hf.KVPolicyCache(model, [None, None])
    with pytest.raises(TypeError, match="policy of layer 0"):
        hf.KVPolicyCache(model, ["window", None, None])
    with pytest.raises(ValueError, match="full_layers: 3"):
        hf.KVPolicyCache(model, kvp.FULL, full_layers=[3])
    with pytest.raises(ValueError, match="sees the last 9 keys only"):
        hf.KVPolicyCache(model_of("mistral"), [kvp.FULL] * 3)
    with pytest.raises(NotImplementedError, match="causal decoder"):
        hf.KVPolicyCache(transformers.T5Config(), kvp.FULL)
    config = transformers.AutoConfig.for_model("qwen3_next", num_hidden_layers=4)
    with pytest.raises(NotImplementedError, match="layers of type linear_attention"):
        hf.KVPolicyCache(config, kvp.FULL)
    cache = hf.KVPolicyCache(model, kvp.StreamingLLM(1, 4))
    forward(model, cache, ids, [10])
    with pytest.raises(ValueError, match="batch: 2 is not allowed"):
        forward(model, cache, ids.repeat(2, 1), [10])
    cache.reset()
    with pytest.raises(ValueError, match="at most 0"):
        cache.crop(-1)
    with pytest.raises(NotImplementedError, match="4D attention_mask"):
        forward_4d = torch.ones(1, 1, 10, 10, dtype=torch.bool).tril()
        model(ids, attention_mask=forward_4d, past_key_values=cache)
    cache.reset()
    with pytest.raises(NotImplementedError, match="a gradient through it"):
        model(ids, past_key_values=cache).logits.sum().backward()
    model.config._attn_implementation = "sdpa"
    with pytest.raises(RuntimeError, match="attention implementation must be 'kvpolicy'"):
        forward(model, hf.KVPolicyCache(model_of("llama").config, kvp.FULL), ids, [10])


# ---- models on disk ----------------------------------------------------------------------------------------


def smollm2():
    folder = ROOT / "models" / "smollm2-135m"
    if not (folder / "config.json").exists():
        pytest.skip("no models/smollm2-135m: tools/get_smollm2")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), folder


def test_smollm2_without_a_bound():
    model, _ = smollm2()
    ids = torch.randint(1000, 40000, (1, 96), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(ids).logits
    got = forward(model, hf.KVPolicyCache(model, kvp.FULL), ids, [64, 1, 31])
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


PROMPT = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to "
    "do: once or twice she had peeped into the book her sister was reading, but it had no pictures or "
    "conversations in it, and"
)
QUESTION = "Write three sentences about whales, ships and the sea, and say why people fear the deep water."
# What examples/apps/generate --rows fp32 --temperature 0 --budget B [--scorers FILE] writes.
TEXTS = {
    ("", 80): "\n  the pictures of the pictures of the pictures of the pictu",
    ("kvpop", 80): "\n  the conversation is the same as the conversation in it.\n\n",
    ("kvpop", 128): "\nwhen the bank he said he said he said he said he said he sa",
    ("kvpop-mlp", 128): "\nwas reading the bank had pictures of the bank had pictures ",
}
ANSWER = (
    "The deep water is a realm of mystery and awe, where the unknown lies, and the unknown is a realm of "
    "mystery and awe. It is a place where the boundaries between reality and fantasy blur,"
)


@pytest.mark.parametrize("scorers,budget", TEXTS)
def test_the_text_of_the_example(scorers, budget):
    """The byte model of this repository, whose tokens are bytes."""
    folder = ROOT / "examples" / "models" / "byte-llama"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = TEXTS[scorers, budget]
    cache = hf.KVPolicyCache(model, kvp.StreamingLLM(4, budget - 4))
    if scorers:
        path = folder / "scorers" / f"{scorers}.safetensors"
        cache = hf.KVPolicyCache.from_pretrained(path, model, budget=budget)
    ids = torch.tensor([list(PROMPT.encode())])
    out = generate(model, ids, cache, max_new_tokens=len(text), pad_token_id=0)
    assert bytes(out[0, ids.shape[1] :].tolist()).decode() == text


def test_the_text_of_the_example_with_smollm2():
    """With --model models/smollm2-135m --policy streaming --budget 32."""
    model, folder = smollm2()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = [
        f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in (("system", system), ("user", QUESTION))
    ]
    ids = tokenizer("".join(turns) + "<|im_start|>assistant\n", return_tensors="pt").input_ids
    cache = hf.KVPolicyCache(model, kvp.StreamingLLM(4, 28))
    out = generate(model, ids, cache, max_new_tokens=40, pad_token_id=0)
    assert tokenizer.decode(out[0, ids.shape[1] :]) == ANSWER


def test_a_damaged_state_restores_nothing():
    model, ids = model_of("llama"), tokens(12, batch=2)
    cache = hf.KVPolicyCache(model, kvp.StreamingLLM(1, 6))
    with torch.no_grad():
        model(ids, past_key_values=cache)
        seen, blobs = cache.snapshot()
        model(ids[:, :3], past_key_values=cache)
        with pytest.raises(ValueError):
            cache.restore((seen, [blobs[0], blobs[1][:-9]]))
        assert cache.get_seq_length() == 15 and cache.cache.lengths() == [15, 15]
        cache.restore((seen, blobs))
        model(ids[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 13 and cache.cache.lengths() == [13, 13]
        # A forward that fails behind its first layer.
        handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        for damaged in (False, True):
            with pytest.raises(ZeroDivisionError):
                model(ids[:, :2], past_key_values=cache)
            if damaged:
                with pytest.raises(ValueError):
                    cache.restore((seen, [blobs[0], blobs[1][:-9]]))
                assert cache.get_seq_length() == 0 and cache.cache.lengths() == [0, 0]
            else:
                cache.restore((seen, blobs))
                assert cache.get_seq_length() == 12 and cache.cache.lengths() == [12, 12]
        handle.remove()
        model(ids, past_key_values=cache)
    assert cache.cache.lengths() == [12, 12]


# ---- files of every system ---------------------------------------------------------------------------------


def shares_of(model, scorers, cache, length):
    """Of the keys that left the window the share that stays, by layer and head. Entries are those of the mask
    of reference()."""
    shares = []
    for layer in range(len(scorers.layers)):
        for head in range(scorers.heads):
            usage = cache.cache.usage(layer, 0, head)
            assert usage.sinks == scorers.sinks and usage.window == scorers.window
            assert usage.size == model.model.layers[layer].self_attn.entries[head]
            shares.append(usage.long_range / (length - scorers.sinks - scorers.window))
    return shares


@pytest.mark.parametrize("cuts", [[60], [1] * 60, [20, 1, 1, 1, 37]], ids=["once", "steps", "chunks"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_systems_from_files(tmp_path, system, cuts):
    """The logits of a gate's file are those of the mask that the same gates make, in any chunks."""
    model, ids = model_of("llama"), tokens(60)
    scorers = gates_of(model, system)
    scorers.save(tmp_path / "a.safetensors")
    cache = kvp.KVPolicyCache.from_pretrained(tmp_path / "a.safetensors", model)
    logits = forward(model, cache, ids, cuts)
    policies = [scorers.policy(layer) for layer in range(3)]
    assert [one.instance for one in cache.policies] == [one.instance for one in policies]
    torch.testing.assert_close(logits, reference(model, policies, ids), rtol=2e-4, atol=2e-4)
    shares = shares_of(model, scorers, cache, 60)
    assert 0.1 < sum(shares) / len(shares) < 0.9, shares
    if scorers.budget is not None:
        assert max(shares) * 44 <= scorers.budget


@pytest.mark.parametrize("system", ["spkv", "wgkv", "lte"])
def test_systems_with_padding_drafts_and_beams(tmp_path, system):
    """Left padding, assisted decoding and beams give the text of each prompt alone, and of greedy steps."""
    model = model_of("llama")
    scorers = gates_of(model, system)
    scorers.save(tmp_path / "a.safetensors")

    def cache():
        return kvp.KVPolicyCache.from_pretrained(tmp_path / "a.safetensors", model)

    prompts = [tokens(40, seed=5), tokens(27, seed=6)]
    alone = [generate(model, ids, cache())[0, ids.shape[1] :] for ids in prompts]
    padded = torch.cat((prompts[0], torch.nn.functional.pad(prompts[1], (13, 0))))
    mask = torch.ones_like(padded)
    mask[1, :13] = 0
    found = generate(model, padded, cache(), attention_mask=mask)[:, 40:]
    assert torch.equal(found, torch.stack(alone))
    drafted = generate(model, prompts[0], cache(), assistant_model=model_of("llama"))[0, 40:]
    assert torch.equal(drafted, alone[0])
    assert generate(model, prompts[0], cache(), num_beams=3).shape == (1, 60)


def test_shut_gates_free_memory(tmp_path):
    """Pages of a DualCache are those of the keys that gates admit."""
    model, ids, found = model_of("llama", max_position_embeddings=2048), tokens(1200), {}
    for name, bias in (("open", 50.0), ("shut", -50.0)):
        scorers = gates_of(model, "spkv")
        with torch.no_grad():
            for scorer in scorers.layers:
                scorer.b2.fill_(bias)
        scorers.save(tmp_path / "a.safetensors")
        cache = kvp.KVPolicyCache.from_pretrained(tmp_path / "a.safetensors", model)
        forward(model, cache, ids, [300] * 4)
        found[name] = cache.memory_bytes()
        assert cache.cache.usage(0, 0, 0).size == (1200 if bias > 0 else 16)
    rows = 3 * 2 * (1200 - 256) * 2 * 16 * 4  # layers, heads, entries beyond the first slab, k and v
    assert found["open"] - found["shut"] >= rows


def test_streaming_file(tmp_path):
    """StreamLLM+ is a model's weights and two numbers; a budget widens the window."""
    model = model_of("llama")
    kvp.Scorers([], window=12, sinks=3, system="streaming").save(tmp_path / "a.safetensors")
    cache = kvp.KVPolicyCache.from_pretrained(tmp_path / "a.safetensors", model)
    logits = forward(model, cache, tokens(40), [40])
    want = reference(model, [kvp.StreamingLLM(3, 12)] * 3, tokens(40))
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
    wide = kvp.KVPolicyCache.from_pretrained(tmp_path / "a.safetensors", model, budget=20)
    assert wide.policies[0].windows == (17,)


def test_refusals_of_systems(tmp_path):
    model = model_of("llama")
    path = tmp_path / "a.safetensors"
    scorers = gates_of(model, "spkv")
    scorers.save(path)
    with pytest.raises(TypeError, match="model: LlamaConfig is not allowed; a UtilityPredictor reads"):
        kvp.KVPolicyCache.from_pretrained(path, model.config)
    other = model_of("llama", hidden_size=64)
    with pytest.raises(ValueError, match="width: 48 is not allowed; it must be 64, the model's"):
        kvp.KVPolicyCache.from_pretrained(path, other)
    cache = kvp.KVPolicyCache.from_pretrained(path, model)
    with pytest.raises(RuntimeError, match="model: another than the cache was made for"):
        model_of("llama").set_attn_implementation(hf.NAME)
        alone = model_of("llama")
        alone.set_attn_implementation(hf.NAME)
        alone(tokens(5), past_key_values=cache)
    gates_of(model, "dms").save(path)
    with pytest.raises(ValueError, match="budget: 24 is not allowed for dms"):
        kvp.KVPolicyCache.from_pretrained(path, model, budget=40)
    cache = kvp.Cache(scorers.policy(0), query_heads=4, kv_heads=2, head_dim=16)
    q, k = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    with pytest.raises(ValueError, match=r"hidden: None is not allowed; a UtilityPredictor reads"):
        cache.prefill(0, q, k, k)
    with pytest.raises(ValueError, match=r"hidden: shape \(1, 3, 8\) is not allowed"):
        cache.prefill(0, q, k, k, hidden=torch.zeros(1, 3, 8))
    with pytest.raises(ValueError, match="hidden: is not allowed"):
        kvp.Cache(kvp.FULL, query_heads=4, kv_heads=2, head_dim=16).prefill(
            0, q, k, k, hidden=torch.zeros(1, 3, 48)
        )
    shifted = kvp.Policy(kvp.Window(20), kvp.ThresholdGate(), gates_of(model, "lte").layers[0])
    with pytest.raises(NotImplementedError, match="delay: 14 is not allowed"):
        kvp.Cache(shifted, query_heads=4, kv_heads=2, head_dim=16)
