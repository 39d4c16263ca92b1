#!/usr/bin/env python3
"""One training step of a model of SmolLM2-135M's shape with random weights: forward, loss, backward and AdamW
(fused), with float32 weights under bfloat16 autocast. Rows:

  dense                     transformers' SDPA, next-token loss, all weights: the others are relative to it
  SP-KV, soft gates         predictors and all weights by the same loss; every key outside the window of 128
                            has a log-bias
  SP-KV, hard, runs         frozen predictors; 25% of the keys of each head are open, in runs of 16 on average
  SP-KV, hard, random       the same share, drawn independently
  KVpop, all weights        algorithm 1: dense teacher (bf16), student on its own sparse states of 2048
                            entries per head, KL over the top 256, target, boundary loss of all positions;
                            MLP scorers
  KVpop, mLSTM, all weights the same with delayed mLSTM scorers
  KVpop, scorers only       the frozen model in bf16, whose forward pass is one of sparse states; target,
                            boundary loss

Rounds are interleaved: each runs one step of every row, from Python ("eager") and then with forward and
backward as a CUDA graph ("graph"); rows of a kind are relative to the dense one of that kind. Times are of
the wall clock between synchronizations. kernel_ms is the sum of the times of a step's kernels, by the
profiler. peak_bytes is that of torch's allocator in an eager step of its own alone: weights, optimizer,
gradients and activations. --profile prints the CUDA operations that take most time. Prints one JSON object;
--out writes it to a file too.
"""

import argparse
import gc
import json
import pathlib
import statistics
import sys
import time

import torch
import transformers
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvpolicy as kvp
from kvpolicy.whole_file import write_whole

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "training"))

from kvpop import KVpop  # noqa: E402
from loop import parser_of  # noqa: E402
from method import Method  # noqa: E402
from step_graph import WARM_UP, StepGraph  # noqa: E402

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 65536,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
# While a graph is recorded transformers builds a mask for SDPA, whose causal kernels take none.
AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
WINDOW, TAU, OPEN, RUN = 128, 0.5, 0.25, 16


class Dense(Method):
    """transformers' own attention."""

    name = "dense"

    @classmethod
    def trains(cls, options):
        return True

    def loss(self, ids, weights):
        logits = self.model(input_ids=ids, use_cache=False).logits
        return {"loss": self.next_token_loss(logits, ids, weights)}


class SoftGates(Dense):
    """SP-KV's joint training."""

    name = "soft"

    def __init__(self, model, options):
        super().__init__(model, options)
        self.scorers = torch.nn.ModuleList(
            kvp.UtilityPredictor(self.heads, self.width, 64) for _ in range(self.layers)
        )

    def loss(self, ids, weights):
        return {"loss": self.next_token_loss(self.logits(ids, self.attend), ids, weights)}

    def attend(self, inputs):
        scores = self.scorers[inputs.layer](inputs.states)
        mask = kvp.build_log_bias(kvp.SPKV(WINDOW, tau=TAU), kvp.SoftGate(), scores)
        return kvp.attend(inputs.q, inputs.k, inputs.v, mask, **inputs.numbers)


class HardGates(SoftGates):
    """Hard gates after the predictors are frozen. Random predictors open no quarter, so `given` logits are
    added to what they compute, times 0."""

    def __init__(self, model, options, runs):
        super().__init__(model, options)
        self.scorers.requires_grad_(False)
        shape = (self.layers, options.batch, self.heads, options.tokens)
        self.given = open_gates(shape, runs).to(model.device)

    def own_parameters(self):
        return []

    def attend(self, inputs):
        with torch.no_grad():
            scores = 0.0 * self.scorers[inputs.layer](inputs.states) + self.given[inputs.layer]
        mask = kvp.build_mask(kvp.SPKV(WINDOW, tau=TAU), scores)
        return kvp.attend(inputs.q, inputs.k, inputs.v, mask, **inputs.numbers)


