"""The loop of the training programs, and the chain from the loss to a gate, by SP-KV's soft gates."""

import json
import os
import pathlib
import pickle
import stat
import subprocess
import sys
import tarfile
import threading
import types
from multiprocessing.reduction import ForkingPickler

import kvpolicy as kvp
import pytest
import torch
import transformers
from training_cases import PROGRAMS, directional, program, run, small_method

SMALL = ["--model", "scratch", "--scratch-size", "32", "2", "2", "--kv-heads", "1", "--task", "recall"]
SMALL += ["--tokens", "64", "--batch", "2", "--steps", "6", "--window", "8", "--evaluate-samples", "1"]
SMALL += ["--device", "cpu"]
LTE = ["--window", "16", "--cap", "20", "--least", "0.25", "--every", "1"]


def test_the_chain_of_soft_gates():
    method, ids, weights = small_method("SPKV", "spkv", "--window", "8", "--hidden", "16")
    with torch.no_grad():
        for scorer in method.scorers:
            scorer.w2.normal_(std=0.5)
            scorer.b2.fill_(0.5)
    exact, near, better = directional(method, ids, weights, list(method.scorers.parameters()))
    assert abs(exact) > 1e-4
    assert abs(exact - better) < 10 * abs(near - better) + 1e-3 * abs(exact)


def test_a_resumed_run_has_the_same_weights(tmp_path):
    whole, _ = run("SPKV", "spkv", tmp_path / "whole", *SMALL)
    run("SPKV", "spkv", tmp_path / "parts", *SMALL, "--seconds", "1e-9")
    for _ in range(5):
        parts, _ = run("SPKV", "spkv", tmp_path / "parts", *SMALL, "--seconds", "1e-9", "--resume")
    assert parts.step == whole.step == 6
    for name, parameter in whole.method.named_parameters():
        assert torch.equal(parameter, dict(parts.method.named_parameters())[name]), name


def test_checkpoints_of_others_are_refused(tmp_path):
    run("SPKV", "spkv", tmp_path, *SMALL, "--seconds", "1e-9")
    with pytest.raises(SystemExit, match="--resume"):
        run("SPKV", "spkv", tmp_path, *SMALL)
    with pytest.raises(SystemExit, match="model"):
        run("SPKV", "spkv", tmp_path, *SMALL, "--scratch-size", "64", "2", "2", "--resume")
    with pytest.raises(SystemExit, match="--rate"):
        run("SPKV", "spkv", tmp_path, *SMALL, "--rate", "0.5", "--resume")
    with pytest.raises(SystemExit, match="--resume"):
        run("SPKV", "spkv", tmp_path / "none", *SMALL, "--resume")


def test_workers_make_the_same_samples(tmp_path, monkeypatch):
    """Weights do not depend on --workers, nor on where a run resumes. Worker processes are spawned, not
    forked, and the run's own process makes the held-out samples and the first one alone."""
    whole, _ = run("SPKV", "spkv", tmp_path / "whole", *SMALL, "--workers", "0")
    recall, made = program("data").Recall, []
    before = recall.__getitem__
    monkeypatch.setattr(
        recall, "__getitem__", lambda self, i: (made.append((self.seed, i)), before(self, i))[1]
    )
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process of the run is forked"))
    run("SPKV", "spkv", tmp_path / "parts", *SMALL, "--workers", "1", "--seconds", "1e-9")
    parts, _ = run("SPKV", "spkv", tmp_path / "parts", *SMALL, "--workers", "2", "--resume")
    assert parts.step == whole.step == 6
    for name, parameter in whole.method.named_parameters():
        assert torch.equal(parameter, dict(parts.method.named_parameters())[name]), name
    assert {i for seed, i in made if seed == 1} == {0}
    assert parts.batches.iterator is None  # so its workers are gone


@pytest.mark.skipif(
    not (torch.cuda.is_available() and kvp.has_cuda()), reason="needs a GPU and the CUDA module"
)
def test_workers_feed_a_gpu(tmp_path):
    """By default samples of a run on CUDA come from workers, through pinned memory."""
    arguments = [*SMALL[:-2], "--device", "cuda", "--steps", "3"]
    trainer, _ = run("SPKV", "spkv", tmp_path, *arguments)
    assert trainer.batches.workers == 2 and trainer.step == 3
    trainer.batches.begin(1)
    assert trainer.batches.iterator._pin_memory
    ids, weights = trainer.batches.of(1)
    trainer.batches.close()
    assert ids.is_cuda and weights.is_cuda
    for row in range(2):
        for found, wanted in zip((ids[row], weights[row]), trainer.train_data[2 + row]):
            assert torch.equal(found.cpu(), wanted)


