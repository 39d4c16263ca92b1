#!/usr/bin/env python3
"""The sizes of things.

columns    No line of a source is wider than COLUMNS. A line with an address may be, and the line of a
           compile_fail test that holds the expected sentence.
prose      Nor is a line of a text, outside tables, code and addresses.
pages      README.md has at most README_LINES lines, a page of docs/ at most PAGE_LINES.
diary      README.md and docs/ have no date and no commit.
functions  In include/ no function has more than FUNCTION_LINES lines, and fewer than LONG_FUNCTIONS have more
           than LONG_LINES.
contracts  Above every __global__ function of include/ stands a comment of /// lines that names grid and
           block.
space      No line of a source or a text ends in white space (two spaces break a line of a text), and the
           last one ends.
repeats    In include/ at most REPEATS pairs of places repeat each other (repeats.py).
"""

import re

import cpp
import house
import repeats as repeated

COLUMNS = 110
README_LINES = 110
PAGE_LINES = 200
FUNCTION_LINES = 200
LONG_LINES = 80
LONG_FUNCTIONS = 25
# Declarations of one call for both contexts repeat each other.
REPEATS = 50

CPP = (".hpp", ".cuh", ".cpp", ".cu", ".h")
ADDRESS = re.compile(r"\bhttps?://\S+")


def is_source(name, text):
    if not name.startswith(house.SOURCE_FOLDERS) and name not in ("CMakeLists.txt", "conanfile.py"):
        return False
    if name.startswith("tests/vectors/"):
        return False
    return name.endswith(CPP + (".py", ".cmake", ".sh", "CMakeLists.txt")) or text.startswith("#!")


def place(name, line, what):
    return f"{name}:{line}: {what}"


def columns(tree):
    findings = []
    for name, text in tree.items():
        if not is_source(name, text):
            continue
        for number, line in enumerate(text.split("\n"), 1):
            if len(line) > COLUMNS and not ADDRESS.search(line) and not line.startswith("// expect:"):
                findings.append(place(name, number, f"{len(line)} columns"))
    return findings


def space(tree):
    findings = []
    for name, text in tree.items():
        page = name.endswith(".md")
        if not page and not is_source(name, text):
            continue
        for number, line in enumerate(text.split("\n"), 1):
            if line != line.rstrip() and not (page and line.endswith("  ") and line[:-2] == line.rstrip()):
                findings.append(place(name, number, "white space at the end of the line"))
        if text and (not text.endswith("\n") or text.endswith("\n\n")):
            findings.append(f"{name} ends without a line's end, or with an empty line")
    return findings


