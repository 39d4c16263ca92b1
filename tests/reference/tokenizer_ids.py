#!/usr/bin/env python3
"""Token ids from the PyPI package `tokenizers`, an implementation that shares nothing with examples/llama.

    tokenizer_ids.py small TOKENIZER.json IDS.json   trains a tokenizer of 512 tokens, writes it with its ids
    tokenizer_ids.py model TOKENIZER.json IDS.json   ids from an existing tokenizer
"""
import json
import sys

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

STRINGS = [
    "",
    "Hello, world!",
    "  leading and trailing spaces   ",
    "a  b   c\t\td\n\n\n e \n f\r\n\u00a0g\u3000h\u2028i",
    "I'll say it's what they've done, we're sure; I'm told he'd DON'T 'S 'LL",
    "In 2024, 1234567 people paid $3.14159 (or 50%) on 01/02/03; x²+½=Ⅷ and ١٢٣",
    "def f(x):\n    return {'a': x[0]**2}  # comment\n\tpass\n",
    "naïve café résumé Ünïcödé ŁÓDŹ ß ﬁ",
    "e\u0301 vs é, कि नमस्ते, ก็ไทย, עִבְרִית",
    "中文字符,日本語のテキスト、한국어 텍스트",
    "👍🏽 👨‍👩‍👧‍👦 🇫🇷 ☃︎ ∑∫√ → ≠",
    "https://example.org/a?b=c&d=%20e#f_g-h",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start <|im_end|",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbb!!!!!!!!!!!!??????",
    "The quick brown fox jumps over the lazy dog. " * 2,
    "\x00\x01\x1b[31m\x7f \x85 \u200b \ufeff \ufffd \U0010ffff",
    " 's 't '\u2019s '' 'rest 've'll",
]


def pre_tokenizer():
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


def train():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(s, special=True) for s in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=specials, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(STRINGS * 3, trainer)
    return tokenizer


def main(arguments):
    if len(arguments) != 3 or arguments[0] not in ("small", "model"):
        sys.exit(__doc__)
    if arguments[0] == "small":
        train().save(arguments[1], pretty=False)
    tokenizer = Tokenizer.from_file(arguments[1])
    cases = []
    for text in STRINGS:
        tokenizer.encode_special_tokens = False
        parsed = tokenizer.encode(text, add_special_tokens=False).ids
        tokenizer.encode_special_tokens = True
        cases.append(dict(text=text, parsed=parsed,
                          spelled=tokenizer.encode(text, add_special_tokens=False).ids))
    with open(arguments[2], "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1:])