def test_steps_out_of_order_have_their_samples():
    dataset = program("data").Recall(64, seed=3)
    made = program("batches").Batches(
        dataset, lambda step: range(2 * step, 2 * step + 2), 4, device=torch.device("cpu")
    )
    state = torch.random.get_rng_state()
    for step in (0, 1, 3, 1, 2, 3, 4, 7):
        ids, weights = made.of(step)
        for row in range(2):
            wanted = dataset[2 * step + row]
            assert torch.equal(ids[row], wanted[0]) and torch.equal(weights[row], wanted[1])
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_text_is_pickled_whole():
    """Not as a tensor in shared memory, which may be smaller than a text."""
    text = program("data").Text(bytes(range(32, 127)) * 100, 64, pairs=1, seed=5)
    packed = ForkingPickler.dumps(text)  # as torch.multiprocessing sends it
    assert len(packed) > len(text.ids)
    for mine, theirs in zip(text[3], pickle.loads(packed)[3]):
        assert torch.equal(mine, theirs)


def test_processes_divide_the_samples():
    loop = program("loop")
    options = types.SimpleNamespace(batch=6)

    def of(rank, count):
        return list(
            loop.Trainer.samples_of(
                types.SimpleNamespace(options=options, ranks=types.SimpleNamespace(rank=rank, count=count)), 4
            )
        )

    assert of(0, 1) == list(range(24, 30))
    for count in (2, 3, 6):
        assert sum((of(rank, count) for rank in range(count)), []) == of(0, 1)


def test_torchrun_with_workers_has_the_gradient_of_one_process(tmp_path):
    """Two processes, each with a worker: the norm of the first gradient, and the losses after two steps."""
    steps = ["--steps", "2", "--log-every", "1"]
    run("SPKV", "spkv", tmp_path / "one", *SMALL, *steps)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(PROGRAMS / "spkv.py"), "--out", str(tmp_path / "two"), *SMALL, *steps, "--workers", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    one, two = (json.loads((tmp_path / name / "metrics.json").read_text())["log"] for name in ("one", "two"))
    norms = [[line["norm"] for line in log if "norm" in line] for log in (one, two)]
    assert len(norms[0]) == len(norms[1]) == 2
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert two[-1]["nll"] == pytest.approx(one[-1]["nll"], rel=1e-3)


# ---- checkpoints know their model --------------------------------------------------------------------------


def saved_model(folder, **sizes):
    torch.manual_seed(4)
    sizes = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "length": 64} | sizes
    model = program("models").from_scratch(**sizes)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("mode", ["joint", "frozen"])
def test_a_checkpoint_is_of_the_weights_that_its_run_began_with(mode, tmp_path):
    """Those of --model, which stay as they are where a run trains a copy of them."""
    model = saved_model(tmp_path / "model")
    arguments = [*SMALL, "--model", str(tmp_path / "model"), "--mode", mode]
    run("SPKV", "spkv", tmp_path / "out", *arguments, "--seconds", "1e-9")
    trainer, _ = run("SPKV", "spkv", tmp_path / "out", *arguments, "--seconds", "1e-9", "--resume")
    assert trainer.step == 2
    with torch.no_grad():
        weight = model.model.layers[1].mlp.up_proj.weight
        weight[3, 5] = weight[3, 5] + 0.25
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(
        SystemExit, match="--resume: .* of model .* is not allowed; this run has .*weights of"
    ):
        run("SPKV", "spkv", tmp_path / "out", *arguments, "--resume")


def test_fingerprints():
    """Of all numbers, their places and names, and the config; not of the dtype of weights that fit in
    bfloat16."""
    models = program("models")

    def made(change=None, **sizes):
        torch.manual_seed(4)
        model = models.from_scratch(**({"width": 32, "layers": 2, "heads": 2, "kv_heads": 1} | sizes))
        model.bfloat16().float()
        with torch.no_grad():
            if change is not None:
                change(model)
        return models.fingerprint(model)

    def swap_numbers(model):
        row = model.model.embed_tokens.weight[7]
        row[[1, 2]] = row[[2, 1]]

    def swap_layers(model):
        first, second = (layer.self_attn.q_proj.weight for layer in model.model.layers)
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)

    def other_base(model):
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}

    changes = [None, lambda m: m.model.norm.weight[3].add_(2**-6), swap_numbers, swap_layers, other_base]
    found = [made(change) for change in changes]
    assert len({*found, made(layers=1)}) == len(changes) + 1
    assert found[0] == made() == made(lambda model: model.bfloat16())


