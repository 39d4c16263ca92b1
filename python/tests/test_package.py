"""What is installed: sizes of the modules, the tables that say what is in them, the source distribution."""

import importlib.util
import pathlib
import subprocess
import sys
import tarfile

import pytest

from kvpolicy import _native

# A wheel has at most 60 MB; the rest of it is text.
MODULES_MB = 58


def modules():
    found = (importlib.util.find_spec(f"kvpolicy.{name}") for name in ("_host", "_cuda"))
    return [pathlib.Path(spec.origin) for spec in found if spec is not None]


def test_sizes():
    sizes = {path.name: path.stat().st_size for path in modules()}
    print(sizes)
    assert sum(sizes.values()) <= MODULES_MB * 10**6


def test_types():
    assert set(_native.types("cpu")) == {"bfloat16", "float16", "float32", "float64"}
    if len(modules()) == 1:
        pytest.skip("no CUDA module")
    attention, scorers = _native.types("cuda"), _native.types("cuda", "scorer")
    assert set(scorers) == set(attention) - {"float64"}


def test_source_distribution(tmp_path):
    """It holds the library and what CMake reads, as files."""
    pytest.importorskip("scikit_build_core")
    build = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run(
        [sys.executable, "-c", build], cwd=pathlib.Path(__file__).parents[1], check=True, capture_output=True
    )
    (archive,) = tmp_path.glob("kvpolicy-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {"/".join(member.name.split("/")[1:]): member for member in tar}
    for name in ("include/kvpolicy/version.hpp", "cmake/nvcc.cmake", "src/module.cpp", "CMakeLists.txt"):
        assert names[name].isfile()
    assert not [name for name, member in names.items() if member.issym() or name.endswith(".so")]
