#!/usr/bin/env python3
"""Time to first token and peak memory of a prompt: all layers of a Qwen3-8B-shaped decoder with random
weights, with dense attention and through a FixedBudgetCache of 4096 entries per KV head with an mLSTM scorer.

Both sides are this program: embedding, RMS norms, matrix products by cuBLAS, the MLP in slices, and the last
token's logits. They differ in attention alone. Dense attention is cuDNN's and keeps all keys and values. The
bounded side is benchmarks/first_token.cu, a library that ctypes loads. All memory is PyTorch's, so its count
is complete. There is no RoPE and no norm of queries and keys, which would cost both sides the same.

Rows, LENGTH in 16k, 32k and 128k:

  dense LENGTH                                  the whole prompt at once
  dense, chunks of 4k LENGTH                    each chunk through all layers, PyTorch's fastest way
  products alone LENGTH                         no attention: what both sides have in common
  first token/LENGTH                            the bounded cache, the whole prompt at once
  first token, given scores/LENGTH              the same without the scorer: random scores from memory
  first token, chunks of 4k/LENGTH              each chunk through all layers

Rows of a length alternate in rounds. median_ms is CUDA events around the whole prompt; memory is allocated
before. peak_bytes is the peak of keys, values, workspace and activations; peak_with_weights_bytes adds the
model's and the scorers' weights. of_dense and peak_of_dense divide by the row dense LENGTH,
of_dense_chunks and peak_of_dense_chunks by dense, chunks of 4k LENGTH.

Before it times, the program compares both sides' attention over a prompt that the cache holds in full. Prints
a table, and one JSON object; --out writes the object to a file too.
"""
import argparse
import ctypes
import json
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 36, 4096, 12288, 151936
QUERY_HEADS, HEADS, DIM = 32, 8, 128
QUERIES, QKV = QUERY_HEADS * DIM, (QUERY_HEADS + 2 * HEADS) * DIM
ENTRIES = 4096  # per KV head, of the bounded cache
SLICE = 16384  # tokens of the MLP at once
CHUNK = 4096
LENGTHS = {"16k": 1 << 14, "32k": 1 << 15, "128k": 1 << 17}
MOST_SECONDS = 60  # no row takes longer than this
DEVICE = "cuda"


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, device=DEVICE, dtype=dtype)


def bytes_of(count):
    return empty(max(count, 1), dtype=torch.uint8)


class Library:
    """benchmarks/first_token.cu. A call that fails raises its message."""
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    signatures = {
        "error": (ctypes.c_char_p, []),
        "weight_bytes": (i64, [i32]),
        "create": (pointer, [i32, i32, pointer]),
        "destroy": (None, [pointer]),
        "cache_bytes": (i64, [pointer]),
        "workspace_bytes": (i64, [pointer, i32]),
        "bind": (i32, [pointer, pointer, i64, pointer]),
        # cache, layer, tokens; q, k, v and their stride; out and its stride; scores and their stride;
        # workspace, bytes; status, stream
        "prefill": (i32, [pointer, i32, i32, pointer, pointer, pointer, i64, pointer, i64, pointer, i64,
                          pointer, i64, pointer, pointer]),
        "advance": (i32, [pointer, pointer, pointer]),
        "clear": (i32, [pointer, pointer]),
    }

    def __init__(self, path):
        library = ctypes.CDLL(path)
        self.functions = {}
        for name, (result, arguments) in self.signatures.items():
            function = getattr(library, f"first_token_{name}")
            function.restype, function.argtypes = result, arguments
            self.functions[name] = function

    def __call__(self, name, *arguments):
        result = self.functions[name](*arguments)
        failures = {self.i32: 1, self.i64: -1, self.pointer: None}
        kind = self.signatures[name][0]
        if kind in failures and result == failures[kind]:
            raise RuntimeError(f"first_token_{name}: {self.functions['error']().decode()}")
        return result


def default_library():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [os.path.join(root, "build", tree, "benchmarks", "first_token.so") for tree in ("gpu", "cuda")]
    return next((path for path in paths if os.path.exists(path)), paths[0])


