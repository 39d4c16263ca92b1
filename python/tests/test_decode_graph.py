"""Decode steps as a CUDA graph: the same tokens as steps that Python launches."""

import contextlib
import copy
import functools
import gc
import inspect
import types
import weakref

import pytest
import torch
from test_transformers import FAMILIES, SYSTEMS, forward, gates_of, generate, hf, model_of, scorers_of, tokens

import kvpolicy as kvp
from kvpolicy import decode_graph

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
on_a_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and kvp.has_cuda()), reason="no GPU, or no CUDA module"
)


def on_gpu(family, **changes):
    return model_of(family, max_position_embeddings=512, **changes).cuda()


def bounded(model, **options):
    scorers = scorers_of(model).to("cuda")
    return hf.KVPolicyCache(model, lambda layer: scorers.policy(layer, 6), **options)


def compare(model, ids, make=bounded, **options):
    """Generates with and without a graph; the cache with it."""
    options = {"max_new_tokens": 40} | options
    plain = generate(model, ids, make(model, cuda_graph=False), **options)
    cache = make(model)
    got = generate(model, ids, cache, **options)
    assert torch.equal(got, plain)
    return cache


def captured(cache):
    return cache.decode_graph._graph


@on_a_gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_writes_the_same_tokens(family):
    model = on_gpu(family)
    ids = tokens(30, batch=2).cuda()
    cache = compare(model, ids)
    assert captured(cache) is not None
    assert cache.get_seq_length() == 69 and cache.cache.lengths() == [69, 69]


@on_a_gpu
@pytest.mark.parametrize("name", ["window", "full", "gate", "mlp", "heavy", "tova", "prompt", "hybrid"])
def test_policies(name):
    """Beyond the budget, and over several reservations of pages."""
    model = on_gpu("llama")

    def make(model, **options):
        mlp = scorers_of(model, "mlp").to("cuda")
        policy = {
            "window": kvp.StreamingLLM(2, 9),
            "full": kvp.FULL,
            "gate": lambda layer: kvp.SPKV(5, mlp.layers[layer]),
            "mlp": lambda layer: mlp.policy(layer, 6),
            "heavy": kvp.H2O(6, 4),
            "tova": kvp.TOVA(8),
            "prompt": kvp.SnapKV(6, window=4),
            "hybrid": [kvp.StreamingLLM(2, 9), None, kvp.TOVA(8)],
        }[name]
        return hf.KVPolicyCache(model, policy, **options)

    cache = compare(model, tokens(30, batch=2).cuda(), make, max_new_tokens=200)
    assert captured(cache) is not None
    if name == "full":  # near max_length steps look at their status
        cache = compare(
            model, tokens(30, batch=2).cuda(), lambda m, **o: make(m, max_length=100, **o), max_new_tokens=60
        )


@on_a_gpu
@pytest.mark.parametrize("system", SYSTEMS)
def test_gates_of_files(tmp_path, system):
    """Gates of every system, some of which read hidden states or positions: a graph writes the tokens of
    steps, over several reservations of pages, and the logits are those of the CPU."""
    path = tmp_path / "a.safetensors"
    gates_of(model_of("llama", max_position_embeddings=512), system).save(path)
    model, ids = on_gpu("llama"), tokens(50, batch=2)
    cache = compare(model, ids.cuda(), functools.partial(hf.KVPolicyCache.from_pretrained, path))
    assert captured(cache) is not None
    on_cpu = model_of("llama", max_position_embeddings=512)
    cuts = [30, 1, 1, 18]
    want = forward(on_cpu, hf.KVPolicyCache.from_pretrained(path, on_cpu), ids, cuts)
    found = forward(model, (one := hf.KVPolicyCache.from_pretrained(path, model)), ids.cuda(), cuts)
    torch.testing.assert_close(found.cpu(), want, rtol=1e-3, atol=1e-3)
    assert captured(one) is not None  # position_ids=None is as if left out
    assert 16 < one.cache.usage(1, 0, 1).size < 50


