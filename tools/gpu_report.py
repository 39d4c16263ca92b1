#!/usr/bin/env python3
"""The summary of a tools/gpu run: reads what is in the folder, and "stage<TAB>result" lines from standard input; writes
report.json and prints a short table."""
import csv
import json
import os
import sys
import time
import xml.etree.ElementTree

TARGETS = {"16k x 8": (0.2, 0.12), "16k x 1024": (1.3, 0.8), "1M x 8": (1.3, 0.9)}


def load(folder, name):
    try:
        with open(os.path.join(folder, name)) as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def tests(folder):
    """doctest's own counts from its closing lines, and ctest's."""
    try:
        suite = xml.etree.ElementTree.parse(os.path.join(folder, "tests.xml")).getroot()
    except (OSError, xml.etree.ElementTree.ParseError):
        return None
    rows = []
    for case in suite.iter("testcase"):
        text = case.findtext("system-out") or ""
        closing = [line.strip() for line in text.splitlines() if line.startswith("[doctest] ")]
        rows.append({"name": case.get("name"), "result": case.get("status"), "seconds": float(case.get("time") or 0),
                     "closing": closing[-3:]})
    return rows


def profile(folder):
    """Kernel times and counters by benchmark order, from ncu's CSV."""
    try:
        with open(os.path.join(folder, "profile.csv"), newline="") as file:
            lines = [line for line in file if line.startswith('"')]
    except OSError:
        return None
    launches = {}
    for row in csv.DictReader(lines):
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"].split("(")[0].split("<")[0],
                                                 "grid": row.get("Grid Size"), "block": row.get("Block Size")})
        value = row["Metric Value"].replace(",", "")
        try:
            launch[row["Metric Name"] + " [" + row["Metric Unit"] + "]"] = float(value)
        except ValueError:
            launch[row["Metric Name"]] = value
    return list(launches.values())


def main():
    folder = sys.argv[1]
    report = {"date": time.strftime("%Y-%m-%d"), "stages": dict(line.rstrip("\n").split("\t") for line in sys.stdin)}
    bench, baseline = load(folder, "bench.json"), load(folder, "baseline.json")
    report["tests"] = tests(folder)
    for row in report["tests"] or []:
        print(f"{row['result']:>10}  {row['name']}  {row['seconds']:.1f} s  {' '.join(row['closing'][:1])}")
    reference = {row["shape"]: row for row in baseline["rows"]} if baseline else {}
    if bench:
        context = bench["context"]
        report["card"] = context.get("card")
        report["caches"] = context.get("caches")
        report["rows"] = []
        for row in bench["benchmarks"]:
            name = row["name"].split("/iterations")[0]
            entry = {"name": name}
            for key in ("median_ms", "min_ms", "median_ms_without_graph", "workspace_bytes"):
                if key in row:
                    entry[key] = row[key]
            shape = name.split("/")[1] if name.count("/") >= 1 else ""
            if name.startswith("mask/") and shape in TARGETS and name.split("/")[2].startswith("random"):
                entry["target_ms"], entry["stretch_ms"] = TARGETS[shape]
                if shape in reference and "median_ms" in entry:
                    entry["baseline_ms"] = reference[shape]["median_ms"]
                    entry["times_faster"] = reference[shape]["median_ms"] / entry["median_ms"]
            report["rows"].append(entry)
            if "median_ms" in entry:
                print(f"{entry['median_ms']:9.4f} ms  ({entry['median_ms_without_graph']:.4f} without a graph)  {name}" +
                      (f"  target {entry['target_ms']}, stretch {entry['stretch_ms']}" if "target_ms" in entry else "") +
                      (f", {entry['times_faster']:.1f}x the baseline" if "times_faster" in entry else ""))
    report["baseline"] = baseline
    for row in (baseline or {}).get("rows", []):
        print(f"{row['median_ms']:9.3f} ms  baseline {row['shape']}: sort {row['sort_ms']:.3f}, Fenwick {row['fenwick_ms']:.3f}")
    report["profile"] = profile(folder)
    for launch in report["profile"] or []:
        time_key = next((key for key in launch if key.startswith("gpu__time_duration")), None)
        if time_key:
            print(f"    {launch[time_key]:12.2f} {time_key[-6:]}  {launch['kernel']}  {launch['grid']}")
    for stage, result in report["stages"].items():
        print(f"{result:>10}  {stage}")
    with open(os.path.join(folder, "report.json"), "w") as file:
        json.dump(report, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
