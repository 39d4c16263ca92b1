#!/usr/bin/env python3
"""The order of includes in include/kvpolicy.

    version.hpp < core < cuda < policies < scorers < masks < attention < caches < losses, metrics
    < headers of the root

arrows     A header includes its own folder or lower ones. Headers that include each other do so after their
           last line of code.
bodies     The one way up: a public header includes the body of its own folder (host/, cuda/) after its last
    line
           of code,
           and cuda.cuh and cuda_scorers.cuh include dispatch_* and device_*.
host_cuda  host/ does not include CUDA code, and CUDA code does not include host/.
stems      A file name stands once in a folder of include/kvpolicy and the folders below it.
umbrella   kvpolicy.hpp reaches every public header but those of NOT_IN_UMBRELLA.
levels     The folders, with those joined that include each other, have at most LEVELS levels.
"""

import collections
import posixpath
import re

import house

LEVELS = 8
ORDER = (
    ("base",),
    ("core",),
    ("cuda",),
    ("policies",),
    ("scorers",),
    ("masks",),
    ("attention",),
    ("caches",),
    ("losses", "metrics"),
    ("root",),
)
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
# fmt.hpp needs a library; the others are read by CUDA code only.
NOT_IN_UMBRELLA = ("fmt.hpp", "caches/top_k_slots.hpp", "core/cuda_error.hpp")
BASE = re.compile(r"(core/)?(version|needs_cpp20)(\.hpp)?")
INCLUDE = re.compile(r'[ \t]*#[ \t]*include[ \t]*[<"]kvpolicy/([^>"]+)[>"]')

Include = collections.namedtuple("Include", "source line target at_end")


def top(header):
    if BASE.fullmatch(header):
        return "base"
    return header.split("/")[0] if "/" in header else "root"


def is_host(header):
    return "/host/" in header


def is_cuda(header):
    return header.endswith(".cuh")


def is_body(header):
    """Below X/host or X/cuda; cuda/ itself is no body."""
    return "/" in header and header.split("/")[1] in ("host", "cuda") and "/" in header.split("/", 1)[1]


def headers(tree):
    prefix = "include/kvpolicy/"
    return {
        name[len(prefix) :]: text
        for name, text in tree.items()
        if name.startswith(prefix) and name.endswith((".hpp", ".cuh"))
    }


def includes(texts):
    found = []
    for name, text in texts.items():
        # Comments, namespaces and the assertions that a header ends with are no code.
        text = re.sub(
            r"/\*.*?\*/|//[^\n]*|\bstatic_assert\s*\([^;]*;|\b(inline )?namespace [\w: ]*\{",
            lambda m: re.sub(r"[^\n]", " ", m.group()),
            text,
            flags=re.S,
        )
        lines = text.split("\n")
        code = 0
        continued = False
        for number, line in enumerate(lines, 1):
            directive = continued or line.lstrip().startswith("#")
            continued = directive and line.endswith("\\")
            if line.strip(" \t}") and not directive:
                code = number
        for number, line in enumerate(lines, 1):
            match = INCLUDE.match(line)
            if match:
                found.append(Include(name, number, match.group(1), 0 < code < number))
    return found


def goes_to_body(include):
    """Whether this is the one allowed way up."""
    source, target = include.source, include.target
    if source in ("cuda.cuh", "cuda_scorers.cuh"):
        return is_body(target) and posixpath.basename(target).startswith(("dispatch_", "device_"))
    own = top(source) == top(target) and not is_body(source)
    return own and include.at_end and (is_body(target) or is_cuda(target))


def place(include):
    return f"include/kvpolicy/{include.source}:{include.line}: {include.source} includes {include.target}"