def test_a_loss_that_is_not_finite_stops(tmp_path):
    trainer = program("loop").Trainer
    before = trainer.train_step

    def spoil(self):
        if self.step == 3:
            with torch.no_grad():
                self.method.scorers[1].b2[0] = float("nan")
        return before(self)

    trainer.train_step = spoil
    try:
        with pytest.raises((SystemExit, ValueError), match="step 3.*layer 1, head 0"):
            run("SPKV", "spkv", tmp_path, *SMALL)
    finally:
        trainer.train_step = before


def test_a_gradient_that_is_not_finite_stops_before_the_step(tmp_path):
    """A finite loss may have a gradient that is not; its step would spoil all weights and the next
    checkpoint."""
    trainer = program("loop").Trainer
    before = trainer.pass_of

    def spoil(self, *batch):
        losses = before(self, *batch)
        if self.step == 2:
            next(iter(self.trained.values())).grad.fill_(float("inf"))
        return losses

    trainer.pass_of = spoil
    try:
        with pytest.raises(SystemExit, match="step 2: the loss is .*, the gradient's norm inf"):
            run("SPKV", "spkv", tmp_path, *SMALL, "--checkpoint-every", "1")
    finally:
        trainer.pass_of = before
    parameters = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["parameters"]
    assert all(p.isfinite().all() for p in parameters.values())


@pytest.mark.parametrize(
    "name, value",
    [
        *(("tokens", "1"), ("batch", "0"), ("steps", "-1"), ("rate", "nan"), ("clip", "-1"), ("pairs", "0")),
        *(("log-every", "0"), ("evaluate-samples", "0"), ("checkpoint-every", "-1"), ("seed", "-1")),
        *(
            ("workers", "-1"),
            ("seconds", "nan"),
            ("kv-heads", "3"),
            ("device", "none"),
            ("weight-decay", "inf"),
        ),
    ],
)
def test_numbers_that_no_run_has_are_refused(name, value, tmp_path):
    """In a sentence, before a step: after the last one the result would be lost."""
    with pytest.raises(SystemExit, match=f"--{name}: .* is not allowed; it must be"):
        run("SPKV", "spkv", tmp_path / "out", *SMALL, f"--{name}", value)
    assert not (tmp_path / "out").exists()


def test_texts_and_folders_are_refused(tmp_path):
    text, archive = tmp_path / "a.txt", tmp_path / "a.tar.xz"
    options = [one for one in SMALL if one not in ("--task", "recall")]
    for content, found in (
        (b"", "of 0 tokens"),
        (b"abc", "of 3 tokens"),
        (b"x" * 900, "held-out text.*45 t"),
    ):
        text.write_bytes(content)
        with pytest.raises(SystemExit, match=f"text: .*{found}.* is not allowed; it must have 64"):
            run("SPKV", "spkv", tmp_path / "out", *options, "--text", str(text))
    with tarfile.open(archive, "w:xz") as made:
        made.add(__file__, "train.txt")
    archive.write_bytes(archive.read_bytes()[:-40])
    with pytest.raises(SystemExit, match="a.tar.xz is not allowed; it must be a text"):
        run("SPKV", "spkv", tmp_path / "out", *options, "--text", str(archive))
    for out in (text, text / "below"):
        with pytest.raises(SystemExit, match="--out: .* is not allowed; it must be a folder"):
            run("SPKV", "spkv", out, *SMALL)


