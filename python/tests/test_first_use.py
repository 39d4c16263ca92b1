"""Policies that are compiled at their first use."""

import os
import subprocess
import sys

import pytest
import reference
import torch
from test_caches import DIM, KV_HEADS, cache_of, close, expected, rows, run

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
# A scorer, on CUDA too: examples/recipes/own_scorer_on_cuda.cu.
NORM = """
struct SmallNorm {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::on_arrival;
    std::int32_t head_dim = 0;
    std::size_t scratch_size() const { return 0; }
    float score(std::int32_t, const float* key, const float*, float*) const {
        float squares = 0.0f;
        for (std::int32_t d = 0; d < head_dim; ++d) { squares += key[d] * key[d]; }
        return -std::sqrt(squares);
    }
};
#if defined(__CUDACC__)
template <>
struct kvpolicy::device_scorer<SmallNorm> : kvpolicy::warp_device_scorer<SmallNorm> {
    template <class T>
    __device__ static float score(const SmallNorm& scorer, std::int32_t, const T* key, const T*, std::int32_t,
                                  std::int32_t) {
        float squares = 0.0f;
        for (int d = static_cast<int>(threadIdx.x) % 32; d < scorer.head_dim; d += 32) {
            const auto x = static_cast<float>(key[d]);
            squares += x * x;
        }
        return -sqrtf(kvpolicy::cuda_backend::warp_total(squares));
    }
};
#endif
"""


def band(low=0.0, high=1.0):
    return kvp.CppPart(BAND, f"Band{{{low}f, {high}f}}")


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
    policy = kvp.Policy(kvp.Sink(1), kvp.Window(4), kvp.TopKBudget(5), band())
    mask = kvp.build_mask(policy, scores)
    want = [
        [reference.expiry_of(row.cpu(), 1, 4, 5, is_open=lambda z: 0 <= z <= 1) for row in sequence]
        for sequence in scores
    ]
    assert torch.equal(reference.clamp(mask.expiry.cpu()), torch.tensor(want, dtype=torch.int32))
    number = len(list(cache.glob("*.so")))
    # Other run-time numbers take the same library; the compiled operator does, too.
    other = kvp.Policy(kvp.Sink([0, 1, 2]), kvp.Window(3), kvp.TopKBudget(9), band())
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


CUTS = [[40], [1] * 40, [7, 1, 20, 1, 1, 10]]


@pytest.mark.parametrize("kind", ["fixed", "dual"])
def test_a_cache_is_the_mask(kind, device):
    """A gate of one's own under a budget, and keys at a stride beside a window."""
    policy = kvp.Policy(kvp.Window(4), kvp.Stride(8))
    if kind == "fixed":
        policy = kvp.Policy(kvp.Sink([1, 2]), kvp.Window(4), kvp.TopKBudget(5), kvp.Decay(0.9), band())
    q, k, v = rows(40, device=device)
    scores = torch.rand(2, KV_HEADS, 40, device=device) * 2
    for cuts in CUTS:
        cache = cache_of(policy, device)
        got = run(cache, q, k, v, cuts, scores=scores if kind == "fixed" else None)
        want, expiry = expected_of(policy, q, k, v, scores)
        close(got, want)
        assert cache.usage(0, 1, 1).size == (expiry[1, 1] > 39).sum()
    assert cache._groups[0].pooled == (kind == "dual")
    blob = cache.snapshot(0)
    cache.restore(1, blob)
    assert cache.lengths() == [40, 40]


def expected_of(policy, q, k, v, scores):
    """As expected() of test_caches.py, with the mask of the device."""
    expiry = kvp.build_mask(policy, scores).expiry.cpu()
    return reference.attention(*(x.cpu().double() for x in (q, k, v)), expiry)[0], expiry


def test_a_scorer_in_a_cache(device):
    norm = kvp.CppPart(NORM, f"SmallNorm{{{DIM}}}")
    policy = kvp.Policy(kvp.Sink(1), kvp.Window(4), kvp.TopKBudget(5), norm)
    q, k, v = rows(40, device=device)
    scores = -k.square().sum(-1).sqrt()
    want = expected(kvp.KVpop(1, 4, 5), q, k, v, scores)[0]
    for cuts in CUTS:
        close(run(cache_of(policy, device), q, k, v, cuts), want)
    cache = cache_of(policy, device)
    with pytest.raises(ValueError, match="scores: are not allowed"):
        cache.step(0, *(x[:, :, :1] for x in (q, k, v)), scores=scores[:, :, :1])
    # Layers of other numbers are in the same library; drafts as with the package's policies.
    other = kvp.Policy(kvp.Sink(0), kvp.Window(3), kvp.TopKBudget(2), policy.own_parts[0])
    cache = cache_of([policy, other], device, max_draft_tokens=2)
    assert len(cache._groups) == 1
    for start, stop in ((0, 30), (30, 31)):
        for layer, numbers in enumerate(((1, 4, 5), (0, 3, 2))):
            part = [x[:, :, start:stop] for x in (q, k, v)]
            want = expected(kvp.KVpop(*numbers), q, k, v, scores)[0][:, :, start:stop]
            close(cache.prefill(layer, *part), want)
        cache.advance()


