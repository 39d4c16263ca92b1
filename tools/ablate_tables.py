"""The tables of tools/ablate, from the files that its programs wrote."""

import json
import pathlib
import re
import shutil
import statistics
import struct
import subprocess
import sys
import time

from whole_file import write_whole

ORDER = ['dense', 'streaming', 'keynorm', 'random', 'stride', 'h2o', 'tova',
         'snapkv', 'snapkv-prompt', 'oracle-1', 'oracle-2', 'oracle-4',
         'oracle-inf', 'gated-2']
# The rows of the table `compared`, and what the plots show.
COMPARED = ['streaming', 'keynorm', 'h2o', 'tova', 'snapkv',
            'kvpop-mlp-beta1', 'kvpop-mlp', 'kvpop-mlp-beta4',
            'kvpop-mlp-betainf', 'kvpop-beta1', 'kvpop-immediate', 'kvpop',
            'kvpop-beta4', 'kvpop-betainf', 'kvpop-matched',
            'kvpop-decay-0.5', 'kvpop-decay-1', 'kvpop-decay-2',
            'kvpop-mlp-decay-1', 'kvpop-mlp-window-128-decay-1',
            'kvpop-mlp-window-192-decay-1', 'kvpop-window-128-decay-1',
            'kvpop-window-192-decay-1', 'kvpop-window-128-decay-2',
            'oracle-1', 'oracle-2', 'oracle-4', 'oracle-inf']
PLOTTED = ['streaming', 'h2o', 'tova', 'snapkv', 'oracle-2',
           'kvpop-mlp-beta1', 'kvpop-mlp', 'kvpop-mlp-beta4',
           'kvpop-mlp-betainf', 'kvpop', 'kvpop-beta4', 'kvpop-betainf',
           'kvpop-immediate', 'kvpop-decay-2', 'kvpop-window-128-decay-1',
           'kvpop-window-128-decay-2']


def cell(values, digits):
    return ', '.join('-' if v is None else f'{v:.{digits}f}'
                     for v in values) if any(
                         v is not None for v in values) else '-'


def spread(rows, digits):
    """Mean and standard deviation of each column."""
    return ', '.join(f'{statistics.mean(c):.{digits}f} ± '
                     f'{statistics.stdev(c):.{digits}f}'
                     for c in zip(*rows)) or '-'


