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


class Text(torch.utils.data.Dataset):
    """Samples of `tokens` tokens, cut from a text at random places.

    text       bytes
    tokenizer  of transformers; None for a model whose tokens are bytes
    name       of the text, for its errors
    pairs      retrieval queries woven into each sample of bytes: lines "@AB:1234" in its first 60%, and the
               same lines in random order in its last quarter

    A sample is (tokens [tokens] int64, weights [tokens] float32): weights[t] is what token t counts in the
    loss; the digits of a repeated line count ANSWER_WEIGHT, those of its first appearance 0."""

    def __init__(self, text, tokens, *, tokenizer=None, pairs=0, seed=1, samples=1 << 40, name="a text"):
        if pairs and tokenizer is not None:
            raise ValueError(f"pairs: {pairs} is not allowed with a tokenizer; it must be 0")
        if 4 * pairs * LINE > tokens:
            raise ValueError(
                f"pairs: {pairs} is not allowed; {tokens} tokens hold at most {tokens // (4 * LINE)}"
            )
        if tokenizer is None:
            empty = torch.empty(0, dtype=torch.uint8)
            self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else empty
        else:
            ids = tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"]
            self.ids = torch.tensor(ids, dtype=torch.int32)
        if len(self.ids) < tokens:
            raise ValueError(
                f"text: {name} of {len(self.ids)} tokens is not allowed; it must have {tokens}, one sample's"
            )
        self.tokens, self.pairs, self.seed, self.samples = tokens, pairs, seed, samples

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
        body = self.tokens - 2 * self.pairs * LINE
        at = draw.randrange(len(self.ids) - body + 1)
        ids = self.ids[at : at + body].long()
        return (_woven(ids, self.pairs, draw, weights) if self.pairs else ids), weights


def _woven(ids, pairs, draw, weights):
    """Text with the lines of retrieval queries; writes their weights."""
    length = len(weights)
    keys = draw.sample(range(KEYS), pairs)
    lines = [b"@%c%c:%04d\n" % (65 + key // 26, 65 + key % 26, draw.randrange(10**DIGITS)) for key in keys]
    early = sorted(draw.randrange(int(0.6 * length) - pairs * LINE) for _ in lines)
    late = sorted(draw.randrange(int(0.75 * length) - pairs * LINE, len(ids) + 1) for _ in lines)
    parts, used, at = [], 0, 0
    for number, (place, line) in enumerate(zip(early + late, lines + draw.sample(lines, pairs))):
        parts += [ids[used:place], torch.tensor(list(line))]
        at += place - used
        asked = number >= pairs
        weights[at : at + LINE] = 0.0 if not asked else 1.0
        weights[at + KEY : at + KEY + DIGITS] = ANSWER_WEIGHT if asked else 0.0
        at, used = at + LINE, place
    return torch.cat((*parts, ids[used:]))


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
