#!/usr/bin/env python3
"""The PyTorch baselines of benchmarks/attention.cu: compiled FlexAttention with a mask_mod that reads
lifetimes (and the time to make its block mask), and dense causal attention by cuDNN. Tensors and lifetimes
are those of the C++ benchmark, bit for bit.

Caches are cold: 256 MB are written before every timed call. "extra_bytes" is the peak of memory beyond inputs
and results. Prints one JSON object; --out writes it to a file too, and --check compares FlexAttention's
numbers with a plain formula.
"""
import argparse
import json
import math
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import masks  # the same lifetimes, from the same scores

GROUPS = ("flex", "mass", "dense")
HEADS, GROUP, WINDOW = 8, 4, masks.WINDOW
QUERY_HEADS = HEADS * GROUP

# One compilation per shape and mask: each is a function of its own.
torch._dynamo.config.cache_size_limit = 256
flex = torch.compile(flex_attention, dynamic=False)
# For up to 512 blocks Inductor turns the block mask's argsort, and its sums over 128 x 128 pairs, into Triton
# kernels that keep a whole row in registers. Triton compiles these for minutes (pytorch/pytorch#182060).
# Without them the sort is ATen's.
block_mask_of = torch.compile(create_block_mask, dynamic=False,
                              options={"triton.persistent_reductions": False})


def hashed(first, count):
    """The C++ benchmark's numbers in [-4, 4) for indices first .. first + count - 1."""
    mask = 0xFFFFFFFF
    i = torch.arange(first, first + count, device="cuda", dtype=torch.int64)
    x = (i * 2654435761 + 12345) & mask
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & mask
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & mask
    x = x ^ (x >> 16)
    return (x >> 8).to(torch.float32) * 2.0**-21 - 4.0


def tensor(batch, heads, length, dim, seed):
    out = torch.empty(batch * heads * length * dim, device="cuda", dtype=torch.bfloat16)
    piece = 1 << 26
    for first in range(0, out.numel(), piece):
        count = min(piece, out.numel() - first)
        out[first:first + count] = (hashed(first + seed, count) * 0.433).to(torch.bfloat16)
    return out.reshape(batch, heads, length, dim)


def budget_lifetimes(length):
    return masks.mask_of(masks.scores_of(HEADS, length))


def gate_lifetimes(length, threshold):
    t = torch.arange(length, device="cuda", dtype=torch.int32)
    return torch.where(masks.scores_of(HEADS, length) >= threshold, 2147483647, t + WINDOW).to(torch.int32)


