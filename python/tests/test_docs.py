"""The code of the pages about Python and of the package's README runs, and prints what the page says."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ("pytorch.md", "pytorch-parts.md", "transformers.md", "several-gpus.md", "evaluation.md")
PAGES += tuple(sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("training/*.md")))


def blocks():
    """{name: (code, output)} of the Python blocks; the README's is named readme."""
    text = "".join((ROOT / "docs" / page).read_text() for page in PAGES)
    found = {}
    for name, code in re.findall(r"<!-- pytest: ([\w-]+) -->\n```python\n(.*?)```", text, re.S):
        output = re.search(rf"<!-- pytest-output: {name} -->\n```text\n(.*?)```", text, re.S)
        found[name] = code, output.group(1)
    assert len(found) == text.count("```python")
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "python/README.md").read_text(), re.S)
    found["readme"] = code, "torch.Size([1, 8, 512, 64])\n"
    return found


@pytest.mark.parametrize("name", blocks())
def test_page(name, tmp_path):
    code, output = blocks()[name]
    for needs, text in (("transformers", "import transformers"), ("accelerate", "DistributedConfig")):
        if text in code and importlib.util.find_spec(needs) is None:
            pytest.skip(f"no {needs}")
    command, environment = [sys.executable], dict(os.environ)
    if "init_process_group" in code:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        environment["CUDA_VISIBLE_DEVICES"] = ""  # the page's group is one of the CPU
    (tmp_path / "page.py").write_text(code)
    ran = subprocess.run(
        [*command, "page.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == output
