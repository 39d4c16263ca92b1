"""Policies as expressions: what is mapped to an instance, and what is refused."""

import pytest
import torch

import kvpolicy as kvp


def test_expressions_map_to_instances():
    instances = {
        "window": kvp.StreamingLLM(4, 60),
        "top_k": kvp.Policy(kvp.TopKBudget(3836), kvp.Sink(4), kvp.Decay(0.999), kvp.Window(256)),
        "gate_at_least": kvp.SPKV(64),
        "gate_above": kvp.LTE(4, 60, 192),
        "gate_evict": kvp.DMS(64),
    }
    for name, policy in instances.items():
        assert policy.instance == name
        assert policy.ranked == (name != "window")
    top_k = instances["top_k"]
    assert (top_k.sinks, top_k.windows, top_k.budgets) == ((4,), (256,), (3836,))
    assert kvp.SPKV(64).budgets == (kvp.UNLIMITED,)
    scorer = kvp.MLPScorer(2, 8, 16)
    assert kvp.KVpop(4, 60, 192, scorer).scorer is scorer


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: kvp.Policy(3), TypeError, "3 is not allowed"),
        (lambda: kvp.Policy(kvp.Sink), TypeError, "it must be a part"),
        (lambda: kvp.Policy(kvp.Window(1), kvp.Window(2)), ValueError, "a second Window"),
        (lambda: kvp.Policy(kvp.Window(1), kvp.Decay(0.9)), ValueError, "rank keys"),
        (lambda: kvp.Policy(kvp.Window(1), torch.nn.Identity()), ValueError, "rank keys"),
        (
            lambda: kvp.Policy(kvp.ThresholdGate(), kvp.Decay(0.9)),
            NotImplementedError,
            "no compiled instance",
        ),
        (lambda: kvp.Sink(-1), ValueError, "Sink: -1 is not allowed; it must be 0"),
        (lambda: kvp.Window(0), ValueError, "Window: 0 is not allowed; it must be 1"),
        (lambda: kvp.Window(2.5), TypeError, "2.5 is not allowed"),
        (lambda: kvp.Window([1, 2.5]), TypeError, "2.5 is not allowed"),
        (lambda: kvp.TopKBudget([]), ValueError, "empty"),
        (lambda: kvp.Decay(1.5), ValueError, "gamma: 1.5"),
        (lambda: kvp.Decay(), TypeError, "either"),
        (lambda: kvp.ThresholdGate.probability(1.5), ValueError, "tau: 1.5"),
    ],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make()
