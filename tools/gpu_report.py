#!/usr/bin/env python3
"""The summary of a tools/gpu run: gpu_report.py RAW REPORT reads what the stages wrote into the folder RAW,
writes the file REPORT (JSON) and prints a short table."""
import csv
import fnmatch
import glob
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree

from whole_file import write_whole


def load(folder, name):
    try:
        with open(os.path.join(folder, name)) as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def lines(folder, name):
    try:
        with open(os.path.join(folder, name)) as file:
            return [line.strip() for line in file if line.strip()]
    except OSError:
        return []


def tests(folder, name):
    """doctest's own counts from its closing lines, and ctest's; of all parts that ran at once."""
    cases = []
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), f"{name}-*.xml"))):
        try:
            cases += xml.etree.ElementTree.parse(path).getroot().iter("testcase")
        except (OSError, xml.etree.ElementTree.ParseError):
            continue
    rows = []
    for case in cases:
        text = case.findtext("system-out") or ""
        closing = [line.strip() for line in text.splitlines() if line.startswith("[doctest] ")]
        rows.append({"name": case.get("name"), "result": case.get("status"),
                     "seconds": float(case.get("time") or 0), "closing": closing[-3:]})
    return rows


def launches_in(folder, name):
    """Rows of ncu's CSV; a row is one metric of one launch."""
    return csv.DictReader(line for line in lines(folder, name) if line.startswith('"'))


def kernels_of_library():
    """The names behind __global__ in the library's headers."""
    include = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "include")
    bounds = r"(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?"
    names = set()
    for path in glob.glob(os.path.join(include, "**", "*.cuh"), recursive=True):
        with open(path) as file:
            names.update(re.findall(r"__global__\s+void\s+" + bounds + r"(\w+)\s*\(", file.read()))
    return names


def profile(folder, operation):
    """Kernel times and counters in the benchmarks' order."""
    launches = {}
    for row in launches_in(folder, f"profile-{operation}.csv"):
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"], "grid": row.get("Grid Size"),
                                                 "block": row.get("Block Size")})
        value = row["Metric Value"].replace(",", "")
        try:
            launch[row["Metric Name"] + " [" + row["Metric Unit"] + "]"] = float(value)
        except ValueError:
            launch[row["Metric Name"]] = value
    return list(launches.values())


def baselines_of(folder, operation):
    """What the runs of the operation's baseline wrote, as one."""
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), f"baseline-{operation}.*.json")))
    found = [one for one in (load(folder, os.path.basename(path)) for path in paths) if one]
    return {**found[0], "rows": [row for one in found for row in one.get("rows", [])]} if found else None


def targets(folder, operation):
    """(pattern, pass, stretch, names of baseline rows) of every row of the suite's table, which may take
    several lines."""
    rows = []
    for line in lines(folder, f"targets-{operation}.txt"):
        if rows and ("|" not in line or rows[-1].count("|") < 3):
            rows[-1] += " " + line
        else:
            rows.append(line)
    for row in rows:
        pattern, passes, stretch, baselines = (part.strip() for part in row.split("|"))
        yield pattern, passes, stretch, [name.strip() for name in baselines.split(",") if name.strip()]


def of_name(target, pattern, name):
    """The target for the benchmark `name`: an asterisk at its end stands for what that of the pattern
    matched."""
    if " of " in target and target.endswith("*") and pattern.endswith("*"):
        return target[:-1] + name[len(pattern) - 1:]
    return target


def limit_ms(target, row, baseline_ms, rates):
    """A target in milliseconds, None where it is unknown. "3.4x" is relative to the first baseline, "3.4x
    fastest" to the fastest, "0.7 of NAME" a share of the rate of the benchmark of that name."""
    if " of " in target:
        share, other = target.split(" of ", 1)
        if other not in rates or not row.get("tflops"):
            return None
        return row["median_ms"] * row["tflops"] / (float(share) * rates[other])
    if target.endswith("x fastest"):
        return min(baseline_ms) / float(target.split("x")[0]) if baseline_ms else None
    if target.endswith("x"):
        return baseline_ms[0] / float(target[:-1]) if baseline_ms else None
    return float(target)


