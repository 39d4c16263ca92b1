"""H2O, TOVA and SnapKV against a simulated cache, and the received mass against the formula."""

import warnings

import kvpolicy as kvp
import pytest
import reference
import torch

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def rows(dtype, device, length=40, batch=2):
    return (torch.randn(batch, heads, length, 64, device=device).to(dtype) for heads in (4, 2))


@pytest.mark.parametrize("options", [{}, {"queries": 5}, {"aggregate": "max"}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mass_is_the_formula(dtype, options, device, compiled):
    compiled(dtype)
    q, k = rows(dtype, device)
    scores = torch.randn(2, 2, 40, device=device)
    for mask in (None, kvp.build_mask(kvp.KVpop(1, 4, 5), scores)):
        mass = kvp.received_mass(q, k, mask, **options)
        want = reference.received_mass(
            q.cpu().double(),
            k.cpu().double(),
            None if mask is None else mask.expiry.cpu(),
            options.get("queries"),
            options.get("aggregate") == "max",
        )
        # Weights are exp of float32 logits below 8, whose products of 16-bit numbers are exact: 2^-21 of
        # each.
        torch.testing.assert_close(mass.cpu().double(), want, rtol=1e-5, atol=1e-6)


CASES = {
    "h2o": (lambda **o: kvp.H2O(6, 4, **o), {"kind": "h2o", "window": 5, "budget": 6}),
    "tova": (lambda **o: kvp.TOVA(8, **o), {"kind": "tova", "window": 1, "budget": 8}),
    "snapkv": (
        lambda **o: kvp.SnapKV(6, 4, **o),
        {"kind": "snapkv", "window": 4, "budget": 6, "pool": 5},
    ),
    "snapkv_max": (
        lambda **o: kvp.SnapKV(6, 4, pool=3, pool_largest=True, **o),
        {"kind": "snapkv", "window": 4, "budget": 6, "pool": 3, "pool_largest": True},
    ),
}


@pytest.mark.parametrize("prompt", [None, 25])
@pytest.mark.parametrize("chunk", [None, 8, 1])
@pytest.mark.parametrize("name", CASES)
def test_masks_are_those_of_a_cache(name, chunk, prompt, device):
    policy, numbers = CASES[name]
    q, k = rows(torch.float32, device)
    mask = kvp.build_observed_mask(policy(prefill="dense" if chunk is None else chunk), q, k, prompt=prompt)
    for b in range(2):
        want = reference.observed_mask(
            q[b].cpu().double(), k[b].cpu().double(), chunk=chunk, prompt=prompt, **numbers
        )
        assert torch.equal(reference.clamp(mask.expiry[b].cpu().long()), reference.clamp(want))


def test_lengths(device):
    q, k = rows(torch.float32, device)
    lengths = torch.tensor([40, 15], dtype=torch.int32, device=device)
    mask = kvp.build_observed_mask(kvp.TOVA(5), q, k, lengths=lengths)
    alone = kvp.build_observed_mask(kvp.TOVA(5), *(x[1:, :, :15].contiguous() for x in (q, k)))
    assert torch.equal(mask.expiry[1:, :, :15], alone.expiry) and (mask.expiry[1, :, 15:] == -1).all()


def test_heavy_hitters_without_recent_keys_warn():
    for recent in (0, [4, 0]):
        with pytest.warns(UserWarning, match="H2O: recent is 0"):
            kvp.H2O(4, recent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvp.H2O(4, 1)
        kvp.H2O(0, [1, 2])


def test_refusals():
    q, k = rows(torch.float32, "cpu", 9, 1)
    with pytest.raises(ValueError, match="must observe attention"):
        kvp.build_observed_mask(kvp.KVpop(1, 2, 3), q, k)
    with pytest.raises(ValueError, match="build_observed_mask takes it"):
        kvp.build_mask(kvp.TOVA(4), torch.zeros(1, 2, 9))
    with pytest.raises(ValueError, match="prefill: 0 is not allowed"):
        kvp.build_observed_mask(kvp.TOVA(4, prefill=0), q, k)
    with pytest.raises(ValueError, match="pooling width"):
        kvp.build_observed_mask(kvp.SnapKV(4, 2, pool=4), q, k)
    with pytest.raises(ValueError, match="aggregate: 'sum' is not allowed"):
        kvp.received_mass(q, k, aggregate="sum")
    with pytest.raises(ValueError, match="it ranks by attention"):
        kvp.Policy(kvp.Window(2), kvp.ThresholdGate(), kvp.TopKBudget(3), kvp.LastMass())
    with pytest.raises(ValueError, match="a second scorer"):
        kvp.Policy(kvp.Window(2), kvp.TopKBudget(3), kvp.LastMass(), kvp.LastMass())
