#!/usr/bin/env python3
"""Tests of tools/train_tiny and of the NumPy reference against each other.

Needs PyTorch and NumPy for most tests; without them those are skipped.
"""

import importlib.machinery
import importlib.util
import json
import pathlib
import random
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.dont_write_bytecode = True


def load(name, path):
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


train_tiny = load('train_tiny', ROOT / 'tools' / 'train_tiny')
torch = train_tiny.torch
try:
    import numpy as np
    llama_numpy = load('llama_numpy', HERE / 'llama_numpy.py')
except ImportError:
    np = None

TEXT = b''.join(b'line %d of a text to cut from\n' % i for i in range(4000))


class SequenceTest(unittest.TestCase):
    """Held-out sequences; the standard library is enough."""

    def check_layout(self, raw, spans, answers, length, pairs):
        self.assertEqual(len(raw), length)
        self.assertEqual(len(spans), 2 * pairs)
        self.assertEqual(len(answers), pairs)
        known = {}
        for i, (begin, end) in enumerate(spans):
            line = raw[begin:end]
            self.assertRegex(line, rb'^@[A-Z]{2}:[0-9]{4}\n$')
            if i < pairs:
                self.assertLessEqual(end, 0.6 * length)
                self.assertNotIn(line[1:3], known)
                known[line[1:3]] = line[4:8]
            else:
                self.assertGreaterEqual(begin, int(0.75 * length))
                self.assertEqual(known.pop(line[1:3]), line[4:8])
                self.assertEqual(answers[i - pairs], begin + 4)
        self.assertEqual(known, {})

    def test_layout_and_text(self):
        for length, pairs in ((256, 5), (1024, 16), (4096, 32)):
            raw, spans, answers = train_tiny.make_sequence(
                random.Random(length), TEXT, 31, length, pairs)
            self.check_layout(raw, spans, answers, length, pairs)
            rest = bytearray(raw)
            for begin, end in reversed(spans):
                del rest[begin:end]
            self.assertEqual(rest, TEXT[31:31 + len(rest)])

    def test_shipped_sequences(self):
        folder = train_tiny.MODEL_DIR
        data = (folder / 'eval.bin').read_bytes()
        description = json.loads((folder / 'eval.json').read_text())
        length = description['length']
        self.assertEqual(len(data), length * description['sequences'])
        for i in range(description['sequences']):
            self.check_layout(data[i * length:(i + 1) * length],
                              description['lines'][i],
                              description['answers'][i], length,
                              description['pairs'])


@unittest.skipIf(torch is None or np is None, 'needs PyTorch and NumPy')
class ModelTest(unittest.TestCase):
    CONFIG = dict(train_tiny.CONFIG, hidden_size=48, intermediate_size=80,
                  num_hidden_layers=3, num_attention_heads=6,
                  num_key_value_heads=2, head_dim=16,
                  max_position_embeddings=128)

    def setUp(self):
        torch.manual_seed(1)
        self.model = train_tiny.Llama(self.CONFIG)
        with torch.no_grad():
            for weight in self.model.parameters():
                # Far from the start, so that every part matters.
                if weight.dim() == 1:
                    weight += 0.3 * torch.randn_like(weight)
                else:
                    weight *= 3.0
                weight.copy_(weight.bfloat16().float())
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name)
        (self.path / 'config.json').write_text(json.dumps(self.CONFIG))
        train_tiny.save(self.model, self.path)

    def tearDown(self):
        self.folder.cleanup()

    def test_file_layout(self):
        data = (self.path / 'model.safetensors').read_bytes()
        size = int.from_bytes(data[:8], 'little')
        self.assertEqual(size % 8, 0)
        header = json.loads(data[8:8 + size])
        header.pop('__metadata__')
        at = 0
        for entry in sorted(header.values(), key=lambda e: e['data_offsets']):
            count = int(np.prod(entry['shape']))
            self.assertEqual(entry['dtype'], 'BF16')
            self.assertEqual(entry['data_offsets'], [at, at + 2 * count])
            at += 2 * count
        self.assertEqual(len(data), 8 + size + at)
        self.assertIn('model.layers.2.self_attn.q_proj.weight', header)
        self.assertIn('model.embed_tokens.weight', header)
        self.assertIn('model.norm.weight', header)

    def test_both_readers_get_the_weights_back(self):
        mine = train_tiny.read_safetensors(self.path / 'model.safetensors')
        other = llama_numpy.read_safetensors(self.path / 'model.safetensors')
        names = {'model.' + n for n, _ in self.model.named_parameters()}
        self.assertEqual(set(mine), names)
        self.assertEqual(set(other), names)
        for name, weight in self.model.named_parameters():
            self.assertTrue(torch.equal(mine['model.' + name], weight))
            self.assertTrue(np.array_equal(other['model.' + name],
                                           weight.detach().numpy()))

    def test_numpy_agrees_with_pytorch(self):
        tokens = [random.Random(2).randrange(256) for _ in range(100)]
        with torch.no_grad():
            mine = self.model(torch.tensor([tokens]))[0].double().numpy()
        reference = llama_numpy.Llama(self.path)
        other = reference.logits(tokens)
        self.assertGreater(other.std(), 0.5)
        self.assertLess(np.abs(mine - other).max(), 2e-4)
        short = reference.attention('model.layers.0.self_attn',
                                    np.ones((100, 48)), block=7)
        long = reference.attention('model.layers.0.self_attn',
                                   np.ones((100, 48)))
        self.assertLess(np.abs(short - long).max(), 1e-12)

    def test_evaluations_agree(self):
        config = dict(train_tiny.CONFIG, num_hidden_layers=1)
        model = train_tiny.Llama(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.bfloat16().float())
        (self.path / 'config.json').write_text(json.dumps(config))
        train_tiny.save(model, self.path)
        raw, spans, answers = train_tiny.make_sequence(
            random.Random(3), TEXT, 62, 1024, 16)
        (self.path / 'eval.bin').write_bytes(raw)
        (self.path / 'eval.json').write_text(json.dumps({
            'sequences': 1, 'length': 1024, 'digits': 4,
            'answers': [answers], 'lines': [spans]}))
        mine = train_tiny.evaluate(model, [(raw, spans, answers)], 'cpu')
        other = llama_numpy.evaluate(llama_numpy.Llama(self.path),
                                     self.path, 0)
        self.assertAlmostEqual(mine['bits_per_byte'],
                               other['bits_per_byte'], places=4)
        self.assertEqual(mine['recall_exact'], other['recall_exact'])

    def test_batches_have_the_layout(self):
        batches = train_tiny.Batches(TEXT, 'cpu', 4)
        tokens, targets, weights = batches.draw(8, 1024, 16)
        self.assertTrue(torch.equal(tokens[:, 1:], targets[:, :-1]))
        for row, last, weight in zip(tokens.tolist(), targets[:, -1].tolist(),
                                     weights.tolist()):
            raw = bytes(row + [last])
            known, count = {}, 0
            for begin in (i for i, c in enumerate(raw) if c == ord('@')):
                key = raw[begin + 1:begin + 3]
                value = raw[begin + 4:begin + 8]
                asked = key in known
                self.assertEqual(known.setdefault(key, value), value)
                expected = (train_tiny.QUERY_WEIGHTS if asked
                            else train_tiny.FIRST_WEIGHTS)
                if begin > 0:
                    self.assertEqual(tuple(weight[begin - 1:begin + 8]),
                                     expected)
                count += 1
            self.assertEqual(count, 32)
            self.assertEqual(len(known), 16)
            self.assertEqual(sum(w == 10.0 for w in weight), 64)


if __name__ == '__main__':
    unittest.main()
