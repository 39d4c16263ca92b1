"""Metrics of masks against their definitions."""

import pytest
import reference
import torch

import kvpolicy as kvp

B, H, S = 2, 3, 40
SINKS, WINDOW, BUDGET = 2, 5, 6
POLICY = kvp.KVpop(SINKS, WINDOW, BUDGET)


def masks(device):
    teacher, student = (kvp.build_mask(POLICY, torch.randn(B, H, S, device=device)) for _ in range(2))
    return teacher, student


def test_metrics_are_the_definition(device):
    mask, _ = masks(device)
    seen = reference.visible(mask.expiry.cpu())
    assert torch.equal(kvp.live_keys(mask).cpu().long(), seen.sum(-1))
    assert torch.equal(kvp.live_keys(mask.expiry), kvp.live_keys(mask))
    pairs = seen.sum((-1, -2)).double() / (S * (S + 1) / 2)
    torch.testing.assert_close(kvp.density(mask).cpu(), pairs, rtol=1e-12, atol=0)
    eligible = reference.long_range(S, SINKS, WINDOW)
    gone = (eligible & ~seen).sum((-1, -2)).double() / eligible.sum()
    torch.testing.assert_close(kvp.evict_ratio(POLICY, mask).cpu(), gone, rtol=1e-12, atol=0)
    held = seen[:, :, 30].sum(1)
    assert torch.equal(kvp.retention_map(mask, 30).cpu().long(), held)


def test_recall_is_the_definition(device):
    teacher, student = masks(device)
    eligible = reference.long_range(S, SINKS, WINDOW)
    of_teacher, of_student = (reference.visible(m.expiry.cpu()) & eligible for m in (teacher, student))

    def share(part, whole):
        return torch.where(whole == 0, 1.0, part.double() / whole.clamp(min=1))

    recall = share((of_teacher & of_student).sum(-1), of_teacher.sum(-1))
    chance = share(of_student.sum(-1), eligible.sum(-1).expand(B, H, S))
    found = kvp.oracle_recall(POLICY, teacher, student)
    first = SINKS + WINDOW + BUDGET
    assert (found.queries == S - first).all()
    for mine, theirs in (
        (found.mean, recall[..., first:].mean(-1)),
        (found.chance_mean, chance[..., first:].mean(-1)),
        (found.last, recall[..., -1]),
        (found.chance_last, chance[..., -1]),
    ):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-12, atol=0)


def test_density_by_gates_is_not_by_pairs(device):
    """SP-KV, eq. 8: with all gates shut rho is 0, and a window of half the sequence shows 0.75 of pairs."""
    length, window = 256, 128
    scores = torch.full((1, 3, length), -3.0, device=device)
    scores[:, 1], scores[:, 2, ::4] = 3.0, 0.0
    policy = kvp.SPKV(window)
    assert kvp.open_gates(policy, scores).tolist() == [[0.0, 1.0, 0.25]]
    mask = kvp.build_mask(policy, scores)
    assert kvp.density(mask)[0, 0].item() == 24640 / 32896
    # A layout: head 1 dense, the others their window.
    layout = torch.arange(length, device=device, dtype=torch.int32) + window
    layout = layout.expand(1, 3, length).clone()
    layout[:, 1] = 2**31 - 1
    found = kvp.coverage(policy, mask, layout)
    assert found.keys.tolist() == [[0, 128, 32]] and found.covered.tolist() == [[0, 128, 0]]
    assert kvp.coverage(policy, mask, mask).covered.tolist() == [[0, 128, 32]]
    lengths = torch.tensor([130], dtype=torch.int32, device=device)
    assert kvp.open_gates(policy, scores, lengths=lengths).tolist() == [[0.0, 1.0, 33 / 130]]
    assert kvp.coverage(policy, mask, mask, lengths=lengths).keys.tolist() == [[0, 2, 1]]
    by_head = kvp.Policy(kvp.Sink(2), kvp.Window(4), kvp.ThresholdGate([-4.0, 3.0, 0.5], strict=True))
    assert kvp.open_gates(by_head, scores).tolist() == [[1.0, 0.0, 0.0]]
    evicting = kvp.Policy(kvp.Window(4), kvp.EvictionGate(0.0))
    assert kvp.open_gates(evicting, scores).tolist() == [[1.0, 0.0, 1.0]]


def test_lengths(device):
    mask, _ = masks(device)
    lengths = torch.tensor([S, 9], dtype=torch.int32, device=device)
    live = kvp.live_keys(mask, lengths=lengths)
    assert (live[1, :, 9:] == 0).all() and torch.equal(live[0], kvp.live_keys(mask)[0])


def test_refusals():
    mask, other = masks("cpu")
    with pytest.raises(NotImplementedError, match="oracle_recall takes"):
        kvp.oracle_recall(kvp.SPKV(4), mask, other)
    with pytest.raises(NotImplementedError, match="open_gates takes one with a gate"):
        kvp.open_gates(POLICY, torch.zeros(1, 1, 4))
    with pytest.raises(ValueError, match="other: shape .2, 3, 9. is not allowed"):
        kvp.coverage(POLICY, mask, mask.expiry[..., :9])
    with pytest.raises(ValueError, match="query: -1 is not allowed"):
        kvp.retention_map(mask, -1)
    with pytest.raises(TypeError, match="expiry: float32 is not allowed; it must be int32"):
        kvp.live_keys(mask.expiry.float())
