#!/usr/bin/env python3
"""Where a model needs long-range attention, by trained SP-KV gates (section 4): the density of each head, and
layouts in which some heads attend globally and the others to a window.

    spkv_probe.py --out build/spkv --text build/corpus/corpus.tar.xz

reads what spkv.py wrote in --out, with the same options for the model and the data. Layouts A and B make
whole layers global, one of --every and the last: A from layer 0 on, B from layer --every - 1 on. C draws as
many heads at random; D takes the densest. Coverage is the share of open gates that are in global heads."""

import json

import kvpolicy as kvp
import loop
import torch
from kvpolicy.whole_file import write_whole
from spkv import SPKV


class Probe(SPKV):
    """SP-KV's gates, and policies by layer that take their place."""

    @staticmethod
    def add_options(parser):
        SPKV.add_options(parser)
        parser.add_argument("--every", type=int, default=4, help="layers per global layer of A and B")
        parser.add_argument("--global-heads", type=int, default=0, help="of C and D; 0: as many as A has")

    def __init__(self, model, options):
        super().__init__(model, options)
        self.layout = None

    def policy(self, layer):
        return super().policy(layer) if self.layout is None else self.layout[layer]

    def hybrid(self, heads):
        """Policies of the layers: global attention in `heads`, a mask [L, Hkv], windows in the others."""
        window, sinks = self.options.window, kvp.Sink(self.options.sinks)
        windows = [[kvp.UNLIMITED if wide else window for wide in row] for row in heads.tolist()]
        return [kvp.Policy(sinks, kvp.Window(row)) for row in windows]

    def gated(self, heads):
        """As hybrid, where the global heads have SP-KV's gates."""
        (threshold,) = super().policy(0).thresholds
        rows = [[threshold if wide else float("inf") for wide in row] for row in heads.tolist()]
        parts = kvp.Sink(self.options.sinks), kvp.Window(self.options.window)
        return [kvp.Policy(*parts, kvp.ThresholdGate(row)) for row in rows]

    def nll(self, samples, attend):
        """(NLL, share of visible pairs) of a pass by `attend`."""
        nll, visible = 0.0, 0.0
        for ids, weights in samples:
            self.scores, self.parts = {}, {}
            nll += self.next_token_loss(self.logits(ids, attend), ids, weights).item() / len(samples)
            shares = self.visible_share() if self.parts else torch.ones(1)
            visible += shares.mean().item() / len(samples)
        return nll, visible


def layouts(density, every, count, seed):
    """{name: the global heads, a mask like `density` [L, Hkv]} of figure 4."""
    layers, heads = density.shape
    a, b = (
        torch.tensor([layer % every == first or layer == layers - 1 for layer in range(layers)])
        for first in (0, every - 1)
    )
    a, b = (mask[:, None].expand(layers, heads) for mask in (a, b))
    count = count or int(a.sum())
    if count > layers * heads:
        raise ValueError(
            f"--global-heads: {count} is not allowed; it must be at most {layers * heads}, all KV heads"
        )
    drawn = torch.randperm(layers * heads, generator=torch.Generator().manual_seed(seed))
    densest = density.flatten().argsort(descending=True, stable=True)
    c, d = (
        torch.zeros(layers * heads, dtype=torch.bool).index_fill(0, order[:count], True).view_as(density)
        for order in (drawn, densest)
    )
    return {"A": a, "B": b, "C": c, "D": d}


def probe(method, samples):
    """The record of figure 4: density by head, and a row for every layout."""
    options, rows = method.options, []

    def row(name, attend, heads=None, coverage=None):
        nll, visible = method.nll(samples, attend)
        budget = None if heads is None else int(heads.sum())
        rows.append(
            {"layout": name, "global_heads": budget, "coverage": coverage, "visible": visible, "nll": nll}
        )

    row("full attention", method.dense)
    found = method.measure_tau(options.tau, samples)
    density = torch.tensor(found["density_by_head"], dtype=torch.float64)
    row("SP-KV", method.attend_hard, coverage=1.0)
    chosen = layouts(density, options.every, options.global_heads, options.seed)
    for name, heads in {**chosen, "windows": torch.zeros_like(chosen["A"])}.items():
        coverage = (density * heads).sum().item() / max(density.sum().item(), 1e-30)
        method.layout = method.hybrid(heads)
        row(name, method.attend_hard, heads, coverage)
        if name == "D":
            method.layout = method.gated(heads)
            row("D, gated", method.attend_hard, heads, coverage)
        method.layout = None
    heads = {name: heads.nonzero().tolist() for name, heads in chosen.items()}
    return {"tau": options.tau, "density_by_head": density.tolist(), "heads": heads, "layouts": rows}


def show(record):
    print("density by layer (rows) and KV head (columns)")
    for layer, row in enumerate(record["density_by_head"]):
        print(f"{layer:4d}  " + "  ".join(f"{density:.3f}" for density in row))
    dense = record["layouts"][0]["nll"]
    print(f"{'layout':16s}  global heads  coverage  visible pairs     NLL   to full attention")
    for row in record["layouts"]:
        budget = "-" if row["global_heads"] is None else row["global_heads"]
        coverage = "-" if row["coverage"] is None else f"{row['coverage']:.3f}"
        change = f"{100 * (row['nll'] / dense - 1):+.2f}%"
        print(
            f"{row['layout']:16s}  {budget:>12}  {coverage:>8}  {row['visible']:13.3f}  {row['nll']:6.4f}   "
            f"{change:>17}"
        )


def main(arguments=None):
    """Probes a run of spkv.py; returns the record."""
    options = loop.parser_of(Probe).parse_args(arguments)
    if (options.out / "model").is_dir():
        options.model = str(options.out / "model")
    try:
        if options.model == "scratch":
            raise FileNotFoundError(f"--out: {options.out} is not allowed; it must be that of a finished run")
        run = loop.Trainer(Probe, options, loop.Ranks.begin(options.device))
        run.method.load(options.out)
        run.method.to(run.ranks.device)
        with torch.no_grad(), run.precision():
            record = probe(run.method, list(run.held_out()))
    except (ValueError, OSError) as error:
        raise loop.Refused(str(error)) from error
    show(record)
    write_whole(options.out / "probe.json", json.dumps(record, indent=1) + "\n")
    return record


if __name__ == "__main__":
    main()
