#!/usr/bin/env python3
"""The PyTorch baseline of benchmarks/prefill.cu: dense attention of the same prompts. A dense engine's keys
and values are where its cache has them, so no copy of them is timed.

Whole prompts are causal attention by cuDNN. PyTorch's cuDNN does not take 2k queries over 4096 + 2k keys as
causal (its diagonal starts at the first key): there are several ways, and the fastest one counts.

Caches are cold: 256 MB are written before every timed call. Prints one JSON object; --out writes it to a file
too.
"""
import argparse
import os
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from attention import HEADS, QUERY_HEADS, Timer, dense, tensor, time_dense

DIM = 128


def by_cudnn(q, k, v, **options):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def time_chunk(timer, name, past, length):
    """The queries of a chunk over `past` keys and the chunk's own."""
    q = tensor(1, QUERY_HEADS, length, DIM, 1)
    k, v = (tensor(1, HEADS, past + length, DIM, seed) for seed in (2, 3))
    bias = causal_lower_right(length, past + length)
    visible = torch.ones(length, past + length, dtype=torch.bool, device="cuda").tril(past)
    old, own = [x[:, :, :past] for x in (k, v)], [x[:, :, past:] for x in (k, v)]

    def by_flash_attention():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)

    timer.row(f"FlashAttention dense {name}", by_flash_attention)
    timer.row(f"cuDNN masked {name}", lambda: by_cudnn(q, k, v, attn_mask=visible))
    # More pairs than a chunk has: every query sees every key.
    timer.row(f"cuDNN all pairs {name}", lambda: by_cudnn(q, k, v))
    # Without the merge of both results.
    timer.row(f"cuDNN two calls {name}", lambda: (by_cudnn(q, *old), dense(q, *own)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    arguments = parser.parse_args()
    timer = Timer(arguments.quick, arguments.out, False)
    with torch.no_grad():
        for name, length in (("8k", 1 << 13), ("16k", 1 << 14), ("32k", 1 << 15), ("128k", 1 << 17)):
            time_dense(timer, name, 1, length, DIM, False)
            torch.cuda.empty_cache()
        time_dense(timer, "8 x 4k", 8, 1 << 12, DIM, False)
        time_chunk(timer, "2k over 4096", 4096, 1 << 11)
    print(timer.write())


if __name__ == "__main__":
    main()
