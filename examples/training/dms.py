#!/usr/bin/env python3
"""DMS: a logit per key decides at its insertion whether it is evicted when it leaves the window. Training
relaxes the decision with noise, asks for a rising share of evictions, and distills the dense model.

    dms.py --text build/corpus/corpus.tar.xz --out build/dms --compression 4

The logit is linear in [k; v], and the model is frozen; --all-weights trains it too."""

import copy

import kvpolicy as kvp
import torch
from kvpolicy.training import attend_with
from loop import train
from method import Method


class DMS(Method):
    name = "dms"

    @staticmethod
    def add_options(parser):
        add = parser.add_argument
        parser.set_defaults(rate=3e-3, model_rate=3e-5)
        add("--window", type=int, default=512, help="keys that stay whatever their decision")
        add("--all-weights", action="store_true", help="train the model's weights too")
        add("--compression", type=float, default=4.0, help="the ratio at the end of the schedule")
        add("--steps-per-unit", type=int, default=100, help="steps in which the ratio grows by 1")
        add("--compression-weight", type=float, default=1.0, help="factor of the compression loss")
        add("--count", choices=("alphas", "decisions"), default="alphas", help="what the target counts")
        add("--temperature", type=float, default=0.1, help="of the relaxed decision")
        add("--no-noise", action="store_true", help="leave the logistic noise out")
        add("--start", type=float, default=-5.0, help="the first logit of all keys")
        add("--top", type=int, default=256, help="logits of the teacher that are distilled")
        add("--divergence", choices=("reverse", "forward"), default="reverse", help="KL(student || teacher)")

    @classmethod
    def trains(cls, options):
        return options.all_weights

    def __init__(self, model, options):
        super().__init__(model, options)
        self.teacher = model if not self.trains(options) else copy.deepcopy(model).requires_grad_(False)
        self.scorers = torch.nn.ModuleList(
            kvp.LinearScorer(self.heads, self.head_dim) for _ in range(self.layers)
        )
        for scorer in self.scorers:
            torch.nn.init.constant_(scorer.bias, options.start)

    def own_parameters(self):
        return list(self.scorers.parameters())

    def policy(self, layer):
        return kvp.DMS(self.options.window)

    def score(self, inputs):
        return self.scorers[inputs.layer](inputs.k, inputs.v)

    def gate(self, layer):
        """The gate of one layer in this step; the seed draws the same noise in every pass of the step."""
        seed = (self.options.seed << 40) + (self.rank << 32) + self.step * self.layers + layer
        return kvp.DmsGate(self.options.temperature, not self.options.no_noise, seed)

    def attend(self, inputs):
        scores = self.scores[inputs.layer] = self.score(inputs)
        mask = kvp.build_log_bias(self.policy(inputs.layer), self.gate(inputs.layer), scores)
        return kvp.attend(inputs.q, inputs.k, inputs.v, mask, **inputs.numbers)

    def loss(self, ids, weights):
        with torch.no_grad(), attend_with(self.teacher, self.dense):
            teacher = self.teacher(input_ids=ids, use_cache=False).logits
        student = self.logits(ids, self.attend)
        reverse = self.options.divergence == "reverse"
        top = min(self.options.top, student.shape[-1])
        divergence = kvp.top_distillation(teacher, student, top=top, reverse=reverse)
        options = self.options
        target = kvp.eviction_target(self.step, options.compression, options.steps_per_unit)
        compression, evicted = self.compression(target)
        decided = torch.stack([(z.detach() > 0).float().mean() for z in self.scores.values()]).mean()
        return {
            "loss": divergence + options.compression_weight * compression,
            "kl": divergence,
            "compression": compression,
            "target": torch.tensor(target),
            "alpha": evicted,
            "evicted": decided,
        }

    def compression(self, target):
        """(max(0, target - mean alpha) over all layers, mean alpha)."""
        hard = self.options.count == "decisions"
        layers = [(self.policy(layer), self.gate(layer), z) for layer, z in self.scores.items()]
        sums = [kvp.eviction_sums(*layer, straight_through=hard) for layer in layers]
        total = [torch.stack(part).sum() for part in zip(*sums)]
        # Each layer's value is the whole loss, and its gradient that layer's: one value, all gradients.
        terms = [kvp.compression_loss(*layer, target, total=total, straight_through=hard) for layer in layers]
        return terms[0] + sum(term - term.detach() for term in terms[1:]), total[0] / total[1]

    @torch.no_grad()
    def evaluate(self, ids, weights):
        """Measures under hard decisions; `evicted` is the share of keys with a logit above 0."""
        found = super().evaluate(ids, weights)
        scores = torch.stack([z.float() for z in self.scores.values()])
        return {**found, "cached": self.cached(), "evicted": (scores > 0).float().mean().item()}

    def save(self, path, notes):
        scorers = kvp.Scorers(self.scorers, window=self.options.window, system=self.name)
        scorers.training_notes = {**notes, "compression": f"{self.options.compression:g}"}
        scorers.save(path)


if __name__ == "__main__":
    train(DMS)
