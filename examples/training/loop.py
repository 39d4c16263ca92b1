"""The loop that all training programs share: options, AdamW with warm-up and a cosine, checkpoints, a log.

A program is `train(Method)`. It runs on one device, or on several by torchrun, which divide the samples of
a step. Step n reads samples that depend on the seed and on n alone, so a resumed run ends with the weights of
an uninterrupted one. README.md in this folder has the options and the files of a run."""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import signal
import threading
import time

import data
import kvpolicy as kvp
import models
import torch
from batches import Batches
from kvpolicy.whole_file import output_lock, whole_files, whole_path, write_whole
from step_graph import StepGraph
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT = "checkpoint.pt"  # in --out
BACKENDS = ("inductor", "aot_eager", "eager")  # of torch.compile
# Options in which a resumed run may differ.
FREE = ("out", "resume", "seconds", "device", "workers", "log_every", "evaluate_every", "checkpoint_every")


class Refused(SystemExit):
    """Ends a program with one sentence for the user."""


def parser_of(method):
    parser = argparse.ArgumentParser(
        description=method.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=pathlib.Path, required=True, help="folder of the result, the log and the checkpoint")
    add("--model", default="byte", help="byte, smollm2, a folder of transformers, or scratch")
    add("--scratch-size", type=int, nargs=3, default=(128, 4, 4), metavar=("WIDTH", "LAYERS", "HEADS"))
    add("--kv-heads", type=int, default=2, help="of a model from scratch")
    add("--text", default=None, help="a text, or build/corpus/corpus.tar.xz of tools/make_corpus")
    add("--task", choices=("recall", "palindrome"), help="a generated task in place of a text")
    add("--pairs", type=int, default=None, help="retrieval queries per sample of a text, or pairs of recall")
    add("--held-out", default=None, help="text to evaluate on; of corpus.tar.xz its held-out text is taken")
    add("--tokens", type=int, default=1024, help="tokens per sample")
    add("--batch", type=int, default=8, help="samples per step, of all processes")
    add("--steps", type=int, default=1000)
    add("--workers", type=int, default=None, help="processes that make samples; default: 2 on CUDA, else 0")
    add("--rate", type=float, default=1e-3, help="learning rate of gates and scorers")
    add("--model-rate", type=float, default=1e-4, help="learning rate of the model's weights")
    add("--warmup", type=int, default=20, help="steps until the full learning rate")
    add("--weight-decay", type=float, default=0.1, help="of the model's matrices")
    add("--clip", type=float, default=1.0, help="the largest norm of the gradient")
    add("--seed", type=int, default=1)
    add("--log-every", type=int, default=20)
    add("--evaluate-every", type=int, default=0, help="steps between evaluations; 0: at the end alone")
    add("--evaluate-samples", type=int, default=8)
    add("--checkpoint-every", type=int, default=0, help="steps between checkpoints; 0: when --seconds end")
    add("--seconds", type=float, default=0.0, help="stop after this time with a checkpoint; 0: never")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--device", default=None, help="cpu or cuda; default: cuda where it is")
    add("--cuda-graph", action="store_true", help="steps as CUDA graphs, where the method's steps are alike")
    compiled = "the model's layers by torch.compile in training steps"
    add("--compile", nargs="?", const="inductor", choices=BACKENDS, metavar="BACKEND", help=compiled)
    add("--fp32", action="store_true", help="train in float32 on CUDA, not in bfloat16")
    method.add_options(parser)
    return parser