class Model:
    """The decoder without its attention. Activations [tokens, width], bf16."""

    def __init__(self, library, layers):
        def weights(rows, columns):
            return empty(rows, columns).normal_(0, 0.02)
        self.library, self.layers = library, layers
        before = torch.cuda.memory_allocated()
        self.embedding, self.head = weights(VOCABULARY, HIDDEN), weights(VOCABULARY, HIDDEN)
        self.norm = torch.ones(HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        self.qkv = [weights(QKV, HIDDEN) for _ in range(layers)]
        self.out = [weights(HIDDEN, QUERIES) for _ in range(layers)]
        self.gate = [weights(INTERMEDIATE, HIDDEN) for _ in range(layers)]
        self.up = [weights(INTERMEDIATE, HIDDEN) for _ in range(layers)]
        self.down = [weights(HIDDEN, INTERMEDIATE) for _ in range(layers)]
        self.bytes = torch.cuda.memory_allocated() - before
        # Even in [-0.2, 0.2), as in benchmarks/prefill.cu.
        count = library("weight_bytes", layers) // 4
        self.scorers = empty(count, dtype=torch.float32).uniform_(-0.2, 0.2)
        self.scorer_bytes = count * 4

    def normalized(self, x):
        return F.rms_norm(x, (HIDDEN,), self.norm, 1e-6)

    def project(self, layer, x, qkv):
        for of, into in zip(x.split(SLICE), qkv.split(SLICE)):
            torch.mm(self.normalized(of), self.qkv[layer].t(), out=into)

    def finish(self, layer, x, attended):
        """x <- the residual stream after the layer."""
        for of, attention in zip(x.split(SLICE), attended.split(SLICE)):
            of.addmm_(attention, self.out[layer].t())
            normalized = self.normalized(of)
            gate = F.silu(F.linear(normalized, self.gate[layer]), inplace=True)
            gate.mul_(F.linear(normalized, self.up[layer]))
            of.addmm_(gate, self.down[layer].t())

    def read_chunk(self, attention, tokens, first, layers):
        """The residual stream of tokens first .. first + len(tokens) - 1 after so many layers."""
        x = F.embedding(tokens, self.embedding)
        qkv = attention.qkv[:len(x)]
        for layer in range(layers):
            self.project(layer, x, qkv)
            self.finish(layer, x, attention(layer, first, qkv))
        return x

    def read(self, attention, tokens, chunk, layers):
        """Reads a prompt: the logits [1, VOCABULARY] behind its last token."""
        for first in range(0, len(tokens), chunk):
            x = self.read_chunk(attention, tokens[first:first + chunk], first, layers)
            attention.advance()
        return F.linear(self.normalized(x[-1:]), self.head)


def heads_of(qkv):
    """q, k and v [1, heads, tokens, dim] of a product [tokens, QKV]."""
    rows = qkv.view(1, len(qkv), -1, DIM).transpose(1, 2)
    return rows[:, :QUERY_HEADS], rows[:, QUERY_HEADS:QUERY_HEADS + HEADS], rows[:, QUERY_HEADS + HEADS:]


def rows_of(out):
    """[tokens, heads * dim] of [1, heads, tokens, dim]: a view, as cuDNN and FlashAttention write it."""
    return out.transpose(1, 2).reshape(out.shape[2], -1)


def causal(q, k, v):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def chunk_by_flash_attention(q, k, v, past):
    """The queries of a chunk over `past` keys and the chunk's own."""
    bias = causal_lower_right(q.shape[2], past + q.shape[2])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)


def chunk_by_cudnn(q, k, v, past):
    """PyTorch's cuDNN has no causal diagonal that ends at the last key: two calls, merged by their LSE."""
    def attend(first, last, is_causal):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k[:, :, first:last], v[:, :, first:last], None, True, 0.0, is_causal, False)
        return out, lse.reshape(1, q.shape[1], q.shape[2], 1)
    old, old_lse = attend(0, past, False)
    own, own_lse = attend(past, k.shape[2], True)
    return torch.lerp(own, old, torch.sigmoid(old_lse - own_lse).to(own.dtype))


