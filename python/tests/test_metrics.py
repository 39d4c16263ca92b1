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


def test_lengths(device):
    mask, _ = masks(device)
    lengths = torch.tensor([S, 9], dtype=torch.int32, device=device)
    live = kvp.live_keys(mask, lengths=lengths)
    assert (live[1, :, 9:] == 0).all() and torch.equal(live[0], kvp.live_keys(mask)[0])


def test_refusals():
    mask, other = masks("cpu")
    with pytest.raises(NotImplementedError, match="oracle_recall takes"):
        kvp.oracle_recall(kvp.SPKV(4), mask, other)
    with pytest.raises(ValueError, match="query: -1 is not allowed"):
        kvp.retention_map(mask, -1)
    with pytest.raises(TypeError, match="expiry: float32 is not allowed; it must be int32"):
        kvp.live_keys(mask.expiry.float())
