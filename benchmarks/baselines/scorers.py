#!/usr/bin/env python3
"""What a PyTorch user does for an mLSTM without its projections (benchmarks/scorers.cu): mlstm_kernels, NX-AI's own Triton kernels, over
queries, keys, values and gates that are there: 8 heads, 16k tokens, 128 features and values, forward, and forward with backward to all of
them.

KVPOLICY_MLSTM_KERNELS may name a folder that the package is in (and einops, which it imports); otherwise it is imported as installed. Where that
fails, rows have no median_ms, and say why. Of the package's chunkwise kernels and chunk sizes the fastest counts; "with" names it, "all"
has the others.

Caches are cold: 256 MB are written before every timed call. A call is a CUDA graph where it can be captured, so that the time of Python is not
in it; median_ms_without_graph is the call as a user makes it. Prints one JSON object; --out writes it to a file too.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys

HEADS, LENGTH, DIM = 8, 16384, 128
WAYS = [("triton_xl_chunk", 64), ("triton_xl_chunk", 128), ("triton_xl_chunk", 256), ("triton_limit_chunk", 64)]


def kernels():
    """The package's chunkwise kernels by name, or the reason why there are none."""
    path = os.environ.get("KVPOLICY_MLSTM_KERNELS")
    if path:
        sys.path.insert(0, path)
    try:
        import mlstm_kernels
        from mlstm_kernels.torch.chunkwise import registry
        return registry, getattr(mlstm_kernels, "__version__", "unknown"), None
    except Exception as error:
        where = f"in {path}" if path else "as an installed package (KVPOLICY_MLSTM_KERNELS names none)"
        return {}, None, f"not measured: mlstm_kernels could not be imported {where}: {type(error).__name__}: {error}"


def time_ms(torch, call, repetitions):
    """Medians by graph (None where it cannot be captured) and as it is."""
    flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()

        def median(run):
            times = []
            for _ in range(repetitions):
                flushed.fill_(1)
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                run()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
            return statistics.median(times)

        direct = median(call)
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                call()
            by_graph = median(graph.replay)
        except Exception as error:
            print(f"no graph: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            by_graph = None
    return by_graph, direct


def measure(torch, kernel, chunk, batch, both, repetitions):
    generator = torch.Generator(device="cuda").manual_seed(1)

    def drawn(*size):
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v, d_h = (drawn(batch, HEADS, LENGTH, DIM) for _ in range(4))
    i = drawn(batch, HEADS, LENGTH)
    f = drawn(batch, HEADS, LENGTH) + 4.0
    inputs = [q, k, v, i, f]
    for x in inputs:
        x.requires_grad_(both)

    def call():
        h = kernel(q=q, k=k, v=v, i=i, f=f, return_last_states=False, chunk_size=chunk,
                   autocast_kernel_dtype=torch.bfloat16)
        if both:
            torch.autograd.grad(h, inputs, d_h)

    with torch.set_grad_enabled(both):
        return time_ms(torch, call, repetitions)


def compile_all():
    """Runs every way once, each in a process of its own, so that Triton's cache has the kernels."""
    ways = [subprocess.Popen([sys.executable, __file__, "--compile", str(n)]) for n in range(len(WAYS))]
    return max(way.wait() for way in ways)


def compile_way(number):
    registry, _, reason = kernels()
    if reason is not None:
        print(reason, file=sys.stderr)
        return
    import torch
    name, chunk = WAYS[number]
    for batch in (1, 8):
        for both in (False, True):
            measure(torch, registry[name], chunk, batch, both, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--compile", type=int, nargs="?", const=-1, metavar="WAY",
                        help="compile what other runs time, or one way of it")
    arguments = parser.parse_args()
    if arguments.compile is not None:
        sys.exit(compile_all() if arguments.compile < 0 else compile_way(arguments.compile))
    result = {"caches": "cold", "rows": []}
    registry, version, reason = kernels()
    torch = None
    try:
        import torch
        result |= {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "mlstm_kernels": version}
    except Exception as error:
        reason = reason or f"not measured: {type(error).__name__}: {error}"
    for size, batch in (("16k x 8", 1), ("batch 8/16k x 8", 8)):
        for what, both in (("forward", False), ("forward + backward", True)):
            row = {"name": f"mlstm_kernels {size} {what}", "median_ms": None}
            tried = {}
            for name, chunk in WAYS if reason is None else []:
                way = f"{name}, chunks of {chunk}"
                try:
                    by_graph, direct = measure(torch, registry[name], chunk, batch, both,
                                               10 if arguments.quick else 30)
                    tried[way] = {"median_ms": by_graph if by_graph is not None else direct,
                                  "median_ms_without_graph": direct, "graph": by_graph is not None}
                except Exception as error:  # one that this card or version cannot run does not cost the others
                    tried[way] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
                torch.cuda.empty_cache()
            timed = [way for way in tried if "median_ms" in tried[way]]
            if timed:
                best = min(timed, key=lambda way: tried[way]["median_ms"])
                row |= tried[best] | {"with": best, "all": tried}
            else:
                row |= {"error": reason or "not measured: no kernel ran", "all": tried}
            result["rows"].append(row)
            print(json.dumps(row), file=sys.stderr)
            if arguments.out:
                with open(arguments.out, "w") as file:
                    file.write(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
