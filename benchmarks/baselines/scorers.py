#!/usr/bin/env python3
"""The baseline of the mLSTM without projections of benchmarks/scorers.cu: mlstm_kernels, NX-AI's own Triton
kernels, over given queries, keys, values and gates: 8 heads, 16k tokens, 128 features and values, forward,
and forward with backward to all of them.

KVPOLICY_MLSTM_KERNELS may name a folder that the package is in (and einops, which it imports); otherwise it
is imported as installed. Where that fails, rows have no median_ms, and say why. Of the package's chunkwise
kernels, chunk sizes and types of gates the fastest counts; "with" names it, "all" has the others. Each runs
in a process of its own, since a compiler that dies takes its process along.

Caches are cold: 256 MB are written before every timed call. A call is a CUDA graph where it can be captured,
so that the time of Python is not in it; median_ms_without_graph is the call as a user makes it. Prints one
JSON object; --out writes it to a file too.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys

HEADS, LENGTH, DIM = 8, 16384, 128
# Kernel, chunk, type of the gates. (Compiling triton_xl_chunk for gates in bf16, Triton died of an
# assertion in LLVM.)
WAYS = [("triton_limit_chunk", 64, "float32"), ("triton_xl_chunk", 128, "float32"),
        ("triton_xl_chunk", 256, "float32")]
SIZES = [("16k x 8", 1), ("batch 8/16k x 8", 8)]


def name_of(way):
    kernel, chunk, gates = way
    return f"{kernel}, chunks of {chunk}, gates in {gates}"


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
        why = f"{type(error).__name__}: {error}"
        return {}, None, f"not measured: mlstm_kernels could not be imported {where}: {why}"


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


def measure(torch, kernel, way, batch, both, repetitions):
    _, chunk, gates = way
    generator = torch.Generator(device="cuda").manual_seed(1)

    def drawn(*size, dtype=torch.bfloat16):
        return torch.randn(*size, device="cuda", dtype=dtype, generator=generator)

    q, k, v, d_h = (drawn(batch, HEADS, LENGTH, DIM) for _ in range(4))
    i = drawn(batch, HEADS, LENGTH, dtype=getattr(torch, gates))
    f = drawn(batch, HEADS, LENGTH, dtype=getattr(torch, gates)) + 4.0
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


def run_way(number, repetitions):
    """What one way takes, by name of the row, a JSON object a line as they come."""
    registry, _, _ = kernels()
    import torch
    for size, batch in SIZES:
        for what, both in (("forward", False), ("forward + backward", True)):
            try:
                by_graph, direct = measure(torch, registry[WAYS[number][0]], WAYS[number], batch, both,
                                           repetitions)
                found = {"median_ms": by_graph if by_graph is not None else direct,
                         "median_ms_without_graph": direct, "graph": by_graph is not None}
            except Exception as error:  # a row that this GPU or version cannot run
                found = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
            print(json.dumps({"row": f"mlstm_kernels {size} {what}"} | found), flush=True)
            torch.cuda.empty_cache()


def start_way(number, repetitions):
    return subprocess.Popen([sys.executable, __file__, "--way", str(number),
                             "--repetitions", str(repetitions)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(process, seconds):
    try:
        out, err = process.communicate(timeout=seconds)
        end = f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        end = f"took more than {seconds} s"
    rows = {}
    for line in out.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            rows[row.pop("row")] = row
    return rows, f"{end}: {err.strip().splitlines()[-1][:200] if err.strip() else 'without a word'}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--compile", action="store_true",
                        help="compile what other runs time, all ways at once")
    parser.add_argument("--way", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--repetitions", type=int, default=30, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way is not None:
        run_way(arguments.way, arguments.repetitions)
        return
    result = {"caches": "cold", "rows": []}
    _, version, reason = kernels()
    try:
        import torch
        result |= {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "mlstm_kernels": version}
    except Exception as error:
        reason = reason or f"not measured: {type(error).__name__}: {error}"
    if arguments.compile:
        for process in [start_way(number, 1) for number in range(len(WAYS))] if reason is None else []:
            result_of(process, 200)
        return
    ways = {}
    for number, way in enumerate(WAYS if reason is None else []):
        ways[name_of(way)] = result_of(start_way(number, 10 if arguments.quick else 30), 60)
        write(result, ways, reason, arguments.out)  # what comes later may be cut off
    text = write(result, ways, reason, arguments.out)
    print(text)


def write(result, ways, reason, path):
    """Rows of what has been measured so far; their text, in the file too."""
    result["rows"] = []
    for size, _ in SIZES:
        for what in ("forward", "forward + backward"):
            row = {"name": f"mlstm_kernels {size} {what}", "median_ms": None}
            tried = {way: rows.get(row["name"], {"error": end}) for way, (rows, end) in ways.items()}
            timed = [way for way in tried if "median_ms" in tried[way]]
            if timed:
                best = min(timed, key=lambda way: tried[way]["median_ms"])
                row |= tried[best] | {"with": best, "all": tried}
            else:
                row |= {"error": reason or "not measured: no kernel ran", "all": tried}
            result["rows"].append(row)
    text = json.dumps(result, indent=1)
    if path:
        with open(path, "w") as file:
            file.write(text + "\n")
    return text


if __name__ == "__main__":
    main()
