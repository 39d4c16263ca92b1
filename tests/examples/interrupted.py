#!/usr/bin/env python3
"""interrupted.py TRAIN_SCORER TEXT FOLDER [OPTION...]: runs of train_scorer that are killed, interrupted,
diverge, or meet a full disk. Each must leave whole files, say what happened behind all that it printed, and
fail."""

import json
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

PROGRAM, TEXT, FOLDER = sys.argv[1], pathlib.Path(sys.argv[2]).resolve(), pathlib.Path(sys.argv[3])
OPTIONS = sys.argv[4:]  # of every run that trains, as in --backend cuda
COMMON = ["--budgets", "128,96", "--warm-up", "2", "--threads", "1", "--hidden", "16", *OPTIONS]
FOREVER = [*COMMON, "--steps", "1000000"]


def command(*options):
    return [str(pathlib.Path(PROGRAM).resolve()), *map(str, options)]


def run(*options, expect=0, **more):
    done = subprocess.run(
        command(*options), cwd=FOLDER, check=False, capture_output=True, text=True, timeout=120, **more
    )
    assert done.returncode == expect, (options, done.returncode, done.stdout, done.stderr)
    return done


def train(*options, **more):
    return run("--qkv", "qkv", *options, **more)


def start(*options):
    """A run that has said its first line."""
    process = subprocess.Popen(
        command("--qkv", "qkv", *options),
        cwd=FOLDER,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().startswith("mlp: "), process.communicate()
    return process


def end(process, number):
    process.send_signal(number)
    output, error = process.communicate(timeout=60)
    return process.returncode, output, error


def metadata(name):
    """Of a safetensors file, which must have all its bytes."""
    data = (FOLDER / name).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    last = max(one["data_offsets"][1] for key, one in header.items() if key != "__metadata__")
    assert len(data) == 8 + size + last, f"{name}: {len(data)} bytes are not all"
    return header["__metadata__"]


def left_over():
    return sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".part", ".lock"))


def test_signals():
    for number, name in ((signal.SIGTERM, "term"), (signal.SIGINT, "int")):
        process = start(*FOREVER, "--out", name)
        time.sleep(0.3)
        status, _, error = end(process, number)
        assert status == 128 + number, (status, error)
        assert f"--resume {name}.checkpoint goes on" in error, error
        assert not (FOLDER / name).exists() and not left_over(), left_over()
        # The checkpoint is that of a run that left off after this step.
        step = int(metadata(f"{name}.checkpoint")["checkpoint"])
        assert step > 0
        train(*FOREVER, "--out", "x", "--checkpoint", "whole", "--stop-after", step)
        assert (FOLDER / "whole").read_bytes() == (FOLDER / f"{name}.checkpoint").read_bytes()
    # With a name of its own, and on from there.
    status, _, error = end(
        start(*FOREVER, "--out", "y", "--checkpoint", "c", "--resume", "whole"), signal.SIGTERM
    )
    assert status == 143 and "--resume c goes on" in error, (status, error)
    assert int(metadata("c")["checkpoint"]) >= step


def test_kills():
    draw, step = random.Random(1), 0
    options = [*FOREVER, "--out", "k", "--checkpoint", "kept", "--checkpoint-every", 1]
    options += ["--metrics", "lines", "--evaluate-every", 1]
    for _ in range(8):
        there = (FOLDER / "kept").exists()
        process = start(*options, *(["--resume", "kept"] if there else []))
        time.sleep(0.02 + 0.2 * draw.random())
        assert end(process, signal.SIGKILL)[0] == -signal.SIGKILL
        if (FOLDER / "kept").exists():
            now = int(metadata("kept")["checkpoint"])
            assert now >= step, (now, step)
            step = now
    assert step > 0
    train(*options, "--resume", "kept", "--stop-after", step + 1)
    # A run that leaves off early does not write --out, so the lock of a killed one is still there.
    (FOLDER / "k.lock").unlink(missing_ok=True)
    assert not left_over(), left_over()
    steps = [json.loads(line)["step"] for line in (FOLDER / "lines").read_text().splitlines()]
    assert steps[-1] == step + 1 and len(steps) >= step, (steps[-3:], step)


def test_one_run_per_file():
    process = start(*FOREVER, "--out", "o")
    error = train(*COMMON, "--steps", 1, "--out", "o", expect=1).stderr
    assert "--out: o is being written by another process" in error, error
    train(*COMMON, "--steps", 1, "--out", "other")
    end(process, signal.SIGKILL)
    train(*COMMON, "--steps", 1, "--out", "o")
    metadata("o")


def limited(size):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return {"preexec_fn": limit, "restore_signals": False}


def test_full_disk():
    error = train(*COMMON, "--steps", 4, "--out", "f", "--metrics", "/dev/full", expect=1).stderr
    assert "/dev/full: cannot be written: No space left on device" in error, error
    assert not (FOLDER / "f").exists()
    train(*COMMON, "--steps", 4, "--out", "f", "--seed", 2)
    before = (FOLDER / "f").read_bytes()
    error = train(*COMMON, "--steps", 4, "--out", "f", expect=1, **limited(4096)).stderr
    assert "f: cannot be written: File too large; step 4 could not be saved in f.checkpoint" in error, error
    assert (FOLDER / "f").read_bytes() == before and not left_over(), left_over()
    # What was learned until the disk is full is saved.
    options = [*COMMON, "--steps", 400, "--evaluate-every", 1, "--out", "g", "--metrics", "m"]
    train(*options, "--checkpoint", "half", "--stop-after", 2)
    size = (FOLDER / "half").stat().st_size + 10000
    (FOLDER / "m").write_text(json.dumps("x" * size) + "\n")
    error = train(*options, "--resume", "half", expect=1, **limited(size + 1000)).stderr
    assert "m: cannot be written: File too large; step " in error and "is saved in g.checkpoint" in error, (
        error
    )
    assert int(metadata("g.checkpoint")["checkpoint"]) > 2
    for line in (FOLDER / "m").read_text().splitlines():
        json.loads(line)
    # A log on a full disk.
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("--qkv", "qkv", *COMMON, "--steps", 1, "--out", "h"),
            cwd=FOLDER,
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1 and "No space left on device" in done.stderr, done


def test_divergence():
    train(*COMMON, "--steps", 3, "--out", "d")
    before = (FOLDER / "d").read_bytes()
    with open(FOLDER / "log", "w") as log:
        done = subprocess.run(
            command("--qkv", "qkv", *COMMON, "--steps", 60, "--rate", 1000, "--out", "d"),
            cwd=FOLDER,
            check=False,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
    text = (FOLDER / "log").read_text().splitlines()
    assert done.returncode == 1, text
    assert text[0].startswith("mlp: ") and text[-1].startswith("train_scorer: step "), text
    assert "diverged" in text[-1] and "layer " in text[-1] and ", head " in text[-1], text
    assert (FOLDER / "d").read_bytes() == before and not (FOLDER / "d.checkpoint").exists()


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    data = ["--length", 320, "--pairs", 4, "--sequences", 3, "--dump", "qkv", "--dump-targets", 2]
    run("--text", TEXT, *data, "--threads", 1)
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            begin = time.monotonic()
            test()
            print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
