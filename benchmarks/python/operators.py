"""What the PyTorch operators cost on the CPU: python3 benchmarks/python/operators.py [cpu].

enqueue is the time of a call on the CPU, the median of batches of calls after a synchronization; GPU is
measured by events around the same calls. The last rows are floors: an autograd function without work, whose
outputs torch allocates, and torch's own calls. Results: benchmarks/notes/.
"""

import statistics
import sys
import time

import torch

import kvpolicy as kvp
from kvpolicy import _native

DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda", None if "cpu" in sys.argv else 0)
BATCHES, CALLS = 60, 20


def synchronize():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def enqueue(call):
    times = []
    for _ in range(BATCHES):
        synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    synchronize()
    return statistics.median(times)


def on_the_gpu(call):
    if DEVICE.type != "cuda":
        return float("nan")
    times = []
    for _ in range(BATCHES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def row(name, call):
    for _ in range(CALLS):
        call()
    print(f"{name:40s} enqueue {enqueue(call):8.2f} us   GPU {on_the_gpu(call):8.2f} us", flush=True)


class Floor(torch.autograd.Function):
    """Allocates what attend does, forward and backward, and no more."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.empty_like(q)
        lse = torch.empty(*q.shape[:-1], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(out, lse, q, k, v)
        return out, lse

    @staticmethod
    def backward(ctx, *_gradients):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[2:])


def main():
    query_heads, kv_heads, tokens, dim = 8, 2, 128, 64
    dtype = torch.bfloat16
    q, k, v = (
        torch.randn(1, heads, tokens, dim, device=DEVICE, dtype=dtype)
        for heads in (query_heads, kv_heads, kv_heads)
    )
    scores = torch.randn(1, kv_heads, tokens, device=DEVICE)
    policy = kvp.KVpop(4, 16, 32)
    mask = kvp.build_mask(policy, scores)
    out, lse = kvp.attend(q, k, v, mask, return_lse=True)
    mlp = kvp.MLPScorer(kv_heads, dim, 128).to(DEVICE)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    d_out = torch.randn_like(out)

    def module():
        _native.call("attend", q, q, k, v, (mask.expiry, None, None), (None,) * 3, 0.0, 0.0, out, lse)

    def both(forward):
        torch.autograd.grad(forward(), leaves, d_out)

    with torch.no_grad():
        row("attend, mask: a call of the module", module)
        row("build_mask", lambda: kvp.build_mask(policy, scores))
        row("attend", lambda: kvp.attend(q, k, v))
        row("attend, mask", lambda: kvp.attend(q, k, v, mask))
        ops = torch.ops.kvpolicy.attend
        row("attend, mask: torch.ops", lambda: ops(q, k, v, *mask, None, None, None, 0.0, 0.0))
        row("causal_lse", lambda: kvp.causal_lse(q, k))
        row("future_mass", lambda: kvp.future_mass(q, k, 16, lse=lse))
        row("MLP scorer", lambda: mlp(k, v))
    row("attend, mask: a gradient is wanted", lambda: kvp.attend(*leaves, mask))
    row("attend, mask: forward, backward", lambda: both(lambda: kvp.attend(*leaves, mask)))
    held = kvp.attend(*leaves, mask)
    row(
        "attend, mask: backward",
        lambda: torch.autograd.grad(held, leaves, d_out, retain_graph=True),
    )
    row("floor: a gradient is wanted", lambda: Floor.apply(*leaves))
    row("floor: forward, backward", lambda: both(lambda: Floor.apply(*leaves)[0]))
    held, _ = Floor.apply(*leaves)
    row("floor: backward", lambda: torch.autograd.grad(held, leaves, d_out, retain_graph=True))
    with torch.no_grad():
        row("torch.empty_like", lambda: torch.empty_like(q))
        row("torch.empty, sizes as a tuple", lambda: torch.empty(q.shape, dtype=q.dtype, device=q.device))
        row("torch.empty, sizes one by one", lambda: torch.empty(*q.shape, dtype=q.dtype, device=q.device))


if __name__ == "__main__":
    main()
