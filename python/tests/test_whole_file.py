"""Files that are whole after a kill and on a full disk, and written by one process at a time."""

import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import time

import kvpolicy as kvp
import pytest
import torch
from kvpolicy import whole_file
from kvpolicy.whole_file import output_lock, whole_files, whole_path, write_whole
from training_cases import run

PYTHON = str(pathlib.Path(kvp.__file__).resolve().parents[1])
SMALL = ["--model", "scratch", "--scratch-size", "32", "2", "2", "--kv-heads", "1", "--tokens", "64"]
SMALL += ["--batch", "2", "--steps", "6", "--window", "8", "--evaluate-samples", "1", "--device", "cpu"]


def child(code, *arguments, **more):
    """A process that runs code with the module's functions; it prints a line when it is ready."""
    source = f"import os, signal, resource, sys, time\nfrom whole_file import *\n{code}"
    loader = (  # without the package, which takes seconds to import
        "import importlib.util, sys; "
        f"spec = importlib.util.spec_from_file_location('whole_file', {whole_file.__file__!r}); "
        "module = importlib.util.module_from_spec(spec); sys.modules['whole_file'] = module; "
        "spec.loader.exec_module(module); exec(sys.argv.pop(1))"
    )
    command = [sys.executable, "-c", loader, source, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more)


def test_a_kill_in_the_middle_leaves_a_whole_file(tmp_path):
    file, draw = tmp_path / "out", random.Random(1)
    texts = ("a" * 3_000_000, "b" * 2_000_001)
    write_whole(file, texts[0])
    for _ in range(10):
        process = child(
            "with output_lock(sys.argv[1]):\n"
            "    print(flush=True)\n"
            "    while True:\n"
            "        for text in ('b' * 2_000_001, 'a' * 3_000_000):\n"
            "            write_whole(sys.argv[1], text)\n",
            file,
        )
        process.stdout.readline()
        time.sleep(0.02 * draw.random())
        process.kill()
        process.wait()
        assert file.read_text() in texts
    with output_lock(file):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.lock"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_leaves_the_old_file(tmp_path):
    file = tmp_path / "out"
    write_whole(file, "old")
    process = child(
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    write_whole(sys.argv[1], 'x' * 2000)\n"
        "except OSError as error:\n    print(error.strerror)\n",
        file,
    )
    assert process.communicate()[0] == "File too large\n"
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    scorers = kvp.Scorers([kvp.LinearScorer(2, 8, 8)], window=8, gamma_range=None)
    scorers.save(file)
    before, handler = file.read_bytes(), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(Exception, match="File too large"):
            scorers.save(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_error_and_a_link(tmp_path):
    file, link = tmp_path / "out", tmp_path / "link"
    write_whole(file, b"old")
    with pytest.raises(ZeroDivisionError), whole_path(file) as part:
        part.write_text("new")
        raise ZeroDivisionError
    assert file.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["out"]
    link.symlink_to("out")
    write_whole(link, "new")
    assert link.is_symlink() and file.read_text() == "new"
    mask = os.umask(0)
    os.umask(mask)
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask
    with whole_files(tmp_path / "folder") as part:
        (part / "a").write_text("a")
        assert not (tmp_path / "folder").exists()
    assert (tmp_path / "folder" / "a").read_text() == "a"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "out"]


def test_a_file_is_kept_for_one_process(tmp_path):
    file = tmp_path / "out"
    process = child("with output_lock(sys.argv[1]):\n    print(flush=True)\n    time.sleep(60)", file)
    process.stdout.readline()
    with pytest.raises(FileExistsError, match="--out: .* is being written by another process"):
        with output_lock(file):
            pass
    process.kill()
    process.wait()
    with output_lock(file), output_lock(tmp_path / "other"):
        pass
    assert not list(tmp_path.iterdir())


def test_another_text_of_the_same_name_is_refused(tmp_path):
    text = tmp_path / "text"
    options = [*SMALL, "--text", str(text)]
    text.write_bytes(b"some text " * 400)
    run("SPKV", "spkv", tmp_path / "out", *options, "--seconds", "1e-9")
    text.write_bytes(b"other text" * 400)
    with pytest.raises(SystemExit, match="--resume: .* of data .* is not allowed; this run has"):
        run("SPKV", "spkv", tmp_path / "out", *options, "--resume")
    text.write_bytes(b"some text " * 400)
    trainer, _ = run("SPKV", "spkv", tmp_path / "out", *options, "--resume")
    assert trainer.step == 6
    json.loads((tmp_path / "out" / "metrics.json").read_text())


def test_a_signal_saves_a_checkpoint(tmp_path):
    program = pathlib.Path(__file__).resolve().parents[2] / "examples" / "training" / "spkv.py"
    options = [*SMALL, "--task", "recall", "--log-every", "1", "--steps", "100000", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": PYTHON}
    for number in (signal.SIGTERM, signal.SIGINT):
        resume = ["--resume"] if (tmp_path / "checkpoint.pt").exists() else []
        process = subprocess.Popen(
            [sys.executable, str(program), *options, *resume],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        while "step" not in (line := process.stdout.readline()):
            assert line, process.communicate()
        if number == signal.SIGTERM:  # two runs cannot share a folder
            with pytest.raises(SystemExit, match="is being written by another process"):
                run("SPKV", "spkv", tmp_path, *SMALL, "--task", "recall", "--resume")
        process.send_signal(number)
        output, error = process.communicate(timeout=60)
        assert process.returncode == 128 + number, error
        assert "stopped" in output
        assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] > 0
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".lock", ".part")]