def check(options):
    """Refuses numbers that no run can have, before anything is made."""
    sizes = (*options.scratch_size, options.kv_heads) if options.model == "scratch" else (128, 4, 4, 2)
    for name, allowed, holds in (
        ("scratch_size", "above 0, with heads of 16 or fewer numbers, or a multiple of 8", _fits(*sizes[:3])),
        ("kv_heads", "a divisor of HEADS in --scratch-size", sizes[3] > 0 and sizes[2] % sizes[3] == 0),
        ("pairs", "above 0 with --task recall, 0 to 676 with a text", _has_pairs(options)),
        ("tokens", "2 or more", options.tokens >= 2),
        ("batch", "1 or more", options.batch >= 1),
        ("steps", "0 or more", options.steps >= 0),
        ("workers", "0 or more", options.workers is None or options.workers >= 0),
        ("rate", "a finite number, 0 or more", options.rate is None or 0 <= options.rate < math.inf),
        ("model_rate", "a finite number, 0 or more", 0 <= options.model_rate < math.inf),
        ("warmup", "0 or more", options.warmup >= 0),
        ("weight_decay", "a finite number, 0 or more", 0 <= options.weight_decay < math.inf),
        ("clip", "above 0", options.clip > 0),
        ("seed", "0 to 2^20", 0 <= options.seed <= 1 << 20),
        ("log_every", "1 or more", options.log_every >= 1),
        ("evaluate_every", "0 or more", options.evaluate_every >= 0),
        ("evaluate_samples", "1 or more", options.evaluate_samples >= 1),
        ("checkpoint_every", "0 or more", options.checkpoint_every >= 0),
        ("seconds", "0 or more", options.seconds >= 0),
    ):
        if not holds:
            value = getattr(options, name)
            raise Refused(f"--{name.replace('_', '-')}: {value} is not allowed; it must be {allowed}")


def _fits(width, layers, heads):
    whole = min(width, layers, heads) > 0 and width % heads == 0
    return whole and max(16, width // heads) % 8 == 0


def _has_pairs(options):
    least = 1 if options.task == "recall" else 0
    return options.pairs is None or least <= options.pairs <= data.KEYS


@dataclasses.dataclass
class Ranks:
    """This process among those of torchrun. begin() starts the process group, and end() destroys it, unless a
    caller had already started one: several runs can share it."""

    rank: int
    count: int
    device: torch.device
    owns_group: bool = False

    @classmethod
    def begin(cls, device):
        rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if device is None:
            device = "cuda" if torch.cuda.is_available() and kvp.has_cuda() else "cpu"
        try:
            device = (
                torch.device(device, int(os.environ.get("LOCAL_RANK", 0)))
                if device == "cuda"
                else torch.device(device)
            )
            if device.type == "cuda":
                torch.cuda.set_device(device)
            elif device.type != "cpu":
                raise RuntimeError("kvpolicy has no operators for it")
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            raise Refused(
                f"--device: {device} is not allowed; it must be cpu, or cuda where it is: {error}"
            ) from None
        owns_group = count > 1 and not dist.is_initialized()
        if owns_group:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(rank, count, device, owns_group)

    def end(self):
        if self.owns_group:
            dist.destroy_process_group()


def make_data(options, tokenizer):
    """(training samples, held-out samples)."""
    if options.task is not None:
        pairs = 8 if options.pairs is None else options.pairs
        make = (
            data.Palindrome
            if options.task == "palindrome"
            else lambda *a, **b: data.Recall(*a, pairs=pairs, **b)
        )
        return make(options.tokens, seed=options.seed), make(options.tokens, seed=f"held out {options.seed}")
    if options.text is None:
        raise Refused("--text: none is not allowed without --task; it must be a text or a corpus.tar.xz")
    archive = options.text.endswith(".xz")
    held_out = options.held_out or (options.text if archive else None)
    pairs = options.pairs if options.pairs is not None else 0
    train = data.read_text(options.text, "train.txt")
    if held_out is None:  # the last twentieth of a text
        cut = len(train) - len(train) // 20
        train, test = train[:cut], train[cut:]
    else:
        test = data.read_text(held_out, "heldout.txt")
    shared = {"tokenizer": tokenizer, "pairs": pairs}
    source = f"the last twentieth of {options.text}" if held_out is None else held_out
    return (
        data.Text(train, options.tokens, seed=options.seed, name=options.text, **shared),
        data.Text(test, options.tokens, seed="held out", name=f"held-out text, {source}", **shared),
    )


def make_model(method, options, device):
    """(model, tokenizer). Weights that are trained are float32; frozen ones bfloat16 on CUDA."""
    frozen = not method.trains(options)
    dtype = torch.bfloat16 if frozen and device.type == "cuda" and not options.fp32 else torch.float32
    if options.model != "scratch":
        return models.load(options.model, dtype=dtype, device=device)
    width, layers, heads = options.scratch_size
    sizes = {"width": width, "layers": layers, "heads": heads, "kv_heads": options.kv_heads}
    return models.from_scratch(**sizes, length=options.tokens, device=device), None


class Interrupts:
    """Within `with`, the first SIGINT or SIGTERM only sets `signal`; a second one ends the process. The
    handlers of a program are its main thread's: in another thread nothing changes."""

    def __init__(self):
        self.signal, self.before = 0, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self.receive)
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number, _):
        self.signal = number
        signal.signal(number, self.before[number])


