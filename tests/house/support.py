#!/usr/bin/env python3
"""Compares docs/support.md, docs/systems.md and README.md with the code.

pages     README.md and docs/systems.md list the same systems, one per page of docs/systems/; each has a
          header, and rows in the table of docs/support.md.
code      One CUDA source, of which nvcc's front end reads one line per cell of the tables "systems" and
          "scorers". A line that is rejected stands for "no". Needs nvcc; exits with 77 where there is none.

    support.py [--root FOLDER] [--nvcc PATH] [pages] [code]
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

PRELUDE = """\
#include <kvpolicy/kvpolicy.hpp>

#include <kvpolicy/cuda.cuh>

namespace kvp = kvpolicy;

enum class trains { none, scores, scorer };

template <class P>
constexpr trains training() {
    if constexpr (!P::ranked || P::observed) {
        return trains::none;
    } else if constexpr (P::scorer_type::when == kvp::score_time::given) {
        return trains::scores;
    } else {
        using S = typename P::scorer_type;
        return kvp::device_scorer<S>::has_gradients || kvp::HiddenScorer<S> ? trains::scorer : trains::none;
    }
}

template <class P>
concept observed_mask_on_cuda =
    requires(const kvp::cuda& ctx, const P& policy, kvp::rows_view<const float> q,
             const kvp::Sequences& sequences, kvp::plane_view<kvp::expiry_t> expiry,
             kvp::workspace_view workspace) {
        kvp::build_observed_mask(ctx, policy, {}, q, q, sequences, expiry, workspace);
    };

"""

# What a cell's line is, by table and column; {0} is the policy or the scorer.
CACHE = "void line_{1}() {{ kvp::cuda_backend::require_device_policy<{0}>(); }}"
LINES = {
    "systems": {
        "CPU": "static_assert(kvp::AnyPolicy<{0}>);",
        "CUDA mask": "static_assert(!{0}::observed || observed_mask_on_cuda<{0}>);",
        "CUDA cache": CACHE,
        "training": "static_assert(training<{0}>() == trains::{2});",
    },
    "scorers": {
        "CPU": "static_assert(kvp::Scorer<{0}>);",
        "CUDA sequence": "static_assert(kvp::device_scorer<{0}>::scores_sequences);",
        "CUDA gradients": "static_assert(kvp::device_scorer<{0}>::has_gradients);",
        "CUDA cache": CACHE.replace("<{0}>", "<kvp::Policy<kvp::Window<60>, kvp::TopKBudget<8>, {0}>>"),
    },
}
NAMES = re.compile(r"\b([A-Za-z]\w*)")
REJECTED = re.compile(r"support\.cu\((\d+)\): error|at line (\d+) of \S*support\.cu")
SKIP = 77


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table(text, name):
    """[{column: cell}] of the table after <!-- support: name -->."""
    lines = text.split(f"<!-- support: {name} -->\n", 1)[1].split("\n")
    header = cells(lines[0])
    rows = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(header, cells(line))))
    return rows


def qualified(type_name):
    """`KVpop<4, MlpScorer<64>>` with kvp:: before each name."""
    return NAMES.sub(r"kvp::\1", type_name.strip("`"))


def cuda_source(text):
    """The source, and {line: (row's name, column, whether the table says that the line compiles)}."""
    source, expected = PRELUDE, {}
    for name, lines in LINES.items():
        for row in table(text, name):
            first = next(iter(row.values()))
            subject = qualified(row.get("policy", first))
            for column, line in lines.items():
                cell = row[column]
                value = "none" if cell == "-" else cell
                number = source.count("\n") + 1
                source += line.format(subject, number, value) + "\n"
                expected[number] = (first, column, cell != "no")
    return source, expected


def code(root, nvcc):
    text = (root / "docs/support.md").read_text(encoding="utf-8")
    source, expected = cuda_source(text)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "support.cu"
        path.write_text(source, encoding="utf-8")
        # The first front end stops at the lines that are rejected, so that no code is made.
        command = [nvcc, "-std=c++20", "-arch=sm_80", "-I", root / "include", "-c", "-o", "/dev/null", path]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                check=False)
    rejected = {int(a or b) for a, b in REJECTED.findall(result.stdout)}
    faults = [f"docs/support.md: {row}, {column}: the code says {'no' if number in rejected else 'yes'}"
              for number, (row, column, compiles) in expected.items() if compiles == (number in rejected)]
    if not rejected <= expected.keys() or (result.returncode != 0) != bool(rejected):
        faults.append(f"the source does not compile:\n{result.stdout}")
    return faults


def systems_of(path):
    """{page: name} of the systems' table of a text."""
    found = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        match = re.match(r"\| \[([^\]]+)\]\((?:docs/)?systems/(\w+)\.md\)", line)
        if match:
            found[match.group(2)] = match.group(1)
    return found


def pages(root, _):
    faults = []
    readme, systems = (systems_of(root / name) for name in ("README.md", "docs/systems.md"))
    if readme != systems:
        difference = set(readme.items()) ^ set(systems.items())
        faults.append(f"README.md and docs/systems.md list different systems: {difference}")
    on_disk = {path.stem for path in (root / "docs/systems").glob("*.md")}
    if set(systems) != on_disk:
        faults.append(f"docs/systems.md and docs/systems/ differ: {set(systems) ^ on_disk}")
    support = (root / "docs/support.md").read_text(encoding="utf-8")
    supported = [row["system"] for row in table(support, "systems")]
    for page, name in systems.items():
        if not (root / f"include/kvpolicy/{page}.hpp").exists():
            faults.append(f"docs/systems/{page}.md has no header {page}.hpp")
        for part in name.split(" and "):
            if not any(row.split(",")[0] == part for row in supported):
                faults.append(f"docs/support.md has no row for {part}")
    return faults


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
    parser.add_argument("--nvcc", default=shutil.which("nvcc"))
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="pages, code")
    arguments = parser.parse_args()
    checks = {"pages": pages, "code": code}
    if unknown := set(arguments.checks) - set(checks):
        parser.error(f"there is no check {', '.join(sorted(unknown))}")
    wanted = arguments.checks or list(checks)
    if "code" in wanted and not arguments.nvcc:
        print("support.code: skipped, nvcc was not found")
        wanted.remove("code")
        if not wanted:
            sys.exit(SKIP)
    failed = False
    for name in wanted:
        faults = checks[name](arguments.root, arguments.nvcc)
        print(f"support.{name}: {len(faults)} findings", *faults, sep="\n  ")
        failed = failed or bool(faults)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
