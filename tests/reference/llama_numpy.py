#!/usr/bin/env python3
"""The Llama architecture in NumPy, float64, written to be read.

Independent of the engine under examples/ and of PyTorch: RMSNorm, RoPE on
halves, grouped-query attention, SwiGLU.  Reads a folder with config.json and
model.safetensors under Hugging Face's names (BF16, F16, F32 or F64).

    llama_numpy.py DIR --eval        bits per byte and recall on eval.bin
    llama_numpy.py DIR --tokens 1,2  logits of the last position
"""

import argparse
import json
import pathlib
import struct
import sys

import numpy as np


def read_safetensors(path):
    """{name: float32 array}; bfloat16 is widened, which is exact."""
    data = pathlib.Path(path).read_bytes()
    size, = struct.unpack_from('<Q', data)
    header = json.loads(data[8:8 + size])
    tensors = {}
    for name, entry in header.items():
        if name == '__metadata__':
            continue
        begin, end = (8 + size + at for at in entry['data_offsets'])
        raw, kind = data[begin:end], entry['dtype']
        if kind == 'BF16':
            bits = np.frombuffer(raw, '<u2').astype(np.uint32) << 16
            values = bits.view(np.float32)
        else:
            values = np.frombuffer(
                raw, {'F16': '<f2', 'F32': '<f4', 'F64': '<f8'}[kind])
        tensors[name] = values.reshape(entry['shape'])
    return tensors


class Llama:
    def __init__(self, folder):
        folder = pathlib.Path(folder)
        self.config = json.loads((folder / 'config.json').read_text())
        self.weights = {
            name: value.astype(np.float64) for name, value
            in read_safetensors(folder / 'model.safetensors').items()}

    def norm(self, name, x):
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return (x / np.sqrt(mean + self.config['rms_norm_eps'])
                * self.weights[name])

    def linear(self, name, x):
        return x @ self.weights[name].T

    def attention(self, prefix, x, block=512):
        c = self.config
        length = x.shape[0]
        heads, kv_heads = c['num_attention_heads'], c['num_key_value_heads']
        head_dim = c.get('head_dim') or c['hidden_size'] // heads

        def split(name, count):     # [heads, length, head_dim]
            y = self.linear(f'{prefix}.{name}.weight', x)
            return y.reshape(length, count, head_dim).transpose(1, 0, 2)

        # Dimension i turns together with dimension i + head_dim / 2.
        half = head_dim // 2
        theta = float(c.get('rope_theta', 10000.0))
        angle = np.outer(np.arange(length), theta ** (-np.arange(half) / half))
        cos, sin = np.cos(angle), np.sin(angle)

        def rope(y):
            a, b = y[..., :half], y[..., half:]
            return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

        q, k = rope(split('q_proj', heads)), rope(split('k_proj', kv_heads))
        v = split('v_proj', kv_heads)
        out = np.empty((length, heads, head_dim))
        for h in range(heads):
            kv = h // (heads // kv_heads)
            # In blocks of queries, so that long sequences fit in memory.
            for first in range(0, length, block):
                last = min(first + block, length)
                logits = q[h, first:last] @ k[kv, :last].T / np.sqrt(head_dim)
                future = (np.arange(last)[None, :]
                          > np.arange(first, last)[:, None])
                logits[future] = -np.inf
                logits -= logits.max(axis=-1, keepdims=True)
                p = np.exp(logits)
                p /= p.sum(axis=-1, keepdims=True)
                out[first:last, h] = p @ v[kv, :last]
        return self.linear(f'{prefix}.o_proj.weight',
                           out.reshape(length, heads * head_dim))

    def mlp(self, prefix, x):
        gate = self.linear(f'{prefix}.gate_proj.weight', x)
        up = self.linear(f'{prefix}.up_proj.weight', x)
        silu = gate / (1.0 + np.exp(-gate))
        return self.linear(f'{prefix}.down_proj.weight', silu * up)

    def logits(self, tokens):
        """[length, vocabulary] for a sequence of token ids."""
        x = self.weights['model.embed_tokens.weight'][np.asarray(tokens)]
        for i in range(self.config['num_hidden_layers']):
            p = f'model.layers.{i}'
            x = x + self.attention(f'{p}.self_attn', self.norm(
                f'{p}.input_layernorm.weight', x))
            x = x + self.mlp(f'{p}.mlp', self.norm(
                f'{p}.post_attention_layernorm.weight', x))
        x = self.norm('model.norm.weight', x)
        tied = self.config.get('tie_word_embeddings', False)
        return self.linear('model.embed_tokens.weight' if tied
                           else 'lm_head.weight', x)


def log_softmax(logits):
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def evaluate(model, folder, sequences):
    """Bits per byte and recall on the first sequences of eval.bin."""
    folder = pathlib.Path(folder)
    description = json.loads((folder / 'eval.json').read_text())
    length, digits = description['length'], description['digits']
    data = np.frombuffer((folder / 'eval.bin').read_bytes(), np.uint8)
    data = data.reshape(description['sequences'], length)
    bits, count, exact, asked = 0.0, 0, 0, 0
    for i in range(sequences or description['sequences']):
        logits = model.logits(data[i])[:-1]
        target = data[i, 1:].astype(np.int64)
        cost = -log_softmax(logits)[np.arange(length - 1), target] / np.log(2)
        text = np.ones(length, bool)
        for begin, end in description['lines'][i]:
            text[begin:end] = False
        bits += cost[text[1:]].sum()
        count += int(text[1:].sum())
        right = logits.argmax(axis=-1) == target
        for answer in description['answers'][i]:
            exact += bool(right[answer - 1:answer - 1 + digits].all())
            asked += 1
    return {'bits_per_byte': bits / count, 'recall_exact': exact / asked}


def main():
    parser = argparse.ArgumentParser(
        description='Run a Llama model in NumPy, float64.')
    parser.add_argument('folder', type=pathlib.Path)
    parser.add_argument('--tokens', help='token ids, with commas between')
    parser.add_argument('--eval', action='store_true')
    parser.add_argument('--sequences', type=int, default=0,
                        help='of eval.bin; 0 is all')
    args = parser.parse_args()
    model = Llama(args.folder)
    if args.eval:
        print(json.dumps(evaluate(model, args.folder, args.sequences)))
    if args.tokens:
        tokens = [int(t) for t in args.tokens.split(',')]
        print(json.dumps(model.logits(tokens)[-1].tolist()))
    return 0


if __name__ == '__main__':
    sys.exit(main())
