#!/usr/bin/env python3
"""Sources that prove with few compiles that every header is self-contained.

    chains.py FOLDER HEADER...   writes FOLDER/<number>.cpp, and prints a line "<file> <last header>" for each

HEADER is relative to include/kvpolicy. A header is self-contained if it compiles behind its own includes
alone. So one source may hold a chain of headers, each of which includes the one before it: what stands before
a header there is what the header itself brings. The chains are as few as possible (Dilworth's theorem). Each
header stands twice in its chain, which shows that its guard holds.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "house"))

import house  # noqa: E402
import include_order  # noqa: E402


def reached(start, targets):
    """The headers that a compiler reads for the headers of start."""
    seen, todo = set(start), list(start)
    while todo:
        for target in targets[todo.pop()]:
            if target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


def chains(names, includes):
    """A partition of names into chains, for [Include]."""
    everything = set(names).union(*({include.source, include.target} for include in includes))
    targets = {name: [] for name in everything}
    above = {name: [] for name in everything}  # what stands before the header's own text
    for include in includes:
        targets[include.source].append(include.target)
        if not include.at_end:
            above[include.source].append(include.target)
    whole = {name: reached([name], targets) for name in names}
    before = {name: reached(above[name], targets) for name in names}
    # Not a header that the other one brings, too (bodies do so, after the last line of code): it would stand
    # behind less than its own includes.
    after = {name: [other for other in names if name in before[other] and other not in whole[name]]
             for name in names}
    next_, previous = {}, {}

    def joined(name, seen):
        for other in after[name]:
            if other not in seen:
                seen.add(other)
                if other not in previous or joined(previous[other], seen):
                    next_[name], previous[other] = other, name
                    return True
        return False

    for name in names:
        joined(name, set())
    result = []
    for name in names:
        if name not in previous:
            chain = [name]
            while chain[-1] in next_:
                chain.append(next_[chain[-1]])
            result.append(chain)
    return result


def self_test():
    def include(source, target, at_end=False):
        return include_order.Include(source, 1, target, at_end)

    # b and c include a; a's body includes d, which includes a: d behind a would miss what follows the body.
    found = chains("abcd", [include("b", "a"), include("c", "a"), include("a", "d", True), include("d", "a")])
    assert sorted(sum(found, [])) == list("abcd") and len(found) == 2, found
    assert not any("a" in chain and "d" in chain for chain in found), found
    assert chains("abc", [include("c", "b"), include("b", "a")]) == [["a", "b", "c"]]


def main(folder, names):
    self_test()
    texts = include_order.headers(house.files(house.repository()))
    # Under nvcc alone CUDA code is read.
    includes = [include for include in include_order.includes(texts)
                if include.target in texts and not include.target.endswith(".cuh")]
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for number, chain in enumerate(chains(names, includes)):
        text = "".join(2 * f"#include <kvpolicy/{name}>\n" for name in chain)
        path = folder / f"{number}.cpp"
        path.write_text(text, encoding="utf-8")
        print(path, chain[-1])


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
