"""The policies that an evaluation compares, by name, and what they are made for."""

import dataclasses
import math
import pathlib
from typing import Callable, Optional

import torch
from torch import nn

from kvpolicy.attention import causal_lse, future_mass
from kvpolicy.files import SYSTEMS, Scorers
from kvpolicy.fits import check_fits
from kvpolicy.masks import build_mask
from kvpolicy.metrics import oracle_recall
from kvpolicy.observed import H2O, TOVA, SnapKV
from kvpolicy.policy import Decay, KVpop, Policy, StreamingLLM, Window


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a policy is made for: `budget` entries per head (0: no bound), of which `sinks` and `window`;
    `length` tokens and `decoded` after them; `oracle`, per layer the scores [Hkv, length] of a policy with a
    beta."""

    budget: int
    sinks: int
    window: int
    length: int
    decoded: int
    oracle: Optional[list] = None

    @property
    def long_range(self):
        return self.budget - self.sinks - self.window


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """A policy of a table. make(setting) gives what KVPolicyCache takes: a Policy, or a function of the
    layer. `prompted`: three quarters of a sequence are a prompt in one call, and the rest are decoded;
    otherwise all comes in chunks. `scorers`: of a file."""

    name: str
    label: str
    make: Callable
    bounded: bool = True
    prompted: bool = False
    beta: float = 0.0
    scorers: Optional[Scorers] = None

    @property
    def recalled(self):
        """Whether trained scorers rank keys, as an oracle does, by what a dense pass shows."""
        return self.scorers is not None and self.scorers.system == "kvpop" and not self.scorers.reads_hidden


class KeyNorm(nn.Module):
    """r = -|k|: keys of small norm tend to draw attention (Devoto et al., 2024)."""

    def forward(self, k, v):
        return -k.float().square().sum(-1).sqrt()


class GivenScores(nn.Module):
    """Scores [Hkv, length] of the tokens of one sequence, in their order; 0 after its end."""

    def __init__(self, scores):
        super().__init__()
        self.scores, self.at = scores, 0

    def forward(self, k, v):
        begin, self.at = self.at, self.at + k.shape[2]
        part = self.scores[:, begin : self.at].to(k.device)
        return nn.functional.pad(part, (0, k.shape[2] - part.shape[1]))[None]


def _dense(setting):
    return Policy(Window(setting.length + setting.decoded))


def _streaming(setting):
    return StreamingLLM(setting.sinks, setting.budget - setting.sinks)


def _key_norm(setting):
    return KVpop(setting.sinks, setting.window, setting.long_range, KeyNorm())


def _h2o(setting):
    """A budget of B entries is B - 1 keys and the new token."""
    recent = (setting.budget - 1) // 2
    return H2O(setting.budget - 1 - recent, recent, prefill=1)


def _oracle(setting):
    scorers = [GivenScores(scores) for scores in setting.oracle]
    return lambda layer: KVpop(setting.sinks, setting.window, setting.long_range, scorers[layer])


_OBSERVED = 32  # SnapKV's window

_BY_NAME = (
    Evaluated("dense", "dense", _dense, bounded=False),
    Evaluated("streaming", "StreamingLLM", _streaming),
    Evaluated("keynorm", "small key norms", _key_norm),
    Evaluated("h2o", "H2O", _h2o),
    Evaluated("tova", "TOVA", lambda setting: TOVA(setting.budget - 1, prefill=1)),
    Evaluated(
        "snapkv",
        "SnapKV, chunks of 64",
        lambda setting: SnapKV(setting.budget - _OBSERVED, _OBSERVED, prefill=64),
    ),
    Evaluated(
        "snapkv-prompt",
        "SnapKV, prompt then decode",
        lambda setting: SnapKV(setting.budget - _OBSERVED, _OBSERVED),
        prompted=True,
    ),
    *(
        Evaluated(f"oracle-{beta:g}", f"oracle, beta {beta:g}", _oracle, beta=beta)
        for beta in (1.0, 2.0, 4.0, math.inf)
    ),
)


def trained(path, window, model):
    """The system of a file, named by the file: KVpop with the scorers, sinks, window and budgets of the
    evaluation, all others with the numbers of the file."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"scorers: {path} is not allowed; it must be a file of Scorers.save")
    scorers = Scorers.load(path).requires_grad_(False).to(model.device)
    check_fits(scorers, model.config, path)
    if scorers.system != "kvpop":
        label = SYSTEMS[scorers.system]
        if scorers.system in ("spkv", "wgkv"):
            label += f", tau {scorers.threshold:g}"
        if scorers.budget is not None:
            label += f", cap {scorers.budget}"
        return Evaluated(path.stem, label, lambda setting: scorers.policy, bounded=False, scorers=scorers)
    delay = getattr(scorers.layers[0], "delay", None)
    if delay is not None and delay != window:
        raise ValueError(
            f"window: {window} is not allowed; the scorers of {path} read keys after {delay} tokens"
        )
    notes = scorers.training_notes
    label = "KVpop-mlp" if scorers.layers[0].kind == "mlp" else "KVpop"
    label += f", beta {notes['beta']}" if "beta" in notes else ""
    if scorers.gamma_range and scorers.gamma_range[0] == scorers.gamma_range[1]:
        label += f", gamma {scorers.gamma_range[0]:g}"

    def make(setting):
        def policy(layer):
            log_gamma = scorers.log_gamma(layer)
            decay = () if log_gamma is None else (Decay(log_gamma=log_gamma),)
            return KVpop(setting.sinks, setting.window, setting.long_range, *decay, scorers.layers[layer])

        return policy

    return Evaluated(path.stem, label, make, scorers=scorers)


