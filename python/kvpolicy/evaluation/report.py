"""Tables of results."""


def _number(value, places):
    return "-" if value is None else f"{value:.{places}f}"


def table(found):
    """The table of evaluate's results as text, a line per policy and budget."""
    head = "cache,less,rows,bits/B,nll/tok,exact,first,digits,cache MiB,tokens/s"
    lines = [tuple(head.split(","))]
    for one in found["results"]:
        lines.append(
            (
                one["label"],
                f"{100 * one['compression']:.0f}%" if one["budget"] or one["compression"] else "-",
                f"{one['rows_per_head']:.0f}",
                _number(one["bits_per_byte"], 4),
                _number(one["nll_per_token"], 4),
                _number(one["recall_exact"], 3),
                _number(one["recall_first_digit"], 3),
                _number(one["recall_digits"], 3),
                _number(one["cache_mib"], 2),
                f"{one['tokens_per_s']:.0f}" if one["tokens_per_s"] else "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines)]
    rows = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        for line in lines
    ]
    queries = found["results"][0]["lookups"] if found["results"] else 0
    return (
        f"{found['model']}: {found['sequences']} sequences of {found['length']} tokens, {queries} retrieval "
        f"queries; {found['sinks']} sinks, a window of {found['window']}; cache in {found['storage']}\n\n"
        + "\n".join(rows)
        + "\n"
    )
