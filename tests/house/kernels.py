#!/usr/bin/env python3
"""Every __global__ function of include/ is in an object of the build.

The build compiles each object of the command line for all architectures (tests/house/CMakeLists.txt). A
kernel's device stub in one of them stands for its code for each. Without objects only the self-test runs; one
that is not built skips the check, with 77.

    kernels.py [--root FOLDER] [--nm PATH] [OBJECT...]
"""

import argparse
import pathlib
import re
import subprocess
import sys

import cpp
import house

SKIP = 77
# A word of a declaration, and whether "(" follows.
WORD = re.compile(r"\s*(\w+)\s*(\(?)")


def kernels(text):
    """The names of a source's kernels: the word before the parameters, behind attributes that have
    parentheses, too."""
    code = cpp.blank(text)
    for match in re.finditer(r"\b__global__\b", code):
        at = match.end()
        while True:
            word = WORD.match(code, at)
            house.expect(word, f"a kernel without a name: {text[match.start() : match.end() + 80]}")
            if not word[2]:
                at = word.end()
            elif word[1].startswith("__"):
                at = cpp.closing(code, word.start(2), "()") + 1
            else:
                yield word[1]
                break


def findings(sources, symbols):
    """A line per kernel that no device stub among the symbols is of. Mangled, a name stands behind its
    length."""
    stubs = "\n".join(line for line in symbols.splitlines() if "__device_stub__" in line)
    for path, text in sources.items():
        for name in kernels(text):
            if not re.search(rf"\D{len(name)}{name}[EI]", stubs):
                yield f"{path}: {name} is in no object: instantiate it in tests/gpu/<operation>/instances.cu"


def self_test():
    sources = {
        "a": "__global__ void __launch_bounds__(f(2), 1) one(int); // __global__ void no(int)\n"
        "template <class T>\n__global__ void __maxnreg__(8) two(\n    int);"
    }
    house.expect(list(kernels(sources["a"])) == ["one", "two"], "the names of kernels")
    both = "t __device_stub__ZN8kvpolicy3oneEi\nt __device_stub__ZN8kvpolicy3twoIiEEvi\n"
    house.expect(not list(findings(sources, both)), "kernels that are there")
    house.expect(len(list(findings(sources, both.replace("3two", "4twos")))) == 1, "a kernel that is not")
    only_called = "W _ZN8kvpolicy3oneEi\n"
    house.expect(len(list(findings(sources, only_called))) == 2, "kernels without a stub")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=pathlib.Path, default=house.repository(), help="another checkout")
    parser.add_argument("--nm", default="nm")
    parser.add_argument("objects", nargs="*", type=pathlib.Path, metavar="OBJECT")
    arguments = parser.parse_args()
    self_test()
    if not arguments.objects:
        print("kernels: no objects to look at")
        return 0
    for path in arguments.objects:
        if not path.exists():
            print(f"kernels: {path} is not built")
            return SKIP
    listing = subprocess.run([arguments.nm, *arguments.objects], check=True, capture_output=True, text=True)
    tree = house.files(arguments.root)
    headers = {name: tree[name] for name in tree if re.match(r"include/.*\.(hpp|cuh)$", name)}
    count = sum(len(list(kernels(text))) for text in headers.values())
    house.expect(count > 100, f"only {count} kernels in include/")
    found = list(findings(headers, listing.stdout))
    print(f"kernels: {len(found)} findings in {count} kernels")
    for finding in found:
        print(f"  {finding}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
