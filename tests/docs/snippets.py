#!/usr/bin/env python3
"""The code in README.md and docs/ is compiled and run.

In a Markdown file,

    <!-- test: name -->
    ```cpp
    ...
    ```

makes the block a program of that name (```cuda: a .cu, where CUDA is on). Blocks with the same name are
joined in the order of the text. Code that the reader need not see stands in a comment, and is joined too:

    <!-- test-hidden: name
    std::vector<float> keys(1024);
    -->

Without a main() the #include lines are moved to the top and the rest becomes the body of one. What the
program prints is compared with

    <!-- test-output: name -->
    ```text
    ...
    ```

if there is such a block. A C++ block that is no program says so, with the reason:
<!-- no test: a sketch of ... -->.

    snippets.py extract FOLDER FILE...   writes the programs, prints a line "name extension" for each
    snippets.py together SOURCE PROGRAM...
                                         writes one program that runs the extracted C++ program of the name
                                         that it is given
    snippets.py chains FOLDER PROGRAM... writes FOLDER/<number>.cpp, in each of which a program follows those
                                         whose includes are among its own: if that compiles, the includes of
                                         each suffice. Prints a line "<file> <last program>" for each
    snippets.py check ROOT FILE...       every C++ block has a mark, every relative link a target
    snippets.py run EXPECTED PROGRAM [ARGUMENT...]
                                         runs a program and compares its output
"""

import difflib
import pathlib
import re
import subprocess
import sys

EXTENSIONS = {"cpp": "cpp", "c++": "cpp", "cuda": "cu"}
NAME = r"[A-Za-z0-9_.-]+"


class Part:
    """A piece of a program: where it stands (the line before its first one) and its lines."""

    def __init__(self, path, line, lines, language=None):
        self.path, self.line, self.lines, self.language = path, line, lines, language


def blocks(path):
    """Yields (mark, Part) for every fenced block and every hidden comment; mark is (kind, argument) or
    None."""
    lines = path.read_text(encoding="utf-8").split("\n")
    mark = None
    i = 0
    while i < len(lines):
        line = lines[i].strip()
        hidden = re.fullmatch(rf"<!-- test-hidden: ({NAME})", line)
        marked = re.fullmatch(rf"<!-- (test|test-output|no test): (.+?) -->", line)
        fence = re.fullmatch(r"(`{3,}|~{3,})\s*([^`]*)", line)
        if hidden or fence:
            close = "-->" if hidden else fence.group(1)
            end = i + 1
            while end < len(lines) and lines[end].strip() != close:
                end += 1
            if end == len(lines):
                sys.exit(f"{path}:{i + 1}: no closing {close}")
            # A block inside a list is indented; so is its code then.
            indent = len(lines[i]) - len(lines[i].lstrip())
            body = [text[indent:] if not text[:indent].strip() else text for text in lines[i + 1 : end]]
            if hidden:
                yield ("test", hidden.group(1)), Part(path, i + 1, body)
            else:
                language = fence.group(2).split()[0] if fence.group(2) else ""
                yield mark, Part(path, i + 1, body, language)
            mark = None
            i = end
        elif marked:
            if marked.group(1) != "no test" and not re.fullmatch(NAME, marked.group(2)):
                sys.exit(f"{path}:{i + 1}: \"{marked.group(2)}\" is not a name ({NAME})")
            mark = (marked.group(1), marked.group(2))
        elif line:
            mark = None
        i += 1


def collect(paths):
    programs, outputs = {}, {}
    for path in paths:
        for mark, part in blocks(path):
            if mark is None or mark[0] == "no test":
                continue
            into = programs if mark[0] == "test" else outputs
            parts = into.setdefault(mark[1], [])
            if parts and parts[0].path != path:
                sys.exit(f"{path}:{part.line}: the name {mark[1]} is taken by {parts[0].path}")
            parts.append(part)
    for name in outputs:
        if name not in programs:
            sys.exit(
                f"{outputs[name][0].path}:{outputs[name][0].line}: output of {name}, which is not a program"
            )
    return programs, outputs


def program(parts):
    includes, body = [], []
    whole = any(re.search(r"\bint main\(", line) for part in parts for line in part.lines)
    for part in parts:
        # Errors then name the line of the text.
        body.append(f'#line {part.line + 1} "{part.path}"')
        for number, line in enumerate(part.lines, part.line + 1):
            if not whole and line.startswith("#include"):
                includes += [f'#line {number} "{part.path}"', line]
                body.append("")
            else:
                body.append(line)
    if not whole:
        body = includes + ["int main() {"] + body + ["    return 0;", "}"]
    return "\n".join(body) + "\n"


