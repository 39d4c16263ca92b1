#!/usr/bin/env python3
"""KVpop, algorithm 1: scorers learn at the boundary of a budget which keys later queries will read, while
the model reads the sparse attention that the scorers choose.

    kvpop.py --text build/corpus/corpus.tar.xz --pairs 32 --tokens 4096 --out build/kvpop
    kvpop.py --train-model --text build/corpus/corpus.tar.xz --tokens 4096 --out build/kvpop-all

The first trains scorers beside a frozen model, the second the model's weights as well, which a dense copy
teaches. The boundary loss reaches scorers and decay alone: their inputs are detached (3.3)."""

import kvpolicy as kvp
import torch
from distilled import Distilled
from loop import train


class KVpop(Distilled):
    name = "kvpop"

    @staticmethod
    def add_options(parser):
        Distilled.add_options(parser)
        add = parser.add_argument
        add("--train-model", action="store_true", help="train the model's weights as well")
        add("--scorer", choices=("mlp", "mlstm"), default="mlp")
        add("--immediate", action="store_true", help="score the mLSTM at insertion, not at window exit")
        add("--hidden", type=int, default=128, help="of the MLP")
        add(
            "--norm",
            nargs="?",
            const="rms",
            choices=("rms", "layer"),
            help="of the mLSTM's readout; alone: rms",
        )
        add("--skip", action="store_true", help="skip connection of the mLSTM's readout")
        add("--raw-inputs", action="store_true", help="do not standardize what scorers read")
        add("--window", type=int, default=64)
        add("--gamma-range", type=float, nargs=2, default=(0.999, 0.999999), metavar=("MIN", "MAX"))
        add("--decay-rate", type=float, default=2e-2, help="learning rate of the decay's alpha")
        add("--no-decay", action="store_true", help="gamma = 1")
        add("--beta", type=float, default=1.0, help="tempering of the target; 1 is the paper's mean")
        add("--look-ahead", type=int, default=None, help="queries after the window that count; default: all")
        add("--aggregate", choices=("max", "mean"), default="max", help="of a KV head's query heads")
        add("--total-mass", action="store_true", help="do not divide the target by its number of queries")
        add("--dense-normalizer", action="store_true", help="the exact target, not the sparse pass's (D.3)")
        add("--dense-states", action="store_true", help="off-policy: layers read dense attention")
        add("--positions", type=int, default=1024, help="of the boundary loss, per sample and head; 0: all")
        add("--late", type=float, default=0.5, help="share of the positions drawn late (B.6)")
        add("--temperature", type=float, default=1.0, help="tau of the boundary loss")
        add("--omega-min", type=float, default=0.0, help="least weight by margin (B.4); 1: no weights")
        add("--no-balance", action="store_true", help="do not balance keeps and drops (B.5)")
        add("--score-weight", type=float, default=1.0, help="of the boundary loss beside the KL")

    @classmethod
    def trains(cls, options):
        return options.train_model

    def __init__(self, model, options):
        super().__init__(model, options)
        self.scorers = kvp.Scorers(
            [self.make_scorer() for _ in range(self.layers)],
            window=options.window,
            sinks=options.sinks,
            budget=options.budgets[0] - self.least_entries(),
            gamma_range=None if options.no_decay else tuple(options.gamma_range),
        )
        self.log_gammas, self.recalls = [None] * self.layers, []

    def least_entries(self):
        return self.options.sinks + self.options.window

    def make_scorer(self):
        options = self.options
        if options.scorer == "mlp":
            return kvp.MLPScorer(self.heads, self.head_dim, options.hidden)
        delay = 0 if options.immediate else options.window
        return kvp.mLSTMScorer(
            self.heads, self.head_dim, delay=delay, norm=options.norm or False, skip=options.skip
        )

    def parameter_groups(self):
        groups = super().parameter_groups()
        if self.scorers.alpha is not None:
            groups[0]["params"] = list(self.scorers.layers.parameters())
            alpha = {"params": [self.scorers.alpha], "lr": self.options.decay_rate, "weight_decay": 0.0}
            groups.insert(1, {**alpha, "constant": False})
        return groups

    @torch.no_grad()
    def begin(self, ids, weights):
        """Standardizes what scorers read: keys and values differ in size by layer and dimension, and one
        rate has to do for all. Deviations, and for an MLP means, of the first sample's dense states go into
        the weights that read them."""
        rows = {}

        def keep(inputs):
            rows[inputs.layer] = torch.cat((inputs.k, inputs.v), -1).float()
            return self.dense(inputs)

        if self.options.raw_inputs:
            return
        self.hidden_states(ids, keep)
        for layer in sorted(rows):
            scorer = self.scorers.layers[layer]
            mean, deviation = rows[layer].mean((0, 2)), rows[layer].std((0, 2)) + 1e-3  # [Hkv, Dk + Dv]
            for name, parameter in scorer.named_parameters():
                if name in ("w1", "w_q", "w_k", "w_v", "w_i", "w_f", "skip"):  # that read [k; v]
                    parameter /= deviation if parameter.dim() == 2 else deviation[:, None]
            if self.options.scorer == "mlp":
                scorer.b1 -= torch.einsum("hyx,hx->hy", scorer.w1, mean)

    # ---- algorithm 1 ---------------------------------------------------------------------------------------

    @property
    def budget(self):
        """Long-range keys per KV head: k = B - s - w (eq. 1)."""
        return self.entries - self.least_entries()

    def parts_of(self, log_gamma):
        """KVpop's policy of the current budget, with a decay or without."""
        decay = [] if log_gamma is None else [kvp.Decay(log_gamma=log_gamma)]
        return kvp.KVpop(self.options.sinks, self.options.window, self.budget, *decay)

    def policy(self, layer):
        return self.parts_of(self.scorers.log_gamma(layer))

    def score(self, inputs):
        return self.scorers.layers[inputs.layer](inputs.k.detach(), inputs.v.detach())

    def attend(self, inputs):
        layer, options = inputs.layer, self.options
        with torch.enable_grad():
            scores = self.scores[layer] = self.score(inputs)  # line 5
        mask = None if options.dense_states else self.top_k_mask(layer, scores)  # lines 6 and 7
        out, lse = kvp.attend(inputs.q, inputs.k, inputs.v, mask, return_lse=True, **inputs.numbers)
        target = self.target(inputs, None if options.dense_normalizer else lse.detach())  # line 9
        with torch.enable_grad():
            self.parts[layer] = self.boundary_loss(layer, scores, target)  # line 10
        return out

    @torch.no_grad()
    def top_k_mask(self, layer, scores):
        """The mask by static priorities r - t log gamma (eq. 20) in float32 (F). build_mask reads a Decay on
        the CPU, where alpha would cost a synchronization."""
        if self.log_gammas[layer] is not None:
            t = torch.arange(scores.shape[-1], device=scores.device)
            scores = scores - t * self.log_gammas[layer][:, None]
        return kvp.build_mask(self.parts_of(None), scores)

    @torch.no_grad()
    def target(self, inputs, lse):
        """r_tgt [B, Hkv, S]: the logarithm of the attention that keys get after they left the window (eq. 2,
        3), with the normalizer of the sparse pass (eq. 9) or, without one, of dense attention."""
        options = self.options
        return kvp.future_mass(
            inputs.q,
            inputs.k,
            options.window,
            lse=lse,
            look_ahead=options.look_ahead,
            normalize=not options.total_mass,
            aggregate=options.aggregate,
            beta=options.beta,
            **inputs.numbers,
        )

    def boundary_loss(self, layer, scores, target):
        """Equation 7 at sampled positions, with the decay as a function of alpha."""
        options = self.options
        seed = (options.seed << 40) + (self.rank << 32) + self.step * self.layers + layer
        return kvp.boundary_loss(
            self.parts_of(self.log_gammas[layer]),
            scores,
            target,
            temperature=options.temperature,
            omega_min=options.omega_min,
            balance=not options.no_balance,
            count=options.positions or None,
            late=options.late,
            seed=seed,
        )

    def graph_key(self):
        """Positions that are drawn differ by step."""
        return self.entries if self.options.positions == 0 else None

    def student(self, ids):
        """The student's logits on its own sparse states, and the boundary loss with what to print of it."""
        if self.scorers.alpha is not None:
            self.log_gammas = self.scorers.log_gamma(slice(None)).unbind()
        if self.trains(self.options):
            logits = self.logits(ids, self.attend)
        else:  # the KL would reach nothing that is trained
            with torch.no_grad():
                logits = self.hidden_states(ids, self.attend)
        found = [part for _, part in sorted(self.parts.items())]
        numbers = {"boundary": torch.stack([part.loss for part in found]).mean()}  # line 12
        counts = torch.stack([part.counts for part in found]).sum(0).double()
        examples = counts[0].clamp(min=1)
        numbers |= {"kept": counts[2] / examples, "agree": counts[3] / examples}
        if self.scorers.alpha is not None:
            with torch.no_grad():  # values, which keep no autograd graph alive, as detached views would
                self.log_gammas = list(torch.stack(self.log_gammas))
                ages = -1 / torch.stack(self.log_gammas)  # queries in which a score falls by 1
            numbers |= {"age_min": ages.min(), "age_max": ages.max()}
        return logits, numbers

    def loss(self, ids, weights):
        teacher = self.largest(self.dense_logits(ids)) if self.trains(self.options) else None
        logits, numbers = self.student(ids)
        loss = self.options.score_weight * numbers["boundary"]
        if teacher is not None:
            numbers["kl"] = self.divergence(teacher, logits)  # line 13
            loss = loss + numbers["kl"]
        return {"loss": loss, **numbers}

    # ---- what comes out ------------------------------------------------------------------------------------

    def evaluate_policy(self, ids, weights, dense):
        """And how many of the keys that the exact target chooses the scorers keep (figure 7), in the states
        of the sparse pass."""
        self.recalls.clear()
        found = super().evaluate_policy(ids, weights, dense)
        return {**found, "recall": torch.stack(self.recalls).mean().item()}

    def attend_hard(self, inputs):
        out = super().attend_hard(inputs)
        policy, mask = self.policy(inputs.layer), self.parts[inputs.layer]
        teacher = kvp.build_mask(policy, self.target(inputs, None))
        self.recalls.append(kvp.oracle_recall(policy, teacher, mask).mean.mean())
        return out

    def save(self, path, notes):
        self.scorers.training_notes = {**notes, "beta": f"{self.options.beta:g}"}
        self.scorers.save(path)


if __name__ == "__main__":
    train(KVpop)
