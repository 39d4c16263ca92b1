"""Repeated places of a tree: runs of at least LINES code lines that stand in two places, the same to the
letter or of the same shape (with other names and numbers). Comments, blank lines, includes and lines of
punctuation do not count; white space is folded. A run in more than PLACES places does not count either."""

import collections
import functools
import re

import cpp

LINES = 6
PLACES = 8
WORD = re.compile(r"[A-Za-z_]\w*|\d[\w.']*|\S")
KEYWORDS = frozenset("""
    alignas auto bool break case catch char class concept const consteval constexpr continue decltype
    default delete do double else enum explicit extern false final float for friend if inline int long
    mutable namespace noexcept nullptr operator override private protected public requires return short
    signed sizeof static static_assert struct switch template this throw true try typedef typename union
    unsigned using virtual void volatile while __device__ __global__ __host__ __shared__ __forceinline__ asm
    """.split())


@functools.lru_cache(maxsize=None)
def code_lines(text):
    """[(line number, words)] of the lines that count."""
    lines = []
    for number, line in enumerate(cpp.blank(text, keep_strings=True).split("\n"), 1):
        words = WORD.findall(line)
        if any(re.match(r"\w", word) for word in words) and not (
            words[0] == "#" and words[1:2] in (["include"], ["pragma"])
        ):
            lines.append((number, tuple(words)))
    return lines


@functools.lru_cache(maxsize=None)
def kind(word):
    return word if word in KEYWORDS or not re.match(r"\w", word) else "0" if word[0].isdigit() else "a"


def shape(words):
    return tuple(map(kind, words))


def thin(words):
    """Lines whose shape says little: one name at most, or a member's declaration."""
    names = sum(kind(word) == "a" for word in words)
    return names < 2 or words[-1] == ";" and not set(words) & set("()[]+-/%?.!|")


def nothing(_):
    return False


def runs(texts, form, says_little):
    """{(file, file): [(line, line, lines)]}: the longest runs of lines of equal form, each once."""
    files = {
        name: [(number, form(words), says_little(words)) for number, words in code_lines(text)]
        for name, text in texts.items()
    }
    windows = collections.defaultdict(list)
    for name, lines in files.items():
        for i in range(len(lines) - LINES + 1):
            window = lines[i : i + LINES]
            if sum(line[2] for line in window) * 2 <= LINES:
                windows[tuple(line[1] for line in window)].append((name, i))
    starts = collections.defaultdict(set)
    for places in windows.values():
        if 1 < len(places) <= PLACES:
            for k, (first, i) in enumerate(places):
                for second, j in places[k + 1 :]:
                    if first != second or abs(i - j) >= LINES:
                        starts[first, second].add((i, j))
    found = {}
    for (first, second), pairs in starts.items():
        rows = []
        for i, j in sorted(pairs):
            if (i - 1, j - 1) in pairs:
                continue
            n = LINES
            while (i + n - LINES + 1, j + n - LINES + 1) in pairs:
                n += 1
            rows.append((files[first][i][0], files[second][j][0], n))
        found[first, second] = rows
    return found


def pairs(texts):
    """One row a pair of files with a run: the longest run, and how many more."""
    exact = runs(texts, tuple, nothing)
    alike = runs(texts, shape, thin)
    rows = []
    for key in sorted(set(exact) | set(alike)):
        found = exact.get(key) or alike[key]
        first, second, n = max(found, key=lambda row: row[2])
        more = len(found) - 1
        rows.append(
            (
                n,
                f"{key[0]}:{first} and {key[1]}:{second} share {n} lines"
                f"{'' if key in exact else ' of the same shape'}{f', and {more} more runs' if more else ''}",
                key in exact,
            )
        )
    return [row[1:] for row in sorted(rows, reverse=True)]