def write(path, text):
    # Unchanged files keep their time, so that nothing is compiled again.
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def extract(folder, paths):
    folder.mkdir(parents=True, exist_ok=True)
    programs, outputs = collect(paths)
    wanted = set()
    for name, parts in programs.items():
        languages = {part.language for part in parts if part.language is not None}
        if len(languages) != 1 or not languages <= EXTENSIONS.keys():
            sys.exit(
                f"{parts[0].path}:{parts[0].line}: {name} should be blocks of one language, cpp or cuda, "
                f"and has {sorted(languages)}"
            )
        extension = EXTENSIONS[languages.pop()]
        write(folder / f"{name}.{extension}", program(parts))
        wanted.add(f"{name}.{extension}")
        if name in outputs:
            write(
                folder / f"{name}.expected", "\n".join(sum((part.lines for part in outputs[name]), [])) + "\n"
            )
            wanted.add(f"{name}.expected")
        print(name, extension)
    for file in folder.iterdir():
        if file.suffix in (".cpp", ".cu", ".expected") and file.name not in wanted:
            file.unlink()


# A short text names results that it does not go on to use, and counts with int, of which clang++ warns.
IGNORED = [f'#pragma GCC diagnostic ignored "-W{warning}"' for warning in
           ("sign-conversion", "unused-variable", "unused-but-set-variable", "unused-local-typedefs")]


def inner_program(path):
    """(namespace, includes, lines) of a program whose main() becomes program() in a namespace of its own."""
    lines = path.read_text(encoding="utf-8").split("\n")
    includes = [line.split("//")[0].rstrip() for line in lines if line.startswith("#include")]
    lines = ["" if line.startswith("#include") else line for line in lines]
    first, = (i for i, line in enumerate(lines) if re.match(r"int main\(\) *\{", line))
    # Other functions than ::main must return.
    lines[first] = lines[first].replace("main", "program", 1)
    lines[lines.index("}", first)] = "    return 0; }"
    space = "text_of_" + re.sub(r"\W", "_", path.stem)
    return space, includes, [f"namespace {space} {{"] + lines + ["}"]


def together(source, paths):
    """Each program stands in a namespace of its own, behind the includes of all."""
    includes, bodies, calls = ["#include <string_view>"], [], []
    for path in paths:
        space, own, lines = inner_program(path)
        includes += own
        bodies += lines
        calls.append(f'    if (name == "{path.stem}") return {space}::program();')
    entry = [
        "int main(int count, char** arguments) {",
        '    const std::string_view name{count > 1 ? arguments[1] : ""};',
    ]
    entry += calls + ["    return 2;", "}"]
    text = list(dict.fromkeys(includes)) + IGNORED + bodies + entry
    write(source, "\n".join(text) + "\n")


def chains(folder, paths):
    """Each program stands behind its own includes alone: those of the programs before it, and more."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []  # (includes, lines, last program)
    for path in sorted(paths, key=lambda path: (len(set(inner_program(path)[1])), path.stem)):
        _, own, lines = inner_program(path)
        fitting = [chain for chain in found if chain[0] <= set(own)]
        chain = max(fitting, key=lambda chain: len(chain[0]), default=None)
        if chain is None:
            chain = [set(), [], None]
            found.append(chain)
        chain[1] += [line for line in dict.fromkeys(own) if line not in chain[0]] + IGNORED + lines
        chain[0], chain[2] = set(own), path.stem
    for number, (_, lines, last) in enumerate(found):
        write(folder / f"{number}.cpp", "\n".join(lines) + "\n")
        print(folder / f"{number}.cpp", last)


def check(root, paths):
    faults = []
    for path in paths:
        shown = path.relative_to(root)
        for mark, part in blocks(path):
            if part.language in EXTENSIONS and mark is None:
                faults.append(
                    f"{shown}:{part.line}: a C++ block without <!-- test: name --> or "
                    "<!-- no test: reason -->"
                )
        fenced = False
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if re.match(r"\s*(```|~~~)", line):
                fenced = not fenced
            if fenced:
                continue
            for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
                if re.match(r"[a-z]+:|#", target):
                    continue
                if not (path.parent / target.split("#")[0]).exists():
                    faults.append(f"{shown}:{number}: the link {target} leads nowhere")
    collect(paths)
    print("\n".join(faults) or f"{len(paths)} files are in order")
    return 1 if faults else 0


def run(expected, command):
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        print(result.stdout)
        print(f"{command[0]} exits with {result.returncode}")
        return 1

    def lines(text):
        return [line.rstrip() for line in text.rstrip().split("\n")]

    difference = list(difflib.unified_diff(lines(pathlib.Path(expected).read_text(encoding="utf-8")),
                                           lines(result.stdout), "the text", "the program", lineterm=""))
    print("\n".join(difference) or result.stdout)
    return 1 if difference else 0


def main(arguments):
    command = arguments[0] if arguments else ""
    if command == "extract" and len(arguments) >= 2:
        return extract(pathlib.Path(arguments[1]), [pathlib.Path(path) for path in arguments[2:]])
    if command == "check" and len(arguments) >= 2:
        return check(pathlib.Path(arguments[1]), [pathlib.Path(path) for path in arguments[2:]])
    if command == "together" and len(arguments) > 2:
        return together(pathlib.Path(arguments[1]), [pathlib.Path(path) for path in arguments[2:]])
    if command == "chains" and len(arguments) > 2:
        return chains(pathlib.Path(arguments[1]), [pathlib.Path(path) for path in arguments[2:]])
    if command == "run" and len(arguments) > 2:
        return run(arguments[1], arguments[2:])
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
