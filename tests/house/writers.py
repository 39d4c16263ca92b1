#!/usr/bin/env python3
"""Files are written in one place per language, so that a kill or a full disk leaves the old file:
examples/apps/support/whole_file.hpp and line_file.hpp, python/kvpolicy/whole_file.py.

writers    No other file of HERE opens a file to write, renames one, or lets
           a library write to a path that is not a temporary one (`part`)."""

import re

import house

HERE = ("examples/", "tools/", "python/kvpolicy/", "benchmarks/python/")
WRITERS = re.compile(r"^(examples/apps/support/(whole|line)_file\.|python/kvpolicy/whole_file\.py$)")
CPP = re.compile(r"\bstd::o?fstream\b|\bfopen\(|\brename\(|\bO_(WRONLY|RDWR|CREAT)\b")
PYTHON = re.compile(
    r"\.write_(text|bytes)\(|\bopen\((?!part\b)[^)\n]*,\s*[\"'][wax]|\bos\.(replace|rename)\(|\.rename\("
    r"|\b(save_file|torch\.save)\((?!\w+, part\b)|save_pretrained\((?!part\))|\.replace\((target|out|path)\)"
)
# Files that a later run does not read: logs of programs, sources for a compiler, locks.
ALLOWED = {
    "tools/ablate": ("open(log or os.devnull",),
    "tools/evaluate": ("self.log = open(",),
    "python/kvpolicy/first_use.py": (
        ".lock",
        "path.write_text(source",
        "log.write_text(",
        "unfinished.rename(",
    ),
}


def writers(tree):
    findings = []
    for name, text in tree.items():
        if (
            not name.startswith(HERE)
            or WRITERS.match(name)
            or name.endswith((".md", ".json", ".cmake", ".txt"))
        ):
            continue
        pattern = CPP if name.endswith((".cpp", ".hpp", ".cu", ".cuh")) else PYTHON
        if pattern is PYTHON and not name.endswith(".py") and not text.startswith("#!/usr/bin/env python3"):
            continue
        for number, line in enumerate(text.split("\n"), 1):
            if pattern.search(line) and not any(part in line for part in ALLOWED.get(name, ())):
                findings.append(f"{name}:{number}: writes a file without whole_file: {line.strip()}")
    return findings


def self_test():
    def finds(name, text, count=1):
        found = writers({name: text})
        house.expect(len(found) == count, f"writers finds {found} in {name}")

    finds("examples/a.cpp", "std::ofstream out(file);\nstd::ifstream in(file);\nrename(a, b);\n", 2)
    finds("examples/apps/support/whole_file.cpp", "::rename(a, b);\n", 0)
    finds("tests/a.cpp", "std::ofstream out(file);\n", 0)
    finds("tools/a", "#!/usr/bin/env python3\nopen(a, 'w')\nopen(a)\nopen(a, 'rb')\nb.write_text(c)\n", 2)
    finds("examples/a.py", "torch.save(state, path)\ntorch.save(state, part)\nsave_file(a, b)\n", 2)
    finds("tools/evaluate", "#!/usr/bin/env python3\n    self.log = open(name, 'w')\n", 0)


if __name__ == "__main__":
    house.main("writers", {"writers": writers}, self_test)
