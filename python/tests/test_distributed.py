"""Several processes give the numbers of one: attention over a sequence on ranks, masks and the future-mass
target, generation under tensor parallelism, and training by DDP and FSDP2. On the CPU by gloo, and on two
GPUs by NCCL."""

import copy
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
import reference
import torch
from ranks import Ranks
from test_attention import TOLERANCE, masked
from torch.distributed.fsdp import fully_shard

import kvpolicy as kvp
from kvpolicy import distributed as kvd

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples/python/train_scorer_ddp.py"
TWO_GPUS = torch.cuda.device_count() >= 2 and kvp.has_cuda()


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Process groups, each started when a test asks for it."""
    started = {}

    def group(backend, count):
        key = backend, count
        if key not in started or not started[key].alive:
            started[key] = Ranks(count, backend, tmp_path_factory.mktemp("group"))
        return started[key]

    yield group
    for one in started.values():
        one.stop()


@pytest.fixture(params=[("gloo", 2), ("gloo", 3), ("nccl", 2)], ids=lambda p: f"{p[0]}-{p[1]}")
def ranks(request, groups):
    if request.param[0] == "nccl" and not TWO_GPUS:
        pytest.skip("no two GPUs, or no CUDA module")
    return groups(*request.param)


# ---- attend ------------------------------------------------------------------------------------------------


def share(shards, tensor):
    """A leaf with this rank's share."""
    return shards.shard(tensor.detach()).clone().requires_grad_(tensor.requires_grad)


def attend_check(device, layout, length, dtype, case):
    """Results and gradients are those of kvp.attend, and of the formula in float64."""
    kvd._TOGETHER = 1 if layout == "zigzag" else 1 << 26  # one KV head at a time, or both at once
    shards = kvd.SequenceShards(length, layout=layout)
    options, formula, mask = {}, {}, None
    q = torch.randn(2, 6, length, 16, device=device).to(dtype).requires_grad_()
    k, v = (torch.randn(2, 2, length, dim, device=device).to(dtype).requires_grad_() for dim in (16, 40))
    if case != "causal":
        mask = masked(device, length)
        formula = {name: x.detach().cpu() for name, x in mask._asdict().items()}
    if case == "soft_cap":
        options["logits_soft_cap"] = formula["soft_cap"] = 2.0
    if case == "packed":
        edges = torch.tensor([0, 9, 9, 10, length], dtype=torch.int32, device=device)
        options["cu_seqlens"], formula["segments"] = edges, edges.cpu()
    if case == "lengths":
        options["lengths"] = torch.tensor([length, 11], dtype=torch.int32, device=device)
    out, lse = kvp.attend(q, k, v, mask, return_lse=True, **options)
    weights = torch.randn_like(out), torch.randn_like(lse)
    ((out * weights[0]).sum() + (lse * weights[1]).sum()).backward()
    leaves = [q, k, v] + ([mask.log_bias] if mask else [])

    own = [share(shards, x) for x in (q, k, v)]
    own_mask = None
    if mask is not None:
        own_mask = kvp.Mask(share(shards, mask.expiry), share(shards, mask.log_bias), mask.bias_from)
        own.append(own_mask.log_bias)
    own_out, own_lse = kvd.attend(shards, *own[:3], own_mask, return_lse=True, **options)
    own_weights = [shards.shard(x) for x in weights]
    ((own_out * own_weights[0]).sum() + (own_lse * own_weights[1]).sum()).backward()

    rtol, atol = TOLERANCE[dtype]
    close = {"rtol": rtol, "atol": atol}
    assert own_out.dtype == dtype and own_out.shape == (2, 6, shards.tokens, 40)
    torch.testing.assert_close(own_out, shards.shard(out), **close)
    torch.testing.assert_close(own_lse, shards.shard(lse), rtol=max(rtol, 1e-6), atol=max(atol, 1e-6))
    for found, whole in zip(own, leaves):
        scale = whole.grad.abs().max().item()
        torch.testing.assert_close(found.grad, shards.shard(whole.grad), rtol=rtol, atol=atol * scale)
    if case == "lengths" or device.type == "cuda":
        return
    exact = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    if mask is not None:
        formula["log_bias"] = formula["log_bias"].double().requires_grad_()
        exact.append(formula["log_bias"])
    want, want_lse = reference.attention(*exact[:3], **formula)
    ((want * weights[0].double()).sum() + (want_lse * weights[1].double()).sum()).backward()
    torch.testing.assert_close(own_out.double(), shards.shard(want), **close)
    for found, whole in zip(own, exact):
        scale = whole.grad.abs().max().item()
        tolerance = max(atol, 1e-6) * scale  # biases are read as float32, and lse is float32
        torch.testing.assert_close(
            found.grad.double(), shards.shard(whole.grad), rtol=max(rtol, 1e-6), atol=tolerance
        )


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("case", ["causal", "mask", "soft_cap", "packed", "lengths"])
def test_attend(ranks, layout, case):
    # 37 tokens are no multiple of 2, 3, 4 or 6 pieces.
    ranks.run(attend_check, layout, 37, torch.float32, case)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_attend_dtypes(ranks, layout, dtype):
    ranks.run(attend_check, layout, 48, dtype, "mask")


