"""Policies that are compiled at their first use."""

import os
import subprocess
import sys

import pytest
import reference
import torch

import kvpolicy as kvp

S = 40
BAND = """
struct Band {
    static constexpr part_kind kind = part_kind::gate;
    float low, high;
    KVPOLICY_HOST_DEVICE constexpr void write(HeadParams&, std::int32_t, std::int32_t) const {}
    KVPOLICY_HOST_DEVICE constexpr bool open(float score, const HeadParams&) const {
        return score >= low && score <= high;
    }
};
"""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A folder of the module's own, so that every source is compiled once."""
    before = os.environ.get("KVPOLICY_CACHE")
    folder = tmp_path_factory.mktemp("cache")
    os.environ["KVPOLICY_CACHE"] = str(folder)
    yield folder
    os.environ.pop("KVPOLICY_CACHE")
    if before is not None:
        os.environ["KVPOLICY_CACHE"] = before


def test_a_struct_in_a_string(device, cache):
    scores = torch.randn(2, 3, S, device=device)
    policy = kvp.Policy(kvp.Sink(1), kvp.Window(4), kvp.TopKBudget(5), kvp.CppPart(BAND, "Band{0.0f, 1.0f}"))
    mask = kvp.build_mask(policy, scores)
    want = [
        [reference.expiry_of(row.cpu(), 1, 4, 5, is_open=lambda z: 0 <= z <= 1) for row in sequence]
        for sequence in scores
    ]
    assert torch.equal(reference.clamp(mask.expiry.cpu()), torch.tensor(want, dtype=torch.int32))
    number = len(list(cache.glob("*.so")))
    # Other run-time numbers take the same library; the compiled operator does, too.
    other = kvp.Policy(
        kvp.Sink([0, 1, 2]), kvp.Window(3), kvp.TopKBudget(9), kvp.CppPart(BAND, "Band{0.0f, 1.0f}")
    )
    compiled = torch.compile(lambda z: kvp.build_mask(other, z).expiry, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(scores), kvp.build_mask(other, scores).expiry)
    lengths = torch.tensor([S, 9], dtype=torch.int32, device=device)
    short = kvp.build_mask(policy, scores, lengths=lengths).expiry
    assert (short[1, :, 9:] == -1).all() and torch.equal(short[0], mask.expiry[0])
    assert len(list(cache.glob("*.so"))) == number and not list(cache.glob("*.[0-9]*"))


def test_a_stride_of_keys(device):
    mask = kvp.build_mask(kvp.Policy(kvp.Window(4), kvp.Stride(8)), torch.zeros(1, 2, S, device=device))
    t = torch.arange(S)
    kept = torch.where(t % 8 == 0, torch.full_like(t, reference.NEVER), t + 4)
    assert torch.equal(reference.clamp(mask.expiry[0, 0].cpu().long()), reference.clamp(kept))


def test_a_source_compiles_for_cuda(monkeypatch):
    """Where nvcc is, with or without a GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    try:
        kvp.first_use._compiler(device)
    except NotImplementedError:
        pytest.skip("no nvcc")
    library = kvp.first_use._library(kvp.Policy(kvp.Window(4), kvp.Stride(8)).instance, device)
    assert library.kvpolicy_build_mask is not None


def test_another_process_finds_the_library(cache):
    code = (
        "import torch, kvpolicy as kvp\n"
        "kvp.build_mask(kvp.Policy(kvp.Window(4), kvp.Stride(8)), torch.zeros(1, 1, 9))"
    )
    environment = {**os.environ, "KVPOLICY_CACHE": str(cache), "CXX": "no-such-compiler"}
    kvp.build_mask(kvp.Policy(kvp.Window(4), kvp.Stride(8)), torch.zeros(1, 1, 9))
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "no-such-compiler was not found" in ran.stderr
    del environment["CXX"]
    before = {path: path.stat().st_mtime_ns for path in cache.glob("*.so")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*.so")} == before


def test_refusals(cache):
    scores = torch.zeros(1, 2, 9)
    bad = kvp.Policy(kvp.Window(2), kvp.CppPart("struct Part { int x; };", "Part{1}"))
    with pytest.raises(RuntimeError, match="docs/extend.md:\n(.|\n)*error"):
        kvp.build_mask(bad, scores)
    assert not list(cache.glob("*.[0-9]*"))
    policy = kvp.Policy(kvp.Window(2), kvp.CppPart(BAND, "Band{0.0f, 1.0f}"))
    with pytest.raises(ValueError, match="NaN"):
        kvp.build_mask(policy, scores * float("nan"))
    with pytest.raises(TypeError, match="lengths: int64 is not allowed; it must be int32"):
        kvp.build_mask(policy, scores, lengths=torch.tensor([8]))
    with pytest.raises(NotImplementedError, match="takes Sink"):
        kvp.boundary_loss(policy, scores, scores)
    with pytest.raises(NotImplementedError, match="build_mask alone"):
        kvp.gate_sparsity(policy, scores)
    with pytest.raises(ValueError, match="Stride: 0 is not allowed"):
        kvp.Stride(0)
