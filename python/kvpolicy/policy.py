"""Policies as expressions of parts: Policy(Sink(4), Window(256), TopKBudget(3836), Decay(0.9995)).

An expression is mapped to an instance that is compiled ahead of time; its numbers are run-time values, one
for all KV heads or one per KV head. expiry = max(sink, window, min(gate, budget)); docs/concepts.md explains
the parts.
"""

import dataclasses
import math
import numbers

import torch

from kvpolicy import first_use

UNLIMITED = 2**31 - 1


def _whole(name, value, least):
    """A whole number, or a sequence of them by KV head, as a tuple."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for one in values:
        if isinstance(one, bool) or not isinstance(one, numbers.Integral):
            raise TypeError(f"{name}: {one!r} is not allowed; it must be a whole number")
        if not least <= one <= UNLIMITED:
            raise ValueError(f"{name}: {one} is not allowed; it must be {least} to 2^31 - 1")
    if not values:
        raise ValueError(f"{name}: an empty sequence is not allowed; it must have a number per KV head")
    return tuple(map(int, values))


def _logits(name, value):
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not values or any(not isinstance(one, numbers.Real) or math.isnan(one) for one in values):
        raise ValueError(f"{name}: {value!r} is not allowed; it must be a number, or one per KV head")
    return tuple(map(float, values))


def _logit_of(probability):
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"tau: {probability} is not allowed; it must be a probability in [0, 1]")
    if probability in (0.0, 1.0):
        return math.copysign(math.inf, probability - 0.5)
    return math.log(probability) - math.log1p(-probability)


@dataclasses.dataclass(frozen=True)
class Sink:
    """The first `keys` keys never expire. `keys`: an int >= 0, or one per KV head."""

    keys: object

    def __post_init__(self):
        object.__setattr__(self, "keys", _whole("Sink", self.keys, 0))


@dataclasses.dataclass(frozen=True)
class Window:
    """A query sees its `keys` most recent keys, itself included. `keys`: an int >= 1, or one per KV head."""

    keys: object

    def __post_init__(self):
        object.__setattr__(self, "keys", _whole("Window", self.keys, 1))


@dataclasses.dataclass(frozen=True)
class TopKBudget:
    """Of the keys that left the window, the `keys` best stay. `keys`: an int >= 0, or one per KV head;
    UNLIMITED keeps all."""

    keys: object

    def __post_init__(self):
        object.__setattr__(self, "keys", _whole("TopKBudget", self.keys, 0))


@dataclasses.dataclass(frozen=True)
class SharedBudget:
    """The KV heads of a layer share `keys` * Hkv slots: of the keys of all heads that left their windows, the
    best stay (docs/shared-budget.md). `keys` per KV head: their sum. The `floor` best keys of a head stay, at
    most its `cap` best compete, and `score_offset` is added to a head's scores where heads are compared; each
    is one number, or one per KV head. Where decays differ by head, keys are ranked at every query. A policy
    with it is compiled at its first use, anew for other limits, but not for other `keys`."""

    keys: object
    floor: object = 0
    cap: object = UNLIMITED
    score_offset: object = 0.0

    def __post_init__(self):
        for name in ("keys", "floor", "cap"):
            label = "SharedBudget" if name == "keys" else name
            object.__setattr__(self, name, _whole(label, getattr(self, name), 0))
        object.__setattr__(self, "score_offset", _logits("score_offset", self.score_offset))
        if UNLIMITED in self.keys:
            raise ValueError(f"SharedBudget: {UNLIMITED} is not allowed; it must be below 2^31 - 1")
        if not all(map(math.isfinite, self.score_offset)):
            raise ValueError(f"score_offset: {self.score_offset} is not allowed; it must be finite")

    @property
    def source(self):
        """A C++ part with these limits, whose keys are run-time values."""
        arrays, limits = [], []
        for name, kind in (("floor", "std::int32_t"), ("cap", "std::int32_t"), ("score_offset", "float")):
            values = getattr(self, name)
            texts = [f"{one.hex()}f" if kind == "float" else str(one) for one in values]
            arrays.append(f"    static constexpr {kind} {name}s[] = {{{', '.join(texts)}}};\n")
            limits.append(f".{name} = per_head({name}s, 1, {len(values)})")
        return (
            "struct LayerBudget : SharedBudget<> {\n"
            + "".join(arrays)
            + "    constexpr explicit LayerBudget(PerHead<std::int32_t> k)\n"
            + f"        : SharedBudget<>(k, {{{', '.join(limits)}}}) {{}}\n}};\n"
        )


class Decay:
    """Scores fall with age: at query q, key t counts as r_t + (q - t) log(gamma).

    `gamma` is a number in (0, 1], or `log_gamma` is a tensor [1] or [Hkv] of natural logarithms <= 0. A
    tensor may need a gradient: boundary_loss gives it one. build_mask reads it on the CPU, so a CUDA tensor
    there costs a synchronization.
    """

    def __init__(self, gamma=None, *, log_gamma=None):
        if (gamma is None) == (log_gamma is None):
            raise TypeError("Decay: takes either gamma or log_gamma")
        if gamma is not None:
            if not 0.0 < gamma <= 1.0:
                raise ValueError(f"gamma: {gamma} is not allowed; it must be above 0 and at most 1")
            log_gamma = torch.tensor([math.log(gamma)], dtype=torch.float32)
        if log_gamma.dim() != 1:
            raise ValueError(f"log_gamma.dim(): {log_gamma.dim()} is not allowed; it must be 1")
        self.log_gamma = log_gamma

    def __repr__(self):
        return f"Decay(log_gamma={self.log_gamma!r})"


@dataclasses.dataclass(frozen=True)
class ThresholdGate:
    """A key that leaves the window stays where its score is at least `threshold`, or above it with
    `strict` (LTE). The threshold is a logit, or one per KV head; probability(tau) converts."""

    threshold: object = 0.0
    strict: bool = False

    def __post_init__(self):
        object.__setattr__(self, "threshold", _logits("threshold", self.threshold))

    @classmethod
    def probability(cls, tau, strict=False):
        return cls(_logit_of(tau), strict)


@dataclasses.dataclass(frozen=True)
class EvictionGate:
    """A key that leaves the window expires where its score is above `threshold` (DMS). The threshold is a
    logit, or one per KV head."""

    threshold: object = 0.0

    def __post_init__(self):
        object.__setattr__(self, "threshold", _logits("threshold", self.threshold))

    @classmethod
    def probability(cls, tau):
        return cls(_logit_of(tau))


class ObservedScorer:
    """A scorer that observes attention: those of kvpolicy.observed."""

    instance = ""


@dataclasses.dataclass(frozen=True)
class CppPart:
    """A part of a policy in C++: a keep part, a gate or a scorer (docs/extend.md). `source` defines a struct
    at namespace scope, with the library's names in scope; `expression` makes one, e.g. "Band{0.0f, 1.0f}". A
    policy with such a part is compiled at its first use by build_mask or a Cache, by g++ for CPU tensors and
    by nvcc for CUDA tensors. A scorer runs in a Cache; build_mask takes the scores of its caller."""

    source: str
    expression: str


@dataclasses.dataclass(frozen=True)
class Stride:
    """Every `step`-th key never expires. Policies with it are compiled at their first use."""

    step: int

    def __post_init__(self):
        _whole("Stride", self.step, 1)

    source = ""

    @property
    def expression(self):
        return f"Stride<>{{{self.step}}}"


@dataclasses.dataclass(frozen=True)
class QuestPages:
    """Selection at the read (Quest): a decoded token reads the newest token's page and the `pages` - 1 others
    with the largest bound

        sum over d of max(q_d min_d, q_d max_d)

    where min_d and max_d are those of the page's keys. The query heads of a KV head read the same pages:
    their largest bound counts, or with `aggregate` "mean" its mean. `pages`: an int >= 1, or one per KV head;
    UNLIMITED reads all. Every key stays where it is: a Cache selects in steps and attend, and masks and
    chunks read every key. On CUDA page_size is a multiple of 16."""

    pages: object
    page_size: int = 16
    aggregate: str = "max"

    def __post_init__(self):
        object.__setattr__(self, "pages", _whole("QuestPages", self.pages, 1))
        _whole("page_size", self.page_size, 1)
        if self.aggregate not in ("max", "mean"):
            raise ValueError(f"aggregate: {self.aggregate!r} is not allowed; it must be 'max' or 'mean'")


_KINDS = {
    Sink: "Sink",
    Window: "Window",
    TopKBudget: "TopKBudget",
    SharedBudget: "TopKBudget",
    Decay: "Decay",
    ThresholdGate: "gate",
    EvictionGate: "gate",
    QuestPages: "QuestPages",
}


# The C++ types of the gates of instances.
_GATE_TYPES = {
    "gate_at_least": "ThresholdGate<at_least>",
    "gate_above": "ThresholdGate<above>",
    "gate_evict": "EvictionGate",
}


def _heads_of(part, first, last):
    """A part of the KV heads `first` up to but not including `last`."""
    stays = (1, last - first)
    if isinstance(part, Decay):
        log_gamma = part.log_gamma
        return part if log_gamma.numel() in stays else Decay(log_gamma=log_gamma[first:last])
    if isinstance(part, torch.nn.Module):
        own = not hasattr(part, "share") or part.heads == last - first
        return part if own else part.share(first, last)
    if isinstance(part, ObservedScorer):
        return part
    (name, numbers), *_ = vars(part).items()
    return part if len(numbers) in stays else dataclasses.replace(part, **{name: numbers[first:last]})


class Policy:
    """Parts in any order, at most one of a kind: Sink, Window, TopKBudget or SharedBudget, Decay, a gate,
    QuestPages, and a scorer (a torch.nn.Module of kvpolicy.scorers, any module that maps k and v to scores
    [B, Hkv, S], or what H2O, TOVA and SnapKV observe); and any number of Stride and CppPart.

    A part that is left out has its neutral number: no sinks, a window of 1, no budget, gamma = 1. Raises
    TypeError for what is no part, ValueError for two parts of a kind and for parts that rank keys of no
    budget, and NotImplementedError for a Decay on a gate alone. A policy with a Stride, a CppPart or a
    SharedBudget has no instance in the package: build_mask and Cache (a SharedBudget: on the CPU) compile one
    at the first use, into the folder KVPOLICY_CACHE (default ~/.cache/kvpolicy); other operators refuse it.
    """

    def __init__(self, *parts):
        found, own = {}, []
        for part in parts:
            if isinstance(part, (CppPart, Stride)):
                own.append(part)
                continue
            scores = isinstance(part, (torch.nn.Module, ObservedScorer))
            kind = "scorer" if scores else _KINDS.get(type(part))
            if kind is None:
                raise TypeError(f"Policy: {part!r} is not allowed; it must be a part or a torch.nn.Module")
            if kind in found:
                raise ValueError(f"Policy: a second {kind} is not allowed; it must have at most one")
            found[kind] = part
        self.parts = tuple(parts)
        self.scorer = found.get("scorer")
        gate, budget, decay = found.get("gate"), found.get("TopKBudget"), found.get("Decay")
        ranks = gate is not None or budget is not None or any(isinstance(part, CppPart) for part in own)
        if not ranks and (decay or self.scorer):
            raise ValueError(
                "Policy: a Decay or a scorer without a TopKBudget or a gate is not allowed; they rank keys"
            )
        if decay is not None and budget is None:
            raise NotImplementedError(
                "Policy: a Decay on a gate without a TopKBudget has no compiled instance; leave Decay out"
            )
        self.selection = found.get("QuestPages")
        if isinstance(self.scorer, ObservedScorer) and (budget is None or any((gate, decay, self.selection))):
            raise ValueError(
                f"Policy: a gate, a Decay or QuestPages is not allowed with {self.scorer!r}; it ranks by "
                "attention, and must have a TopKBudget"
            )
        self.sinks = found["Sink"].keys if "Sink" in found else (0,)
        self.windows = found["Window"].keys if "Window" in found else (1,)
        self.budgets = budget.keys if budget else (UNLIMITED,) if gate else (0,)
        self.thresholds = gate.threshold if gate else (0.0,)
        self.log_gamma = decay.log_gamma if decay else None
        self.gate, self.has_budget = gate, budget is not None
        observed = isinstance(self.scorer, ObservedScorer)
        self.instance = self.scorer.instance if observed else self._instance_of(gate, budget)
        shared = isinstance(budget, SharedBudget)
        self.own_parts = (*own, budget) if shared else tuple(own)
        if self.own_parts:
            if observed:
                raise ValueError(
                    f"Policy: {self.own_parts[0]!r} is not allowed with {self.scorer!r}; it takes no other "
                    "parts"
                )
            self.expression = first_use.expression_of(
                own,
                _GATE_TYPES.get(self.instance),
                "LayerBudget" if shared else budget and "TopKBudget<>",
                decay and "Decay<1>",
                (budget.source,) if shared else (),
            )
            self.instance = first_use.mask_source(self.expression)

    @staticmethod
    def _instance_of(gate, budget):
        """The name of the compiled instance (src/instances.hpp)."""
        if isinstance(gate, EvictionGate):
            return "gate_evict"
        if gate is not None:
            return "gate_above" if gate.strict else "gate_at_least"
        return "top_k" if budget is not None else "window"

    def share(self, first, last):
        """The policy of KV heads `first` up to but not including `last`: of one rank that holds these. What
        is one for all heads, or of last - first heads already, stays; so does a scorer without share()."""
        if self.own_parts:
            raise NotImplementedError(
                f"policy: {self.own_parts[0]!r} is not allowed; it has no share of the heads"
            )
        whole_layer = isinstance(self.scorer, ObservedScorer) and self.scorer.numbers()[2]
        if whole_layer:
            raise NotImplementedError(
                f"policy: {self.scorer!r} is not allowed on a share of the heads; with whole_layer it needs "
                "the attention of all"
            )
        return Policy(*(_heads_of(part, first, last) for part in self.parts))

    @property
    def ranked(self):
        """Whether a key's expiry depends on its score."""
        return self.instance != "window"

    def __repr__(self):
        return f"Policy({', '.join(map(repr, self.parts))})"