def said_by(command, root):
    """The first line that a program prints, None without such a program."""
    try:
        done = subprocess.run(command, cwd=root, capture_output=True,
                              text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return (done.stdout.splitlines() or [None])[0]


def provenance(root):
    card = said_by(['nvidia-smi', '--query-gpu=name,driver_version,'
                    'clocks.max.sm,power.limit', '--format=csv,noheader'],
                   root)
    commit = said_by(['git', 'describe', '--always', '--dirty', '--abbrev=12',
                      '--exclude=*'], root)
    return {'card': card or 'none: CPU backend',
            'date': time.strftime('%Y-%m-%d'),
            **({'commit': commit} if commit else {}),
            'command': ' '.join(['tools/ablate', *sys.argv[1:]])}


def metadata(file):
    """Of a safetensors file."""
    with open(file, 'rb') as stream:
        size, = struct.unpack('<Q', stream.read(8))
        return json.loads(stream.read(size)).get('__metadata__', {})


class Tables:
    def __init__(self, out, chosen, groups):
        self.out, self.chosen, self.groups = out, chosen, groups
        self.parts = list(self.read_parts())
        # A scorer has one window; policies without are of the common one.
        self.measured = {}
        for r in (self.results(None, host_first=False) or
                  {'results': []})['results']:
            self.measured.setdefault(r['policy'], {})[r['budget']] = r
        self.budgets = sorted({b for by in self.measured.values()
                               for b in by if b}, reverse=True)

    def read_parts(self):
        """(measured on the host beside a GPU, results); a file that its
        program did not finish is left out."""
        for file in sorted((self.out / 'parts').glob('*.json')):
            try:
                data = json.loads(file.read_text())
                data['results'][0]['policy']
            except (ValueError, KeyError, IndexError):
                print(f'ablate: {file} is not whole and left out', flush=True)
                continue
            yield file.stem.endswith('-host'), data

    def results(self, window, host_first):
        """The results with this window, dense first, then budget by budget;
        of policies that both backends have measured those of one."""
        whole, by_key = None, {}
        for _, data in sorted(self.parts,
                              key=lambda part: part[0] == host_first):
            if window is not None and data['window'] != window:
                continue
            whole = whole or dict(data)
            for r in data['results']:
                by_key[(r['policy'], r['budget'])] = r
        if whole is None:
            return None
        place = {p: i for i, p in enumerate([*ORDER, *self.chosen])}

        def rank(r):
            name = r['policy']
            for suffix in ('-gated', '-matched'):
                name = name.removesuffix(suffix)
            return (-(r['budget'] or 1 << 30), place.get(name, 1 << 20),
                    r['policy'])
        whole['results'] = sorted(by_key.values(), key=rank)
        return whole

    def held_out(self, name):
        """Of the last line of a training: [(loss, recall)] by budget."""
        file = self.out / f'{name}.jsonl'
        lines = file.read_text().splitlines() if file.exists() else []
        try:
            last = json.loads(lines[-1]) if lines else {}
        except ValueError:  # ended within a line
            return []
        if not (self.out / f'{name}.safetensors').exists() and \
                not (self.out / 'parts' / f'{name}-training.done').exists():
            return []
        return [(h['loss'], h['recall']) for h in last.get('held_out', [])]

    def of(self, name, key):
        """By budget; None where it was not measured."""
        by = self.measured.get(name, {})
        return [by[b][key] if b in by else None for b in self.budgets]

    def of_shipped(self, file, key, digits):
        """What shipped/NAME.json has of a scorer that is shipped."""
        measured = self.out / 'shipped' / f'{file.stem}.json'
        try:
            rows = json.loads(measured.read_text())['results']
        except (OSError, ValueError):
            return '-'
        by = {r['budget']: r[key] for r in rows}
        return cell([by.get(b) for b in self.budgets], digits)

    # ---- tables ------------------------------------------------------------

    def group(self, names):
        """A line a scorer: held-out loss, oracle recall, bits, accuracy."""
        lines = ['| scorer | held-out loss | oracle recall | bits per byte | '
                 'retrieval accuracy |', '| --- | --- | --- | --- | --- |']
        for name in names:
            held = self.held_out(name)
            if not held and name not in self.measured:
                continue
            lines.append(
                f'| {name} | {cell([h[0] for h in held], 3)} | '
                f'{cell([h[1] for h in held], 3)} | '
                f"{cell(self.of(name, 'bits_per_byte'), 3)} | "
                f"{cell(self.of(name, 'recall_exact'), 2)} |")
        return '\n'.join(lines) + '\n'

    def all_groups(self):
        text = ''
        for group, members in self.groups.items():
            names = [n for n in members if n in self.chosen]
            if names:
                text += f'\n**{group}**\n\n{self.group(names)}'
        return text

    def seeds(self, shipped):
        """A scorer as shipped, as it came out here, and mean and standard
        deviation over seeds."""
        lines = ['| scorer | | held-out loss | oracle recall | bits per byte | '
                 'retrieval accuracy |', '| --- | --- | --- | --- | --- | --- |']
        for base in ('kvpop-mlp', 'kvpop-mlp-beta1', 'kvpop',
                     'kvpop-immediate', 'kvpop-decay-2'):
            held = self.held_out(base)
            if not held:
                continue
            if base in shipped and shipped[base].exists():
                said = [re.match(r'loss ([0-9.]+), oracle recall ([0-9.]+)', v)
                        for k, v in sorted(
                            metadata(shipped[base]).items(),
                            key=lambda x: -int(x[0].split('.')[-1])
                            if x[0].startswith('training.held_out.') else 0)
                        if k.startswith('training.held_out.')]
                lines.append(
                    f'| {base} | shipped | '
                    f'{cell([float(m[1]) for m in said], 4)} | '
                    f'{cell([float(m[2]) for m in said], 3)} | '
                    f"{self.of_shipped(shipped[base], 'bits_per_byte', 3)} | "
                    f"{self.of_shipped(shipped[base], 'recall_exact', 2)} |")
            lines.append(
                f'| {base} | trained anew | {cell([h[0] for h in held], 4)} | '
                f'{cell([h[1] for h in held], 3)} | '
                f"{cell(self.of(base, 'bits_per_byte'), 3)} | "
                f"{cell(self.of(base, 'recall_exact'), 2)} |")
            names = [n for n in self.chosen
                     if n == base or n.startswith(f'{base}-seed')]
            held = [h for h in map(self.held_out, names) if h]
            if len(held) < 2:
                continue

            def over(key, digits):
                rows = [row for row in (self.of(n, key) for n in names)
                        if row and None not in row]
                return spread(rows, digits) if len(rows) > 1 else '-'
            lines.append(
                f'| {base} | {len(held)} seeds | '
                f'{spread([[x[0] for x in h] for h in held], 4)} | '
                f'{spread([[x[1] for x in h] for h in held], 3)} | '
                f"{over('bits_per_byte', 3)} | {over('recall_exact', 2)} |")
        return '\n'.join(lines) + '\n' if len(lines) > 2 else ''

    def label(self, name):
        """What evaluate calls a policy, and the window that it does not."""
        result = next(iter(self.measured[name].values()))
        window = re.search(r'-window-(\d+)', name)
        return result['label'] + (f', window {window[1]}' if window else '')

    def compared(self):
        """The caches beside each other, bits | retrieval accuracy at every budget."""
        lines = ['| cache | ' + ' | | '.join(
            f'{b} entries' for b in self.budgets) + ' | |',
                 '| --- |' + ' --- | --- |' * len(self.budgets)]
        for name in COMPARED:
            if name not in self.measured:
                continue
            pairs = zip(self.of(name, 'bits_per_byte'),
                        self.of(name, 'recall_exact'))
            lines.append(f'| {self.label(name)} | ' + ' | '.join(
                f'{cell([a], 3)} | {cell([b], 2)}' for a, b in pairs) + ' |')
        return '\n'.join(lines) + '\n'

    def numbers(self):
        """All of it, for a file."""
        def measured(name):
            return {str(b): [round(r['bits_per_byte'], 5),
                             round(r['recall_exact'], 4)]
                    for b, r in self.measured.get(name, {}).items()}
        scorers = {}
        for name, given in self.chosen.items():
            held = self.held_out(name)
            if held or name in self.measured:
                scorers[name] = {
                    'options': ' '.join(given),
                    'held_out': [[round(a, 5), round(b, 5)] for a, b in held],
                    'measured': measured(name)}
        return {'what': 'tools/ablate; held_out: loss, oracle recall by '
                        'budget; measured: bits per byte, retrieval accuracy '
                        'by KV entries per head',
                'budgets': self.budgets, 'scorers': scorers,
                'others': {n: measured(n) for n in self.measured
                           if n not in self.chosen}}

    def write(self, shipped):
        """ablation.md and .json, MODEL.md and .json; what is to be drawn."""
        sequences = max((d['sequences'] for _, d in self.parts), default=0)
        text = (f'{sequences} held-out sequences; at '
                f'{", ".join(map(str, self.budgets))} KV entries per head, in this order.\n')
        if self.budgets:
            text += f'\n**compared**\n\n{self.compared()}'
        seeds = self.seeds(shipped)
        if seeds:
            text += f'\n**over seeds**\n\n{seeds}'
        write_whole(self.out / 'ablation.md', text + self.all_groups())
        write_whole(self.out / 'ablation.json',
                    json.dumps(self.numbers(), indent=1) + '\n')
        # Those of the host, which measures oracle recall as well.
        whole = self.results(64, host_first=True)
        if whole is None:
            return []
        base = self.out / whole['model']
        write_whole(base.with_suffix('.json'),
                    json.dumps(whole, separators=(',', ':')) + '\n')
        head = ('| cache | less | bits per byte | retrieval accuracy |\n'
                '| --- | ---: | ---: | ---: |\n')
        write_whole(base.with_suffix('.md'), head + ''.join(
            f"| {r['policy']} | {100 * r['compression']:.0f}% | "
            f"{r['bits_per_byte']:.3f} | {r['recall_exact']:.2f} |\n"
            for r in whole['results']))
        there = {r['policy'] for r in whole['results']}
        return [p for p in PLOTTED if p in there]

    def plotted(self):
        """What the plot of quality shows, of what was measured."""
        return [p for p in PLOTTED if p in self.measured]

    def publish(self, root, name):
        """The numbers into benchmarks/results/NAME.json with what they were
        made by, plots into docs/images; tools/results makes the pages."""
        numbers = {**self.numbers(), **provenance(root)}
        write_whole(
            root / 'benchmarks' / 'results' / f'{name}.json',
            json.dumps(numbers, indent=1, ensure_ascii=False) + '\n')
        for drawn, plot in (('ablation-quality', 'ablation-quality'),
                            ('byte-llama-oracle-recall',
                             'ablation-oracle-recall')):
            file = self.out / f'{drawn}.png'
            if file.exists():
                shutil.copy(file, root / 'docs' / 'images' / f'{plot}.png')
        subprocess.run([root / 'tools' / 'results'], check=True)