def open_gates(shape, runs):
    """Logits, a share OPEN of which is above 0: in runs of RUN keys on average, a Markov chain, or drawn
    independently."""
    if not runs:
        return torch.where(torch.rand(shape) < OPEN, 1.0, -1.0)
    ends, begins = 1 / RUN, OPEN / (1 - OPEN) / RUN
    state, draw = torch.rand(shape[:-1]) < OPEN, torch.rand(shape)
    gates = torch.empty(shape)
    for t in range(shape[-1]):
        state = torch.where(state, draw[..., t] >= ends, draw[..., t] < begins)
        gates[..., t] = torch.where(state, 1.0, -1.0)
    return gates


class Row:
    """A method with its model and optimizer."""

    def __init__(self, name, make, arguments, *options, autocast=True):
        parser = parser_of(KVpop)
        base = ["--out", "unused", "--tokens", str(arguments.tokens), "--batch", str(arguments.batch)]
        self.name, self.autocast, self.options = name, autocast, parser.parse_args([*base, *options])
        torch.manual_seed(1)
        config = transformers.LlamaConfig(**SHAPE)
        config.num_hidden_layers = arguments.layers
        with torch.device(arguments.device):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32 if autocast else torch.bfloat16, attn_implementation="sdpa_causal"
            )
        self.method = make(model, self.options).to(arguments.device)
        cuda = arguments.device == "cuda"
        self.optimizer = torch.optim.AdamW(self.method.parameter_groups(), betas=(0.9, 0.95), fused=cuda)
        self.trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.device, self.step_number = arguments.device, 0
        self.graph = StepGraph(self.trained)

    def gradients(self, ids, weights):
        """The losses of a forward pass, and the gradients of its backward pass."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            losses = self.method(ids, weights)
        losses["loss"].backward()
        # A loss that is kept would keep its autograd graph, and with it the stream of an eager step.
        return {"loss": losses["loss"].detach()}

    def step(self, ids, weights, graph=False):
        self.method.begin_step(self.step_number, 1 << 20)
        if graph:
            losses = self.graph.run(self.gradients, ids, weights, self.name)
        else:
            self.optimizer.zero_grad(set_to_none=True)
            losses = self.gradients(ids, weights)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0, foreach=True)
        self.optimizer.step()
        self.step_number += 1
        return losses["loss"]


def rows_of(arguments):
    # Positions are drawn by the step, which a graph does not know: all of them.
    kvpop = ["--budgets", str(arguments.entries), "--positions", "0", "--train-model"]
    mlstm = ["--scorer", "mlstm"]
    makers = {
        "dense": (Dense,),
        "SP-KV, soft gates": (SoftGates,),
        "SP-KV, hard, runs": (lambda m, o: HardGates(m, o, True),),
        "SP-KV, hard, random": (lambda m, o: HardGates(m, o, False),),
        "KVpop, all weights": (KVpop, *kvpop),
        "KVpop, mLSTM, all weights": (KVpop, *kvpop, *mlstm),
        "KVpop, scorers only": (KVpop, *kvpop[:4]),
        "KVpop, mLSTM, scorers only": (KVpop, *kvpop[:4], *mlstm),
    }
    wanted = arguments.only or list(makers)
    for name in wanted:
        make, *options = makers[name]
        yield Row(name, make, arguments, *options, autocast="scorers only" not in name)


def wall_ms(device, call):
    """Time of a call between synchronizations."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def peaks(rows, batch):
    """Each row's peak: what is allocated without the other rows' tensors, and what a step adds."""
    others = {row.name: state_bytes(row) for row in rows}
    for row in rows:
        row.optimizer.zero_grad(set_to_none=True)
    found = {}
    for row in rows:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        row.step(*batch)
        found[row.name] = others[row.name] + torch.cuda.max_memory_allocated() - before
        row.optimizer.zero_grad(set_to_none=True)
    return found


