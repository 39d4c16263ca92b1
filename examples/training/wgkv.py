#!/usr/bin/env python3
"""WG-KV: a write gate per layer and KV head reads the keys before and after RoPE, and decides at the window's
end which keys stay. The model is frozen.

    wgkv.py --text build/corpus/corpus.tar.xz --out build/wgkv --sparsity-weight 0.02 0.08 0.32

Each weight of the sparsity (lambda, 3.3) is a run of its own, in a folder of its own. A table of all lambdas
and thresholds follows: cache size against distillation loss, as in the paper's figure 11."""

import json
import sys
import time

import kvpolicy as kvp
import torch
from kvpolicy.training import attend_with
from kvpolicy.whole_file import write_whole
from loop import Ranks, parser_of, train
from method import Method


class WGKV(Method):
    name = "wgkv"

    @staticmethod
    def add_options(parser):
        add = parser.add_argument
        parser.set_defaults(warmup=100, weight_decay=0.01)
        add("--window", type=int, default=256, help="W_local, 1 for none")
        add("--sinks", type=int, default=0, help="first keys that stay; the paper has none")
        add("--hidden", type=int, default=64, help="width of a gate's hidden layer")
        add("--epsilon", type=float, default=1e-3, help="of log(gate + epsilon)")
        add("--sparsity-weight", type=float, nargs="+", default=[0.08], help="lambdas, each a run of its own")
        add("--scope", choices=("all", "decided"), default="all", help="the keys that the sparsity counts")
        add("--tau", type=float, default=0.1, help="a key stays where its gate reaches this")
        add(
            "--frontier",
            type=float,
            nargs="*",
            default=[0.01, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7],
            help="thresholds that a finished run is measured at",
        )

    @classmethod
    def trains(cls, options):
        return False

    def __init__(self, model, options):
        super().__init__(model, options)
        self.scorers = torch.nn.ModuleList(
            kvp.WriteGateScorer(self.heads, self.head_dim, options.hidden, rope=self.rope)
            for _ in range(self.layers)
        )
        self.tau, (self.weight,) = options.tau, options.sparsity_weight

    def parameter_groups(self):
        decay = self.options.weight_decay
        return [{"params": self.own_parameters(), "lr": self.options.rate, "weight_decay": decay}]

    def graph_key(self):
        """All steps are alike."""
        return "soft"

    def policy(self, layer):
        return kvp.WGKV(self.options.window, kvp.Sink(self.options.sinks), tau=self.tau)

    def score(self, inputs):
        return self.scorers[inputs.layer](inputs.k, inputs.v)

    def attend(self, inputs):
        """Write-gated attention (3.2): softmax(q k + log m), m = gate + epsilon outside the window."""
        scores = self.scores[inputs.layer] = self.score(inputs)
        gate = kvp.SoftWriteGate(self.options.epsilon)
        mask = kvp.build_log_bias(self.policy(inputs.layer), gate, scores)
        return kvp.attend(inputs.q, inputs.k, inputs.v, mask, **inputs.numbers)

    def loss(self, ids, weights):
        with torch.no_grad():
            teacher = self.hidden_states(ids, self.dense)
        distance = kvp.l2_distillation(teacher, self.hidden_states(ids, self.attend))
        scores = self.scores.values()
        terms = [kvp.gate_sparsity(self.policy(0), z, scope=self.options.scope) for z in scores]
        sparsity = torch.stack(terms).mean()
        gates = torch.stack([torch.sigmoid(z.detach()) for z in scores])
        is_open = (gates >= self.tau).to(gates.dtype).mean()
        return {
            "loss": distance + self.weight * sparsity,
            "l2": distance,
            "sparsity": sparsity,
            "gate": gates.mean(),
            "open": is_open,
        }

    @torch.no_grad()
    def evaluate(self, ids, weights):
        """Measures under hard gates, as at_threshold()'s, and the dense nll."""
        truth, logits = self._states_and_logits(ids, self.dense)
        dense = self.next_token_loss(logits, ids, weights)
        return {"nll_dense": dense.item(), **self.at_threshold(self.options.tau, truth, ids, weights)}

    def at_threshold(self, tau, truth, ids, weights):
        """Measures under the gates of one threshold: nll, answers(), the distance of hidden states from
        `truth`, the share of keys that caches hold at the end, and that of the causal pairs that queries
        see."""
        self.tau, self.scores, self.parts = tau, {}, {}
        states, logits = self._states_and_logits(ids, self.attend_hard)
        self.tau = self.options.tau
        pairs = torch.stack([kvp.density(mask).mean() for mask in self.parts.values()])
        return {
            "nll": self.next_token_loss(logits, ids, weights).item(),
            "l2": kvp.l2_distillation(truth, states).item(),
            "cached": self.cached(),
            "visible": pairs.mean().item(),
            **self.answers(logits, ids, weights),
        }

    def measure(self, samples):
        """The frontier of this lambda: the means of at_threshold() by threshold."""
        rows = {tau: {} for tau in self.options.frontier}
        for ids, weights in samples:
            truth, _ = self._states_and_logits(ids, self.dense)
            for tau, row in rows.items():
                for name, value in self.at_threshold(tau, truth, ids, weights).items():
                    row[name] = row.get(name, 0.0) + value / len(samples)
        return {"frontier": [{"lambda": self.weight, "tau": tau, **row} for tau, row in rows.items()]}

    def _states_and_logits(self, ids, attend):
        """Hidden states before the output layer, and logits."""
        with attend_with(self.model, self.between_windows(attend)):
            out = self.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        return out.hidden_states[-1], out.logits

    def save(self, path, notes):
        options = self.options
        numbers = {"window": options.window, "sinks": options.sinks, "threshold": options.tau}
        scorers = kvp.Scorers(self.scorers, system=self.name, **numbers)
        scorers.training_notes = {**notes, "sparsity_weight": f"{self.weight:g}"}
        scorers.save(path)


def train_grid(arguments=None):
    """A run per lambda, in --out/lambda-VALUE; prints the frontier of those that ended, and writes it to
    frontier.json. --seconds are those of all runs together."""
    options = parser_of(WGKV).parse_args(arguments)
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    ranks, rows = Ranks.begin(options.device), []
    try:
        for record in _records(options, arguments, ranks):
            rows += record["measures"]["frontier"]
    finally:
        ranks.end()
    if ranks.rank:
        return rows
    write_whole(options.out / "frontier.json", json.dumps(rows, indent=1) + "\n")
    for number, row in enumerate(rows):
        if number == 0:
            print("".join(f"{name:>10}" for name in row))
        print("".join(f"{value:>10.4g}" for value in row.values()))
    return rows


def _records(options, arguments, ranks):
    """Runs each lambda, and yields its metrics on rank 0; stops where time does."""
    began = time.monotonic()
    for weight in options.sparsity_weight:
        out = options.out / f"lambda-{weight:g}"
        run = [*arguments, "--sparsity-weight", f"{weight:g}", "--out", str(out)]
        if options.seconds:
            run += ["--seconds", str(max(1e-9, options.seconds - (time.monotonic() - began)))]
        if options.resume and not (out / "checkpoint.pt").is_file():
            run.remove("--resume")
        trainer = train(WGKV, run)
        if trainer.step < options.steps:
            return
        if not ranks.rank:
            yield json.loads((out / "metrics.json").read_text())


if __name__ == "__main__":
    train_grid()
