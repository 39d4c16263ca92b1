#!/usr/bin/env python3
"""SP-KV: a utility predictor per layer reads the hidden states, and gates the keys outside a window.

    spkv.py --text build/corpus/corpus.tar.xz --out build/spkv

The first three quarters of the steps train soft gates; then the predictor is frozen and gates are hard
(2.2)."""

import kvpolicy as kvp
import torch
from loop import train
from method import Method


class SPKV(Method):
    name = "spkv"

    @staticmethod
    def add_options(parser):
        parser.add_argument("--window", type=int, default=128)
        parser.add_argument("--hidden", type=int, default=64, help="width of the predictor's hidden layer")
        parser.add_argument(
            "--tau", type=float, default=0.5, help="a key stays where its utility reaches this"
        )

    def __init__(self, model, options):
        super().__init__(model, options)
        make = kvp.UtilityPredictor
        self.scorers = torch.nn.ModuleList(
            make(self.heads, self.width, options.hidden) for _ in range(self.layers)
        )

    def policy(self, layer):
        return kvp.SPKV(self.options.window, tau=self.options.tau)

    def score(self, inputs):
        return self.scorers[inputs.layer](inputs.states)

    def attend(self, inputs):
        scores = self.scores[inputs.layer] = self.score(inputs)
        mask = kvp.build_log_bias(self.policy(inputs.layer), kvp.SoftGate(), scores)
        return kvp.attend(inputs.q, inputs.k, inputs.v, mask, **inputs.numbers)

    def loss(self, ids, weights):
        nll = self.next_token_loss(self.logits(ids, self.attend), ids, weights)
        utility = torch.stack([torch.sigmoid(z.detach()).mean() for z in self.scores.values()]).mean()
        return {"loss": nll, "utility": utility}

    def graph_key(self):
        return "soft"

    def save(self, path, notes):
        scorers = kvp.Scorers(self.scorers, window=self.options.window, gamma_range=None)
        scorers.training_notes = notes
        scorers.save(path)


if __name__ == "__main__":
    train(SPKV)