class Trainer:
    """A run: the method, its optimizer and schedule, the step it is at."""

    def __init__(self, method_class, options, ranks):
        self.options, self.ranks, self.began = options, ranks, time.monotonic()
        torch.manual_seed(options.seed)
        model, self.tokenizer = make_model(method_class, options, ranks.device)
        # Of the weights that the run starts from. Random ones are those of --seed, an option.
        self.model_print = models.fingerprint(model, weights=options.model != "scratch")
        self.train_data, self.test_data = make_data(options, self.tokenizer)
        self.method = method_class(model, options).to(ranks.device)
        if options.compile is not None:  # in place, so that parameters keep their names
            model.base_model.compile(backend=options.compile)
        self.module = self.method
        if ranks.count > 1:
            ids = [ranks.device.index] if ranks.device.type == "cuda" else None
            self.module = DistributedDataParallel(self.method, device_ids=ids, find_unused_parameters=True)
        self.optimizer = torch.optim.AdamW(
            self.method.parameter_groups(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        )
        self.schedule = self.method.schedule(self.optimizer)
        self.step, self.log, self.interrupts = 0, [], Interrupts()
        workers = 2 * (ranks.device.type == "cuda") if options.workers is None else options.workers
        self.batches = Batches(
            self.train_data, self.samples_of, options.steps, device=ranks.device, workers=workers
        )
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self.trained = {name: p for name, p in self.method.named_parameters() if id(p) in trained}
        graph = options.cuda_graph and ranks.device.type == "cuda" and ranks.count == 1
        self.graph = StepGraph(self.trained.values()) if graph else None

    # ---- checkpoints ---------------------------------------------------------------------------------------

    @property
    def checkpoint_path(self):
        return self.options.out / CHECKPOINT

    def identity(self):
        """What a checkpoint and the run that resumes from it must have in common."""
        options = {name: str(value) for name, value in sorted(vars(self.options).items()) if name not in FREE}
        return {
            "method": self.method.name,
            "model": self.model_print,
            "data": self.train_data.fingerprint(),
            "options": options,
        }

    def save_checkpoint(self):
        if self.ranks.rank:
            return
        state = {
            "identity": self.identity(),
            "step": self.step,
            "parameters": {name: p.detach() for name, p in self.trained.items()},
            "buffers": self.own_buffers(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "log": self.log,
        }
        with whole_path(self.checkpoint_path) as part:
            torch.save(state, part)

    def own_buffers(self):
        """Buffers that training moves, such as a controller's; those of the model do not."""
        return {name: b for name, b in self.method.named_buffers() if not name.startswith("model.")}

    def load_checkpoint(self):
        path = self.checkpoint_path
        if not path.is_file():
            raise Refused(f"--resume: {path} is not there; it must be the checkpoint of an earlier run")
        try:
            state = torch.load(path, map_location=self.ranks.device, weights_only=True)
            found = state["identity"]
        except Exception as error:
            raise Refused(f"--resume: {path} is damaged: {error}") from None
        wanted = self.identity()
        for name in ("method", "model", "data"):
            if found.get(name) != wanted[name]:
                raise Refused(
                    f"--resume: {path} of {name} {found.get(name)} is not allowed; "
                    f"this run has {wanted[name]}"
                    + f", by config and weights of --model {self.options.model}"
                    * (name == "model")
                )
        for name, value in wanted["options"].items():
            if found["options"].get(name) != value:
                raise Refused(
                    f"--{name.replace('_', '-')}: {value} is not allowed with --resume; the checkpoint has "
                    f"{found['options'].get(name)}"
                )
        with torch.no_grad():
            for name, value in state["parameters"].items():
                self.trained[name].copy_(value)
            for name, value in state["buffers"].items():
                self.own_buffers()[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step, self.log = state["step"], state["log"]

    # ---- steps ---------------------------------------------------------------------------------------------

    def samples_of(self, step):
        """The numbers of this process's training samples in a step."""
        share = self.options.batch // self.ranks.count
        first = step * self.options.batch + self.ranks.rank * share
        return range(first, first + share)

    def batch(self, dataset, index):
        """One sample of a data set as a batch on the device."""
        return [part[None].to(self.ranks.device) for part in dataset[index]]

    def precision(self):
        wide = self.options.fp32 or self.ranks.device.type != "cuda"
        if wide or not self.method.trains(self.options):
            return contextlib.nullcontext()
        return torch.autocast("cuda", torch.bfloat16)

    def evaluating(self):
        """A context of evaluations: without gradients, and from Python, since each policy and threshold would
        be compiled for a few passes."""
        stack = contextlib.ExitStack()
        stack.enter_context(torch.no_grad())
        stack.enter_context(self.precision())
        if self.options.compile is not None:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        return stack

    def pass_of(self, ids, weights):
        """The losses of a forward pass, scalars by name; the backward pass overwrites the gradients of the
        trained parameters."""

        def compute(ids, weights):
            with self.precision():
                losses = self.module(ids, weights)
            losses["loss"].backward()
            # A loss that is kept would keep nodes of its graph, and a capture needs new ones.
            return {name: torch.as_tensor(value).detach() for name, value in losses.items()}

        if self.graph is not None:
            return self.graph.run(compute, ids, weights, self.method.graph_key())
        self.optimizer.zero_grad(set_to_none=True)
        return compute(ids, weights)

    def train_step(self):
        """One step of the optimizer; returns the losses, and the norm of the gradient before clipping, as
        scalars on the device."""
        ids, weights = self.batches.of(self.step)
        self.method.begin_step(self.step, self.options.steps)
        try:
            losses = self.pass_of(ids, weights)
        except ValueError as error:  # on the CPU the operators refuse a NaN
            self.stop_if_broken(error)
            raise ValueError(f"step {self.step}: {error}") from error
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), self.options.clip)
        if not torch.isfinite(losses["loss"] + norm):  # one look at the device
            what = f"the loss is {losses['loss'].item()}, the gradient's norm {norm.item()}"
            self.stop_if_broken(what, always=True)
        self.optimizer.step()
        self.schedule.step()
        self.method.end_step()
        self.step += 1
        return {**losses, "norm": norm}

    def stop_if_broken(self, what, always=False):
        where = self.method.broken()
        if where or always:
            raise Refused(
                f"step {self.step}: {what}; {where or 'all scores and parameters are finite'}; the "
                "checkpoint of an earlier step stays, and a smaller --rate may help"
            )

    def held_out(self):
        """The held-out samples, (ids [1, S], weights [1, S]) each."""
        for index in range(self.options.evaluate_samples):
            yield self.batch(self.test_data, index)

    def evaluate(self):
        """Means over the held-out samples, the same in every call."""
        sums = {}
        for sample in self.held_out():
            with self.evaluating():
                found = self.method.evaluate(*sample)
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value / self.options.evaluate_samples
        return sums

    def report(self, kind, numbers):
        numbers = {name: float(torch.as_tensor(value).detach()) for name, value in numbers.items()}
        self.log.append({"step": self.step, "kind": kind, **numbers})
        if self.ranks.rank:
            return
        text = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        print(f"[{time.monotonic() - self.began:7.1f} s] {kind} {self.step}: {text}", flush=True)

    def must_stop(self):
        """Whether --seconds have passed, or SIGINT or SIGTERM came, at rank 0."""
        over = bool(self.options.seconds) and time.monotonic() - self.began > self.options.seconds
        over = over or bool(self.interrupts.signal)
        if self.ranks.count > 1:
            flag = torch.tensor(int(over), device=self.ranks.device)
            dist.broadcast(flag, 0)
            over = bool(flag)
        return over

    def run(self):
        """Trains until the last step, or until --seconds are over."""
        try:
            self.run_steps()
        finally:
            self.batches.close()

    def run_steps(self):
        options = self.options
        if self.step < options.steps:
            self.batches.begin(self.step)
        if self.step == 0:
            self.method.begin(*self.batch(self.train_data, 0))
            self.report("evaluate", self.evaluate())
        while self.step < options.steps:
            numbers = self.train_step()
            last = self.step == options.steps
            if self.step % options.log_every == 0 or last:
                self.report("step", numbers)
            if last or (options.evaluate_every and self.step % options.evaluate_every == 0):
                self.report("evaluate", self.evaluate())
            stop = not last and self.must_stop()
            if stop or (options.checkpoint_every and self.step % options.checkpoint_every == 0):
                self.save_checkpoint()
            if stop:
                self.report("stopped", {})
                if self.interrupts.signal:
                    raise SystemExit(128 + self.interrupts.signal)
                return
        self.save_checkpoint()
        self.finish()

    def finish(self):
        """Writes the trained gates or scorers, the model if it was trained, and metrics.json."""
        if self.ranks.rank:
            return
        with self.evaluating():
            measures = self.method.measure(list(self.held_out()))
        metrics = {name: value for name, value in self.log[-1].items() if name not in ("step", "kind")}
        notes = {"method": self.method.name, "model": self.options.model, "seed": self.options.seed}
        notes |= {"steps": self.options.steps, "tokens": self.options.tokens, "batch": self.options.batch}
        notes |= {f"held_out_{name}": f"{value:.6g}" for name, value in metrics.items()}
        self.method.save(self.options.out / f"{self.method.name}.safetensors", notes)
        if self.method.trains(self.options):
            with whole_files(self.options.out / "model") as part:
                self.method.model.save_pretrained(part)
                if self.tokenizer is not None:
                    self.tokenizer.save_pretrained(part)
        record = {"identity": self.identity(), "metrics": metrics, "measures": measures, "log": self.log}
        write_whole(self.options.out / "metrics.json", json.dumps(record, indent=1) + "\n")


def make_folder(out):
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"--out: {out} is not allowed; it must be a folder: {error.strerror}") from None


def train(method, arguments=None):
    """Runs a method with the options of the command line; returns its Trainer."""
    options = parser_of(method).parse_args(arguments)
    check(options)
    ranks = Ranks.begin(options.device)
    try:
        if options.batch % ranks.count:
            raise Refused(
                f"--batch: {options.batch} is not allowed; it must be a multiple of {ranks.count} processes"
            )
        make_folder(options.out)
        checkpoint = options.out / CHECKPOINT
        with contextlib.nullcontext() if ranks.rank else output_lock(checkpoint):
            trainer = Trainer(method, options, ranks)
            if options.resume:
                trainer.load_checkpoint()
            elif checkpoint.is_file():
                raise Refused(f"--out: {options.out} has a checkpoint; give --resume, or another folder")
            with trainer.interrupts:
                trainer.run()
    except (ValueError, OSError, NotImplementedError) as error:
        raise Refused(str(error)) from error
    finally:
        ranks.end()
    return trainer