def prose_lines(text):
    """[(number, line)] of a text's prose: neither code nor tables."""
    lines = []
    fence = None
    for number, line in enumerate(text.split("\n"), 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and fence is None:
            fence = mark.group(1)
        elif fence is not None:
            if mark and mark.group(1).startswith(fence):
                fence = None
        elif not re.match(r"\s*\||    \s*\S", line) or re.match(r"\s*([-*]|\d+\.) ", line):
            lines.append((number, line))
    return lines


def prose(tree):
    findings = []
    for name, text in tree.items():
        if not name.endswith(".md"):
            continue
        for number, line in prose_lines(text):
            plain = ADDRESS.sub("", re.sub(r"\]\([^)\s]*\)", "]", line))
            if len(plain) > COLUMNS:
                findings.append(place(name, number, f"{len(plain)} columns"))
    return findings


def pages(tree):
    findings = []
    for name, text in tree.items():
        most = README_LINES if name == "README.md" else PAGE_LINES
        if name == "README.md" or name.startswith("docs/") and name.endswith(".md"):
            lines = text.count("\n")
            if lines > most:
                findings.append(f"{name} has {lines} lines, and {most} are allowed")
    return findings


def diary(tree):
    findings = []
    for name, text in tree.items():
        if name != "README.md" and not (name.startswith("docs/") and name.endswith(".md")):
            continue
        for number, line in enumerate(text.split("\n"), 1):
            line = ADDRESS.sub("", line)
            for match in re.finditer(
                r"\b20\d\d-\d\d-\d\d\b|\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7,40}\b", line
            ):
                findings.append(
                    place(name, number, f"{match.group()}, which belongs in benchmarks/ or CHANGELOG.md")
                )
    return findings


def library(tree):
    return {
        name: text
        for name, text in tree.items()
        if name.startswith("include/") and name.endswith((".hpp", ".cuh"))
    }


def functions(tree):
    rows = []
    for name, text in library(tree).items():
        for function in cpp.functions(text):
            lines = function.last - function.first + 1
            if lines > LONG_LINES:
                rows.append((lines, place(name, function.first, f"{function.name} has {lines} lines")))
    rows.sort(reverse=True)
    too_long = [what for lines, what in rows if lines > FUNCTION_LINES]
    if len(rows) >= LONG_FUNCTIONS:
        too_long += [what for lines, what in rows if lines <= FUNCTION_LINES]
        too_long.append(
            f"{len(rows)} functions have more than {LONG_LINES} lines, and fewer than {LONG_FUNCTIONS} may"
        )
    return too_long


def contracts(tree):
    findings = []
    for name, text in library(tree).items():
        lines = text.split("\n")
        for function in cpp.functions(text):
            if not re.search(r"\b__global__\b", function.head):
                continue
            above = []
            i = function.first - 2
            while i >= 0 and re.match(r"\s*(///|#)", lines[i]):
                above.append(lines[i].lower())
                i -= 1
            comment = "\n".join(line for line in above if "///" in line)
            if "grid" not in comment or "block" not in comment:
                findings.append(
                    place(
                        name, function.first, f"{function.name}: no /// comment above it names grid and block"
                    )
                )
    return findings


def repeats(tree):
    rows = repeated.pairs(library(tree))
    if len(rows) <= REPEATS:
        return []
    return [what for what, _ in rows] + [f"{len(rows)} pairs of places, and {REPEATS} are allowed"]


CHECKS = {
    check.__name__: check for check in (columns, space, prose, pages, diary, functions, contracts, repeats)
}


def self_test():
    wide = "x" * (COLUMNS + 1)
    body = "".join(f"    call_{i}();\n" for i in range(FUNCTION_LINES))
    block = "".join(f"    first_{i} = second_{i}(third[{i}]);\n" for i in range(6))

    def finds(check, name, text, count=1):
        found = CHECKS[check]({name: text})
        house.expect(len(found) == count, f"{check} finds {found} in {name}")

    finds("columns", "include/kvpolicy/a.hpp", f"// {wide}\n// https://{wide}\n")
    finds("columns", "tools/a", f"#!/usr/bin/env bash\n# {wide}\n")
    finds("columns", "docs/a.md", f"{wide}\n", 0)
    finds("prose", "docs/a.md", f"{wide}\n| {wide} |\n[a](https://{wide})\n```\n{wide}\n```\n- {wide}\n", 2)
    finds("space", "docs/a.md", "break  \nspace \ntab\t\nlast", 3)
    finds("pages", "README.md", "a\n" * (README_LINES + 1))
    finds("pages", "docs/a.md", "a\n" * (PAGE_LINES + 1))
    finds("pages", "docs/a.md", "a\n" * PAGE_LINES, 0)
    finds("diary", "docs/a.md", "on 2026-11-28, at 1a2b3c4\nand 1234567 and deadbeef\n", 2)
    finds("diary", "benchmarks/notes/a.md", "on 2026-11-28\n", 0)
    finds(
        "functions",
        "include/a.cuh",
        "template <int N>\n__global__ void __launch_bounds__(128, 2) kernel(int a) {\n" + body + "}\n",
    )
    finds("functions", "include/a.cuh", "struct s {\n    s(int a) : a_{a} {\n" + body + "    }\n};\n")
    found = functions(
        {"include/a.cuh": "__global__ void __launch_bounds__(128) kernel(int a) {\n" + body + "}\n"}
    )
    house.expect(": kernel has" in found[0], f"a kernel's name in {found}")
    finds("contracts", "include/a.cuh", "/// Grid: one block per head.\n__global__ void kernel() {}\n", 0)
    finds("contracts", "include/a.cuh", "// Grid: one block per head.\n\n__global__ void kernel() {}\n")
    names = [
        f.name
        for f in cpp.functions(
            "namespace a {\nclass b {\n  public:\n    b(int c) : c_{c}, d_{} { f(); }\n"
            "    bool operator()(int) const { return true; }\n};\n"
            "template <class T> requires requires(T t) { t.f(); }\n"
            "auto g(T t = {}) -> int { return [] { return 1; }(); }\n"
            "template <class T> concept C = requires(T t) { t.f(); };\n"
            "inline constexpr int values[]{1, 2};\nint b::h() { return 1; }\n}\n"
        )
    ]
    house.expect(names == ["b", "operator()", "g", "b::h"], f"functions are {names}")
    copies = {"include/a.hpp": "int a() {\n" + block + "}\n", "include/b.hpp": "int b() {\n" + block + "}\n"}
    house.expect(len(repeated.pairs(copies)) == 1, "a copied block")
    renamed = {**copies, "include/b.hpp": "int b() {\n" + block.replace("first", "fourth") + "}\n"}
    house.expect(len(repeated.pairs(renamed)) == 1, "a copied block with other names")
    house.expect(
        not repeated.pairs({"include/a.hpp": "int a() {\n" + block + "}\n"}), "a block that stands once"
    )


if __name__ == "__main__":
    house.main("layout", CHECKS, self_test)
