#!/usr/bin/env python3
"""Words that the library does not use, with what to write instead, in include/, docs/, README.md, examples/,
tests/, tools/, cmake/ and python/.

Most words are looked for between letters, so that parts of an identifier count: card_only, make_room. A word
that is right in its place stands in ALLOWED. Machine-readable files are not read."""

import collections
import re

import house

SCOPE = re.compile(
    r"(README\.md$|(include|docs|examples|tests|tools|cmake|python)/)(?!.*\.(kvpv|json|csv|svg|txt|bib|bin)$)"
)
NOT_READ = re.compile(r"tests/(house|vectors)/|docs/site/")

Word = collections.namedtuple("Word", "pattern instead files")


def word(pattern, instead, files=r""):
    return Word(re.compile(pattern), instead, re.compile(files))


def part(pattern, instead, files=r""):
    """A word, or a part of an identifier."""
    return word(rf"(?<![A-Za-z])(?:{pattern})(?![A-Za-z])", instead, files)


CUDA = r"^include/.*\.cuh$"
MLSTM = r"^include/.*(mlstm|scoring).*\.cuh$"
CODE = r"\.(hpp|cuh|cpp|cu)$"
WORDS = (
    word(r"\bOccupancy\b|\boccupancy\s*\(", "HeadUsage, size(layer, seq, head)"),
    word(r"\bslots\b(?=\s*[;=,\[])|[.>]slots\b", "max_sequences, seq_ids, stages, chunks or bins", CODE),
    word(r"\b(last_)?page_rows\b", "page_size, last_page_len"),
    word(r"\bmost_[a-z]\w*|[.>]longest\b", "max_*, max_seq_len", CODE),
    word(r"\bdim_[kv]\b", "head_dim_qk, head_dim_vo"),
    word(r"\bsoftcap\b", "logits_soft_cap"),
    word(r"\bkeys<", "kv_view"),
    word(r"\bpropos(e|es|ed|als?)\b|\bpropose_\w+", "append_draft, accept, max_draft_tokens"),
    word(r"\bstatus_(taken_twice|not_taken)\b", "status_layer_repeated, status_layer_skipped"),
    part(r"contest(s|ed|ants?)?|newcomers?", "top-k update, candidate"),
    word(r"\blosers?\b|\brivals?\b|\bgives? way\b|\bgiv(en|ing) way\b", "evicted, next victims, is evicted"),
    word(r"\bmortals?\b|\bmortal_\w+", "expirable_entries"),
    word(
        r"\bdeciders?\b|\blone_group\b|\bsettle(s|d|_\w+)?\b",
        "leader block, single_thread_group, resolve_eviction, fix_ties",
    ),
    word(r"\bdual_\w+", "paged_*", CUDA),
    word(r"\b(struct|class)\s+\w+_(problem|launch|arguments|call)\b", "*_params, *_plan", CUDA),
    part(r"born|births?|dies|deaths?", "begin, expiry, visible interval"),
    part(r"life|lives", "visible interval", r"^include/.*/attention/cuda/"),
    part(r"walk(s|ed|ing)?|sweep(s|ing)?", "scan, chunk_states, fused_states_outputs, chunk_outputs"),
    # Identifiers: a comment may say what is kept.
    word(
        r"^[^/]*(?<![A-Za-z])(kept|carr(y|ies|ied)|frames?)(?![A-Za-z])|^\s*/// (In|Out)\b.*\bframes\b",
        "state_decay, cross_chunk, chunk_stats",
        r"^include/.*/mlstm/.*\.cuh$",
    ),
    word(r"\bmlstm_(reads|ends|frames|carry|walk|sweep)\w*", "the chunkwise form's words (kernel_*.cuh)"),
    word(r"\bheavy\b(?![- ]?hitter)", "ref_token", CUDA),
    word(r"\brho\b", "ref_value", CUDA),
    word(r"\bnormalisers?\b|\bnormaliser_\w+|\brow_fold\w*|\bband_\w+", "lse, row_reduce, qk_reduce"),
    part(r"mend(s|ed|ing)?", "fix_nonfinite, fix"),
    part(r"anchor(s|ed)?", "cutoff_checkpoints, reference", r"^include/"),
    word(
        r"\bsurvivors?(_\w+)?\b|\barrivals?\b",
        "decayed_top_k, cutoff_prefix, cutoff_checkpoints",
    ),
    word(r"\bscore_(many|cluster|block)\b", "mlstm_decode_batched, mlstm_decode_cluster, decode_scorer"),
    part(r"lend(s|ing)?|lent|room", "bind, provided, workspace or capacity"),
    part(r"cards?", "GPU"),
    word(r"\blook-ups?\b", "retrieval queries, retrieval accuracy"),
    word(r"\bHead(Rule|Values)\b", "HeadParams, PerHead<T>"),
    word(r"\bengines?\.md\b", "integration.md, integration-cuda.md"),
    word(
        r"\b\w*(initial|normal|standard|optim|serial|quant|random|synchron|minim|maxim|organ|general"
        r"|recogn|vector|factor|real)is"
        r"(e|es|ed|er|ers|ing|ation|ations)\b",
        "American spelling: -ize",
    ),
    word(
        r"(?i)\b(behaviours?|colours?|neighbours?|neighbouring|licences?|centred?|favours?|analyse[ds]?"
        r"|artefacts?|honours?)\b",
        "American spelling",
    ),
)

CARD = r"(?<![A-Za-z])(?:cards?"

