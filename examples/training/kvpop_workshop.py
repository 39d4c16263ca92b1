#!/usr/bin/env python3
"""KVpop's two phases (the workshop paper, 2.2 and E): the dense model learns the text, then becomes sparse.

    kvpop_workshop.py --phase 1 --text build/corpus/corpus.tar.xz --tokens 4096 --out build/uptrained
    kvpop_workshop.py --phase 2 --model build/uptrained/model --text build/corpus/corpus.tar.xz \\
        --tokens 4096 --out build/workshop

Phase 1 trains all weights on the next token under dense attention. Phase 2 trains scorers and all weights by
0.9 next-token loss + 0.1 KL to the model of phase 1 + the boundary loss."""

import torch
from kvpop import KVpop
from loop import train


class Workshop(KVpop):
    name = "kvpop_workshop"

    @staticmethod
    def add_options(parser):
        """KVpop's, with the workshop's defaults: mLSTM scorers read at window exit, the target of equation 1
        (a sum, not a mean), weights by margin alone."""
        KVpop.add_options(parser)
        add = parser.add_argument
        add("--phase", type=int, choices=(1, 2), required=True)
        add("--next-token-weight", type=float, default=0.9)
        add("--kl-weight", type=float, default=0.1)
        parser.set_defaults(train_model=True, scorer="mlstm", total_mass=True, no_balance=True)

    @property
    def dense_phase(self):
        return self.options.phase == 1

    def parameter_groups(self):
        groups = super().parameter_groups()
        return [group for group in groups if group["constant"]] if self.dense_phase else groups

    def graph_key(self):
        return "dense" if self.dense_phase else super().graph_key()

    def loss(self, ids, weights):
        options = self.options
        if self.dense_phase:
            logits = self.logits(ids, self.all_keys)
            return {"loss": self.next_token_loss(logits, ids, weights)}
        teacher = self.largest(self.dense_logits(ids))
        logits, numbers = self.student(ids)
        numbers["nll"] = self.next_token_loss(logits, ids, weights)
        numbers["kl"] = self.divergence(teacher, logits)
        loss = options.next_token_weight * numbers["nll"] + options.kl_weight * numbers["kl"]
        return {"loss": loss + options.score_weight * numbers["boundary"], **numbers}

    def evaluate(self, ids, weights):
        """In phase 1 the dense model alone."""
        if not self.dense_phase:
            return super().evaluate(ids, weights)
        with torch.no_grad():
            return {"nll": self.loss(ids, weights)["loss"].item()}

    def save(self, path, notes):
        """Phase 1 has no scorers to save; its model is in the folder model."""
        if not self.dense_phase:
            super().save(path, notes)


if __name__ == "__main__":
    train(Workshop)
