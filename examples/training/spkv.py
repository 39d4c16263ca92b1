#!/usr/bin/env python3
"""SP-KV: a predictor per layer reads the hidden states, and says which keys outlive their window.

    spkv.py --text build/corpus/corpus.tar.xz --out build/spkv

The first phase trains soft gates, log u of the utility u = sigmoid(r) as a bias of the logits (2.2). The
second freezes the predictor and trains the model under hard gates, u >= tau. docs/training/spkv.md explains
the options."""

import functools
import math

import kvpolicy as kvp
import torch
from kvpolicy.whole_file import whole_path
from loop import train
from method import Method
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

TAUS = (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
KERNEL = 65  # of the bidirectional predictor's convolution (C.4)
FORMAT = "kvpolicy-bidirectional-1"


# ---- predictors --------------------------------------------------------------------------------------------


class LinearPredictor(nn.Module):
    """r_h = a_h . x + b_h of the hidden state x (C.2): weight [heads, width], bias [heads]."""

    def __init__(self, heads, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(heads, width)), nn.Parameter(torch.zeros(heads))

    def forward(self, states):
        """Scores [B, Hkv, S] in the dtype of the parameters, from hidden states [B, S, width]."""
        with torch.autocast(states.device.type, enabled=False):
            return nn.functional.linear(states.to(self.weight.dtype), self.weight, self.bias).mT.contiguous()

    def two_layers(self):
        """A UtilityPredictor of the same scores, since SiLU(y) - SiLU(-y) = y: files and caches read it."""
        heads, width = self.weight.shape
        made = kvp.UtilityPredictor(heads, width, 2 * heads)
        with torch.no_grad():
            made.w1.copy_(torch.cat((self.weight, -self.weight)))
            made.w2.copy_(torch.cat((torch.eye(heads), -torch.eye(heads)), 1))
            made.b2.copy_(self.bias)
        return made


class BidirectionalPredictor(nn.Module):
    """r_t = W2 SiLU(c + sum over j = -32 to 32 of C_j (W1 x_(t + j) + b1)) + b2 (C.4): a score sees 32 hidden
    states ahead, which are there when the key leaves a window of 33 or more."""

    def __init__(self, heads, width, hidden):
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, heads)
        self.mix = nn.Conv1d(hidden, hidden, KERNEL, padding=KERNEL // 2)

    def forward(self, states):
        """Scores [B, Hkv, S] in the dtype of the parameters, from hidden states [B, S, width]."""
        with torch.autocast(states.device.type, enabled=False):
            inner = self.first(states.to(self.first.weight.dtype))
            return self.second(nn.functional.silu(self.mix(inner.mT)).mT).mT.contiguous()


def make_predictor(kind, heads, width, hidden):
    if kind == "linear":
        return LinearPredictor(heads, width)
    return (kvp.UtilityPredictor if kind == "mlp" else BidirectionalPredictor)(heads, width, hidden)


def start(predictor, bias, spread):
    """The initial weights (C.2): scores near `bias`. The last layer's weights are normal, `spread` over the
    root of their number of inputs; with a spread of 0 all scores are `bias`."""
    read_out = {
        LinearPredictor: ("weight", "bias"),
        BidirectionalPredictor: ("second.weight", "second.bias"),
        kvp.UtilityPredictor: ("w2", "b2"),
    }[type(predictor)]
    weight, offset = map(predictor.get_parameter, read_out)
    with torch.no_grad():
        weight.normal_(std=spread * weight.shape[1] ** -0.5)
        offset.fill_(bias)


# ---- the method --------------------------------------------------------------------------------------------


class SPKV(Method):
    name = "spkv"

    @staticmethod
    def add_options(parser):
        add = parser.add_argument
        # The rate of table 8 for 48M weights, 2.06e-3 at 655k tokens per step, times the root of the share of
        # tokens; --rate is by default that times --rate-multiplier.
        parser.set_defaults(rate=None, model_rate=5e-4)
        add("--mode", choices=("joint", "frozen"), default="joint", help="frozen: the predictor alone (C.6)")
        add("--predictor", choices=("mlp", "linear", "bidirectional"), default="mlp")
        add("--hidden", type=int, default=64, help="width of the predictor's hidden layer")
        add("--rate-multiplier", type=float, default=5.0, help="the predictor's rate by the model's")
        add("--predictor-decay", type=float, default=0.1, help="weight decay of the predictor's matrices")
        add("--bias", type=float, default=5.0, help="initial score of every key")
        add("--spread", type=float, default=1.0, help="initial spread of scores around --bias")
        add("--window", type=int, default=128)
        add("--sinks", type=int, default=0, help="first keys that always stay (table 4)")
        add("--tau", type=float, default=0.5, help="a key stays where its utility reaches this")
        add("--gate", choices=("soft", "bernoulli"), default="soft", help="gates of the first phase")
        add("--clip-probability", type=float, default=0.0, help="p of eq. 12, for --gate bernoulli")
        add("--first-phase", type=float, default=None, help="share of the steps before gates are hard")
        add("--anneal", type=int, default=0, help="steps of the second phase until gates are hard (eq. 7)")
        add("--density", type=float, default=0.0, help="lambda of eq. 13: above 0 keeps more keys")

    @classmethod
    def trains(cls, options):
        return options.mode == "joint"

    def __init__(self, model, options):
        super().__init__(model, options)
        if options.rate is None:
            options.rate = options.rate_multiplier * options.model_rate
        if options.first_phase is None:
            hard = options.mode == "joint" and options.gate == "soft"
            options.first_phase = 0.75 if hard else 1.0
        check(options)
        self.scorers = nn.ModuleList(
            make_predictor(options.predictor, self.heads, self.width, options.hidden)
            for _ in range(self.layers)
        )
        for scorer in self.scorers:
            start(scorer, options.bias, options.spread)
        self.tau = options.tau

    def parameter_groups(self):
        first, *rest = super().parameter_groups()
        return [*self.decaying(first["params"], first["lr"], self.options.predictor_decay), *rest]

    # ---- phases --------------------------------------------------------------------------------------------

    def hard_step(self):
        """The number of this step in the second phase; below 0 in the first."""
        return self.step - round(self.options.first_phase * self.steps)

    def gate(self, layer):
        """The training gate of this step; None where the policy's threshold decides."""
        options, hard = self.options, self.hard_step()
        if hard < 0 and options.gate == "soft":
            return kvp.SoftGate()
        if hard < 0:
            return kvp.BernoulliGate(options.clip_probability, self.draw(layer))
        return kvp.AnnealedGate(hard / options.anneal, options.tau) if hard < options.anneal else None

    def graph_key(self):
        """Soft steps are alike, and hard ones. An annealed step has its alpha, a drawn one its seed."""
        gate = self.gate(0)
        return None if isinstance(gate, (kvp.AnnealedGate, kvp.BernoulliGate)) else repr(gate)

    def draw(self, layer):
        """The seed of a layer's draws in this step: of a resumed run the same, of other processes another."""
        numbers = (self.options.seed, self.step, self.rank, layer)
        return functools.reduce(lambda seed, number: (seed * 1000003 + number) % 2**62, numbers)

    def policy(self, layer):
        return kvp.SPKV(self.options.window, kvp.Sink(self.options.sinks), tau=self.tau)

    def score(self, inputs):
        """Scores [B, Hkv, S]. In the second phase the gradient reaches hidden states alone."""
        scorer, states = self.scorers[inputs.layer], inputs.states.to(inputs.q.dtype)
        if self.hard_step() < 0:
            return scorer(states)
        frozen = {name: parameter.detach() for name, parameter in scorer.named_parameters()}
        return torch.func.functional_call(scorer, frozen, (states,))

    def attend(self, inputs):
        gate = self.gate(inputs.layer)
        if gate is None:  # attention skips keys that expire
            return self.attend_hard(inputs)
        scores = self.scores[inputs.layer] = self.score(inputs)
        mask = self.parts[inputs.layer] = kvp.build_log_bias(self.policy(inputs.layer), gate, scores)
        return kvp.attend(inputs.q, inputs.k, inputs.v, mask, **inputs.numbers)

    def loss(self, ids, weights):
        nll = self.next_token_loss(self.logits(ids, self.attend), ids, weights)
        utility = torch.stack([torch.sigmoid(z.detach()).mean() for z in self.scores.values()]).mean()
        losses = {"loss": nll, "nll": nll.detach(), "utility": utility, "density": self.open_share().mean()}
        if self.options.density and self.hard_step() < 0:
            share = self.options.density / len(self.scores)
            terms = [kvp.gate_density(self.policy(0), z, scale=share) for z in self.scores.values()]
            losses["loss"] = nll + sum(terms)
        return losses

    # ---- what a run is worth -------------------------------------------------------------------------------

    def open_share(self):
        """Eq. 8 by layer and head, [L, Hkv]: the share of the last pass's keys with open gates. L counts the
        layers that have gates."""
        (threshold,) = self.policy(0).thresholds
        scores = torch.stack([z.detach().float() for _, z in sorted(self.scores.items())])
        return (scores >= threshold).double().mean((1, 3))

    def visible_share(self):
        """The share of causal pairs that queries saw in the last hard pass, by layer and head, [L, Hkv]."""
        return torch.stack([kvp.density(mask).mean(0) for _, mask in sorted(self.parts.items())])

    def evaluate(self, ids, weights):
        return super().evaluate(ids, weights) | {"density": self.open_share().mean().item()}

    def measure(self, samples):
        """NLL, density (eq. 8) and visible pairs by tau, over all heads and by head: figures 3 and 6."""
        rows = [self.measure_tau(tau, samples) for tau in TAUS]
        for row in rows:
            print("  ".join(f"{name} {row[name]:.4g}" for name in ("tau", "density", "visible", "nll")))
        return {"by_tau": rows}

    def measure_tau(self, tau, samples):
        nll, heads = 0.0, 0.0
        self.tau = tau
        try:
            for ids, weights in samples:
                self.scores, self.parts = {}, {}
                loss = self.next_token_loss(self.logits(ids, self.attend_hard), ids, weights)
                nll += loss.item() / len(samples)
                heads += torch.stack((self.open_share(), self.visible_share())) / len(samples)
        finally:
            self.tau = self.options.tau
        density, visible = heads.mean((1, 2)).tolist()
        by_head = {"density_by_head": heads[0].tolist(), "visible_by_head": heads[1].tolist()}
        return {"tau": tau, "nll": nll, "density": density, "visible": visible, **by_head}

    # ---- files ---------------------------------------------------------------------------------------------

    def scorer_file(self, notes):
        """The trained predictors as a file of scorers. Raises NotImplementedError for bidirectional ones."""
        options = self.options
        if options.predictor == "bidirectional":
            raise NotImplementedError(
                "--predictor: bidirectional is not allowed in a file of scorers; it must be mlp or linear: a "
                f"cache scores a key before the next {KERNEL // 2} hidden states are there"
            )
        layers = [s.two_layers() if options.predictor == "linear" else s for s in self.scorers]
        numbers = {"window": options.window, "sinks": options.sinks, "threshold": options.tau}
        scorers = kvp.Scorers(layers, system=self.name, **numbers)
        scorers.training_notes = notes | {"mode": options.mode, "predictor": options.predictor}
        return scorers

    def save(self, path, notes):
        """Writes the file of scorers; of bidirectional predictors a file that spkv_probe.py alone reads."""
        try:
            self.scorer_file(notes).save(path)
        except NotImplementedError as refusal:
            path = path.with_name("bidirectional.safetensors")
            print(f"{refusal}; {path} is for spkv_probe.py alone")
            tensors = {name: p.detach().cpu().contiguous() for name, p in self.scorers.state_dict().items()}
            with whole_path(path) as part:
                save_file(tensors, part, metadata={"format": FORMAT})

    def load(self, folder):
        """Reads what save wrote in the run's folder."""
        if self.options.predictor != "bidirectional":
            self.scorers = kvp.Scorers.load(folder / f"{self.name}.safetensors").layers
            return
        with safe_open(folder / "bidirectional.safetensors", framework="pt") as file:
            self.scorers.load_state_dict({name: file.get_tensor(name) for name in file.keys()})


def check(options):
    """Refuses numbers that contradict each other, before a step."""
    hard = (1 - options.first_phase) * options.steps
    for name, allowed, holds in (
        ("mode", "joint with --model scratch", options.mode == "joint" or options.model != "scratch"),
        ("first_phase", "above 0 and at most 1", 0 < options.first_phase <= 1),
        ("first_phase", "1 with --mode frozen", options.mode == "joint" or options.first_phase == 1),
        ("anneal", f"0 to {round(hard)}, the steps of the second phase", 0 <= options.anneal <= round(hard)),
        ("window", f"{KERNEL // 2 + 1} or more with --predictor bidirectional", sees_ahead(options)),
        ("window", "1 or more", options.window >= 1),
        ("sinks", "0 or more", options.sinks >= 0),
        ("tau", "a probability in [0, 1]", 0 <= options.tau <= 1),
        ("clip_probability", "0 to 0.5", 0 <= options.clip_probability <= 0.5),
        ("bias", "a finite number", math.isfinite(options.bias)),
        ("spread", "0 or more", options.spread >= 0),
        ("density", "0 or more", options.density >= 0),
    ):
        if not holds:
            value = getattr(options, name)
            raise ValueError(f"--{name.replace('_', '-')}: {value} is not allowed; it must be {allowed}")


def sees_ahead(options):
    return options.predictor != "bidirectional" or options.window > KERNEL // 2


if __name__ == "__main__":
    train(SPKV)