class Attention:
    """A call attends for one layer to a chunk that begins at token `first`, qkv [tokens, QKV], and returns
    [tokens, QUERIES]; advance() follows the last layer. `qkv` is memory for the product."""

    def __init__(self, chunk):
        self.qkv = empty(chunk, QKV)

    def __call__(self, layer, first, qkv):
        return qkv[:, :QUERIES]

    def advance(self):
        pass

    def clear(self):
        """Forgets the prompt."""

    def check(self):
        """Raises what a call could not say."""

    def close(self):
        pass


class Dense(Attention):
    chunked = staticmethod(chunk_by_flash_attention)

    def __init__(self, layers, length, chunk):
        super().__init__(chunk)
        self.kv = [empty(2, length, HEADS, DIM) for _ in range(layers)]

    def __call__(self, layer, first, qkv):
        q, k, v = heads_of(qkv)
        kv = self.kv[layer][:, :first + len(qkv)]
        kv[:, first:].copy_(qkv[:, QUERIES:].view(len(qkv), 2, HEADS, DIM).transpose(0, 1))
        if first == 0:
            return rows_of(causal(q, k, v))
        k, v = kv.transpose(1, 2)[:, None]
        return rows_of(self.chunked(q, k, v, first))


class Bounded(Attention):
    """`scores` [HEADS, length], fp32; None for the scorer's."""

    def __init__(self, model, layers, chunk, scores=None):
        super().__init__(chunk)
        self.library, self.scores, self.weights = model.library, scores, model.scorers
        self.stream = torch.cuda.current_stream().cuda_stream
        self.cache = self.library("create", layers, torch.cuda.current_device(),
                                  None if scores is not None else self.weights.data_ptr())
        self.memory = bytes_of(self.library("cache_bytes", self.cache))
        self.workspace = bytes_of(self.library("workspace_bytes", self.cache, chunk))
        self.status = torch.zeros(1, device=DEVICE, dtype=torch.int32)
        self.out = empty(chunk, QUERIES)
        self.library("bind", self.cache, self.memory.data_ptr(), self.memory.numel(), self.stream)

    def __call__(self, layer, first, qkv):
        at, size = qkv.data_ptr(), qkv.element_size()
        scores, scores_stride = None, 0
        if self.scores is not None:
            scores, scores_stride = self.scores[:, first:].data_ptr(), self.scores.stride(0)
        self.library("prefill", self.cache, layer, len(qkv), at, at + QUERIES * size,
                     at + (QUERIES + HEADS * DIM) * size, qkv.stride(0), self.out.data_ptr(),
                     self.out.stride(0), scores, scores_stride, self.workspace.data_ptr(),
                     self.workspace.numel(), self.status.data_ptr(), self.stream)
        return self.out[:len(qkv)]

    def advance(self):
        self.library("advance", self.cache, self.status.data_ptr(), self.stream)

    def clear(self):
        self.library("clear", self.cache, self.stream)
        self.status.zero_()

    def check(self):
        if self.status.item() != 0:
            raise RuntimeError(f"a prefill did not run: its status is {self.status.item()}")

    def close(self):
        torch.cuda.synchronize()
        self.library("destroy", self.cache)


def compare(name, got, wanted):
    error = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
    if not error < 1e-2:
        raise RuntimeError(f"{name}: the relative difference to dense attention is {error:.3g}")


def check_bounded(model):
    """A prompt that the cache holds in full, whole and in chunks."""
    qkv = empty(ENTRIES, QKV).normal_()
    scores = torch.randn(HEADS, ENTRIES, device=DEVICE)
    wanted = rows_of(causal(*heads_of(qkv)))
    for given in (None, scores):
        for chunk in (ENTRIES, ENTRIES // 2 - 1):
            attention = Bounded(model, 1, chunk, given)
            parts = []
            for first in range(0, ENTRIES, chunk):
                parts.append(attention(0, first, qkv[first:first + chunk]).clone())
                attention.advance()
            attention.check()
            attention.close()
            compare(f"the cache, chunks of {chunk}", torch.cat(parts), wanted)


def milliseconds(call):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    result = call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), result


