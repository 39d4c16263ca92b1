#!/usr/bin/env python3
"""model.generate of a Llama of 8B shape with random weights (bf16) at 32k tokens of context: transformers'
static cache, compiled as generate() compiles it, and KVPolicyCache with 4096 entries per head.

Rows:

  static cache, compiled/16          StaticCache of 32768 tokens; its forward is compiled by generate()
                                     (CompileConfig's defaults: mode reduce-overhead). Time of compiling is
                                     left out
  static cache, largest batch        of the batches below that of its keys and values alone, the largest whose
                                     step runs (not compiled, whose copies of keys and values are as large)
  KVPolicyCache, KVpop, mLSTM/16     a prompt of 32k tokens by prefill_chunk_size, then decode steps
  KVPolicyCache, StreamingLLM/16     the same after a prompt that fills the window
  ..., from Python                   the same with cuda_graph=False
  KVPolicyCache, prompt of ...       peaks of a shorter prompt by prefill_chunk_size
  KVPolicyCache, largest batch       the largest batch whose prompt and steps run; decode steps with full
                                     budgets

ms_per_token is the mean of steps of generate() between two tokens, with all that generate() does there;
tokens_per_s is batch / ms_per_token. first_token_s is the time of the prompt. Peaks are those of torch's
allocator, weights included: prompt_peak_bytes until the first token, decode_peak_bytes behind it.

The static cache is filled with random numbers and its length is set, instead of reading a prompt: a step's
time does not depend on them. At the largest batch the budgets of KVPolicyCache are filled in the same way, by
Cache.prefill of random queries, keys and values.

Prints one JSON object; --out writes it to a file too.
"""
import argparse
import gc
import json
import sys
import time

import torch
import transformers

import kvpolicy as kvp
from kvpolicy.whole_file import write_whole

SHAPE = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "eos_token_id": None,
}
HEADS, DIM = SHAPE["num_key_value_heads"], SHAPE["head_dim"]
SINKS, WINDOW, BUDGET = 4, 256, 3836
ENTRIES = SINKS + WINDOW + BUDGET