def components(edges):
    """Strongly connected components of {node: [node]}, by Tarjan, without recursion."""
    index, low, on_stack, stack, result = {}, {}, set(), [], []
    for root in edges:
        if root in index:
            continue
        work = [(root, iter(edges[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for target in rest:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(edges.get(target, ()))))
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        component.append(stack.pop())
                        on_stack.discard(component[-1])
                        if component[-1] == node:
                            break
                    result.append(sorted(component))
    return result


def arrows(tree):
    texts = headers(tree)
    findings = []
    edges = {name: [] for name in texts}
    for include in includes(texts):
        source, target = top(include.source), top(include.target)
        if include.target not in texts:
            if (
                include.target == "needs_cpp20"
            ):  # what a compiler of an older standard says that it does not find
                continue
            findings.append(f"{place(include)}, which is not there")
        elif target not in RANK or source not in RANK:
            findings.append(
                f"{place(include)}: {target if target not in RANK else source} is no folder of ORDER"
            )
        elif RANK[target] > RANK[source]:
            findings.append(f"{place(include)}, which is above it")
        elif RANK[target] == RANK[source] and source != target:
            findings.append(f"{place(include)}, which stands beside it")
        elif not include.at_end:
            edges[include.source].append(include.target)
    for component in components(edges):
        if len(component) > 1:
            findings.append(f"include each other in a circle: {', '.join(component)}")
    return findings


def bodies(tree):
    findings = []
    for include in includes(headers(tree)):
        source, target = include.source, include.target
        if is_body(target) and not is_body(source) and not goes_to_body(include):
            if top(source) != top(target):
                findings.append(f"{place(include)}, a body of another folder")
            else:
                findings.append(f"{place(include)}, its body, before the last line of code")
    return findings


def host_cuda(tree):
    findings = []
    for include in includes(headers(tree)):
        if (
            is_host(include.source)
            and is_cuda(include.target)
            or is_cuda(include.source)
            and is_host(include.target)
        ):
            findings.append(place(include))
    return findings


def stems(tree):
    found = collections.defaultdict(list)
    for name in headers(tree):
        found[
            top(name) if top(name) != "base" else "root", posixpath.basename(name).rsplit(".", 1)[0]
        ].append(name)
    return [
        f"{stem} stands {len(names)} times in {folder}: {', '.join(names)}"
        for (folder, stem), names in found.items()
        if len(names) > 1
    ]


def room_levels(tree):
    """(levels, a longest chain of rooms, rooms that include each other)."""

    def room(header):
        return posixpath.dirname(header) if top(header) not in ("base", "root") else top(header)

    texts = headers(tree)
    edges = {room(name): set() for name in texts}
    for include in includes(texts):
        if (
            not goes_to_body(include)
            and include.target in texts
            and room(include.source) != room(include.target)
        ):
            edges[room(include.source)].add(room(include.target))
    joined = components(edges)  # what is included comes first
    number = {name: i for i, names in enumerate(joined) for name in names}
    level, below = {}, {}
    for i, names in enumerate(joined):
        targets = {number[t] for name in names for t in edges[name]} - {i}
        below[i] = max(targets, key=level.get, default=None)
        level[i] = 1 + level.get(below[i], 0)
    i = max(level, key=level.get)
    chain = []
    highest = level[i]
    while i is not None:
        chain.append(" + ".join(joined[i]))
        i = below[i]
    return highest, chain, [names for names in joined if len(names) > 1]


def levels(tree):
    highest, chain, circles = room_levels(tree)
    findings = []
    for names in circles:
        if len({name.split("/")[0] for name in names}) > 1:
            findings.append(f"folders of two operations include each other: {', '.join(names)}")
    if highest > LEVELS:
        findings.append(f"{highest} levels, and {LEVELS} are allowed: {' > '.join(chain)}")
    return findings


def umbrella(tree):
    """A header that no program includes by itself is no public one: arguments' checks, and what only CUDA
    code includes."""
    texts = headers(tree)
    below = collections.defaultdict(list)
    for include in includes(texts):
        if include.target.endswith(".hpp"):
            below[include.source].append(include.target)
    reached, left = set(), ["kvpolicy.hpp"]
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += below[name]
    return [
        f"include/kvpolicy/kvpolicy.hpp does not reach {name}"
        for name in texts
        if name.endswith(".hpp")
        and name not in reached
        and not is_body(name)
        and not posixpath.basename(name).startswith("check_")
        and name not in NOT_IN_UMBRELLA
    ]


CHECKS = {check.__name__: check for check in (arrows, bodies, host_cuda, stems, levels, umbrella)}


def self_test():
    """Each check fails on a bad line put into a small tree that passes, and on nothing else."""

    def tree(**changes):
        texts = {
            "version.hpp": "#pragma once\n#define KVPOLICY_VERSION 1\n",
            "core/types.hpp": "#include <kvpolicy/version.hpp>\nint types();\n",
            "cuda/launch.cuh": "#include <kvpolicy/core/types.hpp>\nint launch();\n",
            "policies/sink.hpp": "#include <kvpolicy/core/types.hpp>\nint sink();\n",
            "attention/attend.hpp": "#include <kvpolicy/policies/sink.hpp>\nint attend();\n"
            "#include <kvpolicy/attention/host/host_attend.hpp>\n#if defined(__CUDACC__)\n"
            "#include <kvpolicy/attention/cuda_attend.cuh>\n#endif\n",
            "attention/cuda_attend.cuh": "#include <kvpolicy/attention/attend.hpp>\nint cuda_attend();\n",
            "attention/host/host_attend.hpp": "#include <kvpolicy/attention/attend.hpp>\nint body();\n",
            "attention/cuda/dispatch_attend.cuh": "#include <kvpolicy/attention/cuda_attend.cuh>\n"
            "#include <kvpolicy/cuda/launch.cuh>\nint dispatch();\n",
            "losses/gates.hpp": "#include <kvpolicy/attention/attend.hpp>\nint gates();\n",
            "metrics/density.hpp": "#include <kvpolicy/core/types.hpp>\nint density();\n",
            "cuda.cuh": "#include <kvpolicy/attention/cuda/dispatch_attend.cuh>\n",
            "kvpolicy.hpp": "#include <kvpolicy/losses/gates.hpp>\n#include <kvpolicy/metrics/density.hpp>\n",
        }
        texts.update({name.replace("__", "/").replace("_dot_", "."): text for name, text in changes.items()})
        return {f"include/kvpolicy/{name}": text for name, text in texts.items()}

    def fails(name, text, *expected):
        changed = tree()
        key = f"include/kvpolicy/{name}"
        changed[key] = text + changed.get(key, "int code();\n")
        failed = {check for check, run in CHECKS.items() if run(changed)}
        house.expect(
            failed == set(expected), f"{text.strip()} in {name}: expected {set(expected)}, was {failed}"
        )

    for check, run in CHECKS.items():
        house.expect(not run(tree()), f"{check} finds {run(tree())} in a good tree")
    fails("core/types.hpp", "#include <kvpolicy/policies/sink.hpp>\n", "arrows", "levels")
    fails("policies/sink.hpp", "#include <kvpolicy/metrics/density.hpp>\n", "arrows")
    fails("losses/gates.hpp", "#include <kvpolicy/metrics/density.hpp>\n", "arrows")
    fails("losses/gates.hpp", "#include <kvpolicy/attention/host/host_attend.hpp>\n", "bodies")
    fails("attention/attend.hpp", "#include <kvpolicy/attention/host/host_attend.hpp>\n", "arrows", "bodies")
    fails("attention/host/host_attend.hpp", "#include <kvpolicy/cuda/launch.cuh>\n", "host_cuda")
    fails(
        "attention/cuda/dispatch_attend.cuh",
        "#include <kvpolicy/attention/host/host_attend.hpp>\n",
        "host_cuda",
    )
    fails("attention/cuda/attend.cuh", "#include <kvpolicy/core/types.hpp>\n", "stems")
    fails("core/types.hpp", "#include <kvpolicy/core/missing.hpp>\n", "arrows")
    fails("losses/distill.hpp", "#include <kvpolicy/core/types.hpp>\n", "umbrella")
    chain = tree()
    for i in range(2, 12):
        chain[f"include/kvpolicy/attention/cuda/f{i}/g{i}.cuh"] = (
            f"#include <kvpolicy/attention/cuda/f{i - 1}/g{i - 1}.cuh>\n" if i > 2 else "int g2();\n"
        )
    house.expect(levels(chain), "a chain of ten folders passes as 8 levels")


if __name__ == "__main__":
    house.main("include_order", CHECKS, self_test)