def StreamingLLM(sinks, window):
    """Sinks and a window (Xiao et al., 2024)."""
    return Policy(Sink(sinks), Window(window))


def KVpop(sinks, window, budget, *parts):
    """Sinks, a window, and the `budget` best of the other keys; `parts` may be a Decay and a scorer."""
    return Policy(Sink(sinks), Window(window), TopKBudget(budget), *parts)


def SPKV(window, *parts, tau=0.5):
    """A window, and all keys whose utility sigmoid(score) is at least tau."""
    return Policy(Window(window), ThresholdGate.probability(tau), *parts)


WGKV = SPKV


def LTE(sinks, window, budget, *parts):
    """Sinks, a window, and the `budget` best of the keys with sigmoid(score) > 0.5."""
    return Policy(Sink(sinks), Window(window), ThresholdGate(strict=True), TopKBudget(budget), *parts)


def DMS(window, *parts):
    """A window, and all keys with sigmoid(score) <= 0.5, the relaxed decision to evict."""
    return Policy(Window(window), EvictionGate(), *parts)


def Quest(pages, page_size=16, **options):
    """Every key stays; a decoded token reads `pages` pages of `page_size` keys (Tang et al., 2024). Options
    are QuestPages's."""
    return Policy(Window(page_size), TopKBudget(UNLIMITED), QuestPages(pages, page_size, **options))