def benchmark_rows(bench, table, baselines):
    """Every benchmark with its target, whether it is met, and the ratios to its baselines."""
    rates = {row["name"].split("/iterations")[0]: row["tflops"]
             for row in bench["benchmarks"] if row.get("tflops")}
    for row in bench["benchmarks"]:
        name = row["name"].split("/iterations")[0]
        entry = {"name": name}
        if row.get("error_occurred"):
            entry["error"] = row.get("error_message")
        # Counters of the benchmark's own are at the top level of Google Benchmark's rows, among these.
        known = {"name", "run_name", "run_type", "repetitions", "repetition_index", "threads", "iterations",
                 "real_time", "cpu_time", "time_unit", "family_index", "per_family_instance_index",
                 "error_occurred", "error_message"}
        entry.update({key: value for key, value in row.items() if key not in known})
        for pattern, passes, stretch, names in table:
            if not fnmatch.fnmatchcase(name, pattern) or "median_ms" not in entry:
                continue
            found = {one: baselines[one] for one in names if one in baselines}
            if found:
                entry["baseline_ms"] = found
                entry["times_faster"] = {one: ms / entry["median_ms"] for one, ms in found.items()}
            passes, stretch = (of_name(target, pattern, name) for target in (passes, stretch))
            entry["pass"], entry["stretch"] = passes, stretch
            if " of " in passes and passes.split(" of ", 1)[1] in rates and entry.get("tflops"):
                entry["share_of_rate"] = entry["tflops"] / rates[passes.split(" of ", 1)[1]]
            for met in ("stretch", "pass"):
                limit = limit_ms(entry[met], entry, list(found.values()), rates)
                if limit is not None and entry["median_ms"] <= limit:
                    entry["met"] = met
                    break
            else:
                entry["met"] = "none"
            break
        yield entry


def print_row(entry):
    time_ms = f"{entry['median_ms']:10.4f} ms" if "median_ms" in entry else f"{'':10}   "
    text = f"{time_ms}  {entry['name']}"
    if "met" in entry:
        text += f"  target {entry['pass']}, stretch {entry['stretch']}: met {entry['met']}"
    if "share_of_rate" in entry:
        text += f", {entry['share_of_rate']:.2f} of the rate"
    for name, times in entry.get("times_faster", {}).items():
        text += f", {times:.2f}x {name}"
    print(text + (f"  {entry['error']}" if "error" in entry else ""))


def operation_report(folder, operation):
    bench, baseline = load(folder, f"bench-{operation}.json"), baselines_of(folder, operation)
    context = {key: value for key, value in (bench or {}).get("context", {}).items()
               if key in ("card", "caches")}
    report = {"context": context, "rows": [], "baseline": baseline, "profile": profile(folder, operation)}
    rows = (baseline or {}).get("rows", [])
    table = list(targets(folder, operation))
    baselines = {row["name"]: row["median_ms"] for row in rows if row.get("median_ms") is not None}
    if not bench:  # a library, which the baseline's program has timed
        bench = {"benchmarks": [row for row in rows if row["name"] in baselines and
                                any(fnmatch.fnmatchcase(row["name"], pattern) for pattern, *_ in table)]}
    report["rows"] = list(benchmark_rows(bench, table, baselines))
    for entry in report["rows"]:
        print_row(entry)
    reported = {entry["name"] for entry in report["rows"]}
    for row in rows:
        if row["name"] in reported:
            continue
        rest = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("name", "median_ms"))
        print(f"{row.get('median_ms') or float('nan'):10.4f} ms  baseline {row['name']}  {rest}")
    for launch in report["profile"]:
        time_key = next((key for key in launch if key.startswith("gpu__time_duration")), None)
        if time_key:
            unit = time_key.split("[")[-1].rstrip("]")
            print(f"    {launch[time_key]:12.2f} {unit}  {launch['kernel']}  {launch['grid']}")
    return report


def provenance():
    """Commit (KVPOLICY_COMMIT where the tree has no git folder) and command, which tools/results prints."""
    commit = os.environ.get("KVPOLICY_COMMIT")
    if not commit:
        try:
            command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
            commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            commit = None
    only = os.environ.get("KVPOLICY_GPU_ONLY")
    command = (f'KVPOLICY_GPU_ONLY="{only}" ' if only else "") + "tools/gpu out/gpu"
    return {**({"commit": commit} if commit else {}), "command": command}


def main():
    folder, target = sys.argv[1:]
    report = {"date": time.strftime("%Y-%m-%d"), **provenance(),
              "card": (lines(folder, "card.txt") or [None])[0],
              "cards": len(lines(folder, "card.txt")),
              "stages": dict(line.split("\t") for line in lines(folder, "stages.txt")),
              "tests": tests(folder, "tests"), "portable_tests": tests(folder, "portable"), "operations": {}}
    for row in report["tests"] + report["portable_tests"]:
        print(f"{row['result']:>10}  {row['name']}  {row['seconds']:.1f} s  {' '.join(row['closing'][:1])}")
    for path in sorted(glob.glob(os.path.join(folder, "targets-*.txt"))):
        operation = os.path.basename(path)[len("targets-"):-len(".txt")]
        report["operations"][operation] = operation_report(folder, operation)
    reached = {row["Kernel Name"] for path in glob.glob(os.path.join(folder, "kernels-*.csv"))
               for row in launches_in(folder, os.path.basename(path))}
    if reached:
        report["kernels_not_sanitized"] = sorted(kernels_of_library() - reached)
        missed = ", ".join(report["kernels_not_sanitized"]) or "no kernel"
        print(f"not reached by the sanitizers' selection: {missed}")
    for stage, result in report["stages"].items():
        print(f"{result:>10}  {stage}")
    write_whole(target, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