# (word's pattern begins so, path, line): what may stand.
ALLOWED = (
    # A model's page is its card.
    (CARD, r"", r"[Mm]odel[ _]card"),
    (CARD, r"tools/train_tiny", r"--card\b|\bcard\(|for the card|args\.card"),
    # A command as it was recorded with its result.
    (CARD, r"docs/results-", r"--card-only"),
    # Keys of result files, and the raw file that they are read from.
    (CARD, r"tools/", r"[\"']cards?[\"']|card\.txt|\bcard (=|or\b)"),
    # ScoreBackward::kept, whether the workspace has what the forward pass left there.
    (r"^[^/]*(?<![A-Za-z])(kept", r"", r"\bcall\.kept\b"),
    # Text in the metadata of a file that is compared by its hash.
    (r"\b\w*(initial", r"tools/get_smollm2", r"dequantised"),
    # The page's space for lines of code.
    (r"(?<![A-Za-z])(?:lend", r"docs/site/site\.css", r"room for"),
    # score_time::on_arrival: when a scorer runs. A key evicted on arrival, tokens in the order of arrival.
    (r"\bsurvivors?", r"", r"(?i)\b(on|of) arrival\b"),
    # Blocks and threads arrive at a barrier (CUDA's word); `arrivals` counts the blocks that have arrived.
    (r"\bsurvivors?", r"include/kvpolicy/(caches/|cuda/primitives/async)", r"\barrivals?\b"),
    # score_block(): BlockScorer's member that scores a block of tokens.
    (r"\bscore_", r"", r"\bscore_block\b"),
    # The slots of a top-k set.
    (r"\bslots\b", r"include/kvpolicy/caches/", r"//.*\b(top-k|free|get) slots\b"),
    # Keys of safetensors metadata, and a label that stands in result files.
    (r"\bdim_", r"examples/apps/support/scorers\.cpp|tests/examples/test_gates\.cpp", r"\\?\"dim_[kv]\\?\""),
    (r"\bdim_", r"python/kvpolicy/files\.py", r"\"dim_k\", \"dim_v\""),
    (r"\bdim_", r"docs/training(/files)?\.md", r"`dim_k`, `dim_v`"),
    (r"\bsoftcap\b", r"examples/apps/support/scorers\.cpp", r"\"mlstm: .* softcap "),
    # An argument of transformers.
    (r"\bsoftcap\b", r"python/kvpolicy/(transformers|training)\.py", r"_SOFT_CAP = "),
    # The option of train_scorer for gate_softcap, the soft cap of an mLSTM's gates.
    (r"\bsoftcap\b", r"examples/train_scorer/|tests/examples/", r"--softcap\b"),
)


def stems(pattern):
    """Letters of which every match of a pattern has some, or None: to leave out what cannot match, fast."""
    source = pattern.pattern
    if pattern.flags & re.I:
        return None
    while (inner := re.sub(r"\([^()]*\)[?*+]?|\[[^\]]*\][?*+]?", " ", source)) != source:
        source = inner
    source = re.sub(r"\\.[?*+]?|\w\?", " ", source)
    found = [max(re.findall(r"\w+", part), key=len, default="") for part in source.split("|")]
    return found if all(len(stem) > 2 for stem in found) else None


def findings(tree):
    allowed = [(start, re.compile(path), re.compile(line)) for start, path, line in ALLOWED]
    found = []
    for name, text in tree.items():
        if not SCOPE.match(name) or NOT_READ.match(name):
            continue
        words = [
            entry
            for entry in WORDS
            if entry.files.search(name)
            and (STEMS[entry] is None or any(stem in text for stem in STEMS[entry]))
        ]
        if not words:
            continue
        anything = re.compile(
            "|".join(f"(?:{entry.pattern.pattern.removeprefix('(?i)')})" for entry in words), re.I
        )
        for number, line in enumerate(text.split("\n"), 1):
            if not anything.search(line):
                continue
            for entry in words:
                match = entry.pattern.search(line)
                if match and not any(
                    entry.pattern.pattern.startswith(start) and path.search(name) and here.search(line)
                    for start, path, here in allowed
                ):
                    found.append(f"{name}:{number}: {match.group()}: write {entry.instead}")
    return found


STEMS = {entry: stems(entry.pattern) for entry in WORDS}


def self_test():
    house.expect(stems(re.compile(r"\b(a|b_)?cut\b|[.>]fo\w+, bars?\w*")) == ["cut", "bar"], "stems")
    house.expect(stems(re.compile(r"\bcut\b|\b\w+_(a|b)\b")) is None, "stems of a pattern without letters")

    def finds(count, name, line):
        found = findings({name: line})
        house.expect(len(found) == count, f"{line} in {name}: {found}")

    finds(1, "include/kvpolicy/caches/cuda/a.cuh", "int page_rows;")
    finds(1, "docs/a.md", "on one card")
    finds(1, "tools/a", "self.o.card_only, '--card-only'")
    finds(1, "examples/a.cpp", "make_room();")
    finds(1, "tests/gpu/a.cu", "the walks go in segments")
    finds(1, "include/kvpolicy/scorers/cuda/mlstm/a.cuh", "params.kept[row] = 0.0f;  // kept")
    finds(0, "include/kvpolicy/scorers/cuda/mlstm/a.cuh", "/// Features are kept in F columns")
    finds(1, "include/kvpolicy/attention/cuda/a.cuh", "masked_by_births = 1")
    finds(0, "include/kvpolicy/attention/host/a.hpp", "_mm256_blend_ps")
    finds(0, "docs/a.md", "its model card")
    finds(0, "docs/a.md", "the wildcards of a discarded page")
    finds(1, "docs/a.md", "the behaviour")
    finds(1, "tests/unit/a.cpp", "standardised")
    finds(0, "benchmarks/notes/a.md", "on one card")
    finds(0, "tests/house/words.py", "card")


if __name__ == "__main__":
    house.main("words", {"words": findings}, self_test)