def _given(name, value):
    """A policy of the caller's: a Policy with its own numbers, or a function of the setting."""
    if isinstance(value, Evaluated):
        return dataclasses.replace(value, name=name)
    if isinstance(value, Policy):
        return Evaluated(name, name, lambda setting: value, bounded=False)
    if callable(value):
        return Evaluated(name, name, value)
    raise TypeError(
        f"policies[{name!r}]: {value!r} is not allowed; it must be a kvpolicy.Policy, a function of the "
        "setting, or a name"
    )


def chosen(policies, scorers, window, model):
    """The Evaluated of `policies`: None for all, names (oracle-* stands for all that begin so), or a dict
    from names to names, Policy objects and functions of the Setting. "full" is dense."""
    known = [*_BY_NAME, *(trained(path, window, model) for path in scorers)]
    names = [one.name for one in known]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"scorers: two policies named {min(twice)} are not allowed; rename a file")

    def by_name(pattern):
        pattern = "dense" if pattern == "full" else pattern
        found = [
            one
            for one in known
            if one.name == pattern or (pattern.endswith("*") and one.name.startswith(pattern[:-1]))
        ]
        if not found:
            raise ValueError(f"policies: {pattern} is not allowed; it must be one of {', '.join(names)}")
        return found

    if policies is None:
        return known
    if isinstance(policies, dict):
        return [
            dataclasses.replace(by_name(value)[0], name=name)
            if isinstance(value, str)
            else _given(name, value)
            for name, value in policies.items()
        ]
    found = []
    for name in [policies] if isinstance(policies, str) else policies:
        if not isinstance(name, str):
            raise TypeError(f"policies: {name!r} is not allowed; it must be a name, or in a dict")
        found += [one for one in by_name(name) if one not in found]
    return found


class Observer:
    """A dense pass over one sequence, layer by layer. scores: {beta: by layer [Hkv, length]}, the oracle: the
    attention that keys will receive after they have left the window. trained: {name: by layer}, the scores of
    trained scorers for keys and values as the cache stores them."""

    def __init__(self, window, betas, evaluated, storage):
        self.window, self.storage = window, storage
        self.scorers = {one.name: one.scorers for one in evaluated if one.recalled}
        self.scores = {beta: [] for beta in betas}
        self.trained = {name: [] for name in self.scorers}

    @torch.no_grad()
    def layer(self, q, k, v, scaling, soft_cap, sinks=None):
        """Learned sinks [Hq] take part of each query's attention: exp(sink) joins its normalizer."""
        numbers = {"sm_scale": scaling, "logits_soft_cap": soft_cap or 0.0}
        lse = causal_lse(q, k, **numbers)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.float()[None, :, None])
        for beta, scores in self.scores.items():
            scores.append(future_mass(q, k, self.window, lse=lse, beta=beta, **numbers)[0])
        k, v = k.to(self.storage), v.to(self.storage)
        for name, scores in self.trained.items():
            scores.append(self.scorers[name].layers[len(scores)](k, v)[0])


def recall_of(policy, setting, observed):
    """Of the oracle's long-range keys the share that a trained scorer keeps, by beta, layer and head (KVpop,
    4.3), averaged over sequences; `chance` is that of random keys."""
    sums = {}
    student = [policy.make(setting)(layer) for layer in range(len(policy.scorers.layers))]
    teacher = KVpop(setting.sinks, setting.window, setting.long_range)
    for one in observed:
        for beta, targets in one.scores.items():
            sums.setdefault(beta, [])
            found = [
                oracle_recall(
                    teacher,
                    build_mask(teacher, target[None]),
                    build_mask(student[layer], one.trained[policy.name][layer][None]),
                )
                for layer, target in enumerate(targets)
            ]
            sums[beta].append([torch.cat([x.mean for x in found]), torch.cat([x.chance_mean for x in found])])
    means = {beta: [torch.stack(one).mean(0).flatten() for one in zip(*rows)] for beta, rows in sums.items()}
    return {
        f"{beta:g}": {
            name: [round(x, 3) for x in one.tolist()] for name, one in zip(("mean", "chance"), means[beta])
        }
        for beta in sums
    }
