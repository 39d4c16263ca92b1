#!/usr/bin/env python3
"""The PyTorch baseline of the decode steps of benchmarks/caches.cu: attention alone, by cuDNN, of one query
over B cached keys. It does not append, score or evict. "among products": a product of bf16 matrices precedes
each layer's attention, as in a model.

A call goes through layers of several times the L2 cache in turn, as one graph; median_ms is the time of one
layer. Prints one JSON object; --out writes it to a file too.
"""
import argparse
import json
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, GROUP, DIM = 8, 4, 128
WIDTH = 4096  # of the products


def time_decode(batch, length, backend, repetitions, products=False):
    kv_bytes = 2 * batch * HEADS * length * DIM * 2
    layers = int(min(36, max(4 if kv_bytes < 1e9 else 1, 400e6 / kv_bytes)))  # one of 8 GB is cold by itself
    q = torch.randn(batch, HEADS * GROUP, 1, DIM, device="cuda", dtype=torch.bfloat16)
    keys = [torch.randn(2, batch, HEADS, length, DIM, device="cuda", dtype=torch.bfloat16)
            for _ in range(layers)]
    x = torch.randn(batch, WIDTH, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
               for _ in range(layers if products else 0)]

    def all_layers():
        with sdpa_kernel(backend):
            for layer in range(layers):
                if products:
                    F.linear(x, weights[layer])
                F.scaled_dot_product_attention(q, *keys[layer], enable_gqa=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            all_layers()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            all_layers()
        times = []
        for _ in range(repetitions):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / layers)
    return statistics.median(times), kv_bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    arguments = parser.parse_args()
    rows = []
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION),
                          ("FlashAttention", SDPBackend.FLASH_ATTENTION)):
        sizes = [(4096, 1), (4096, 8), (4096, 32), (4096, 64), (4096, 128), (2048, 1), (2048, 8), (2048, 32)]
        # Beside the ragged caches of benchmarks/ragged.cuh: 8.6 GB of keys and values.
        calls = [("attention alone", *size, False) for size in [*sizes, (131072, 16)]]
        calls += [("attention among products", 4096, batch, True) for batch in (1, 8, 32, 64, 128)]
        for call, length, batch, products in calls:
            entry = {"name": f"{name} {call} {length} x {batch}"}
            try:
                repetitions = 20 if arguments.quick else 60
                median, kv_bytes = time_decode(batch, length, backend, repetitions, products)
                entry |= {"median_ms": median, "gb_per_s": kv_bytes / median * 1e-6}
            except Exception as error:  # one that this version of PyTorch cannot run does not cost the others
                entry |= {"median_ms": None, "error": f"{type(error).__name__}: {str(error)[:200]}"}
            rows.append(entry)
            torch.cuda.empty_cache()
            text = json.dumps({"card": torch.cuda.get_device_name(), "torch": torch.__version__,
                               "caches": "cold", "rows": rows}, indent=1)
            if arguments.out:
                with open(arguments.out, "w") as file:
                    file.write(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