def no_grad_and_forward_only(device):
    shards = kvd.SequenceShards(12)
    q, k, v = (torch.randn(1, heads, 12, 16, device=device) for heads in (2, 1, 1))
    own = [shards.shard(x) for x in (q, k, v)]
    with torch.no_grad():
        out = kvd.attend(shards, *own)
    torch.testing.assert_close(out, shards.shard(kvp.attend(q, k, v)), rtol=1e-5, atol=1e-5)
    own[0].requires_grad_()
    kvd.attend(shards, *own).sum().backward()
    q.requires_grad_()
    kvp.attend(q, k, v).sum().backward()
    torch.testing.assert_close(own[0].grad, shards.shard(q.grad), rtol=1e-5, atol=1e-5)


def test_attend_without_all_gradients(ranks):
    ranks.run(no_grad_and_forward_only)


def shards_check(device, layout, length):
    shards = kvd.SequenceShards(length, layout=layout)
    whole = torch.randn(2, 3, length, 4, device=device, requires_grad=True)
    own = shards.shard(whole)
    assert own.shape[2] == shards.tokens == sum(last - first for first, last in shards.pieces)
    assert torch.equal(own, whole[:, :, shards.positions(device)])
    assert torch.equal(shards.gather(own), whole)
    loss = (shards.gather(own) ** 3).sum()  # alike on all ranks
    loss.backward()
    assert torch.equal(shards.shard(whole.grad), shards.shard(3 * whole.detach() ** 2))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_shards(ranks, layout):
    ranks.run(shards_check, layout, 12)
    ranks.run(shards_check, layout, 25)


# ---- masks and future mass ---------------------------------------------------------------------------------