def lifetime_mask(expiry):
    def visible(b, h, q, t):
        return (t <= q) & (q < expiry[h // GROUP, t])
    return visible


class Timer:
    """Rows of the result, written down as they come: whoever has no more time still has those."""

    def __init__(self, quick, path, compile_only):
        self.quick = quick
        self.path = path
        self.compile_only = compile_only
        self.begin = time.monotonic()
        self.flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        self.rows = []

    def ms(self, call, seconds):
        """Median of as many calls as fit, and the peak of memory while one ran."""
        call()  # compiles
        torch.cuda.synchronize()
        if self.compile_only:
            return None, None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = call()
        torch.cuda.synchronize()
        del kept
        extra = torch.cuda.max_memory_allocated() - before
        times = []
        while len(times) < 3 or (sum(times) < 1000 * seconds and len(times) < 15):
            self.flushed.fill_(1)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times), extra

    def row(self, name, call, **more):
        try:
            median, extra = self.ms(call, 0.1 if self.quick else 0.5)
            entry = {"name": name, "median_ms": median, "extra_bytes": extra, **more}
        # A baseline that this version of PyTorch cannot run does not stop the others.
        except Exception as error:
            entry = {"name": name, "median_ms": None, "error": f"{type(error).__name__}: {str(error)[:200]}"}
        self.rows.append(entry)
        print(f"[{time.monotonic() - self.begin:.0f} s] {json.dumps(entry)}", file=sys.stderr, flush=True)
        self.write()

    def write(self):
        text = json.dumps({"card": torch.cuda.get_device_name(), "torch": torch.__version__, "caches": "cold",
                           "rows": self.rows}, indent=1)
        if self.path:
            with open(self.path, "w") as file:
                file.write(text + "\n")
        return text


def forward_and_backward(call, inputs, gradient):
    def both():
        for x in inputs:
            x.grad = None
        call().backward(gradient)
    return both


def dense(q, k, v):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def time_dense(timer, name, batch, length, dim, backward):
    q = tensor(batch, QUERY_HEADS, length, dim, 1)
    k, v = (tensor(batch, HEADS, length, dim, seed) for seed in (2, 3))
    timer.row(f"cuDNN dense forward {name}", lambda: dense(q, k, v))
    if backward:
        gradient = tensor(batch, QUERY_HEADS, length, dim, 4)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        timer.row(f"cuDNN dense forward + backward {name}",
                  forward_and_backward(lambda: dense(*inputs), inputs, gradient))


def block_mask_by_lifetimes(length):
    visible = lifetime_mask(budget_lifetimes(length))
    return lambda: block_mask_of(visible, None, QUERY_HEADS, length, length, device="cuda")


def time_flex(timer, name, batch, length, dim):
    q = tensor(batch, QUERY_HEADS, length, dim, 1)
    k, v = (tensor(batch, HEADS, length, dim, seed) for seed in (2, 3))
    make = block_mask_by_lifetimes(length)
    timer.row(f"FlexAttention block mask {name}", make)
    block = make()
    timer.row(f"FlexAttention forward {name}", lambda: flex(q, k, v, block_mask=block, enable_gqa=True),
              block_mask_density=1 - block.sparsity() / 100)


def time_flex_backward(timer, name, batch, length, dim):
    q = tensor(batch, QUERY_HEADS, length, dim, 1)
    k, v = (tensor(batch, HEADS, length, dim, seed) for seed in (2, 3))
    block = block_mask_by_lifetimes(length)()
    gradient = tensor(batch, QUERY_HEADS, length, dim, 4)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    timer.row(f"FlexAttention forward + backward {name}",
              forward_and_backward(lambda: flex(*inputs, block_mask=block, enable_gqa=True),
                                   inputs, gradient))


def mass_by_flex(q, k, lse, block):
    """KVpop, D.2: keys take the part of queries, and -lse is a bias; the log-sum-exp is the log of the
    mass."""
    def bias(score, b, h, t, d):
        return score - lse[b, h, d]
    keys = k.repeat_interleave(GROUP, dim=1)
    _, log_mass = flex(keys, q, q[..., :16], score_mod=bias, block_mask=block, return_lse=True)
    count = (q.shape[2] - torch.arange(q.shape[2], device="cuda") - WINDOW).clamp(min=1)
    mass = torch.exp(log_mass) / count
    return torch.log(1e-8 + mass.unflatten(1, (HEADS, GROUP)).amax(2))


def time_mass(timer, name, length, dim):
    q, k = tensor(1, QUERY_HEADS, length, dim, 1), tensor(1, HEADS, length, dim, 2)
    keys = k.repeat_interleave(GROUP, dim=1)
    lse = torch.ops.aten._scaled_dot_product_flash_attention(q, keys, keys, 0.0, True)[1]
    del keys
    later = create_block_mask(lambda b, h, t, d: d >= t + WINDOW, None, None, length, length, device="cuda")
    timer.row(f"FlexAttention future mass {name}", lambda: mass_by_flex(q, k, lse, later))
    return mass_by_flex(q, k, lse, later), lse


def check():
    """FlexAttention's lifetimes and future mass against plain formulas at a small size."""
    length, dim = 512, 64
    q = tensor(1, QUERY_HEADS, length, dim, 1)
    k, v = (tensor(1, HEADS, length, dim, seed) for seed in (2, 3))
    expiry = gate_lifetimes(length, 2.0)
    shorter = torch.minimum(expiry, torch.arange(length, device="cuda", dtype=torch.int32) + 40)
    expiry = torch.where(torch.arange(length, device="cuda") % 3 == 0, expiry, shorter).to(torch.int32)
    block = block_mask_of(lifetime_mask(expiry), None, QUERY_HEADS, length, length, device="cuda")
    got = flex(q, k, v, block_mask=block, enable_gqa=True).float()
    at = torch.arange(length, device="cuda")
    seen = (at[None, None, :] <= at[None, :, None]) & (at[None, :, None] < expiry[:, None, :])
    logits = q.double().unflatten(1, (HEADS, GROUP)) @ k.double()[:, :, None].transpose(-1, -2)
    logits = logits / math.sqrt(dim)
    weights = logits.masked_fill(~seen[None, :, None], -math.inf).softmax(-1)
    wanted = (weights @ v.double()[:, :, None]).flatten(1, 2)
    if (got - wanted).norm() / wanted.norm() > 8e-3:
        sys.exit("FlexAttention with lifetimes is not the formula")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--check", action="store_true", help="check the baselines themselves, nothing else")
    parser.add_argument("--compile", action="store_true",
                        help="call everything once, so that later runs find it in the compilers' "
                             "caches on disk")
    parser.add_argument("--only", nargs="+", default=GROUPS, choices=GROUPS, help="groups of baselines")
    arguments = parser.parse_args()
    if arguments.check:
        check()
        return
    timer = Timer(arguments.quick, arguments.out, arguments.compile)

    def attempt(group, *shape):  # one that this version of PyTorch cannot run does not cost the others
        try:
            group(timer, *shape)
        except Exception as error:
            print(f"{group.__name__} {shape[0]}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr,
                  flush=True)
        torch.cuda.empty_cache()

    sizes = (("16k", 1 << 14), ("32k", 1 << 15), ("64k", 1 << 16), ("128k", 1 << 17))
    if "flex" in arguments.only:
        for name, length in sizes:
            attempt(time_flex, name, 1, length, 128)
        for name, length in sizes[:2]:
            attempt(time_flex_backward, name, 1, length, 128)
    if "mass" in arguments.only:
        with torch.no_grad():
            for name, length in sizes[:2]:
                attempt(time_mass, name, length, 128)
    if "dense" in arguments.only:
        for name, length in sizes:
            attempt(time_dense, name, 1, length, 128, length <= 1 << 15)
        attempt(time_dense, "16k, d 64", 1, 1 << 14, 64, True)
        attempt(time_dense, "8 x 4k", 8, 1 << 12, 128, True)
        attempt(time_dense, "32 x 2k", 32, 1 << 11, 128, True)
        attempt(time_dense, "200k", 1, 200000, 128, False)
    print(timer.write())


if __name__ == "__main__":
    main()