def state_bytes(row):
    """Bytes of weights, buffers and the optimizer's state."""
    tensors = [*row.method.parameters(), *row.method.buffers()]
    tensors += [x for state in row.optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
    return sum(x.numel() * x.element_size() for x in {id(x): x for x in tensors}.values())


def profile(row, batch, top):
    """Time of the kernels of one step; prints the `top` that take most."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as found:
        row.step(*batch)
        torch.cuda.synchronize()
    events = [e for e in found.key_averages() if str(e.device_type).endswith("CUDA")]
    events = [e for e in events if not getattr(e, "is_user_annotation", False)]
    events = sorted(events, key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events) / 1e3
    print(f"---- {row.name}: {total:.2f} ms of kernels", file=sys.stderr)
    for e in events[:top]:
        print(f"{e.self_device_time_total / 1e3:9.3f} ms {e.count:5d} x  {e.key[:110]}", file=sys.stderr)
    return total


def measure(rows, batch, arguments):
    """{(name, kind): [wall ms]}, and rows that a graph cannot record with why."""
    device, times, errors = arguments.device, {}, {}
    for kind in ("eager",) if device != "cuda" or arguments.eager else ("eager", "graph"):
        graph = kind == "graph"
        for row in rows if graph else ():
            try:
                for _ in range(WARM_UP + 2):
                    row.step(*batch, graph=True)
            except Exception as error:  # one row does not cost the others
                while error.__context__ is not None:  # the end of a capture hides what spoiled it
                    error = error.__context__
                errors[row.name] = f"{type(error).__name__}: {str(error)[:300]}"
                print(f"{row.name}: {errors[row.name]}", file=sys.stderr, flush=True)
        for number in range(arguments.rounds):
            for row in rows if number % 2 == 0 else reversed(rows):
                if not graph or row.name not in errors:
                    found = wall_ms(device, lambda row=row, graph=graph: row.step(*batch, graph=graph))
                    times.setdefault((row.name, kind), []).append(found)
    return times, errors


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="also write the JSON here")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--entries", type=int, default=2048, help="of KVpop, per KV head")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", nargs="+", help="names of rows")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--profile", type=int, default=0, metavar="TOP", help="operations to print per row")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    ids = torch.randint(SHAPE["vocab_size"], (arguments.batch, arguments.tokens), device=arguments.device)
    batch, rows = (ids, torch.ones(ids.shape, device=ids.device)), []
    for row in rows_of(arguments):
        rows.append(row)
        for _ in range(2):  # loads kernels, makes the optimizer's state
            loss = row.step(*batch)
        print(f"{row.name}: loss {loss.item():.4f}", file=sys.stderr, flush=True)
    cuda = arguments.device == "cuda"
    peak = peaks(rows, batch) if cuda else {}
    kernels = {row.name: profile(row, batch, arguments.profile) for row in rows} if cuda else {}
    times, errors = measure(rows, batch, arguments)
    card = torch.cuda.get_device_name() if cuda else "CPU"
    result = {"card": card, "torch": torch.__version__, "transformers": transformers.__version__}
    result |= {"tokens": arguments.tokens, "batch": arguments.batch, "layers": arguments.layers, "rows": []}
    base = {}
    for row in rows:
        found = {"name": row.name, "peak_bytes": peak.get(row.name), "kernel_ms": kernels.get(row.name)}
        for kind in ("eager", "graph"):
            wall = times.get((row.name, kind))
            if wall:
                found |= {f"{kind}_ms_min": min(wall), f"{kind}_ms_median": statistics.median(wall)}
        if row.name in errors:
            found["graph_error"] = errors[row.name]
        base = base or dict(found)
        numbers = [key for key in found if "ms" in key and found[key] is not None and key in base]
        found |= {f"{key}_of_dense": found[key] / base[key] for key in numbers}
        result["rows"].append(found)
    text = json.dumps(result, indent=1)
    print(text, flush=True)
    if arguments.out:
        write_whole(arguments.out, text + "\n")


if __name__ == "__main__":
    main()
