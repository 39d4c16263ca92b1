"""What a model is evaluated on: sequences of tokens, with retrieval queries where the text has some."""

import dataclasses
import json
import math
import pathlib

import torch


@dataclasses.dataclass
class Sample:
    """Sequences of one length.

    tokens   [sequences, length] int64
    sizes    [sequences, length]: bytes of text per token
    is_text  [sequences, length] bool: tokens that count as text; those of retrieval queries do not
    answers  per sequence the positions of first digits of retrieval queries
    digits   of an answer, one token each
    """

    tokens: torch.Tensor
    sizes: torch.Tensor
    is_text: torch.Tensor
    answers: list
    digits: int = 4

    @property
    def length(self):
        return self.tokens.shape[1]

    def first(self, sequences=None, tokens=None):
        """The first tokens of the first sequences."""
        if tokens is not None and not 2 <= tokens <= self.length:
            raise ValueError(
                f"tokens: {tokens} is not allowed; it must be 2 to {self.length}, the sequences' length"
            )
        if sequences is not None and sequences < 1:
            raise ValueError(f"sequences: {sequences} is not allowed; it must be 1 or more")
        parts = [part[:sequences, :tokens] for part in (self.tokens, self.sizes, self.is_text)]
        end = parts[0].shape[1]
        answers = [[at for at in one if at + self.digits <= end] for one in self.answers[:sequences]]
        return Sample(*parts, answers, self.digits)

    @classmethod
    def from_text(cls, text, tokenizer, tokens, sequences=None):
        """Text (str or bytes), cut into sequences of `tokens` tokens. tokenizer: of transformers, or None for
        a model whose tokens are bytes."""
        ids, sizes = _encode(text, tokenizer)
        if tokens < 2:
            raise ValueError(f"tokens: {tokens} is not allowed; it must be 2 or more")
        number = min(len(ids) // tokens, sequences or len(ids))
        if number < 1:
            raise ValueError(f"text: {len(ids)} tokens are not allowed; it must have {tokens} or more")
        shape, used = (number, tokens), number * tokens
        return cls(
            torch.tensor(ids[:used]).view(shape),
            torch.tensor(sizes[:used]).view(shape),
            torch.ones(shape, dtype=torch.bool),
            [[] for _ in range(number)],
        )

    @classmethod
    def held_out(cls, folder, tokenizer=None, joined=2):
        """eval.bin and eval.json of the byte model's folder (examples/models/byte-llama). With a tokenizer
        every `joined` sequences of bytes are read as one, and cut to the shortest: an answer counts where
        each of its digits is a token, and a token that reaches into a query's line is no text."""
        folder = pathlib.Path(folder)
        try:
            facts = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
            data = (folder / "eval.bin").read_bytes()
            count, length, digits = facts["sequences"], facts["length"], facts["digits"]
            answers, lines = facts["answers"], facts["lines"]
        except OSError as error:
            raise FileNotFoundError(
                f"held_out: {folder} is not allowed; it must be a folder with eval.bin and eval.json"
            ) from error
        except (ValueError, KeyError) as error:
            raise ValueError(f"held_out: {folder / 'eval.json'} is damaged: {error}") from None
        if len(data) < count * length or len(answers) != count or len(lines) != count:
            raise ValueError(
                f"held_out: {folder / 'eval.bin'} of {len(data)} bytes is not allowed; it must have {count} "
                f"sequences of {length}, with answers and lines"
            )
        if tokenizer is None:
            joined = 1
        found = [
            _joined(data, length, digits, answers, lines, range(at, at + joined), tokenizer)
            for at in range(0, count - joined + 1, joined)
        ]
        end = min((len(one[0]) for one in found), default=0)
        if end < 2:
            raise ValueError(f"joined: {joined} is not allowed; it must be 1 to {count}, the sequences")
        tensors = [torch.tensor([one[i][:end] for one in found]) for i in range(3)]
        kept = [[at for at in one[3] if at + digits <= end] for one in found]
        return cls(*tensors, kept, digits)


def _encode(text, tokenizer):
    """Tokens, and the bytes of each. A character of several tokens belongs to the first that ends it."""
    if tokenizer is None:
        data = text.encode() if isinstance(text, str) else text
        return list(data), [1] * len(data)
    text = text if isinstance(text, str) else text.decode(errors="replace")
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends, at = [0], 0  # bytes before each character
    for character in text:
        at += len(character.encode())
        ends.append(at)
    sizes, before = [], 0
    for _, end in found["offset_mapping"]:
        after = max(before, ends[end])
        sizes.append(after - before)
        before = after
    return list(found["input_ids"]), sizes


def _joined(data, length, digits, answers, lines, numbers, tokenizer):
    """Tokens, sizes, is_text and answers of sequences of bytes that are read as one."""
    text = b"".join(data[i * length : (i + 1) * length] for i in numbers)
    in_line, asked = [False] * len(text), []
    for place, i in enumerate(numbers):
        base = place * length
        for begin, end in lines[i]:
            in_line[base + begin : base + end] = [True] * (end - begin)
        asked += [base + at for at in answers[i]]
    ids, sizes = _encode(text, tokenizer)
    is_text, token_at, at = [], {}, 0
    for token, size in enumerate(sizes):
        if size == 1:
            token_at[at] = token
        is_text.append(not any(in_line[at : at + size]))
        at += size
    kept = []
    for byte in asked:
        first = token_at.get(byte, 0)
        if first >= 1 and all(token_at.get(byte + d) == first + d for d in range(digits)):
            kept.append(first)
    return ids, sizes, is_text, kept


class Score:
    """Sums over sequences: bits of text, and digits of answers that were the most likely token."""

    def __init__(self):
        self.nll, self.bytes, self.tokens = 0.0, 0, 0
        self.digits_right = self.digits = self.whole = self.first = self.answers = 0

    def add(self, sample, sequence, nll, right):
        """nll, right [length - 1] of the tokens after the first: natural log, and whether each was the most
        likely one."""
        is_text = sample.is_text[sequence, 1:]
        self.nll += nll[is_text].sum().item()
        self.bytes += sample.sizes[sequence, 1:][is_text].sum().item()
        self.tokens += is_text.sum().item()
        for at in sample.answers[sequence]:
            digits = right[at - 1 : at - 1 + sample.digits]
            self.digits_right += digits.sum().item()
            self.digits += sample.digits
            self.first += bool(digits[0])
            self.whole += bool(digits.all())
            self.answers += 1

    def result(self):
        def share(of, among):
            return of / among if among else None

        return {
            "bits_per_byte": share(self.nll / math.log(2), self.bytes),
            "nll_per_token": share(self.nll, self.tokens),
            "recall_exact": share(self.whole, self.answers),
            "recall_first_digit": share(self.first, self.answers),
            "recall_digits": share(self.digits_right, self.digits),
            "lookups": self.answers,
        }