@on_a_gpu
def test_a_graph_outlives_a_reset(monkeypatch):
    model = on_gpu("llama")
    made = []
    real = torch.cuda.CUDAGraph
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(1) or real())
    cache = compare(model, tokens(30, batch=2).cuda())
    for length in (30, 7, 50):
        ids = tokens(length, batch=2, seed=length).cuda()
        plain = generate(model, ids, bounded(model, cuda_graph=False))
        cache.reset()
        assert torch.equal(generate(model, ids, cache), plain)
    assert len(made) == 1
    # Weights in place are seen, others make another graph.
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(1))
    cache.reset()
    assert torch.equal(generate(model, ids, cache), generate(model, ids, bounded(model, cuda_graph=False)))
    assert len(made) == 1
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(1))
    cache.reset()
    assert torch.equal(generate(model, ids, cache), plain)
    assert len(made) == 2


@on_a_gpu
def test_other_ways_of_generating():
    model = on_gpu("llama")
    ids = tokens(24, batch=3).cuda()
    mask = torch.stack([(torch.arange(24) >= 24 - n).long() for n in (24, 3, 15)]).cuda()
    assert captured(compare(model, ids * mask, attention_mask=mask)) is not None
    assert captured(compare(model, ids, num_beams=3)) is not None
    sampled = {"do_sample": True, "temperature": 1.3, "num_return_sequences": 2}
    assert captured(compare(model, ids, **sampled)) is not None
    assert captured(compare(model, ids, prefill_chunk_size=7)) is not None
    assert captured(compare(model, ids[:1], prompt_lookup_num_tokens=4)) is None
    options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 12}
    with_graph, without = (
        generate(model, ids, bounded(model, cuda_graph=graph), **options).logits for graph in (True, False)
    )
    assert all(map(torch.equal, with_graph, without))
    half = on_gpu("llama").to(torch.bfloat16)
    assert captured(compare(half, ids)) is not None


@on_a_gpu
def test_a_loop_of_ones_own():
    """Without masks and positions, and with more sequences later."""
    model = on_gpu("llama")
    ids = tokens(40, batch=2).cuda()
    logits = []
    for graph in (False, True):
        cache = bounded(model, cuda_graph=graph)
        with torch.no_grad():
            out = [model(ids[:, :20], past_key_values=cache).logits]
            out += [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(20, 30)]
            cache.batch_select_indices(torch.tensor([1, 0, 1]))
            again = ids[[1, 0, 1]]
            out += [model(again[:, at : at + 1], past_key_values=cache).logits for at in range(30, 40)]
        logits.append(out)
    assert captured(cache) is not None and cache.cache.lengths() == [40] * 3
    assert all(map(torch.equal, *logits))


@on_a_gpu
def test_what_no_graph_serves():
    model = on_gpu("llama")
    ids = tokens(20).cuda()
    hidden = {"output_hidden_states": True, "return_dict_in_generate": True}
    cache = bounded(model)
    assert len(generate(model, ids, cache, **hidden).hidden_states) == 20 and captured(cache) is None
    seen = []
    handle = model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    cache = compare(model, ids)
    assert len(seen) == 80 and captured(cache) is None
    handle.remove()
    assert captured(compare(model, ids)) is not None
    # A forward that waits for the GPU.
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    waiting = on_gpu("llama", rope_parameters=rope)
    assert captured(compare(waiting, ids)) is None
    # A forward that waits unseen by torch: the capture fails, and sampling goes on.
    inner = model.model.layers[1].mlp.forward
    stream = torch.cuda.current_stream

    def wait(x):
        if not torch.cuda.is_current_stream_capturing():
            return inner(x)
        stream().synchronize()
        return inner(x)

    model.model.layers[1].mlp.forward = wait
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        cache = compare(model, ids, do_sample=True)
    assert captured(cache) is None
    del model.model.layers[1].mlp.forward
    assert captured(compare(model, ids, do_sample=True)) is not None