def masks_check(device, layout):
    length = 41
    shards = kvd.SequenceShards(length, layout=layout)
    scores = torch.randn(2, 2, length, device=device, requires_grad=True)
    edges = torch.tensor([0, 9, length], dtype=torch.int32, device=device)
    lengths = torch.tensor([length, 20], dtype=torch.int32, device=device)
    for policy in (kvp.KVpop(2, [3, 5], 6, kvp.Decay(0.9)), kvp.StreamingLLM(2, 5), kvp.SPKV(4)):
        for options in ({}, {"cu_seqlens": edges}, {"lengths": lengths}):
            whole = kvp.build_mask(policy, scores, **options).expiry
            own = kvd.build_mask(shards, policy, shards.shard(scores), **options).expiry
            assert torch.equal(own, shards.shard(whole))
    q, k, v = (torch.randn(2, heads, length, 16, device=device) for heads in (4, 2, 2))
    gate = kvp.AnnealedGate(alpha=0.5)
    kvp.attend(q, k, v, kvp.build_log_bias(kvp.SPKV(4), gate, scores)).square().sum().backward()
    own = share(shards, scores)
    mask = kvd.build_log_bias(shards, kvp.SPKV(4), gate, own)
    kvd.attend(shards, *(shards.shard(x) for x in (q, k, v)), mask).square().sum().backward()
    torch.testing.assert_close(own.grad, shards.shard(scores.grad), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_masks(ranks, layout):
    ranks.run(masks_check, layout)


def future_mass_check(device, layout, dtype):
    length = 50
    shards = kvd.SequenceShards(length, layout=layout)
    q, k = (torch.randn(2, heads, length, 16, device=device).to(dtype) for heads in (4, 2))
    own_q, own_k = shards.shard(q), shards.shard(k)
    close = {"rtol": 1e-5, "atol": 1e-5}
    lse = kvp.causal_lse(q, k)
    own_lse = kvd.causal_lse(shards, own_q, own_k)
    torch.testing.assert_close(own_lse, shards.shard(lse), **close)
    for options in ({}, {"look_ahead": 4}, {"aggregate": "mean", "beta": 2.0}):
        own = kvd.future_mass(shards, own_q, own_k, 5, **options)
        torch.testing.assert_close(own, shards.shard(kvp.future_mass(q, k, 5, **options)), **close)
    own = kvd.future_mass(shards, own_q, own_k, [3, 9], lse=own_lse)
    torch.testing.assert_close(own, shards.shard(kvp.future_mass(q, k, [3, 9])), **close)
    want = reference.future_mass(q.cpu().double(), k.cpu().double(), 5).to(device)
    own = kvd.future_mass(shards, own_q, own_k, 5)
    torch.testing.assert_close(own.double(), shards.shard(want), rtol=2e-4, atol=2e-4)
    lengths = torch.tensor([length, 20], dtype=torch.int32, device=device)
    own = kvd.future_mass(shards, own_q, own_k, 5, lengths=lengths)
    torch.testing.assert_close(own, shards.shard(kvp.future_mass(q, k, 5, lengths=lengths)), **close)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_future_mass(ranks, layout, dtype):
    ranks.run(future_mass_check, layout, dtype)


def windows_check(device):
    """Numbers beyond the KV heads are not read, on one process and on several."""
    shards = kvd.SequenceShards(30)
    q, k = (torch.randn(1, heads, 30, 16, device=device) for heads in (4, 2))
    own_q, own_k = shards.shard(q), shards.shard(k)
    for window in ((3, 4, 5), [6], (7, 2)):
        own = kvd.future_mass(shards, own_q, own_k, window)
        want = shards.shard(kvp.future_mass(q, k, window))
        torch.testing.assert_close(own, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="windows"):
        kvd.future_mass(shards, own_q.repeat(1, 3, 1, 1), own_k.repeat(1, 2, 1, 1), (3, 4, 5))


def test_windows_of_heads(ranks):
    ranks.run(windows_check)


def boundary_loss_check(device):
    """A scorer's step on a sequence of all ranks: scores are gathered, and each rank has the whole loss."""
    shards = kvd.SequenceShards(40)
    q, k, v = (torch.randn(1, heads, 40, 16, device=device) for heads in (2, 1, 1))
    scorer = kvp.MLPScorer(1, 16, 8).to(device)
    torch.nn.init.normal_(scorer.w2)
    target = kvp.future_mass(q, k, 4)
    kvp.boundary_loss(kvp.KVpop(1, 4, 6), scorer(k, v), target).loss.backward()
    want = [parameter.grad.clone() for parameter in scorer.parameters()]
    scorer.zero_grad()
    own_q, own_k, own_v = (shards.shard(x).contiguous() for x in (q, k, v))
    target = shards.gather(kvd.future_mass(shards, own_q, own_k, 4))
    scores = shards.gather(scorer(own_k, own_v))
    kvp.boundary_loss(kvp.KVpop(1, 4, 6), scores, target).loss.backward()
    for parameter, expected in zip(scorer.parameters(), want):
        torch.distributed.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6)


def test_boundary_loss_of_gathered_scores(ranks):
    ranks.run(boundary_loss_check)


# ---- refusals ----------------------------------------------------------------------------------------------