def fastest_chunks():
    """The fastest way that is right to attend to a chunk and 12k tokens before it, and the times of all."""
    q, k, v = heads_of(empty(4 * CHUNK, QKV).normal_())
    wanted, past = causal(q, k, v)[:, :, -CHUNK:], 3 * CHUNK
    ways, times = {"FlashAttention": chunk_by_flash_attention, "cuDNN, two calls": chunk_by_cudnn}, {}
    for name, way in ways.items():
        try:
            compare(name, way(q[:, :, -CHUNK:], k, v, past), wanted)
            times[name] = statistics.median(
                milliseconds(lambda way=way: way(q[:, :, -CHUNK:], k, v, past))[0] for _ in range(7))
        except Exception as error:  # one that this version of PyTorch cannot run does not cost the other
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr, flush=True)
    if not times:
        raise RuntimeError("PyTorch cannot attend to a chunk and tokens before it")
    best = min(times, key=times.get)
    return best, ways[best], times


class Prompt:
    """One row: attention of some kind, make(layers), reads `tokens` in chunks. It has memory for all layers,
    and reads `layers` of them."""

    def __init__(self, name, model, tokens, chunk, make, layers=None):
        self.name, self.model, self.tokens, self.chunk, self.make = name, model, tokens, chunk, make
        self.layers = layers or model.layers
        self.times, self.peak, self.error = [], 0, None

    def once(self, memory_layers, layers):
        """Milliseconds of one prompt, and the peak of memory beyond the weights."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        attention = self.make(memory_layers)
        try:
            # One layer of one chunk: PyTorch then has the memory of activations.
            self.model.read_chunk(attention, self.tokens[:self.chunk], 0, 1)
            attention.clear()
            torch.cuda.synchronize()
            ms, logits = milliseconds(lambda: self.model.read(attention, self.tokens, self.chunk, layers))
            peak = torch.cuda.max_memory_allocated() - before
            attention.check()
            if not logits.isfinite().all():
                raise RuntimeError("logits are not finite")
            return ms, peak
        finally:
            attention.close()

    def attempt(self, run):
        """A row that fails does not cost the others."""
        if self.error is None:
            try:
                run()
            except Exception as error:
                self.error = f"{type(error).__name__}: {str(error)[:200]}"
                torch.cuda.empty_cache()

    def warm_up(self):
        """One layer of the whole prompt: every shape of every kernel."""
        def run():
            self.once(1, 1)
            ms, _ = self.once(1, 1)
            if ms * self.layers > 1000 * MOST_SECONDS:
                raise RuntimeError(f"not timed: one layer takes {ms:.0f} ms, {self.layers} take too long")
        self.attempt(run)

    def run(self):
        def run():
            ms, peak = self.once(self.model.layers, self.layers)
            self.times.append(ms)
            self.peak = max(self.peak, peak)
        self.attempt(run)

    def row(self):
        if self.error is not None:
            return {"name": self.name, "median_ms": None, "error": self.error}
        entry = {"name": self.name, "median_ms": None}
        if self.layers == self.model.layers:
            entry |= {"median_ms": statistics.median(self.times), "min_ms": min(self.times),
                      "rounds": len(self.times)}
        else:
            entry["layers_read"] = self.layers
        return entry | {"peak_bytes": self.peak,
                        "peak_with_weights_bytes": self.peak + self.model.bytes + self.model.scorer_bytes}


def prompts_of(model, name, length, quick):
    tokens = torch.randint(VOCABULARY, (length,), device=DEVICE)
    scores = torch.randn(HEADS, length, device=DEVICE)

    def dense(chunk):
        return lambda layers: Dense(layers, length, chunk)

    def bounded(chunk, given=None):
        return lambda layers: Bounded(model, layers, chunk, given)
    # The slowest row's memory is that of any number of layers read.
    few = min(4, model.layers) if quick and length > LENGTHS["32k"] else None
    rows = ((f"dense {name}", length, dense(length), None),
            (f"first token/{name}", length, bounded(length), None),
            (f"first token, given scores/{name}", length, bounded(length, scores), None),
            (f"products alone {name}", length, lambda layers: Attention(length), None),
            (f"dense, chunks of 4k {name}", CHUNK, dense(CHUNK), few),
            (f"first token, chunks of 4k/{name}", CHUNK, bounded(CHUNK), None))
    return [Prompt(row, model, tokens, chunk, make, layers) for row, chunk, make, layers in rows]


def time_length(model, name, length, seconds, quick):
    """Rows of a length: as many rounds as fit in the seconds, at least one and at most nine."""
    prompts = prompts_of(model, name, length, quick)
    for prompt in prompts:
        prompt.warm_up()
    begin = time.monotonic()
    for number in range(1, 10):
        for prompt in prompts:
            prompt.run()
        elapsed = time.monotonic() - begin
        print(f"{name}: round {number}, {elapsed:.1f} s", file=sys.stderr, flush=True)
        if elapsed * (number + 1) / number > seconds:
            break
    rows = [prompt.row() for prompt in prompts]
    for suffix, reference in (("", rows[0]), ("_chunks", rows[4])):
        for row in rows:
            for key, of in (("median_ms", "of_dense"), ("peak_bytes", "peak_of_dense")):
                if row.get(key) and reference.get(key):
                    row[of + suffix] = row[key] / reference[key]
    return rows


def print_table(rows):
    def cell(row, key, scale=1, digits=2):
        return f"{row[key] * scale:.{digits}f}" if row.get(key) is not None else "-"
    lines = [("", "ms", "/ dense", "/ dense, chunks", "peak GB", "/ dense", "/ dense, chunks",
              "with weights GB")]
    for row in rows:
        lines.append((row["name"], cell(row, "median_ms", digits=1), cell(row, "of_dense"),
                      cell(row, "of_dense_chunks"), cell(row, "peak_bytes", 1e-9), cell(row, "peak_of_dense"),
                      cell(row, "peak_of_dense_chunks"), cell(row, "peak_with_weights_bytes", 1e-9)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line, row in zip(lines, [{}, *rows]):
        cells = [line[0].ljust(widths[0]), *(x.rjust(width) for x, width in zip(line[1:], widths[1:]))]
        print("  ".join(cells) + (f"  {row['error']}" if "error" in row else ""), file=sys.stderr)
    sys.stderr.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="also write the JSON here")
    parser.add_argument("--quick", action="store_true",
                        help="fewer rounds; of 128k, dense in chunks reads 4 layers, for its memory")
    parser.add_argument("--lengths", nargs="+", default=list(LENGTHS), choices=list(LENGTHS))
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the decoder (default: %(default)s)")
    parser.add_argument("--seconds", type=float,
                        help="for the rounds of a length, of which there is at least one (default: 30, or 8 "
                             "if quick)")
    parser.add_argument("--library", default=default_library(), help="default: %(default)s")
    arguments = parser.parse_args()
    seconds = arguments.seconds or (8 if arguments.quick else 30)
    torch.manual_seed(0)
    with torch.no_grad():
        model = Model(Library(arguments.library), arguments.layers)
        check_bounded(model)
        way, chunked, ways = fastest_chunks()
        Dense.chunked = staticmethod(chunked)
        result = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "layers": model.layers,
                  "weights_bytes": model.bytes, "scorer_weights_bytes": model.scorer_bytes,
                  "dense_chunks_by": way, "dense_chunks_ms": ways, "rows": []}
        print(f"dense, chunks: {way}, of {json.dumps(ways)} ms", file=sys.stderr, flush=True)
        for name in arguments.lengths:
            torch.cuda.empty_cache()
            result["rows"] += time_length(model, name, LENGTHS[name], seconds, arguments.quick)
            if arguments.out:  # whoever has no more time still has these
                with open(arguments.out, "w") as file:
                    file.write(json.dumps(result, indent=1) + "\n")
    print_table(result["rows"])
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
