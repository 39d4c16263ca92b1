"""What the checks of this folder share: the files of the tree, the report, and the list of pending checks.

Each script runs its self-test, then its checks: tests/house/NAME.py [--report] [--root DIR] [CHECK...].
--report prints every finding of a pending check, too.
"""

import argparse
import pathlib
import subprocess
import sys

# Checks that the tree does not pass yet. They count their findings and do not fail. Delete a line to enable
# its check.
PENDING: set[str] = set()

SOURCE_FOLDERS = (
    "include",
    "tests",
    "examples",
    "benchmarks",
    "tools",
    "cmake",
    "packaging",
    "python",
    ".ci",
)


def repository(start=pathlib.Path(__file__).resolve()):
    return start.parents[2]


def files(root):
    """The texts of the tree, {path: text}: what git tracks or would track; every
    file where there is no git."""
    try:
        listing = (
            subprocess.run(
                ["git", "-C", root, "ls-files", "-co", "--exclude-standard", "-z"],
                check=True,
                capture_output=True,
            )
            .stdout.decode()
            .split("\0")
        )
    except (OSError, subprocess.CalledProcessError):
        listing = [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]
        listing = [p for p in listing if not p.startswith(("build/", ".git/"))]
    found = {}
    for name in sorted(set(filter(None, listing))):
        path = root / name
        if not path.is_file() or path.is_symlink() or path.stat().st_size > 1 << 20:
            continue
        data = path.read_bytes()
        if b"\0" in data:
            continue
        try:
            found[name] = data.decode()
        except UnicodeDecodeError:
            continue
    return found


def main(script, checks, self_test):
    """Runs self_test() and checks, {name: function of (files) -> list of findings}; ends the program."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--report", action="store_true", help="print the findings of pending checks, too")
    parser.add_argument("--root", type=pathlib.Path, default=repository(), help="another checkout")
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(checks))
    arguments = parser.parse_args()
    unknown = set(arguments.checks) - set(checks)
    if unknown:
        parser.error(f"there is no check {', '.join(sorted(unknown))}")

    self_test()
    tree = files(arguments.root)
    failed = False
    for name, check in checks.items():
        if arguments.checks and name not in arguments.checks:
            continue
        findings = check(tree)
        full = script if name == script else f"{script}.{name}"
        pending = full in PENDING
        print(f"{full}: {len(findings)} findings{' (pending)' if pending and findings else ''}")
        if findings and (arguments.report or not pending):
            for finding in findings:
                print(f"  {finding}")
        failed = failed or (bool(findings) and not pending)
    sys.exit(1 if failed else 0)


def expect(condition, what):
    """A self-test's assertion."""
    if not condition:
        print(f"self-test failed: {what}")
        sys.exit(2)
