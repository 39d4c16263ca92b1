#!/usr/bin/env python3
"""The PyTorch and Triton baseline of benchmarks/masks.cu: a stable sort for ranks, then the paper's Fenwick
tree (KVpop, algorithm 2) in Triton, one program per head, then expiries by a binary search over the cutoffs.

The scores are those of the C++ benchmark, bit for bit. Caches are cold: 256 MB are written before every timed
call. Prints one JSON object; --out writes it to a file too, and --check compares cutoffs and expiries of a
small case with plain loops.
"""
import argparse
import json
import statistics
import sys

import torch
import triton
import triton.language as tl

SINKS, WINDOW, BUDGET = 4, 256, 3836


def scores_of(heads, length):
    i = torch.arange(heads * length, device="cuda", dtype=torch.int64)
    mask = 0xFFFFFFFF
    x = (i * 2654435761 + 12345) & mask
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & mask
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & mask
    x = x ^ (x >> 16)
    return ((x >> 8).to(torch.float32) * 2.0**-21 - 4.0).reshape(heads, length)


@triton.jit
def fenwick(rank, tree, cutoff, length, sinks, window, budget, top, levels: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    rank += head * length
    tree += head * (length + 1)
    cutoff += head * length
    eligible = 0
    for q in range(0, length):
        t = q - window
        if t >= sinks:
            i = tl.load(rank + t) + 1
            while i <= length:
                tl.store(tree + i, tl.load(tree + i) + 1)
                i += i & -i
            eligible += 1
        if eligible < budget:
            tl.store(cutoff + q, 2147483647)
        else:
            index = 0
            missing = budget
            step = top
            for _ in range(levels):
                ahead = index + step
                inside = ahead <= length
                count = tl.load(tree + ahead, mask=inside, other=2147483647)
                take = inside & (count < missing)
                index = tl.where(take, ahead, index)
                missing = tl.where(take, missing - count, missing)
                step = step // 2
            tl.store(cutoff + q, index)


def ranks_of(scores, sinks, window):
    """Rank among the keys that leave the window; -1 for the others."""
    heads, length = scores.shape
    competing = scores[:, sinks:length - window]
    order = torch.sort(competing, dim=1, descending=True, stable=True).indices
    place = torch.arange(order.shape[1], device=scores.device, dtype=torch.int32).expand(heads, -1)
    rank = torch.full((heads, length), -1, device=scores.device, dtype=torch.int32)
    rank[:, sinks:length - window].scatter_(1, order, place)
    return rank


def cutoffs_of(rank, sinks, window, budget):
    heads, length = rank.shape
    tree = torch.zeros(heads, length + 1, device=rank.device, dtype=torch.int32)
    cutoff = torch.empty_like(rank)
    levels = length.bit_length()
    fenwick[(heads,)](rank, tree, cutoff, length, sinks, window, budget, 1 << (levels - 1), levels,
                      num_warps=1)
    return cutoff


def expiry_of(rank, cutoff, sinks, window):
    heads, length = rank.shape
    never = 2147483647
    t = torch.arange(length, device=rank.device, dtype=torch.int32)
    # Cutoffs only fall: the first query whose cutoff is better than the rank, but not before the key
    # leaves the window.
    first = torch.searchsorted(-cutoff, -rank, right=True).to(torch.int32)
    first = torch.maximum(first, t + window)
    first = torch.where(first >= length, never, first)
    first = torch.where(rank < 0, t + window, first)
    first[:, :sinks] = never
    return first


def mask_of(scores):
    rank = ranks_of(scores, SINKS, WINDOW)
    cutoff = cutoffs_of(rank, SINKS, WINDOW, BUDGET)
    return expiry_of(rank, cutoff, SINKS, WINDOW)


def time_ms(call, repetitions):
    flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repetitions):
        flushed.fill_(1)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def check():
    sinks, window, budget, length = 3, 7, 11, 300
    scores = torch.round(scores_of(2, length) * 4) / 4
    rank = ranks_of(scores, sinks, window)
    expiry = expiry_of(rank, cutoffs_of(rank, sinks, window, budget), sinks, window).cpu()
    for h in range(2):
        row = scores[h].tolist()
        wanted = [2147483647 if t < sinks else t + window for t in range(length)]
        kept = []
        for q in range(sinks + window, length):
            t = q - window
            kept.append(t)
            wanted[t] = 2147483647
            if len(kept) > budget:
                worst = min(kept, key=lambda s: (row[s], -s))
                kept.remove(worst)
                wanted[worst] = q
        if wanted != expiry[h].tolist():
            sys.exit(f"the baseline's own expiries are wrong in head {h}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    arguments = parser.parse_args()
    check()
    result = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
              "caches": "cold", "rows": []}
    for name, heads, length in (("16k x 8", 8, 1 << 14), ("16k x 1024", 1024, 1 << 14),
                                ("1M x 8", 8, 1 << 20)):
        scores = scores_of(heads, length)
        many = 5 if arguments.quick else 15
        if length > 1 << 16:
            many = 2  # a second each
        rank = ranks_of(scores, SINKS, WINDOW)
        row = {"name": name, "median_ms": time_ms(lambda: mask_of(scores), many),
               "sort_ms": time_ms(lambda: ranks_of(scores, SINKS, WINDOW), many),
               "fenwick_ms": time_ms(lambda: cutoffs_of(rank, SINKS, WINDOW, BUDGET), many),
               "checksum": int(mask_of(scores).to(torch.int64).clamp(max=length).sum())}
        result["rows"].append(row)
        print(json.dumps(row), file=sys.stderr)
    text = json.dumps(result, indent=1)
    if arguments.out:
        with open(arguments.out, "w") as file:
            file.write(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
