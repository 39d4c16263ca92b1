#!/usr/bin/env python3
"""LTE: a convolution per KV head over a key's neighbors decides whether the key stays when it leaves the
window.

    lte.py --text build/corpus/corpus.tar.xz --out build/lte
    lte.py --model scratch --task recall --out build/lte-recall

Each step attends under hard gates (eq. 5), gives scores the straight-through gradient of the values (eq. 6),
and adds a penalty on open gates (eq. 7) whose weight per head a controller moves until the head retains the
cap (algorithm 1). Evaluation enforces the cap (3.1.3)."""

import copy
import random

import kvpolicy as kvp
import torch
from loop import train
from method import Method
from torch import distributed as dist

PAPER_TOKENS, PAPER_WINDOW, PAPER_CAP = 4096, 768, 512
LEAST_CONV_WINDOW = 13


class LTE(Method):
    name = "lte"

    @staticmethod
    def add_options(parser):
        add = parser.add_argument
        add("--joint", action="store_true", help="train the model's weights, too; from scratch always")
        add("--scorer", choices=("conv", "mlp"), default="conv", help="mlp: LTE-MLP, of a key alone")
        add("--hidden", type=int, default=None, help="width of the mlp; default: the head dimension")
        add("--dropout", type=float, default=0.1, help="of the convolutions, in training")
        add("--open", type=float, default=1.0, help="logit of all gates at the start")
        add("--sinks", type=int, default=4)
        add("--window", type=int, default=None, help="default: the paper's share of --tokens, 768 of 4096")
        add("--cap", type=int, default=None, help="of retained keys, sinks included; default: 512 of 4096")
        add("--slack", type=float, default=0.95, help="share of the cap below which a weight falls")
        add("--factor", type=float, default=1.2, help="of a weight in an update; the paper leaves it open")
        add("--every", type=int, default=32, help="steps between updates")
        add("--scope", choices=("all", "decided"), default="all", help="keys of eq. 6, 7 and the count")
        add("--least", type=float, default=1e-9, help="the smallest weight above 0, and the first")
        parser.set_defaults(rate=3e-4, model_rate=3e-4)

    @classmethod
    def trains(cls, options):
        return options.joint or super().trains(options)

    def __init__(self, model, options):
        super().__init__(model, options)
        share = options.tokens / PAPER_TOKENS
        self.window = round(PAPER_WINDOW * share) if options.window is None else options.window
        self.cap = round(PAPER_CAP * share) if options.cap is None else options.cap
        if not options.sinks <= self.cap:
            raise ValueError(
                f"cap: {self.cap} is not allowed; it must be at least the sinks, {options.sinks}"
            )
        if options.scorer == "conv" and self.window < LEAST_CONV_WINDOW:
            raise ValueError(
                f"window: {self.window} is not allowed; it must be {LEAST_CONV_WINDOW} or more: scores "
                "read 6 keys on either side"
            )
        self.scorers = torch.nn.ModuleList(self.make_scorer() for _ in range(self.layers))
        self.controller = kvp.LambdaController(
            self.layers * self.heads,
            float(self.cap),
            slack=options.slack,
            factor=options.factor,
            least=options.least,
            every=options.every,
        )

    def make_scorer(self):
        """A scorer whose gates are open: a readout of 0 with the bias --open."""
        options = self.options
        if options.scorer == "mlp":
            scorer = kvp.MLPScorer(self.heads, self.head_dim, options.hidden or self.head_dim)
            torch.nn.init.constant_(scorer.b2, options.open)
        else:
            scorer = kvp.ConvScorer(self.heads, self.head_dim, rope=self.rope)
            scorer.dropout = options.dropout
            torch.nn.init.constant_(scorer.readout_bias, options.open)
        return scorer

    # ---- attention -----------------------------------------------------------------------------------------

    def policy(self, layer):
        """Under the cap: of evaluation and generation."""
        return kvp.LTE(self.options.sinks, self.window, self.cap - self.options.sinks)

    def gates(self):
        """Without the cap, which training does not enforce (3.1.3)."""
        return kvp.Policy(
            kvp.Sink(self.options.sinks), kvp.Window(self.window), kvp.ThresholdGate(strict=True)
        )

    def score(self, inputs):
        return self.scorers[inputs.layer](inputs.k, inputs.v)

    def attend(self, inputs):
        gates = self.gates()
        scores = self.scores[inputs.layer] = self.score(inputs)
        values = kvp.straight_through(gates, scores, inputs.v, scope=self.options.scope)
        return kvp.attend(inputs.q, inputs.k, values, kvp.build_mask(gates, scores), **inputs.numbers)

    def streaming(self, inputs):
        """StreamingLLM with as many keys per head as the capped policy has."""
        window = self.window + self.cap - self.options.sinks
        mask = kvp.build_mask(kvp.StreamingLLM(self.options.sinks, window), inputs.k[..., 0])
        return kvp.attend(inputs.q, inputs.k, inputs.v, mask, **inputs.numbers)

    # ---- steps ---------------------------------------------------------------------------------------------

    def lambdas(self):
        """The penalty's weights, [layers, Hkv]."""
        return self.controller.weights.view(self.layers, self.heads)

    def counts(self, scope):
        """Keys that each head retained in the last pass, [L, Hkv], sinks included. L counts the layers that
        have gates."""
        found = [kvp.retention_counts(self.gates(), z, scope=scope) for _, z in sorted(self.scores.items())]
        return torch.stack(found)

    def of_all_layers(self, counts):
        """Counts [layers, Hkv], 0 in a layer without gates."""
        rows = dict(zip(sorted(self.scores), counts))
        return torch.stack([rows.get(layer, torch.zeros_like(counts[0])) for layer in range(self.layers)])

    def begin_step(self, step, steps):
        super().begin_step(step, steps)
        for layer, scorer in enumerate(self.scorers):
            numbers = f"{self.options.seed} {step} {self.rank} {layer}"
            scorer.dropout_seed = random.Random(numbers).getrandbits(31)

    def graph_key(self):
        """Dropout has a seed of each step."""
        return None if self.options.scorer == "conv" and self.options.dropout else "hard"

    def loss(self, ids, weights):
        nll = self.next_token_loss(self.logits(ids, self.attend), ids, weights)
        gates, lambdas = self.gates(), self.lambdas()
        penalty = sum(
            kvp.retention_penalty(gates, z, lambdas[layer], scope=self.options.scope)
            for layer, z in self.scores.items()
        )
        retained = self.counts(self.options.scope)
        self.retained = self.of_all_layers(retained).flatten()
        return {
            "loss": nll + penalty,
            "nll": nll,
            "penalty": penalty,
            "retained": retained.mean(),
            "most_retained": retained.max(),
            "lambda": lambdas.mean(),
            "largest_lambda": lambdas.max(),
        }

    def end_step(self):
        """Algorithm 1, lines 6 to 14. Counts are averaged over processes each step, not the average every
        update (line 8): the average is linear, and so all processes have the controller of a checkpoint."""
        if dist.is_initialized():
            dist.all_reduce(self.retained)
            self.retained /= dist.get_world_size()
        self.controller.observe(self.retained)
        if self.controller.due(self.step):
            self.controller.update()

    # ---- evaluation ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, ids, weights):
        """Of one held-out batch: nll and answers() under the capped policy, under StreamingLLM of the same
        size and dense; under the policy the share of pairs that queries see and of keys that caches hold;
        keys retained out of the window, and the share of heads above the cap, before the cap acts."""
        self.scorers.eval()  # without dropout
        found = {}
        for name, attend in (("", self.attend_hard), ("_streaming", self.streaming), ("_dense", self.dense)):
            self.scores, self.parts = {}, {}
            logits = self.logits(ids, attend)
            found[f"nll{name}"] = self.next_token_loss(logits, ids, weights).item()
            answers = self.answers(logits, ids, weights)
            found |= {f"{measure}{name}": share for measure, share in answers.items()}
            if not name:
                shares = [kvp.density(mask).mean() for mask in self.parts.values()]
                found["visible"] = torch.stack(shares).mean().item()
                found["cached"] = self.cached()
                counts = self.counts("decided")
        found["retained"] = counts.mean().item()
        found["heads_above_cap"] = (counts > self.cap).double().mean().item()
        self.scorers.train()
        return found

    @torch.no_grad()
    def measure(self, samples):
        """By layer and head: the share of keys out of the window whose gate is open (B, figure 5), and the
        penalty's weights."""
        self.scorers.eval()
        counts = []
        for ids, _ in samples:
            self.scores, self.parts = {}, {}
            self.logits(ids, self.attend_hard)
            counts.append(self.counts("decided"))
        return {
            "retention": (torch.stack(counts).mean(0) / max(1, ids.shape[1] - self.window)).tolist(),
            "lambda": self.lambdas().tolist(),
        }

    def save(self, path, notes):
        layers = [copy.copy(scorer) for scorer in self.scorers]
        for scorer in layers:
            if self.options.scorer == "conv":
                scorer.delay = self.window  # of the file: a cache scores keys that leave the window
        scorers = kvp.Scorers(
            layers,
            window=self.window,
            sinks=self.options.sinks,
            system="lte",
            budget=self.cap - self.options.sinks,
        )
        scorers.training_notes = notes
        scorers.save(path)


if __name__ == "__main__":
    train(LTE)
