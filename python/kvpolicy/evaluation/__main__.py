"""python -m kvpolicy.evaluation MODEL: the table of a model on disk."""

import argparse
import contextlib
import json
import pathlib
import sys

import torch

from kvpolicy import evaluation
from kvpolicy.whole_file import output_lock, write_whole

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m kvpolicy.evaluation",
        description="What KV-cache policies cost a model: bits per byte, retrieval accuracy, memory, speed.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder of transformers: config.json, weights, tokenizer.json")
    add("--policy", action="append", metavar="LIST", help="names, as in dense,streaming,oracle-* (all)")
    add("--budget", default="75%,88%,94%", metavar="LIST", help="entries per head, or percent that go")
    add("--scorers", action="append", default=[], metavar="FILE", help="trained scorers; may be repeated")
    add("--text", metavar="FILE", help="the text, cut into sequences of --tokens")
    add(
        "--held-out",
        metavar="FOLDER",
        help="eval.bin and eval.json with retrieval queries, in place of --text (the model's folder)",
    )
    add("--joined", type=int, default=2, help="held-out sequences read as one, with a tokenizer (2)")
    add("--tokens", type=int, help="per sequence (4096, or what the model takes)")
    add("--sequences", type=int, help="at most so many (all)")
    add("--sinks", type=int, default=4)
    add("--window", type=int, default=64)
    add("--chunk", type=int, default=1024, help="tokens per call (1024)")
    add("--speed", type=int, default=0, metavar="N", help="tokens decoded to measure tokens/s (0: none)")
    add("--device", default="cpu")
    add("--dtype", choices=_DTYPES, default="float32", help="of the model (float32)")
    add("--storage", choices=_DTYPES, default="bfloat16", help="of keys and values (bfloat16)")
    add("--out", metavar="FILE.json", help="writes the results after every line")
    return parser


def _list(texts):
    return None if texts is None else [one for text in texts for one in text.split(",") if one]


def _check(options):
    for name in ("joined", "tokens", "sequences", "window", "chunk"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: {value} is not allowed; it must be 1 or more")
    for name in ("sinks", "speed"):
        if getattr(options, name) < 0:
            raise ValueError(f"--{name}: {getattr(options, name)} is not allowed; it must be 0 or more")
    if options.text and options.held_out:
        raise ValueError("--text: is not allowed with --held-out; the text is one of them")
    if options.text and not pathlib.Path(options.text).is_file():
        raise FileNotFoundError(f"--text: {options.text} is not allowed; it must be a file")
    if options.out and not pathlib.Path(options.out).absolute().parent.is_dir():
        raise FileNotFoundError(f"--out: {options.out} is not allowed; its folder must be there")


def run(arguments):
    options = _parser().parse_args(arguments)
    _check(options)
    with output_lock(options.out) if options.out else contextlib.nullcontext():
        _evaluate(options)


def _evaluate(options):
    model, tokenizer = evaluation.load(options.model, dtype=_DTYPES[options.dtype], device=options.device)
    given = {"tokens": options.tokens, "sequences": options.sequences}
    if options.text:
        given["text"] = pathlib.Path(options.text).read_bytes()
    else:
        folder = options.held_out or options.model
        given["sample"] = evaluation.Sample.held_out(folder, tokenizer, options.joined)

    def progress(found):
        line = found["results"][-1]
        print(f"{line['label']} at {line['budget'] or 'no'} budget", file=sys.stderr, flush=True)
        if options.out:
            text = json.dumps(found, sort_keys=True, separators=(",", ":")) + "\n"
            write_whole(options.out, text)

    found = evaluation.evaluate(
        model,
        tokenizer,
        policies=_list(options.policy),
        budgets=_list([options.budget]),
        scorers=options.scorers,
        sinks=options.sinks,
        window=options.window,
        chunk=options.chunk,
        speed=options.speed,
        storage=_DTYPES[options.storage],
        name=pathlib.Path(options.model).resolve().name,
        progress=progress,
        **given,
    )
    print(evaluation.table(found), end="")


def main(arguments=None):
    try:
        run(sys.argv[1:] if arguments is None else arguments)
    except (ValueError, TypeError, OSError, NotImplementedError, RuntimeError) as error:
        sys.exit(f"kvpolicy.evaluation: {error}")


if __name__ == "__main__":
    main()
