"""Samples of the training programs: of bytes, and of a tokenizer's tokens."""

import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from training_cases import program
from transformers import PreTrainedTokenizerFast

TEXT = "".join(f"Line {i} of {i * i} says that a window of {i % 7} keys moves.\n" for i in range(3000))
LINE = re.compile(r"@[A-Z]{2}:\d{4}\n")


def tokenizer_of(digits):
    """Byte-level BPE of 400 tokens, with a token per digit, or with tokens of several."""
    made = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made)


TOKENIZERS = {
    "bytes": lambda: None,
    "digits": lambda: tokenizer_of(True),
    "numbers": lambda: tokenizer_of(False),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_retrieval_queries_among_tokens(name):
    """Each line stands once in the first 60%, and once in the last quarter, where its digits weigh 10; the
    text between is the text's."""
    tokenizer, tokens, pairs = TOKENIZERS[name](), 800, 12
    samples = program("data").Text(TEXT.encode(), tokens, tokenizer=tokenizer, pairs=pairs, seed=3)

    def text_of(ids):
        return bytes(ids.tolist()).decode() if tokenizer is None else tokenizer.decode(ids)

    for index in range(4):
        ids, weights = samples[index]
        assert ids.shape == weights.shape == (tokens,) and ids.dtype == torch.int64
        found = LINE.findall(text_of(ids))
        assert len(found) == 2 * pairs and sorted(found[:pairs]) == sorted(found[pairs:])
        assert len(LINE.findall(text_of(ids[: int(0.6 * tokens)]))) == pairs
        assert len(LINE.findall(text_of(ids[int(0.75 * tokens) :]))) == pairs
        asked = weights == 10.0
        assert text_of(ids[asked]) == "".join(line[4:8] for line in found[pairs:])
        assert text_of(ids[weights == 0.0]) == "".join(found[:pairs])
        # without its lines the sample is one piece of the text
        rest = LINE.sub("", text_of(ids))
        assert len(rest) > tokens // 2 and rest in TEXT
        again = samples[index]
        assert torch.equal(again[0], ids) and torch.equal(again[1], weights)


def test_a_text_with_few_tokens():
    """Rows that are one token each need more text than most."""
    tokenizer = tokenizer_of(True)
    tokenizer.add_tokens(["x" * 100])
    samples = program("data").Text(b"x" * 100_000, 200, tokenizer=tokenizer)
    ids, weights = samples[0]
    assert len(ids) == 200 and (weights == 1.0).all()
    with pytest.raises(ValueError, match="text: a text of 1000 tokens is not allowed; it must have 1200"):
        program("data").Text(b"x" * 100_000, 1200, tokenizer=tokenizer)[0]


def test_texts_that_are_too_short():
    for tokenizer in (None, tokenizer_of(True)):
        with pytest.raises(ValueError, match="text: a text of 3 tokens is not allowed; it must have 64"):
            program("data").Text(b"\x01\x02\x03", 64, tokenizer=tokenizer)
        with pytest.raises(ValueError, match="pairs: 2 is not allowed; 64 tokens hold at most 1"):
            program("data").Text(TEXT.encode(), 64, tokenizer=tokenizer, pairs=2)