class Clock(transformers.StoppingCriteria):
    """Times of the tokens, and peaks of the prompt and of what follows."""

    def __init__(self):
        self.times, self.prompt_peak = [], 0

    def __call__(self, input_ids, scores, **kwargs):
        torch.cuda.synchronize()  # generate() waits here as well
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            self.prompt_peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def tidy():
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def timed(model, ids, cache, tokens, warm_up=8, **options):
    """generate() of `tokens` tokens: a row, whose time per token leaves out the first `warm_up` tokens."""
    clock = Clock()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
                   max_new_tokens=tokens, stopping_criteria=transformers.StoppingCriteriaList([clock]),
                   pad_token_id=0, **options)
    steps = clock.times[warm_up:]
    each = (steps[-1] - steps[0]) / (len(steps) - 1)
    between = sorted(b - a for a, b in zip(steps, steps[1:]))
    return {"batch": len(ids), "ms_per_token": each * 1e3, "tokens_per_s": len(ids) / each,
            "median_ms": between[len(between) // 2] * 1e3, "steps_timed": len(between),
            "first_token_s": clock.times[0] - begin, "prompt_peak_bytes": clock.prompt_peak,
            "decode_peak_bytes": torch.cuda.max_memory_allocated()}


def make_model(layers):
    config = transformers.LlamaConfig(num_hidden_layers=layers, **SHAPE)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    return model.eval()


def prompt_of(batch, length):
    return torch.randint(SHAPE["vocab_size"], (batch, length), device="cuda")


# ---- transformers' static cache ----------------------------------------------------------------------------


def static_cache(model, batch, context, length):
    cache = transformers.StaticCache(config=model.config, max_cache_len=context)
    cache.early_initialization(batch_size=batch, num_heads=HEADS, head_dim=DIM, dtype=torch.bfloat16,
                               device=torch.device("cuda"))
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(length)
    return cache


def time_static(model, batch, context, tokens):
    model.config._attn_implementation = "sdpa"
    tidy()
    length = context - tokens - 1
    cache, ids = static_cache(model, batch, context, length), prompt_of(batch, length + 1)
    begin = time.perf_counter()
    timed(model, ids, cache, 6, 2)  # compiles at the second token, and records the graph
    compile_s = time.perf_counter() - begin
    for layer in cache.layers:
        layer.cumulative_length.fill_(length)
    row = timed(model, ids, cache, tokens, 4)
    # Its prompt was one token.
    return {key: value for key, value in row.items() if key not in ("first_token_s", "prompt_peak_bytes")} | {
        "compile_s": compile_s}


def largest_static(model, context):
    model.config._attn_implementation = "sdpa"
    tidy()
    each = 2 * HEADS * context * DIM * 2 * len(model.model.layers)
    bound = torch.cuda.mem_get_info()[0] // each
    for batch in range(bound, 0, -1):
        cache = None
        try:
            cache = static_cache(model, batch, context, context - 2)
            positions = torch.full((batch, 1), context - 2, device="cuda")
            mask = torch.ones(batch, context - 1, device="cuda", dtype=torch.long)
            with torch.no_grad():
                model(prompt_of(batch, 1), attention_mask=mask, position_ids=positions, past_key_values=cache)
            torch.cuda.synchronize()
            return {"batch": batch, "batch_of_keys_and_values_alone": bound, "bytes_per_sequence": each,
                    "decode_peak_bytes": torch.cuda.max_memory_allocated()}
        except torch.cuda.OutOfMemoryError:
            pass
        finally:
            del cache
            tidy()
    return {"batch": 0}


# ---- KVPolicyCache -----------------------------------------------------------------------------------------


def policies(layers):
    torch.manual_seed(1)
    scorers = [kvp.mLSTMScorer(HEADS, DIM, delay=WINDOW).cuda().requires_grad_(False) for _ in range(layers)]
    for scorer in scorers:
        for parameter in scorer.parameters():
            parameter.uniform_(-0.2, 0.2)
    return {"KVpop, mLSTM": lambda layer: kvp.KVpop(SINKS, WINDOW, BUDGET, scorers[layer]),
            "StreamingLLM": kvp.StreamingLLM(SINKS, ENTRIES - SINKS)}


def fill(cache):
    """Random keys and values in all entries, as a prompt of ENTRIES tokens leaves them."""
    inner, part = cache.cache, 64
    for _ in range(0, ENTRIES, part):
        rows = [torch.randn(inner.sequences, heads, part, DIM, device="cuda", dtype=torch.bfloat16)
                for heads in (SHAPE["num_attention_heads"], HEADS, HEADS)]
        for layer in range(len(inner.policies)):
            inner.prefill(layer, *rows)
        inner.advance()


def time_bounded(model, policy, batch, length, tokens, chunk, **options):
    tidy()
    cache = kvp.KVPolicyCache(model, policy, **options)
    timed(model, prompt_of(batch, 2 * chunk), cache, 4, 1, prefill_chunk_size=chunk)  # loads kernels
    cache.reset()
    row = timed(model, prompt_of(batch, length), cache, tokens, prefill_chunk_size=chunk)
    row |= {"prompt": length, "prefill_chunk_size": chunk, "cache_bytes": cache.memory_bytes(),
            "entries_per_head": cache.cache.usage(0, 0, 0).size}
    if options.get("cuda_graph", True) and cache.decode_graph._graph is None:
        row["error"] = "no graph was captured"
    return row


def peak_of_prompt(model, policy, batch, length, chunk):
    """What a prompt needs beyond weights and cache, by prefill_chunk_size (None: the prompt at once)."""
    tidy()
    weights, cache = torch.cuda.memory_allocated(), kvp.KVPolicyCache(model, policy)
    row = timed(model, prompt_of(batch, length), cache, 2, 0, prefill_chunk_size=chunk)
    return {"batch": batch, "prompt": length, "prefill_chunk_size": chunk,
            "first_token_s": row["first_token_s"], "prompt_peak_bytes": row["prompt_peak_bytes"],
            "beyond_weights_and_cache_bytes": row["prompt_peak_bytes"] - weights - cache.memory_bytes()}


def largest_bounded(model, policy, tokens, chunk):
    """Prompts of two chunks, then filled budgets: peaks are those of any longer prompt."""
    tidy()
    probe = kvp.KVPolicyCache(model, policy)
    with torch.no_grad():
        model(prompt_of(1, 2), past_key_values=probe, logits_to_keep=1)
    each = probe.memory_bytes()
    del probe
    tidy()
    batch = torch.cuda.mem_get_info()[0] // each
    while batch > 0:
        cache = None
        try:
            cache = kvp.KVPolicyCache(model, policy)
            ids = prompt_of(batch, 2 * chunk)
            row = timed(model, ids, cache, 2, 0, prefill_chunk_size=chunk)
            fill(cache)
            more = torch.cat((ids, prompt_of(batch, 2)), 1)
            decode = timed(model, more, cache, tokens)
            if cache.decode_graph._graph is None:
                raise torch.cuda.OutOfMemoryError("no graph was captured")
            row |= {key: decode[key] for key in ("ms_per_token", "tokens_per_s", "median_ms", "steps_timed")}
            row["decode_peak_bytes"] = max(row["decode_peak_bytes"], decode["decode_peak_bytes"])
            del row["first_token_s"]
            return row | {"bytes_per_sequence": each, "prefill_chunk_size": chunk,
                          "entries_per_head": cache.cache.usage(0, 0, 0).size}
        except torch.cuda.OutOfMemoryError:
            pass
        finally:
            del cache
            tidy()
        batch = batch * 31 // 32
    return {"batch": 0}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="also write the JSON here")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=32768, help="tokens (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a prompt at once, per sequence")
    parser.add_argument("--tokens", type=int, default=64, help="that are generated")
    parts = ["bounded", "bounded-largest", "static", "static-largest"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--quick", action="store_true", help="fewer tokens, and no row from Python")
    arguments = parser.parse_args()
    tokens, length = 24 if arguments.quick else arguments.tokens, arguments.context - arguments.tokens
    begin = time.monotonic()
    torch.manual_seed(0)
    model = make_model(arguments.layers)
    weights = torch.cuda.memory_allocated()
    result = {"card": torch.cuda.get_device_name(), "torch": torch.__version__,
              "transformers": transformers.__version__, "layers": arguments.layers, "weights_bytes": weights,
              "context": arguments.context, "rows": []}

    def add(name, measure, *parameters, **options):
        try:
            row = measure(model, *parameters, **options)
        except Exception as error:  # one row does not cost the others
            row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        result["rows"].append({"name": name} | row)
        last = json.dumps(result["rows"][-1])
        print(f"{time.monotonic() - begin:.1f} s: {last}", file=sys.stderr, flush=True)
        if arguments.out:
            write_whole(arguments.out, json.dumps(result, indent=1) + "\n")

    wanted = arguments.only
    kinds, batch = policies(arguments.layers), arguments.batch
    if "bounded" in wanted:
        full = ENTRIES + arguments.chunk  # fills all budgets, too
        for name, prompt in zip(kinds, (length, full)):
            shape = (kinds[name], batch, prompt, tokens, arguments.chunk)
            add(f"KVPolicyCache, {name}/{batch}", time_bounded, *shape)
        if not arguments.quick:
            shape = (kinds["KVpop, mLSTM"], batch, full, 24, arguments.chunk)
            add(f"KVPolicyCache, KVpop, mLSTM/{batch}, from Python", time_bounded, *shape, cuda_graph=False)
        for chunk in (256, 1024, None):
            add(f"KVPolicyCache, prompt of {batch} x 4096, chunks of {chunk or 4096}", peak_of_prompt,
                kinds["KVpop, mLSTM"], batch, 4096, chunk)
    if "bounded-largest" in wanted:
        add("KVPolicyCache, largest batch", largest_bounded, kinds["KVpop, mLSTM"], 24, 64)
    if "static" in wanted:
        add(f"static cache, compiled/{batch}", time_static, batch, arguments.context, 24)
    if "static-largest" in wanted:
        add("static cache, largest batch", largest_static, arguments.context)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
