#!/usr/bin/env python3
"""Writes examples/llama/unicode_ranges.hpp from Python's own Unicode tables: the letters and the numbers that
the GPT-2 pre-tokenizer's \\p{L} and \\p{N} stand for. Run it again only for a newer Unicode."""
import pathlib
import sys
import unicodedata

from whole_file import write_whole


def ranges(major):
    found = []
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code))[0] != major:
            continue
        if found and found[-1][1] == code - 1:
            found[-1][1] = code
        else:
            found.append([code, code])
    return found


def table(name, major):
    lines = [f"inline constexpr CodeRange {name}[] = {{"]
    line = "   "
    for first, last in ranges(major):
        item = f" {{0x{first:x}, 0x{last:x}}},"
        if len(line) + len(item) > 110:
            lines.append(line)
            line = "   "
        line += item
    return "\n".join([*lines, line, "};", ""])


text = f"""#pragma once
// Written by tools/make_unicode_ranges.py from Unicode {unicodedata.unidata_version}.
// clang-format off

namespace llama {{

struct CodeRange {{
    char32_t first, last; // both inclusive
}};

/// General category L.
{table("letter_ranges", "L")}
/// General category N.
{table("number_ranges", "N")}
}} // namespace llama
"""
out = pathlib.Path(__file__).resolve().parent.parent / "examples" / "llama" / "unicode_ranges.hpp"
write_whole(out, text)
print(f"wrote {out.name}: Unicode {unicodedata.unidata_version}")