def test_the_models_forward():
    """It keeps its signature, and a copy of the model is a model of its own, as is one of a subclass."""
    model = model_of("llama")
    signature = inspect.signature(model.forward)
    cache = hf.KVPolicyCache(model, kvp.StreamingLLM(1, 6))
    assert cache.decode_graph is not None and "forward" not in vars(model)
    own = type(model).forward
    assert hf.KVPolicyCache(model, kvp.FULL).decode_graph is not None and type(model).forward is own
    assert inspect.signature(model.forward) == signature
    below = type("Below", (type(model),), {})(model.config).eval()
    assert hf.KVPolicyCache(below, kvp.FULL).decode_graph is not None and type(below).forward is not own
    generate(below, tokens(20), hf.KVPolicyCache(below, kvp.StreamingLLM(1, 6)))
    twin = copy.deepcopy(model)
    assert twin.forward.__self__ is twin
    ids = tokens(20)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
        assert twin(ids).logits.abs().max() == 0 != model(ids).logits.abs().max()
    assert hf.KVPolicyCache(model.config, kvp.FULL).decode_graph is None
    assert hf.KVPolicyCache(model, kvp.FULL, cuda_graph=False).decode_graph is None
    # On the CPU a step runs as it is.
    plain = generate(model, ids, hf.KVPolicyCache(model, kvp.StreamingLLM(1, 6), cuda_graph=False))
    assert torch.equal(generate(model, ids, cache), plain)
    assert captured(cache) is None
    other = model_of("llama")
    other.forward = other.forward  # somebody else's
    assert hf.KVPolicyCache(other, kvp.FULL).decode_graph is None


def test_a_dropped_cache_goes_at_once():
    model = model_of("llama")
    cache = hf.KVPolicyCache(model, kvp.StreamingLLM(1, 6))
    generate(model, tokens(20), cache)
    held = weakref.ref(cache.cache)
    del cache
    assert held() is None


def test_a_dropped_model_goes_at_once():
    model = model_of("llama")
    hf.KVPolicyCache(model, kvp.FULL)
    weight = weakref.ref(model.lm_head.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


def test_what_a_graph_has_of_a_model():
    """Other adapters, factors or scorers make another graph; a prompt and steps do not."""
    model = model_of("llama")
    mlp = scorers_of(model, "mlp")
    cache = hf.KVPolicyCache(model, lambda layer: mlp.policy(layer, 6))
    generate(model, tokens(20), cache)
    before = decode_graph._state_of(model, cache)
    cache.reset()
    generate(model, tokens(30), cache)
    assert decode_graph._state_of(model, cache) == before
    model.model.layers[1].mlp.scaling = {"default": 2.0}
    changed = decode_graph._state_of(model, cache)
    assert changed != before
    model.model.layers[1].mlp.scaling["default"] = 3.0
    assert decode_graph._state_of(model, cache) != changed
    mlp.layers[0].w1 = torch.nn.Parameter(mlp.layers[0].w1.clone())
    assert decode_graph._state_of(model, cache)[-20:] != changed[-20:]

    class Mine(torch.nn.Module):
        def forward(self, k, v):
            return k.float().sum(-1)

    own = hf.KVPolicyCache(model, kvp.Policy(kvp.Window(4), kvp.TopKBudget(6), Mine()))
    assert decode_graph._state_of(model, own) is None


def test_a_captured_state_serves_until_it_changes(monkeypatch):
    """The capture's bookkeeping, without a GPU."""
    model = model_of("llama")
    nothing = contextlib.nullcontext()
    for name in ("device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nothing)
    for name in ("CUDAGraph", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    generator = types.SimpleNamespace(clone_state=object)
    monkeypatch.setattr(torch.cuda, "default_generators", [generator], raising=False)
    memory = (object(),)
    cache = types.SimpleNamespace(
        device=types.SimpleNamespace(index=0),
        policies=hf.KVPolicyCache(model, kvp.FULL).policies,
        marks=lambda: 0,
        rewind=lambda marks: None,
        step_memory=lambda: memory,
    )
    graph, ids = decode_graph.DecodeGraph(), tokens(1)
    with torch.no_grad():
        assert graph._capture(model, model.forward, cache, "step", {"input_ids": ids}, {"input_ids": ids})
    graph._graph, graph._compared = object(), False  # a prompt came
    assert graph._serves(model, cache, "step")
    model.model.layers[0].mlp.scaling, graph._compared = 2.0, False
    assert not graph._serves(model, cache, "step")


@on_a_gpu
def test_a_mask_without_positions():
    """Some models count the positions of a mask, of which a graph sees one column."""
    model = on_gpu("llama")
    cache, ids = bounded(model), tokens(30, batch=2).cuda()
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        for at in range(20, 30):
            mask = torch.ones(2, at + 1, dtype=torch.long, device="cuda")
            model(ids[:, at : at + 1], attention_mask=mask, past_key_values=cache)
    assert captured(cache) is None and cache.cache.lengths() == [30, 30]