@pytest.mark.skipif(
    not (torch.cuda.is_available() and kvp.has_cuda()), reason="needs a GPU and the CUDA module"
)
@pytest.mark.parametrize(
    "method, options",
    [
        ("SPKV", []),
        ("WGKV", []),
        ("LTE", [*LTE, "--dropout", "0"]),
        ("LTE", [*LTE, "--scorer", "mlp"]),
    ],
    ids=["spkv", "wgkv", "lte", "lte-mlp"],
)
def test_steps_as_a_cuda_graph_are_the_steps(method, options, tmp_path):
    """Losses and gradients of a replayed pass are those of a pass from Python. Whole runs differ: AdamW makes
    a step of the learning rate of a gradient that is rounding alone."""
    arguments = [*SMALL[:-2], "--device", "cuda", "--steps", "8", "--fp32", "--cuda-graph", *options]
    trainer, _ = run(method, method.lower(), tmp_path, *arguments, "--seconds", "1e-9", "--workers", "0")
    for _ in range(2):
        trainer.train_step()
    assert trainer.graph.graph is None
    for first in (100, 200):
        samples = [trainer.batch(trainer.train_data, index) for index in (first, first + 1)]
        batch = [torch.cat(parts) for parts in zip(*samples)]
        trainer.pass_of(*batch)
        trainer.method.end_step()  # numbers that move between passes, such as LTE's penalties
        losses = {name: value.clone() for name, value in trainer.pass_of(*batch).items()}
        gradients = {name: p.grad.clone() for name, p in trainer.trained.items() if p.grad is not None}
        assert trainer.graph.graph is not None
        key, trainer.method.graph_key = trainer.method.graph_key, lambda: None
        plain = trainer.pass_of(*batch)
        for name, value in plain.items():
            torch.testing.assert_close(losses[name], value.detach(), rtol=1e-5, atol=1e-6, msg=name)
        for name, p in trainer.trained.items():
            bound = 1e-4 * p.grad.abs().max().item() + 1e-9
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-3, atol=bound, msg=name)
        trainer.method.graph_key = key
        for _ in range(3):
            trainer.pass_of(*batch)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_capture_survives_threads_that_pin_memory():
    """As a DataLoader's does, at any time."""
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    graph = program("step_graph").StepGraph([weight])
    sizes = iter(range(1, 100))

    def compute(ids, weights):
        pin = threading.Thread(target=lambda: torch.empty(next(sizes) << 20, pin_memory=True))
        pin.start()
        pin.join()
        loss = (weight * ids).sum()
        loss.backward()
        return {"loss": loss}

    for step in range(6):
        ids = torch.full((3,), float(step), device="cuda")
        losses = graph.run(compute, ids, ids, "alike")
        assert losses["loss"].item() == 3 * step and weight.grad.tolist() == [step] * 3
    assert graph.graph is not None


def test_answers_are_the_tokens_of_the_largest_weight():
    ids = torch.tensor([[0, 1, 2, 3, 1]])
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 0, 1, 0]]), 4).double()
    answers = program("method").Method.answers
    assert answers(logits, ids, torch.tensor([[1.0, 1, 10, 10, 0]])) == {"answers": 0.5}
    assert answers(logits, ids, torch.tensor([[0.0, 0, 0, 1, 1]])) == {"answers": 0.5}
    assert answers(logits, ids, torch.ones(1, 5)) == {}


def test_layers_keep_a_window_of_their_own():
    """Local and global layers: the model's own attention, and gates in global layers alone (SP-KV, 3.3)."""
    method, ids, weights = small_method("SPKV", "spkv", "--window", "8", "--hidden", "8")
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    )
    method.model = transformers.Qwen2ForCausalLM(config)
    method.scorers.float()
    with torch.no_grad():
        torch.testing.assert_close(method.logits(ids, method.dense), method.model(ids).logits)
        assert method.evaluate(ids, weights)["density"] == 1
        method(ids, weights)
    assert list(method.scores) == list(method.parts) == [1]


def test_processes_draw_for_themselves(monkeypatch):
    """Noise and positions differ by process and by --seed: each process has other samples, and each run."""

    def draws(rank, seed):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        dms, *_ = small_method("DMS", "dms", "--seed", seed)
        spkv, *_ = small_method("SPKV", "spkv", "--seed", seed)
        lte, *_ = small_method("LTE", "lte", "--seed", seed, "--window", "13")
        budget = ("--sinks", "2", "--window", "4", "--budgets", "16", "--positions", "4")
        kvpop, ids, weights = small_method("KVpop", "kvpop", "--seed", seed, *budget, dtype=torch.float32)
        lte.begin_step(5, 10)
        positions = []
        monkeypatch.setattr(kvp, "boundary_loss", spied(kvp.boundary_loss, positions))
        kvpop(ids, weights)
        return [dms.gate(1).seed, spkv.draw(1), lte.scorers[1].dropout_seed, positions[1]]

    def spied(function, seeds):
        return lambda *a, **named: (seeds.append(named["seed"]), function(*a, **named))[1]

    first = draws(0, "1")
    for other in (draws(1, "1"), draws(0, "2")):
        assert all(mine != theirs for mine, theirs in zip(first, other))
    assert first == draws(0, "1")


def test_programs_can_be_run_as_the_pages_say():
    folder = pathlib.Path(program("loop").__file__).parent
    table = (folder / "README.md").read_text()
    for path in folder.glob("*.py"):
        runs = "__main__" in path.read_text()
        assert bool(path.stat().st_mode & stat.S_IXUSR) == runs, path
        assert f"`{path.name}`" in table, path