def refusals(device):
    rank = torch.distributed.get_rank()
    count = torch.distributed.get_world_size()
    with pytest.raises(ValueError, match="length: 1 is not allowed; it must be a whole number of at least"):
        kvd.SequenceShards(1)
    with pytest.raises(ValueError, match="layout: 'ring' is not allowed"):
        kvd.SequenceShards(12, layout="ring")
    shards = kvd.SequenceShards(12)
    q, k, v = (torch.randn(1, heads, shards.tokens, 16, device=device) for heads in (2, 1, 1))
    with pytest.raises(ValueError, match=r"q.size\(2\): 12 is not allowed; rank \d of \d holds"):
        kvd.attend(shards, torch.randn(1, 2, 12, 16, device=device), k, v)
    one = q[:, :, 1:] if rank == 1 else q
    with pytest.raises(ValueError, match=rf"q.size\(2\): .* is not allowed; rank 1 of {count} holds"):
        kvd.attend(shards, one, k, v)
    other = torch.float64 if device.type == "cpu" else torch.float16
    with pytest.raises(TypeError, match="q on rank 1: float.* is not allowed; it must be as on rank 0"):
        kvd.attend(shards, *(x.to(other) if rank == 1 else x for x in (q, k, v)))
    with pytest.raises(TypeError, match="k: bfloat16 is not allowed; it must be float32, as q"):
        kvd.attend(shards, q, k.bfloat16(), v)
    with pytest.raises(ValueError, match="q on rank 1"):
        kvd.attend(shards, q.repeat(1, 2, 1, 1) if rank == 1 else q, k, v)
    with pytest.raises(ValueError, match=r"expiry.size\(2\): 12 is not allowed"):
        kvd.attend(shards, q, k, v, kvp.Mask(torch.zeros(1, 1, 12, dtype=torch.int32, device=device)))
    mask = kvp.Mask(torch.zeros(1, 1, shards.tokens, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="expiry on rank 1: None is not allowed"):
        kvd.attend(shards, q, k, v, None if rank == 1 else mask)
    with pytest.raises(TypeError, match="lengths: int64 is not allowed; it must be int32"):
        kvd.attend(shards, q, k, v, lengths=torch.tensor([12], device=device))
    if device.type == "cpu":
        with pytest.raises(ValueError, match="lengths: .* are not allowed; they must be 0 to 12"):
            kvd.attend(shards, q, k, v, lengths=torch.tensor([13], dtype=torch.int32))
        with pytest.raises(ValueError, match="cu_seqlens: .* is not allowed; it must rise from 0 to 12"):
            kvd.attend(shards, q, k, v, cu_seqlens=torch.tensor([0, 9], dtype=torch.int32))
    with pytest.raises(ValueError, match="tensor.*is not allowed; it must be all 12 tokens"):
        shards.shard(q)
    with pytest.raises(ValueError, match=r"tensor.size\(2\): 12 is not allowed; rank"):
        shards.gather(torch.zeros(1, 1, 12, device=device))


def test_refusals(ranks):
    ranks.run(refusals)


def refusals_without_heads(device):
    """One KV head: the other ranks have none, and raise what the first finds."""
    rank = torch.distributed.get_rank()
    shards = kvd.SequenceShards(12)
    q, k = (torch.randn(1, heads, 12, 16, device=device) for heads in (2, 1))
    own_q, own_k = shards.shard(q), shards.shard(k)
    with pytest.raises(ValueError, match="aggregate: 'avg' is not allowed"):
        kvd.future_mass(shards, own_q, own_k, 3, aggregate="avg")
    for options in ({"beta": 0.5}, {"epsilon": -1.0}, {"look_ahead": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            kvd.future_mass(shards, own_q, own_k, 3, **options)
    with pytest.raises(ValueError, match="window"):
        kvd.future_mass(shards, own_q, own_k, -1)
    with pytest.raises(TypeError, match="scale"):
        kvd.future_mass(shards, own_q, own_k, 3, scale=1.0)
    with pytest.raises(ValueError, match="lse"):
        kvd.future_mass(shards, own_q, own_k, 3, lse=own_k[..., 0])
    with pytest.raises(ValueError, match="cap"):
        kvd.causal_lse(shards, own_q, own_k, logits_soft_cap=-1.0)
    with pytest.raises(ValueError, match="head_dim"):
        kvd.causal_lse(shards, own_q, own_k[..., :8].contiguous())
    with pytest.raises(ValueError, match="beta on rank 1: 2.0 is not allowed; it must be as on rank 0, 1.0"):
        kvd.future_mass(shards, own_q, own_k, 3, beta=2.0 if rank == 1 else 1.0)
    own = kvd.future_mass(shards, own_q, own_k, 3)
    torch.testing.assert_close(own, shards.shard(kvp.future_mass(q, k, 3)), rtol=1e-5, atol=1e-5)


def test_refusals_of_ranks_without_heads(ranks):
    ranks.run(refusals_without_heads)


def refusals_of_a_known_shape(device):
    """One rank errs after all agreed: all raise, and the next call is as before."""
    rank = torch.distributed.get_rank()
    shards = kvd.SequenceShards(12)
    q, k, v = (torch.randn(1, heads, shards.tokens, 16, device=device) for heads in (2, 1, 1))
    want = kvd.attend(shards, q, k, v)
    other = torch.float64 if device.type == "cpu" else torch.float16
    lengths = torch.tensor([12], dtype=torch.int32, device=device)
    wrong = [
        (ValueError, r"q.size\(2\)", (q[:, :, 1:], k, v), {}),
        (TypeError, "k: bfloat16 is not allowed", (q, k.bfloat16(), v), {}),
        (TypeError, "q on rank 1: float", [x.to(other) for x in (q, k, v)], {}),
        (TypeError, "q: NoneType is not allowed; it must be a tensor", (None, k, v), {}),
        (TypeError, "k: NoneType is not allowed", (q, None, v), {}),
        (TypeError, "q: NoneType is not allowed", (None, None, None), {}),
        (ValueError, "lengths on rank 1", (q, k, v), {"lengths": lengths}),
        (TypeError, "lengths: list is not allowed", (q, k, v), {"lengths": [12]}),
        (TypeError, "lengths: int64 is not allowed", (q, k, v), {"lengths": lengths.long()}),
    ]
    for error, sentence, tensors, options in wrong:
        with pytest.raises(error, match=sentence):
            kvd.attend(shards, *(tensors if rank == 1 else (q, k, v)), **(options if rank == 1 else {}))
        assert torch.equal(kvd.attend(shards, q, k, v), want)
    scores = torch.zeros(1, 1, shards.tokens, device=device)
    kvd.build_mask(shards, kvp.KVpop(1, 2, 3), scores)
    with pytest.raises(TypeError, match="scores: NoneType is not allowed"):
        kvd.build_mask(shards, kvp.KVpop(1, 2, 3), None if rank == 1 else scores)


def test_refusals_of_a_known_shape(ranks):
    ranks.run(refusals_of_a_known_shape)


def host_group_check(device):
    """Groups without a backend for CPU tensors get one of gloo, once."""
    world = torch.distributed.group.WORLD
    kvd.dist.get_backend_config, before = lambda group: "cuda:nccl", kvd.dist.get_backend_config
    try:
        group = kvd._host_group(None)
        assert group is not world and kvd._host_group(world) is group
        flag = torch.tensor([torch.distributed.get_rank()])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)
        assert flag.item() == torch.distributed.get_world_size() - 1
        no_grad_and_forward_only(device)
    finally:
        kvd.dist.get_backend_config = before


def test_a_group_for_the_hosts(ranks):
    ranks.run(host_group_check)


def test_without_a_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        kvd.SequenceShards(12)


def test_a_share_of_heads():
    policy = kvp.Policy(
        kvp.Sink([0, 1, 2, 3]),
        kvp.Window(4),
        kvp.TopKBudget((1, 2, 3, 4)),
        kvp.Decay(log_gamma=torch.tensor([0.0, -0.1, -0.2, -0.3])),
        kvp.MLPScorer(4, 8, 8),
    )
    own = policy.share(2, 4)
    assert (own.sinks, own.windows, own.budgets, own.scorer.heads) == ((2, 3), (4,), (3, 4), 2)
    assert torch.equal(own.log_gamma, policy.log_gamma[2:])
    assert torch.equal(own.share(2, 4).scorer.w1, policy.scorer.w1[2:])
    k, v = torch.randn(2, 1, 4, 9, 8)
    scores = policy.scorer(k, v)
    assert torch.equal(own.scorer(k[:, 2:].contiguous(), v[:, 2:].contiguous()), scores[:, 2:])
    scorers = kvp.Scorers([kvp.mLSTMScorer(4, 8, delay=4) for _ in range(2)], window=4)
    torch.nn.init.normal_(scorers.alpha)
    part = scorers.share(1, 3)
    torch.testing.assert_close(part.log_gamma(1), scorers.log_gamma(1)[1:3])
    assert torch.equal(part.layers[1].w_q, scorers.layers[1].w_q[1:3])
    with pytest.raises(NotImplementedError, match="whole_layer"):
        kvp.TOVA(4).share(0, 2)
    with pytest.raises(NotImplementedError, match="share of the heads"):
        kvp.Policy(kvp.Window(2), kvp.Stride(4)).share(0, 1)
    with pytest.raises(ValueError, match="heads: 3 to 6 are not allowed"):
        policy.scorer.share(3, 6)


# ---- tensor parallelism ------------------------------------------------------------------------------------


def tensor_parallel_model(folder):
    """The model of a folder, with its heads on the ranks of the default group."""
    import transformers

    count = torch.distributed.get_world_size()
    rank = str(torch.distributed.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(count))
    try:
        from transformers.distributed import DistributedConfig

        options = {"distributed_config": DistributedConfig(tp_size=count, tp_plan="auto")}
    except ImportError:
        options = {"tp_plan": "auto"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def generate_check(device, folder, scorers, ids, want):
    model = tensor_parallel_model(folder)
    ids = ids.to(device)
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for name, make in caches(scorers).items():
        cache = make(model)
        found = model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False)
        assert found.tolist() == want[name], name
        assert cache.heads == (rank * 6 // count, (rank + 1) * 6 // count)
        assert cache.cache.kv_heads == 6 // count
    with pytest.raises(NotImplementedError, match="whole_layer"):
        kvp.KVPolicyCache(model, kvp.TOVA(20))


def caches(scorers):
    """Caches of a model with six KV heads, by name."""
    return {
        "streaming": lambda model: kvp.KVPolicyCache(model, kvp.StreamingLLM(2, 14)),
        "by head": lambda model: kvp.KVPolicyCache(model, kvp.StreamingLLM(2, [6, 8, 10, 12, 14, 16])),
        "observed": lambda model: kvp.KVPolicyCache(model, kvp.H2O(8, 7)),
        "scorers": lambda model: kvp.KVPolicyCache.from_pretrained(scorers, model, budget=20),
    }


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")),
    reason="no transformers, or no accelerate, which its tensor parallelism needs",
)
def test_generate_under_tensor_parallelism(ranks, tmp_path):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=96, intermediate_size=96, num_hidden_layers=2, num_attention_heads=12,
        num_key_value_heads=6, head_dim=8, eos_token_id=None, initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    trained = kvp.Scorers([kvp.mLSTMScorer(6, 8, delay=8) for _ in range(2)], window=8, sinks=2)
    for scorer in trained.layers:
        torch.nn.init.normal_(scorer.readout)
    torch.nn.init.normal_(trained.alpha)
    scorers = str(tmp_path / "scorers.safetensors")
    trained.save(scorers)
    ids = torch.randint(48, (2, 40))
    want = {
        name: model.generate(
            ids, past_key_values=make(model), max_new_tokens=24, do_sample=False
        ).tolist()
        for name, make in caches(scorers).items()
    }
    assert want["streaming"] != want["scorers"]
    ranks.run(generate_check, str(tmp_path), scorers, ids, want)


# ---- training ----------------------------------------------------------------------------------------------


class Gated(torch.nn.Module):
    """Attention with a learned gate, and its losses."""

    def __init__(self):
        super().__init__()
        self.gate = kvp.WriteGateScorer(3, 16, 8, rope=kvp.Rope())
        torch.nn.init.normal_(self.gate.w2)

    def forward(self, q, k, v):
        scores = self.gate(k, v)
        mask = kvp.build_log_bias(kvp.WGKV(4), kvp.SoftWriteGate(), scores)
        return kvp.attend(q, k, v, mask).square().mean() + kvp.gate_sparsity(kvp.WGKV(4), scores)


def gates_check(device):
    """Gradients of a batch on one process, by DDP and by FSDP2."""
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    module = Gated().to(device)
    whole = [torch.randn(count, heads, 24, 16, device=device) for heads in (6, 3, 3)]
    module(*whole).backward()
    want = [parameter.grad for parameter in module.parameters()]
    own = [x[rank : rank + 1] for x in whole]
    for wrap in (torch.nn.parallel.DistributedDataParallel, fully_shard):
        wrapped = wrap(copy.deepcopy(module))
        wrapped.zero_grad()
        wrapped(*own).backward()
        for parameter, expected in zip(wrapped.parameters(), want):
            gradient = parameter.grad
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_gates_by_ddp_and_fsdp(ranks):
    ranks.run(gates_check)


def train(count, path, *options):
    """Losses of the example, and its weights."""
    command = [sys.executable]
    if count > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += [str(EXAMPLE), "--steps=4", "--batch=6", f"--out={path}", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    losses = [float(line.split()[-1]) for line in ran.stdout.splitlines()]
    return losses, kvp.Scorers.load(path)


@pytest.mark.parametrize("count, options", [(2, []), (3, []), (2, ["--fsdp"])], ids=str)
def test_training_is_that_of_one_process(count, options, tmp_path, alone):
    if torch.cuda.is_available() and torch.cuda.device_count() < count:
        pytest.skip("fewer GPUs than processes")
    losses, scorers = train(count, tmp_path / "several.safetensors", *options)
    want, one = alone
    assert len(losses) == 4 and losses[-1] != losses[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(want), rtol=1e-4, atol=1e-5)
    for (name, found), (_, expected) in zip(scorers.named_parameters(), one.named_parameters()):
        # AdamW's first steps have the size of lr = 0.02, whatever the gradient's.
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3, msg=lambda m, name=name: name + m)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(1, tmp_path_factory.mktemp("one") / "one.safetensors")
