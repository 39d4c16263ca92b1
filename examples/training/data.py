"""Samples of training: text with retrieval queries, and generated tasks. Sample i is a function of the seed
and of i alone, so a run that resumes sees what an uninterrupted one would have seen."""

import hashlib
import lzma
import pathlib
import random
import tarfile

import torch

LINE, KEY, DIGITS = 9, 4, 4  # "@AB:1234\n": the first digit is at KEY
KEYS = 26 * 26
ANSWER_WEIGHT = 10.0
BYTES = 8  # of text that a tokenizer is given per token: twice what it needs for most texts


class Text(torch.utils.data.Dataset):
    """Samples of `tokens` tokens, cut from a text at random places.

    text       bytes
    tokenizer  of transformers, which works on a sample when it is read; None for a model whose tokens are
               bytes
    name       of the text, for its errors
    pairs      retrieval queries woven into each sample: lines "@AB:1234" in its first 60%, and the same lines
               in random order in its last quarter, at random places between tokens

    A sample is (tokens [tokens] int64, weights [tokens] float32): weights[t] is what token t counts in the
    loss; the digits of a repeated line count ANSWER_WEIGHT, the tokens of its first appearance 0."""

    def __init__(self, text, tokens, *, tokenizer=None, pairs=0, seed=1, samples=1 << 40, name="a text"):
        if 4 * pairs * LINE > tokens:
            raise ValueError(
                f"pairs: {pairs} is not allowed; {tokens} tokens hold at most {tokens // (4 * LINE)}"
            )
        empty = torch.empty(0, dtype=torch.uint8)
        self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else empty  # bytes
        self.tokenizer, self.name = tokenizer, name
        self.tokens, self.pairs, self.seed, self.samples = tokens, pairs, seed, samples
        if len(text) < (1 if tokenizer is None else BYTES) * tokens:
            self._check_length(len(self._encode(self.ids)))

    def fingerprint(self):
        """A hash of the text, by which a checkpoint knows it."""
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()[:16]

    def __getstate__(self):
        """For a worker of a DataLoader: the text as an array, since tensors go through /dev/shm, which may be
        smaller than a text."""
        return {**self.__dict__, "ids": self.ids.numpy()}

    def __setstate__(self, state):
        self.__dict__.update(state, ids=torch.from_numpy(state["ids"]))

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        draw = random.Random(f"{self.seed} {index}")
        weights = torch.ones(self.tokens)
        least = LINE if self.tokenizer is None else 1  # tokens of a line
        ids = self._cut(self.tokens - 2 * self.pairs * least, draw)
        return (_woven(ids, self.pairs, self.tokenizer, draw, weights) if self.pairs else ids), weights

    def _cut(self, count, draw):
        """`count` tokens from a random place of the text on."""
        size = count if self.tokenizer is None else BYTES * count
        at = draw.randrange(max(1, len(self.ids) - size + 1))
        ids = self._encode(self.ids[at : at + size])
        while len(ids) < count:  # of a text with few tokens, such as rows of spaces
            self._check_length(len(ids), at == 0 and size >= len(self.ids))
            size *= 2
            at = max(0, min(at, len(self.ids) - size))
            ids = self._encode(self.ids[at : at + size])
        return ids[:count]

    def _encode(self, part):
        """The tokens of bytes [n] uint8, int64."""
        if self.tokenizer is None:
            return part.long()
        text = bytes(part.numpy()).decode(errors="replace")
        return torch.tensor(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _check_length(self, found, whole=True):
        if whole and found < self.tokens:
            raise ValueError(
                f"text: {self.name} of {found} tokens is not allowed; it must have {self.tokens}, one "
                "sample's"
            )


def _woven(ids, pairs, tokenizer, draw, weights):
    """The first tokens of a text with the lines of retrieval queries among them; writes their weights."""
    length = len(weights)
    keys = draw.sample(range(KEYS), pairs)
    names = [chr(65 + key // 26) + chr(65 + key % 26) for key in keys]
    lines = [f"@{name}:{draw.randrange(10**DIGITS):04d}\n" for name in names]
    lines = _lines_of(lines, tokenizer)
    in_lines = sum(len(line) for line, _ in lines)
    ids = ids[: length - 2 * in_lines]
    early = sorted(draw.randrange(int(0.6 * length) - in_lines) for _ in lines)
    late = sorted(draw.randrange(int(0.75 * length) - in_lines, len(ids) + 1) for _ in lines)
    parts, used, at = [], 0, 0
    for number, (place, (line, digits)) in enumerate(zip(early + late, lines + draw.sample(lines, pairs))):
        parts += [ids[used:place], line]
        at += place - used
        asked = torch.where(digits, ANSWER_WEIGHT, 1.0)
        weights[at : at + len(line)] = asked if number >= pairs else 0.0
        at, used = at + len(line), place
    return torch.cat((*parts, ids[used:]))


def _lines_of(lines, tokenizer):
    """(tokens int64, which of them are digits of the value bool) of each line."""
    if tokenizer is None:
        ids = [list(line.encode()) for line in lines]
        ends = [range(1, LINE + 1)] * len(lines)
    else:
        found = tokenizer(lines, add_special_tokens=False, return_offsets_mapping=True)
        ids = found["input_ids"]
        ends = [[end for _, end in offsets] for offsets in found["offset_mapping"]]
    value = range(KEY + 1, KEY + DIGITS + 1)
    return [(torch.tensor(one), torch.tensor([end in value for end in last])) for one, last in zip(ids, ends)]


class Recall(torch.utils.data.Dataset):
    """Associative recall: pairs of a key and a value among filler, then keys of these, whose values count in
    the loss. Tokens: 0 asks, 1 to `symbols` are keys, the next `symbols` values, the rest of `vocabulary`
    filler."""

    def __init__(self, tokens, *, pairs=8, symbols=64, vocabulary=256, seed=1, samples=1 << 40):
        if 6 * pairs > tokens or pairs > symbols or 2 * symbols + 2 > vocabulary:
            raise ValueError(
                f"tokens, pairs, symbols, vocabulary: {tokens}, {pairs}, {symbols}, {vocabulary} are not "
                "allowed; 6 pairs must fit in tokens, pairs in symbols and 2 symbols + 2 in vocabulary"
            )
        self.tokens, self.pairs, self.symbols, self.vocabulary = tokens, pairs, symbols, vocabulary
        self.seed, self.samples = seed, samples

    def fingerprint(self):
        return "recall"  # the options say all

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        draw = random.Random(f"{self.seed} {index}")
        keys = draw.sample(range(1, self.symbols + 1), self.pairs)
        values = [draw.randint(self.symbols + 1, 2 * self.symbols) for _ in keys]
        filler = self.tokens - 5 * self.pairs
        places = sorted(draw.randrange(filler + 1) for _ in keys)
        ids, at = [], 0
        for key, value, place in zip(keys, values, places):
            ids += [draw.randrange(2 * self.symbols + 1, self.vocabulary) for _ in range(place - at)]
            ids, at = ids + [key, value], place
        ids += [draw.randrange(2 * self.symbols + 1, self.vocabulary) for _ in range(filler - at)]
        weights = torch.zeros(self.tokens)
        for key, value in draw.sample(list(zip(keys, values)), self.pairs):
            weights[len(ids) + 2] = 1.0
            ids += [0, key, value]
        return torch.tensor(ids), weights


class Palindrome(torch.utils.data.Dataset):
    """A palindrome with a gap (SP-KV, G): symbols, a gap of filler, and the symbols in reverse order,
    which count in the loss. Tokens: 0 filler, 1 asks, the rest of `vocabulary` symbols."""

    def __init__(self, tokens, *, gap=None, vocabulary=64, seed=1, samples=1 << 40):
        self.gap = tokens // 2 if gap is None else gap
        self.length = (tokens - self.gap - 1) // 2
        if self.length < 1:
            raise ValueError(f"gap: {self.gap} is not allowed; it must be at most {tokens - 3}")
        self.tokens, self.vocabulary, self.seed, self.samples = tokens, vocabulary, seed, samples

    def fingerprint(self):
        return "palindrome"  # the options say all

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        draw = random.Random(f"{self.seed} {index}")
        symbols = [draw.randrange(2, self.vocabulary) for _ in range(self.length)]
        gap = self.tokens - 2 * self.length - 1
        weights = torch.zeros(self.tokens)
        weights[-self.length :] = 1.0
        return torch.tensor(symbols + [0] * gap + [1] + symbols[::-1]), weights


def read_text(path, name):
    """The bytes of a text file, or of `name` in the archive that tools/make_corpus writes."""
    path = pathlib.Path(path)
    try:
        if path.suffix != ".xz":
            return path.read_bytes()
        with tarfile.open(path, "r:xz") as archive:
            return archive.extractfile(name).read()
    except (OSError, EOFError, KeyError, lzma.LZMAError, tarfile.TarError) as error:
        raise FileNotFoundError(
            f"text: {path} is not allowed; it must be a text, or a corpus.tar.xz: {error}"
        ) from error