def test_generate_with_a_part(cache):
    pytest.importorskip("transformers", minversion="5.0")
    import kvpolicy.transformers as hf
    from test_transformers import generate, model_of, tokens

    model = model_of("llama")
    part = kvp.CppPart(NORM, f"SmallNorm{{{DIM}}}")
    own = hf.KVPolicyCache(model, kvp.Policy(kvp.Sink(1), kvp.Window(4), kvp.TopKBudget(5), part))
    number = len(list(cache.glob("*.so")))

    class Norm(torch.nn.Module):
        def forward(self, k, v):
            return -k.square().sum(-1).sqrt()

    plain = hf.KVPolicyCache(model, kvp.KVpop(1, 4, 5, Norm()))
    assert torch.equal(generate(model, tokens(30), own), generate(model, tokens(30), plain))
    assert len(list(cache.glob("*.so"))) <= number + 1


def test_a_damaged_folder(cache, capfd):
    """A library that is cut off, and one without its sum, are compiled again; the time is printed."""
    policy = kvp.Policy(kvp.Window(4), kvp.Stride(3))
    want = kvp.build_mask(policy, torch.zeros(1, 1, 9)).expiry
    compiled = "kvpolicy: compiled a policy with "
    assert capfd.readouterr().err.count(compiled) == 1
    newest = max(cache.glob("*.so"), key=lambda path: path.stat().st_mtime_ns)
    whole = newest.read_bytes()
    for damage in (
        lambda: newest.write_bytes(whole[: len(whole) // 2]),
        newest.with_suffix(".sum").unlink,
        newest.unlink,
    ):
        kvp.first_use._library.cache_clear()
        copy = newest.with_suffix(".copy")
        newest.rename(copy)  # the library that this process has loaded keeps its bytes
        newest.write_bytes(whole)
        damage()
        assert torch.equal(kvp.build_mask(policy, torch.zeros(1, 1, 9)).expiry, want)
        assert capfd.readouterr().err.count(compiled) == 1
        copy.unlink()
    kvp.first_use._library.cache_clear()
    kvp.build_mask(policy, torch.zeros(1, 1, 9))
    assert compiled not in capfd.readouterr().err


def shared_expiry(scores, windows, budgets, floors=None, caps=None, offsets=None, gammas=None, is_open=None):
    """expiry [Hkv, S] of heads that share sum(budgets) slots, from the definition (docs/shared-budget.md): at
    every query the held keys and the candidates are sorted. One gamma, or one per head."""
    heads, length = scores.shape
    floors, caps = floors or [0] * heads, caps or [length] * heads
    offsets, gammas = offsets or [0.0] * heads, gammas or [0.0] * heads
    expiry, held = torch.full((heads, length), kvp.UNLIMITED, dtype=torch.int32), []
    for q in range(length):
        for h in range(heads):
            t = q - windows[h]
            if t >= 0 and (is_open is None or is_open(scores[h, t].item())):
                held.append((h, t))
            elif t >= 0:
                expiry[h, t] = q

        def place(key, q=q):
            h, t = key
            return -(scores[h, t].item() + offsets[h] + (q - t) * gammas[h]), t, h

        held.sort(key=place)
        of = [[key for key in held if key[0] == h] for h in range(heads)]
        stay = {key for h in range(heads) for key in of[h][: floors[h]]}
        others = sorted((key for h in range(heads) for key in of[h][floors[h] : caps[h]]), key=place)
        stay |= set(others[: sum(budgets) - len(stay)])
        for key in held:
            if key not in stay:
                expiry[key] = q
        held = [key for key in held if key in stay]
    return expiry


def test_a_budget_that_heads_share(device, cache):
    scores = torch.randint(-8, 8, (2, 3, S)) / 4  # exact sums, and ties
    log_gamma = torch.tensor([-0.25, 0.0, -0.5])
    cases = [
        ([kvp.SharedBudget(4)], dict(budgets=[4, 4, 4])),
        ([kvp.SharedBudget((1, 2, 5)), kvp.Decay(log_gamma=torch.tensor([-0.25]))],
         dict(budgets=[1, 2, 5], gammas=[-0.25] * 3)),
        ([kvp.SharedBudget(4, floor=2, cap=(3, 7, kvp.UNLIMITED), score_offset=(0.0, 1.0, -0.5)),
          kvp.Decay(log_gamma=log_gamma)],
         dict(budgets=[4, 4, 4], floors=[2] * 3, caps=[3, 7, S], offsets=[0.0, 1.0, -0.5],
              gammas=log_gamma.tolist())),
        ([kvp.SharedBudget(4), kvp.ThresholdGate(0.25)], dict(budgets=[4] * 3, is_open=lambda z: z >= 0.25)),
    ]  # fmt: skip
    for parts, numbers in cases:
        policy = kvp.Policy(kvp.Window((5, 1, 9)), *parts)
        mask = kvp.build_mask(policy, scores.to(device)).expiry.cpu()
        want = torch.stack([shared_expiry(sequence, [5, 1, 9], **numbers) for sequence in scores])
        assert torch.equal(reference.clamp(mask), reference.clamp(want)), policy
    # Other keys need no other library; other limits do.
    before = set(cache.glob("*.so"))
    kvp.build_mask(kvp.Policy(kvp.Window((5, 1, 9)), kvp.SharedBudget(7)), scores.to(device))
    assert set(cache.glob("*.so")) == before


@pytest.mark.parametrize(
    "budget",
    [kvp.SharedBudget(4), kvp.SharedBudget(4, floor=(1, 2, 3), cap=(9, 4, 6))],
    ids=["plain", "limits"],
)
def test_a_cache_of_a_budget_that_heads_share(budget):
    """Prompts, chunks and steps of two layers hold what the mask of each shows its last query."""
    torch.manual_seed(7)
    policy = kvp.Policy(kvp.Sink(1), kvp.Window(4), budget)
    scores = torch.randn(2, 1, 3, S)
    held = kvp.Cache([policy, policy], query_heads=3, kv_heads=3, head_dim=8, max_length=S)
    cuts = [0, 7, 8, 30, 31, S]
    for begin, end in zip(cuts, cuts[1:]):
        for layer in range(2):
            call = held.step if end - begin == 1 else held.prefill
            call(layer, *torch.randn(3, 1, 3, end - begin, 8), scores=scores[layer, :, :, begin:end])
        held.advance()
    for layer in range(2):
        seen = kvp.build_mask(policy, scores[layer]).expiry[0] > S - 1
        assert [sorted(held.retained(layer, 0, head)) for head in range(3)] == [
            row.nonzero()[:, 0].tolist() for row in seen
        ]
        assert seen.sum() == 3 * (1 + 4 + 4)
    if torch.cuda.is_available():
        with pytest.raises(NotImplementedError, match="SharedBudget in a Cache"):
            kvp.Cache(policy, query_heads=3, kv_heads=3, head_dim=8, device="cuda")


def test_refusals_of_shared_budgets(cache):
    scores = torch.zeros(1, 2, 9)
    policy = kvp.Policy(kvp.Window(2), kvp.SharedBudget(3))
    with pytest.raises(ValueError, match="a second TopKBudget is not allowed"):
        kvp.Policy(kvp.TopKBudget(3), kvp.SharedBudget(3))
    for keys in (-1, kvp.UNLIMITED):
        with pytest.raises(ValueError, match="SharedBudget: .* is not allowed"):
            kvp.SharedBudget(keys)
    with pytest.raises(ValueError, match="floor: -1 is not allowed"):
        kvp.SharedBudget(3, floor=-1)
    with pytest.raises(ValueError, match="score_offset: .*inf.* is not allowed"):
        kvp.SharedBudget(3, score_offset=float("inf"))
    with pytest.raises(ValueError, match="sum of the floors of layer 0: 8 is not allowed"):
        kvp.build_mask(kvp.Policy(kvp.SharedBudget(3, floor=4)), scores)
    with pytest.raises(NotImplementedError, match="boundary_loss takes"):
        kvp.boundary_loss(policy, scores, scores)
    with pytest.raises(NotImplementedError, match="has no share of the heads"):
        policy.share(0, 1)
    with pytest.raises(ValueError, match="takes no other parts|must have a TopKBudget"):
        kvp.Policy(kvp.SharedBudget(3), kvp.LastMass())


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
    for call in (lambda: kvp.build_mask(bad, scores), lambda: cache_of(bad)):
        with pytest.raises(RuntimeError, match="error: .*needs .static constexpr kvpolicy::part_kind kind"):
            call()
    typo = kvp.CppPart("\nstruct Part {\n    int x = y;\n};", "Part{}")
    with pytest.raises(RuntimeError, match="^Policy: part 1:3:.* error: .*y.*docs/extend.md$"):
        kvp.build_mask(kvp.Policy(kvp.Window(2), typo), scores)
    assert not list(cache.glob("*.[0-9]*"))
    own = kvp.Policy(kvp.Window(2), kvp.TopKBudget(3), kvp.Decay(0.9), band())
    for mixed in (
        kvp.Policy(kvp.Window(2), kvp.TopKBudget(3), band(), kvp.mLSTMScorer(KV_HEADS, DIM, delay=2)),
        kvp.Policy(kvp.Window(2), kvp.TopKBudget(3), band(), kvp.QuestPages(4)),
    ):
        with pytest.raises(NotImplementedError, match="must be alone beside the package's parts"):
            cache_of(mixed)
    with pytest.raises(ValueError, match="needs a scorer or scores"):
        run(cache_of(own), *rows(9), [9])
    policy = kvp.Policy(kvp.Window(2), band())
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
