#!/usr/bin/env python3
"""Draws the plots of docs/performance.md from a committed report of tools/gpu:

    benchmarks/plot_attention.py benchmarks/results/library_h200_DATE.json docs/images

writes attention-time.png (milliseconds against sequence length, beside FlexAttention and cuDNN),
attention-density.png (rate against the share of visible pairs) and attention-roofline.png. Needs matplotlib
(pip install matplotlib, or Debian's python3-matplotlib). What the report has no numbers for is left out.
"""
import argparse
import json
import os
import sys

LENGTHS = {"16k": 1 << 14, "32k": 1 << 15, "64k": 1 << 16, "128k": 1 << 17}
PEAK_TFLOPS, PEAK_TBYTES = 989.0, {"H100": 3.35, "H200": 4.8}  # SXM: dense bf16; memory
OURS, FLEX, DENSE, LIMIT = "#0b6e4f", "#c1440e", "#3a5ba0", "#888888"


def load(path):
    try:
        with open(path) as file:
            report = json.load(file)
        operation = report["operations"]["attention"]
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"plot_attention: {path} is no report of tools/gpu with attention in it ({error})")
    ours = {row["name"]: row for row in operation["rows"] if row.get("median_ms")}
    baselines = {row["name"]: row
                 for row in (operation.get("baseline") or {}).get("rows", []) if row.get("median_ms")}
    return report, ours, baselines


def series(rows, template, value="median_ms"):
    """(lengths, values) of the rows that a name template with {} for the length finds."""
    found = [(length, rows[template.format(name)][value]) for name, length in LENGTHS.items()
             if template.format(name) in rows]
    return [x for x, _ in found], [y for _, y in found]


def draw_line(axes, points, label, color, style="o-"):
    if points[0]:
        axes.plot(*points, style, label=label, color=color)


def time_plot(plt, ours, baselines, caption, path):
    panels = [("forward", "forward/{}", ["forward"]),
              ("forward + backward", "forward + backward/{}", ["forward + backward"]),
              ("future mass", "future mass/{}", ["future mass"])]
    panels = [panel for panel in panels if series(ours, panel[1])[0]]
    if not panels:
        return
    figure, all_axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4.2), squeeze=False)
    for axes, (title, template, words) in zip(all_axes[0], panels):
        draw_line(axes, series(ours, template), "kvpolicy", OURS)
        for word in words:
            draw_line(axes, series(baselines, f"FlexAttention {word} {{}}"), "FlexAttention", FLEX, "s-")
            draw_line(axes, series(baselines, f"cuDNN dense {word} {{}}"), "cuDNN, dense", DENSE, "^-")
        if title == "forward":
            draw_line(axes, series(baselines, "FlexAttention block mask {}"), "FlexAttention's block mask",
                      FLEX, "s:")
        axes.set(title=title, xlabel="tokens", ylabel="ms", xscale="log", yscale="log")
        shown = [(name, length) for name, length in LENGTHS.items() if length in axes.lines[0].get_xdata()]
        axes.set_xticks([length for _, length in shown], [name for name, _ in shown])
        low, high = axes.get_ylim()
        marks = [m * 10**e for e in range(-1, 4) for m in (1, 2, 5) if low <= m * 10**e <= high]
        axes.set_yticks(marks, [f"{mark:g}" for mark in marks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    finish(figure, caption, path)


def density_plot(plt, ours, baselines, caption, path):
    causal = LENGTHS["32k"] * (LENGTHS["32k"] + 1) / 2 * 32
    points = sorted((row["live_pairs"] / causal, row["tflops"]) for name, row in ours.items()
                    if name.startswith("forward/32k, gates"))
    if not points:
        return
    figure, axes = plt.subplots(figsize=(6, 4.2))
    axes.plot([100 * x for x, _ in points], [y for _, y in points], "o-", color=OURS,
              label="kvpolicy, gates open at random")
    if "forward/32k" in ours:
        row = ours["forward/32k"]
        axes.plot([100 * row["live_pairs"] / causal], [row["tflops"]], "D", color=OURS,
                  label="kvpolicy, budget 4096")
    for name, color in (("FlexAttention", FLEX), ("cuDNN dense", DENSE)):
        row = baselines.get(f"{name} forward 32k")
        if row:  # it computes all causal pairs, whatever is alive
            dense = 4 * 128 * causal / row["median_ms"] * 1e-9
            axes.plot([100 * x for x, _ in points], [dense * x for x, _ in points], "--", color=color,
                      label=f"{name}: visible pairs over its time")
    axes.set(xlabel="visible pairs, % of causal", ylabel="TF/s over visible pairs",
             title="forward, 32k tokens", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    finish(figure, caption, path)


def roofline_plot(plt, ours, gpu, caption, path):
    rows = [row for row in ours.values() if row.get("tensor_bytes") and row.get("flops")]
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(6.5, 4.4))
    name, tbytes = next(((name, tbytes) for name, tbytes in PEAK_TBYTES.items() if name in gpu),
                        (None, None))
    if name:
        axes.plot([10, PEAK_TFLOPS / tbytes, 1e6], [10 * tbytes, PEAK_TFLOPS, PEAK_TFLOPS], color=LIMIT,
                  label=f"{name}: {PEAK_TFLOPS:g} TF/s, {tbytes:g} TB/s")
    for word, marker in (("forward + backward", "s"), ("forward", "o"), ("soft gates", "P"),
                         ("future mass", "^"), ("causal lse", "v")):
        of = [row for row in rows if row["name"].split("/")[0] == word]
        if of:
            axes.plot([row["flops"] / row["tensor_bytes"] for row in of], [row["tflops"] for row in of],
                      marker, ls="", label=word)
    axes.set(xlabel="FLOP per byte of the call's tensors", ylabel="TF/s over visible pairs",
             xscale="log", yscale="log", ylim=(10, 1500))
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    finish(figure, caption, path)


def finish(figure, caption, path):
    figure.text(0.5, 0.005, caption, ha="center", fontsize=8, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=130)
    print(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report")
    parser.add_argument("folder")
    arguments = parser.parse_args()
    report, ours, baselines = load(arguments.report)
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot_attention: needs matplotlib: pip install matplotlib, "
                 "or apt install python3-matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    gpu = (report.get("card") or "an unknown GPU").split(",")[0]
    caption = f"{gpu}, bf16, 32 query and 8 KV heads, head_dim 128, cold caches"
    os.makedirs(arguments.folder, exist_ok=True)
    time_plot(plt, ours, baselines, caption, os.path.join(arguments.folder, "attention-time.png"))
    density_plot(plt, ours, baselines, caption, os.path.join(arguments.folder, "attention-density.png"))
    roofline_plot(plt, ours, gpu, caption, os.path.join(arguments.folder, "attention-roofline.png"))


if __name__ == "__main__":
    main()
