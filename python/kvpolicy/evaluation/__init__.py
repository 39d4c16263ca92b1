"""What KV-cache policies cost a model of transformers: the tables of docs/evaluation.md from Python.

evaluate() measures bits per byte, retrieval accuracy, memory and speed by policy and budget, as the C++
program of examples/evaluate does; python -m kvpolicy.evaluation MODEL prints the table. answer() asks a model
with a bounded cache several questions about one context.
"""

import dataclasses
import pathlib
import time
import warnings

import torch

from kvpolicy.evaluation.policies import (
    Evaluated,
    GivenScores,
    KeyNorm,
    Observer,
    Setting,
    chosen,
    recall_of,
)
from kvpolicy.evaluation.report import table
from kvpolicy.evaluation.sample import Sample, Score
from kvpolicy.transformers import NAME, KVPolicyCache, observe_with

__all__ = [
    "Evaluated",
    "GivenScores",
    "KeyNorm",
    "Sample",
    "Setting",
    "answer",
    "entries_of",
    "evaluate",
    "load",
    "table",
]

_BINS = 64
_ROWS = 256  # logits whose losses are taken at once
_WARM_UP = 3  # untimed steps: on CUDA the second captures a graph, which the third replays


def load(folder, *, dtype=torch.float32, device="cpu"):
    """(model, tokenizer) of a folder on disk; the tokenizer is None for a model whose tokens are bytes (a
    vocabulary of 256 and no file of a tokenizer). Raises FileNotFoundError for a folder without a model."""
    import transformers

    folder = pathlib.Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"model: {folder} is not allowed; it must be a folder with a config.json and weights"
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = model.to(device).eval().requires_grad_(False)
    if (folder / "tokenizer_config.json").is_file():
        return model, transformers.AutoTokenizer.from_pretrained(folder)
    if (folder / "tokenizer.json").is_file():
        return model, transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    if model.config.vocab_size == 256:
        return model, None
    raise FileNotFoundError(f"model: {folder} is not allowed; it must have a tokenizer.json")


