#!/usr/bin/env python3
"""Two GPUs against one: attention of a sequence whose tokens lie on both, forward and backward, the
future-mass target, and generation under tensor parallelism.

    torchrun --nproc-per-node 2 several_gpus.py [--only attend future_mass generate] [--out FILE]

The first process also measures one GPU, while the others wait. Times are means over calls that follow each
other, of the slowest process. Prints one JSON object.
"""

import argparse
import json
import os
import sys
import time

import torch
from torch import distributed as dist

import kvpolicy as kvp
from kvpolicy import distributed as kvd
from kvpolicy.whole_file import write_whole

GROUPS = ("attend", "future_mass", "generate")
QUERY_HEADS, KV_HEADS, DIM = 32, 8, 128


def rows(heads, length, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(1, heads, length, DIM, device="cuda", dtype=torch.bfloat16, generator=generator)


class Bench:
    def __init__(self, path):
        self.rank, self.path, self.rows = dist.get_rank(), path, []

    def ms(self, call, seconds=0.4):
        """Mean time of a call and the peak of memory beyond what is held before."""
        call()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        one = time.perf_counter() - began
        count = max(2, min(20, int(seconds / one)))
        return count, held

    def time(self, call, all_ranks):
        """Milliseconds of a call on one GPU (the first rank's), or of the slowest of all."""
        if not all_ranks and self.rank != 0:
            dist.barrier()
            return None, None
        count, held = self.ms(call)
        if all_ranks:
            counts = torch.tensor(count, device="cuda")
            dist.broadcast(counts, 0)
            count = int(counts)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        result = torch.tensor([begin.elapsed_time(end) / count, torch.cuda.max_memory_allocated() - held])
        if all_ranks:
            result = result.cuda()
            dist.all_reduce(result, dist.ReduceOp.MAX)
        else:
            dist.barrier()
        return result.tolist()

    def row(self, name, one, several, **more):
        """One GPU's call against that of all."""
        alone, alone_bytes = self.time(one, False)
        torch.cuda.empty_cache()
        alone = alone or 0.0
        for layout, call in several.items():
            took, took_bytes = self.time(call, True)
            torch.cuda.empty_cache()
            if self.rank == 0:
                self.rows.append(
                    {
                        "name": name,
                        "layout": layout,
                        "one_ms": alone,
                        "several_ms": took,
                        "speedup": alone / took,
                        "one_extra_bytes": alone_bytes,
                        "several_extra_bytes": took_bytes,
                        **more,
                    }
                )
                print(json.dumps(self.rows[-1]), file=sys.stderr, flush=True)

    def write(self):
        if self.rank != 0:
            return
        text = json.dumps(
            {
                "card": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "gpus": dist.get_world_size(),
                "rows": self.rows,
            },
            indent=1,
        )
        print(text)
        if self.path:
            write_whole(self.path, text + "\n")


def both(attend, leaves, gradient):
    def call():
        for x in leaves:
            x.grad = None
        attend(*leaves).backward(gradient)

    return call


def time_attend(bench, length):
    q, k, v = (rows(heads, length, seed) for heads, seed in ((QUERY_HEADS, 1), (KV_HEADS, 2), (KV_HEADS, 3)))
    gradient = rows(QUERY_HEADS, length, 4)
    scores = torch.randn(1, KV_HEADS, length, device="cuda", generator=torch.Generator("cuda").manual_seed(5))
    masks = {
        "causal": None,
        "KVpop(4, 256, 3836)": kvp.build_mask(kvp.KVpop(4, 256, 3836), scores),
        "SPKV(256), a quarter open": kvp.build_mask(
            kvp.Policy(kvp.Window(256), kvp.ThresholdGate(0.6745)), scores
        ),
    }
    layouts = {layout: kvd.SequenceShards(length, layout=layout) for layout in ("contiguous", "zigzag")}
    for name, mask in masks.items():
        whole = [x.detach().requires_grad_() for x in (q, k, v)]

        def one(mask=mask):
            return lambda *leaves: kvp.attend(*leaves, mask)

        calls, forwards = {}, {}
        for layout, shards in layouts.items():
            own = [shards.shard(x).detach().clone().requires_grad_() for x in (q, k, v)]
            own_mask = None if mask is None else kvp.Mask(shards.shard(mask.expiry).contiguous())
            own_gradient = shards.shard(gradient).contiguous()

            def attend(*leaves, shards=shards, own_mask=own_mask):
                return kvd.attend(shards, *leaves, own_mask)

            calls[layout] = both(attend, own, own_gradient)
            forwards[layout] = torch.no_grad()(lambda attend=attend, own=own: attend(*own))
        forward = torch.no_grad()(lambda whole=whole, mask=mask: kvp.attend(*whole, mask))
        bench.row(f"attend forward, {name}, {length} tokens", forward, forwards)
        bench.row(
            f"attend forward + backward, {name}, {length} tokens", both(one(), whole, gradient), calls
        )
    shards = layouts["zigzag"]
    own = [shards.shard(x) for x in (k, v)]
    bench.row("  K and V alone", lambda: None, {"zigzag": lambda: list(kvd._gathered(shards, *own))})
    gradients = torch.zeros(length, 1, KV_HEADS, 2 * DIM, device="cuda", dtype=torch.bfloat16)
    bench.row("  gradients alone", lambda: None, {"zigzag": lambda: shards.start_sum(gradients)()})


def time_future_mass(bench, length):
    q, k = rows(QUERY_HEADS, length, 1), rows(KV_HEADS, length, 2)
    shards = kvd.SequenceShards(length)
    own = [shards.shard(x).contiguous() for x in (q, k)]
    bench.row(
        f"future_mass, {length} tokens",
        lambda: kvp.future_mass(q, k, 256),
        {"contiguous": lambda: kvd.future_mass(shards, *own, 256)},
    )


def time_generate(bench, layers, batch, prompt, new):
    """A Llama of an 8B model's widths with random weights: the prompt, then greedy tokens, eager."""
    import transformers
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=QUERY_HEADS, num_key_value_heads=KV_HEADS, eos_token_id=None,
        max_position_embeddings=65536,
    )
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    generator = torch.Generator("cuda").manual_seed(2)
    ids = torch.randint(32000, (batch, prompt), device="cuda", generator=generator)
    found, times = {}, {}

    def run(tokens):
        cache = kvp.KVPolicyCache(model, kvp.StreamingLLM(4, 4092))
        return model.generate(
            ids, past_key_values=cache, max_new_tokens=tokens, do_sample=False, prefill_chunk_size=8192
        )

    def measure(name):
        run(2)
        for tokens in (1, new):
            torch.cuda.synchronize()
            began = time.perf_counter()
            found[name] = run(tokens)
            torch.cuda.synchronize()
            times[name, tokens] = time.perf_counter() - began

    if bench.rank == 0:
        measure("one")
    dist.barrier()
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    model.config.distributed_config = DistributedConfig(tp_size=mesh.size())
    model._device_mesh, model._tp_size = mesh, mesh.size()
    with torch.no_grad():
        model = apply_tensor_parallelism(model, mesh)
    torch.cuda.empty_cache()
    measure("several")
    if bench.rank == 0:
        same = (found["one"] == found["several"])[:, prompt:].float().mean().item()
        step = {name: (times[name, new] - times[name, 1]) / (new - 1) for name in ("one", "several")}
        bench.rows.append(
            {
                "name": f"generate, {layers} layers of 8B widths, batch {batch}, prompt {prompt}",
                "prompt_one_ms": 1e3 * times["one", 1],
                "prompt_several_ms": 1e3 * times["several", 1],
                "prompt_speedup": times["one", 1] / times["several", 1],
                "step_one_ms": 1e3 * step["one"],
                "step_several_ms": 1e3 * step["several"],
                "step_speedup": step["one"] / step["several"],
                "same_tokens": same,
            }
        )
        print(json.dumps(bench.rows[-1]), file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", default=GROUPS, choices=GROUPS)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=16, help="of the model that generates")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--out", help="also write the JSON here")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    bench = Bench(arguments.out)
    if "attend" in arguments.only:
        time_attend(bench, arguments.tokens)
    torch.cuda.empty_cache()
    if "future_mass" in arguments.only:
        time_future_mass(bench, arguments.tokens)
    torch.cuda.empty_cache()
    if "generate" in arguments.only:
        time_generate(bench, arguments.layers, arguments.batch, arguments.prompt, arguments.new)
    bench.write()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