def entries_of(budget, length):
    """Entries per head of a budget: a number, or a percentage that goes, rounded to sixteenths: "75%" of 4096
    leaves 1024, "94%" leaves 256."""
    text = str(budget)
    number = text.removesuffix("%")
    if not number.isdigit() or (text.endswith("%") and int(number) > 99) or text == "0":
        raise ValueError(f"budgets: {budget} is not allowed; it must be 1 or more, or 0% to 99%")
    if text == number:
        return int(number)
    return max(1, length * (16 - (int(number) * 16 + 50) // 100) // 16)


# ---- running a model ---------------------------------------------------------------------------------------


def _cache(model, policy, **options):
    """A KVPolicyCache without draft tokens, and without a CUDA graph where a scorer counts its calls: the
    graph would repeat the scores of its capture."""
    cache = KVPolicyCache(model, policy, max_draft_tokens=0, **options)
    if any(isinstance(one.scorer, GivenScores) for one in cache.policies):
        cache.decode_graph = None
    return cache


@torch.no_grad()
def _forward(model, ids, cache, **options):
    """Logits of ids [1, n], which follow what the cache has seen."""
    with warnings.catch_warnings():
        # The name that transformers had before 5.24.
        warnings.filterwarnings("ignore", message=".*past_key_values. is deprecated")
        return model(ids, past_key_values=cache, use_cache=True, **options).logits


@torch.no_grad()
def _observe(model, ids, window, evaluated, storage):
    """The Observer of one sequence; None where no policy asks."""
    trained = any(one.recalled for one in evaluated)
    betas = {one.beta for one in evaluated if one.beta} | ({1.0, 2.0} if trained else set())
    if not betas:
        return None
    observer = Observer(window, sorted(betas), evaluated, storage)
    config = model.config.get_text_config(decoder=True)
    before, config._attn_implementation = config._attn_implementation, NAME
    try:
        with observe_with(observer.layer):
            model(ids[None], use_cache=False, logits_to_keep=1)
    finally:
        config._attn_implementation = before
    return observer


def _losses(logits, targets):
    """nll (natural log, float64) and whether each target was the most likely token, of logits [n, vocab]."""
    nll, right = [], []
    for rows, wanted in zip(logits.split(_ROWS), targets.split(_ROWS)):
        rows = rows.double()
        nll.append(torch.logsumexp(rows, -1) - rows.gather(1, wanted[:, None])[:, 0])
        right.append(rows.argmax(-1) == wanted)
    return torch.cat(nll).cpu(), torch.cat(right).cpu()


def _run(model, ids, cache, cuts):
    """nll and right [length - 1] of the tokens after the first, and the most likely token after the last;
    tokens come in chunks of the lengths `cuts`."""
    found, at = [], 0
    for n in cuts:
        logits = _forward(model, ids[None, at : at + n], cache)[0]
        targets = ids[at + 1 : at + n + 1]
        if len(targets):
            found.append(_losses(logits[: len(targets)], targets))
        at += n
    return torch.cat([one[0] for one in found]), torch.cat([one[1] for one in found]), logits[-1].argmax()


def _cuts(length, chunk, prompt):
    if prompt:
        return [prompt] + [1] * (length - prompt)
    return [min(chunk, length - at) for at in range(0, length, chunk)]


def _speed(model, cache, token, steps):
    """Tokens per second of `steps` greedy tokens from `token` on, which follows what the cache has seen; the
    first _WARM_UP are not timed."""

    def clock():
        if token.is_cuda:
            torch.cuda.synchronize(token.device)
        return time.perf_counter()

    for step in range(steps):
        if step == _WARM_UP:
            start = clock()
        token = _forward(model, token.view(1, 1), cache)[0, -1].argmax()
    return (steps - _WARM_UP) / (clock() - start)


class _Held:
    """What caches hold after the last token, summed over sequences: entries by layer and head, and of a
    layer's keys in each part of the sequence the share that is held (of caches on the CPU)."""

    def __init__(self, layers, heads, length):
        self.rows = torch.zeros(layers, heads, dtype=torch.float64)
        self.kept = torch.zeros(layers, _BINS, dtype=torch.float64)
        self.edges = [-(-i * length // _BINS) for i in range(_BINS + 1)]
        self.length, self.by_position = length, True

    def add(self, cache):
        layers, heads = self.rows.shape
        sizes = (torch.tensor(self.edges[1:]) - torch.tensor(self.edges[:-1])).double() * heads
        for layer in range(layers):
            for head in range(heads):
                self.rows[layer, head] += cache.usage(layer, 0, head).size
                if cache.device.type != "cpu":
                    self.by_position = False
                    continue
                held = torch.tensor(cache.retained(layer, 0, head), dtype=torch.int64)
                bins = (held * _BINS // self.length).clamp(max=_BINS - 1)
                self.kept[layer] += torch.bincount(bins, minlength=_BINS) / sizes.clamp(min=1)

    def result(self, sequences):
        rows = (self.rows / sequences).flatten()
        found = {"rows_per_head": rows.mean().item(), "rows": [round(x, 3) for x in rows.tolist()]}
        if self.by_position:
            found["kept_by_position"] = [round(x, 3) for x in (self.kept / sequences).flatten().tolist()]
        return found


# ---- evaluate ----------------------------------------------------------------------------------------------


def evaluate(
    model,
    tokenizer=None,
    *,
    policies=None,
    budgets=("75%", "88%", "94%"),
    text=None,
    sample=None,
    scorers=(),
    tokens=None,
    sequences=None,
    sinks=4,
    window=64,
    chunk=1024,
    speed=0,
    storage=torch.bfloat16,
    name=None,
    progress=None,
):
    """What policies cost a model, by policy and budget. Returns a dict as
    benchmarks/results/evaluation_*.json has it; table(result) is its text.

    model      a causal decoder of transformers that KVPolicyCache takes, in evaluation; tokenizer: None for a
               model whose tokens are bytes
    policies   None for all, a sequence of names (dense, streaming, keynorm, h2o, tova, snapkv, snapkv-prompt,
               oracle-1, -2, -4 and -inf, and the files of scorers without their suffix; a trailing * stands
               for the rest), or a dict from names to names, to Policy objects, which are run once with
               numbers of their own, and to functions of a Setting, which give a Policy or a function of the
               layer's number for each budget
    budgets    entries per head, or percentages that go; above sinks + window
    sample     a Sample; or text, from which sequences of `tokens` tokens are cut (default: 4096, or what the
               model takes). `sequences`: at most so many
    scorers    files of Scorers.save or train_scorer. A file of gates, or of StreamLLM+, is run once with its
               own numbers: what it keeps is measured
    chunk      tokens per call; storage: dtype of keys and values, while the model computes in its own
    speed      tokens that are decoded after the first sequence to measure tokens per second, after three
               untimed ones; 0: none

    bits_per_byte and nll_per_token (natural log) are sums over the tokens of text after the first of each
    sequence, each predicted from those before it through the bounded cache. recall_exact is the share of
    retrieval queries whose digits are all the most likely token given those before, None without queries.
    rows_per_head are entries after the last token, cache_mib the memory of keys and values. The oracle's
    scores are the future attention of a dense pass over the whole sequence; oracle_recall is the share of its
    long-range keys that a trained scorer keeps. `rows` are the entries by layer and head; of a gate's file
    gate_density is the share of keys beyond sinks and window among them, and compression what it spares.
    """
    length = tokens or min(4096, getattr(model.config, "max_position_embeddings", None) or 4096)
    if (sample is None) == (text is None):
        raise TypeError("evaluate: takes either text or sample")
    if tokenizer is None and sample is None and model.config.vocab_size != 256:
        raise TypeError("tokenizer: None is not allowed; only tokens of a vocabulary of 256 are bytes")
    if sample is None:
        sample = Sample.from_text(text, tokenizer, length, sequences)
    sample = sample.first(sequences, tokens)
    rows = [_plan(one, sample.length, sinks, window) for one in budgets]
    evaluated = chosen(policies, scorers, window, model)
    plan = [(one, 0) for one in evaluated if not one.bounded]
    plan += [(one, budget) for budget in rows for one in evaluated if one.bounded]
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    found = {
        "model": name or pathlib.Path(getattr(config, "_name_or_path", "") or config.model_type).name,
        "sequences": len(sample.tokens),
        "length": sample.length,
        "sinks": sinks,
        "window": window,
        "layers": config.num_hidden_layers,
        "kv_heads": heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "position_bins": _BINS,
        "storage": str(storage).removeprefix("torch."),
        "results": [],
    }
    observed = [
        _observe(model, ids, window, evaluated, storage) for ids in sample.tokens.to(model.device)
    ]
    for policy, budget in plan:
        setting = Setting(budget, sinks, window, sample.length, speed + _WARM_UP if speed else 0)
        found["results"].append(_measure(model, sample, policy, setting, observed, chunk, storage, found))
        if progress is not None:
            progress(found)
    return found


def _plan(budget, length, sinks, window):
    entries = entries_of(budget, length)
    if entries <= sinks + window:
        raise ValueError(
            f"budgets: {budget} is not allowed; it must leave more than sinks + window = {sinks + window} "
            f"entries of {length}, and leaves {entries}"
        )
    return entries


def _measure(model, sample, policy, setting, observed, chunk, storage, of):
    """A line of the table."""
    score, held, mib, tokens_per_s = Score(), _Held(of["layers"], of["kv_heads"], sample.length), 0.0, 0.0
    cuts = _cuts(sample.length, chunk, sample.length // 4 * 3 if policy.prompted else 0)
    for sequence, ids in enumerate(sample.tokens.to(model.device)):
        oracle = observed[sequence].scores[policy.beta] if policy.beta else None
        made = policy.make(dataclasses.replace(setting, oracle=oracle))
        cache = _cache(model, made, storage=storage, max_length=sample.length + setting.decoded)
        *losses, token = _run(model, ids, cache, cuts)
        score.add(sample, sequence, *losses)
        held.add(cache.cache)
        if sequence == 0:
            mib = cache.cache.memory_bytes(entries_only=True) / 2**20
            if setting.decoded:
                tokens_per_s = _speed(model, cache, token, setting.decoded)
    found = {"policy": policy.name, "label": policy.label, "budget": setting.budget}
    found["compression"] = 1 - setting.budget / sample.length if setting.budget else 0.0
    found |= score.result() | held.result(len(sample.tokens))
    found |= {"cache_mib": mib, "tokens_per_s": tokens_per_s}
    if policy.scorers is not None:
        found["training"] = policy.scorers.training_notes
    if policy.recalled:
        found["oracle_recall"] = recall_of(policy, setting, observed)
    elif policy.scorers is not None:
        found["system"] = policy.scorers.system
        found["compression"] = 1 - found["rows_per_head"] / sample.length
        always = min(policy.scorers.sinks + policy.scorers.window, sample.length)
        beyond = max(1, sample.length - always)
        found["gate_density"] = [round(max(0.0, rows - always) / beyond, 4) for rows in found["rows"]]
    return found


# ---- questions about a context -----------------------------------------------------------------------------


def answer(model, tokenizer, context, questions, policy, *, max_new_tokens=50, storage=None, **options):
    """Greedy answers of a model to questions about a context, which the cache takes in once: it keeps what
    `policy` keeps (a Policy, or what else KVPolicyCache takes), and each question starts from there.

    context    text, or ids [n]; questions: a sequence of texts, or of ids. Answers are texts, or ids
    storage    dtype of keys and values; None: the model's
    options    of generate

    tokenizer may be None for ids."""

    def ids_of(name, given):
        if torch.is_tensor(given):
            ids = given.view(1, -1).to(model.device)
        elif tokenizer is None:
            raise TypeError(f"{name}: {type(given).__name__} is not allowed without a tokenizer; pass ids")
        else:
            ids = tokenizer(given, add_special_tokens=False, return_tensors="pt").input_ids.to(model.device)
        if ids.shape[1] == 0:
            raise ValueError(f"{name}: no tokens are not allowed; there must be 1 or more")
        return ids

    start = ids_of("context", context)
    asked = [ids_of(f"questions[{i}]", one) for i, one in enumerate(questions)]
    most = start.shape[1] + max((one.shape[1] for one in asked), default=0) + max_new_tokens
    cache = _cache(model, policy, storage=storage, max_length=most)
    _forward(model, start, cache, logits_to_keep=1)
    state = cache.snapshot()
    answers = []
    for ids in asked:
        cache.restore(state)
        given = torch.cat((start, ids), 1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*past_key_values. is deprecated")
            out = model.generate(
                given,
                past_key_values=cache,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                attention_mask=torch.ones_like(given),
                **options,
            )
        new = out[0, given.shape[1] :]
        answers.append(new if torch.is_tensor(context) else tokenizer.decode(new, skip_special_tokens=True))
    return answers
