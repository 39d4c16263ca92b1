"""Caches with a bounded memory: a policy run online, token by token.

A Cache holds the keys and values of the layers of one model. Layers with finite budgets lie in the library's
FixedBudgetCache, the others (gates without a cap, budgets beyond max_length, SnapKV) in its DualCache, whose
pages are allocated as keys are admitted. All memory is torch's.
"""

import math
import struct
from typing import NamedTuple

import torch

from kvpolicy import _native, first_use
from kvpolicy.policy import UNLIMITED, ObservedScorer, Policy, SharedBudget, TopKBudget
from kvpolicy.scorers import UtilityPredictor, WriteGateScorer

_NOT_SET = -(2**31)
_NAN, _EXHAUSTED, _BAD_LENGTH = 1, 2, 4  # status_bits of the library
_RESERVED = 64  # tokens
_PAGE = 16
_SLAB_TOKENS = 256  # per KV head, layer and sequence

# Scorers that run inside the library's cache; all others run before a call, and their scores are given.
_INSIDE = ("mlstm", "conv")

FULL = Policy(TopKBudget(UNLIMITED))
"""The policy of full attention: every key stays."""


class Usage(NamedTuple):
    """Entries of one head in use, and the most that it can have."""

    sinks: int
    window: int
    long_range: int
    capacity: int

    @property
    def size(self):
        return self.sinks + self.window + self.long_range


def _by_head(name, values, heads):
    if len(values) not in (1, heads):
        raise ValueError(
            f"{name}: {len(values)} numbers are not allowed; they must be 1 or one per KV head, {heads}"
        )
    return list(values) * heads if len(values) == 1 else list(values)


def observes(policy):
    """Whether a policy ranks keys by the attention that they receive (H2O, TOVA, SnapKV)."""
    return isinstance(policy.scorer, ObservedScorer)


def reads_hidden(policy):
    """Whether a policy's scores are those of hidden states (SP-KV)."""
    return isinstance(policy.scorer, UtilityPredictor)


def unscored(policy):
    """Whether no key's fate depends on a score."""
    return policy.instance == "window" or (
        policy.instance == "top_k" and all(one in (0, UNLIMITED) for one in policy.budgets)
    )


class _Group:
    """Layers that one cache of the library holds."""

    def __init__(self, cache, layers, kind, scorer):
        policies = [cache.policies[layer] for layer in layers]
        addresses = 0, 0
        if scorer == "own":
            library = first_use.cache_library(
                policies[0].expression, kind == "dual", cache.dtype, cache.device
            )
            kind, addresses = "dual" if library.pooled else "fixed", library[:2]
            scorer = "given" if library.given else "own"
            if policies[0].scorer is not None and not library.given:
                raise ValueError(
                    f"scorer: {type(policies[0].scorer).__name__} is not allowed; the policy must have one "
                    "scorer, which is a CppPart, or rank keys"
                )
        self.layers, self.kind, self.scorer, self.pooled = layers, kind, scorer, kind == "dual"
        self.device, self.slabs = cache.device, []
        # Tokens that pages are reserved for; at most: tokens of the call before advance(), of the longest
        # sequence.
        self.reserved, self.taken, self.longest = 0, 0, 0
        count, heads, sequences = len(layers), cache.kv_heads, cache.sequences
        numbers = [
            [one for policy in policies for one in _by_head(name, of(policy), heads)]
            for name, of in (
                ("sinks", lambda policy: policy.sinks),
                ("windows", lambda policy: policy.windows),
                ("budgets", lambda policy: policy.budgets),
                ("thresholds", lambda policy: policy.thresholds),
                (
                    "log_gamma",
                    lambda policy: (0.0,) if policy.log_gamma is None else policy.log_gamma.detach().tolist(),
                ),
            )
        ]
        selection = policies[0].selection
        page = math.lcm(_PAGE, selection.page_size) if selection else _PAGE
        slab_pages = count * heads * sequences * max(1, _SLAB_TOKENS // page)
        pages = (cache.max_length // page + 1) * count * heads * sequences
        numbers_of_scorer, self.parameters, self.frequencies = (0, 0, 0.0, 0, 0, 0.0, 0, None), [], None
        if scorer in _INSIDE:
            first = policies[0].scorer
            numbers_of_scorer = _numbers_of(first, cache.device)
            self.frequencies = numbers_of_scorer[-1]
            self.parameters = [
                [cache.parameter(policy.scorer, name) for name in first.names] for policy in policies
            ]
        device = -1 if cache.device.index is None else cache.device.index
        self.native = _native._module(cache.device.type).make_cache(
            device,
            (kind, scorer, str(cache.dtype).removeprefix("torch."), *addresses),
            (
                count,
                sequences,
                cache.query_heads,
                heads,
                cache.head_dim,
                cache.value_dim,
                page if self.pooled else 1,
                cache.max_draft_tokens,
            ),
            (slab_pages, pages // slab_pages + 1, cache.max_length),
            (policies[0].instance, *numbers),
            (cache.sm_scale, cache.logits_soft_cap),
            _observation(policies[0].scorer) + _selection(policies, heads),
            numbers_of_scorer,
            self.parameters,
        )
        self.sizes = self.native.sizes()
        self.memory = self.allocate(self.sizes[2])
        self.call("bind", self.memory)
        self.lengths = None  # [sequences] int64, part of the memory, where a scorer asks
        if any(isinstance(policy.scorer, WriteGateScorer) for policy in policies):
            first = self.native.lengths_address() - self.memory.data_ptr()
            self.lengths = self.memory[first : first + 8 * sequences].view(torch.int64)

    def allocate(self, size):
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def call(self, name, *arguments):
        """A method of the library's cache, on the current stream."""
        if self.device.type == "cuda":
            context = torch._C._cuda_getCurrentRawStream(self.device.index), self.device.index
        else:
            context = torch.get_num_threads(), -1
        return getattr(self.native, name)(*context, *arguments)

    def add_slab(self):
        slab = self.allocate(self.sizes[3])
        self.call("add_slab", slab)
        self.slabs.append(slab)

    def count_advance(self):
        """After advance(): the tokens that were taken no longer count as reserved."""
        self.reserved, self.longest = max(0, self.reserved - self.taken), self.longest + self.taken
        self.taken = 0

    def status(self, count):
        """Words for a call that may find no page; None where none can."""
        return torch.zeros(count, dtype=torch.int32, device=self.device) if self.pooled else None

    def whole(self, name, *arguments):
        """A call about sequences, which may want pages: with slabs until it has them."""
        while True:
            status = self.status(1)
            result = self.call(name, *arguments, status)
            if status is None or not status.item() & _EXHAUSTED:
                return result
            self.add_slab()


def _numbers_of(scorer, device):
    """d_qk, d_v, gate_softcap, rope and norm of a scorer inside the cache."""
    _, d_qk, d_v, _, layout, dims, norm = (numbers := scorer.call_numbers())[0]
    (gate_softcap, base), frequencies = numbers[1:]
    if frequencies is not None:
        frequencies = frequencies.to(device, torch.float32).contiguous()
    return d_qk, d_v, gate_softcap, layout, dims, base, norm, frequencies


def _observation(scorer):
    """The library's Observation, for a policy that observes attention: queries, accumulate, mean,
    whole_layer, pool, pool_largest, chunk."""
    if not isinstance(scorer, ObservedScorer):
        return 0, False, False, False, 1, False, 0
    chunk, largest, whole_layer, pool, pool_largest = scorer.numbers()
    queries = {"h2o": UNLIMITED, "tova": 1, "snapkv": 0}[scorer.instance]
    return queries, scorer.instance == "h2o", not largest, whole_layer, pool, pool_largest, chunk


def _selection(policies, heads):
    """The numbers of QuestPages: pages by layer and head, page_size, mean over the heads."""
    first = policies[0].selection
    if first is None:
        return [1], 1, False
    pages = [one for policy in policies for one in _by_head("pages", policy.selection.pages, heads)]
    return pages, first.page_size, first.aggregate == "mean"


class Cache:
    """Keys and values of `len(policies)` layers and `sequences` sequences, as their policies keep them.

    policies          a Policy per layer. A scorer of a policy is asked for each new key and value; without
                      one the caller gives scores. A UtilityPredictor reads `hidden` of the calls. Positions
                      of a WriteGateScorer's keys count the tokens of their sequence.
    query_heads, kv_heads, head_dim, value_dim    of each layer; value_dim defaults to head_dim
    dtype, device     of keys and values: what the module is compiled for (on CUDA not float64)
    sm_scale          of the logits; 0 stands for 1 / sqrt(head_dim). logits_soft_cap: 0 stands for none
    max_draft_tokens  the most tokens per sequence of append_draft
    max_length        the most tokens of a sequence with a layer in a DualCache (gates without a budget,
                      budgets beyond it, SnapKV); its page tables take 4 bytes per 16 of them and head
    separate_layers   each layer advances on its own, by advance(layer): then a layer may take several calls
                      before the next layer takes the first
    bad_tokens        what happens to a NaN score, and under an mLSTMScorer or a ConvScorer to a key or value
                      that is NaN or infinite. "refuse": ValueError on the CPU, which names the token. "drop":
                      the token ranks last and does not reach the scorer's state. CUDA cannot refuse what it
                      has not looked at, and drops in either case

    prefill, step, append_draft, accept and attend take one layer; advance() follows the last layer. Tensors
    are [batch, heads, tokens, head_dim] with a contiguous last dimension. Entry i of a call is sequence
    seq_ids[i] (default: i) and brings its first q_len[i] tokens (default: all). No gradients.

    Calls on CUDA are enqueued on the current stream. Those that may take pages of a DualCache wait for it:
    steps once per 64 tokens and near max_length, chunks of more than 64 tokens, accept, fork, reorder and
    restore. snapshot always waits.

    Raises ValueError, TypeError or NotImplementedError with one sentence, and writes nothing. NaN scores
    raise on the CPU, unless bad_tokens is "drop". On CUDA they rank last; where a chunk into a DualCache
    raises for one, clear its sequence.

    A child process of fork() may use a cache on the CPU that it inherits; calls run on one thread there.
    """

    def __init__(
        self,
        policies,
        *,
        query_heads,
        kv_heads,
        head_dim,
        value_dim=None,
        sequences=1,
        dtype=torch.float32,
        device="cpu",
        sm_scale=0.0,
        logits_soft_cap=0.0,
        max_draft_tokens=0,
        max_length=32768,
        separate_layers=False,
        bad_tokens="refuse",
    ):
        if bad_tokens not in ("refuse", "drop"):
            raise ValueError(f"bad_tokens: {bad_tokens!r} is not allowed; it must be 'refuse' or 'drop'")
        self.bad_tokens = bad_tokens
        self.policies = [policies] if isinstance(policies, Policy) else list(policies)
        for policy in self.policies:
            if not isinstance(policy, Policy):
                raise TypeError(f"policies: {policy!r} is not allowed; they must be of kvpolicy.Policy")
        self.query_heads, self.kv_heads, self.head_dim = query_heads, kv_heads, head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.sequences, self.dtype, self.device = sequences, dtype, torch.device(device)
        self.sm_scale, self.logits_soft_cap = float(sm_scale), float(logits_soft_cap)
        self.max_draft_tokens, self.max_length = max_draft_tokens, max_length
        if max_length < 1:
            raise ValueError(f"max_length: {max_length} is not allowed; it must be 1 or more")
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        # Of steps and of other calls: a captured step keeps its own.
        self._workspaces = [torch.empty(0, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self._sizes, self._zeros = {}, torch.empty(0)
        self._separate = separate_layers
        self._called = {}  # tokens by layer since advance(), at most; None: not known
        self._drafted = {}  # draft tokens by layer
        grouped = {}
        for layer, policy in enumerate(self.policies):
            key = (*self._kind(policy), layer if separate_layers else -1)
            grouped.setdefault(key, []).append(layer)
        self._groups = [_Group(self, layers, *key[:2]) for key, layers in grouped.items()]
        self._of = {layer: (group, i) for group in self._groups for i, layer in enumerate(group.layers)}

    def _kind(self, policy):
        """What layers of one native cache have in common: kind, scorer, gate, and numbers of the scorer."""
        scorer = policy.scorer
        if observes(policy):
            if self.max_draft_tokens:
                raise NotImplementedError(
                    "max_draft_tokens: draft tokens under a policy that ranks keys by received attention are "
                    "not allowed; each query changes its ranks"
                )
            keeps = policy.instance == "snapkv"
            return "dual" if keeps else "fixed", "keeping" if keeps else "evicting", policy.scorer
        largest = [max(numbers) for numbers in (policy.sinks, policy.windows, policy.budgets)]
        kind = "fixed" if sum(largest) <= max(self.max_length, 1) else "dual"
        gate = policy.instance if policy.gate is not None else "top_k"
        inside = getattr(scorer, "kind", None)
        stateless = inside not in _INSIDE
        if policy.own_parts or policy.selection:
            if not stateless or (policy.own_parts and policy.selection):
                raise NotImplementedError(
                    f"policy: {policy!r} is not allowed in a Cache; a Stride, a CppPart or QuestPages must "
                    "be alone beside the package's parts, and without an mLSTMScorer or a ConvScorer"
                )
            if policy.own_parts:
                if self.device.type == "cuda" and isinstance(policy.own_parts[-1], SharedBudget):
                    raise NotImplementedError(
                        f"device: {self.device} is not allowed for a SharedBudget in a Cache; it must be the "
                        "CPU"
                    )
                return kind, "own", policy.expression
            return "dual", "selecting", gate, policy.selection.page_size, policy.selection.aggregate
        if stateless:
            return kind, "given", gate
        shape = (scorer.heads, scorer.head_dim, scorer.value_dim)
        if shape != (self.kv_heads, self.head_dim, self.value_dim):
            raise ValueError(
                f"scorer of {shape[0]} heads, head_dim {shape[1]}, value_dim {shape[2]} is not allowed; it "
                f"must be of {self.kv_heads}, {self.head_dim}, {self.value_dim}"
            )
        if any(window != scorer.delay for window in policy.windows):
            raise NotImplementedError(
                f"delay: {scorer.delay} is not allowed; in a cache it must be the policy's window, "
                f"{policy.windows[0]}"
            )
        if inside == "conv":
            rope = scorer.rope
            return "dual", "conv", gate, None if rope is None else (rope.layout, rope.base, rope.dims)
        return kind, "mlstm", gate, scorer.d_qk, scorer.d_v, scorer.gate_softcap, scorer.norm

    def parameter(self, scorer, name):
        """A parameter as the library reads it."""
        tensor = getattr(scorer, name)
        return None if tensor is None else tensor.detach().to(self.device, torch.float32).contiguous()

    # ---- calls on a layer ----------------------------------------------------------------------------------

    def prefill(
        self, layer, q, k, v, *, scores=None, hidden=None, seq_ids=None, q_len=None, return_lse=False
    ):
        """Appends a chunk of n tokens per sequence and attends: the result of n steps, in one pass. A policy
        that ranks keys by received attention takes the chunk as blocks of a prompt (`prefill` of its scorer),
        and keeps other keys than steps do. SnapKV prunes at the end of every call, of one token too: decode
        with step().

        q [B, Hq, n, Dk], k [B, Hkv, n, Dk], v [B, Hkv, n, Dv]; scores [B, Hkv, n] for a policy with ranks and
        no scorer; hidden [B, n, width] for a UtilityPredictor; seq_ids and q_len [B] int32. Returns out [B,
        Hq, n, Dv], a view of [B, n, Hq, Dv], 0 beyond q_len; with return_lse also the log-sum-exp [B, Hq, n]
        float32 (natural log).
        """
        return self._write("prefill", layer, q, k, v, (scores, hidden), seq_ids, q_len, return_lse)

    def step(self, layer, q, k, v, *, scores=None, hidden=None, seq_ids=None, q_len=None, return_lse=False):
        """One token per sequence: as prefill with n = 1. For a policy that ranks keys by received attention
        it is a decoded token; prefill would take it as a block of a prompt."""
        return self._write("step", layer, q, k, v, (scores, hidden), seq_ids, q_len, return_lse)

    def append_draft(
        self, layer, q, k, v, *, scores=None, hidden=None, seq_ids=None, q_len=None, return_lse=False
    ):
        """Attends as prefill, and keeps the tokens aside until accept(): entries stay as they are."""
        return self._write("append_draft", layer, q, k, v, (scores, hidden), seq_ids, q_len, return_lse)

    @torch.no_grad()
    def _write(self, name, layer, q, k, v, given, seq_ids, q_len, return_lse):
        scores, hidden = given
        group, index = self._layer(layer)
        for argument, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.dim() != 4:
                raise ValueError(f"{argument}.dim(): {tensor.dim()} is not allowed; it must be 4")
        count, tokens = q.shape[0], q.shape[2]
        if name == "step" and tokens != 1:
            raise ValueError(f"q.size(2): {tokens} is not allowed; it must be 1 in a step")
        for argument, tensor in (("k", k), ("v", v), ("scores", scores)):
            if tensor is not None and tensor.dim() > 2 and tensor.shape[2] != tokens:
                raise ValueError(
                    f"{argument}.size(2): {tensor.shape[2]} is not allowed; it must be {tokens}, as q's"
                )
        policy = self.policies[layer]
        if scores is None and policy.scorer is not None and group.scorer in ("given", "selecting"):
            scores = self._scored(policy, group, k, v, hidden, seq_ids)
        elif hidden is not None:
            raise ValueError("hidden: is not allowed with scores, or for a scorer that does not read it")
        elif scores is not None and policy.scorer is not None:
            raise ValueError("scores: are not allowed for a policy that has a scorer of its own")
        scores = self._scores(policy, group, k, scores, q_len)
        # On CUDA an entry may be refused by its status, and leaves its rows as they are.
        make = torch.empty if q_len is None and self.device.type == "cpu" else torch.zeros
        out = make(count, tokens, self.query_heads, self.value_dim, dtype=self.dtype, device=self.device)
        out = out.transpose(1, 2)
        lse = None
        if return_lse:
            lse = torch.full((count, self.query_heads, tokens), -torch.inf, device=self.device)
        if count == 0 or tokens == 0:
            return (out, lse) if return_lse else out
        single = (name == "step",) if name != "append_draft" else ()
        call = "append_draft" if name == "append_draft" else "write"
        self._check_finite(layer, seq_ids, k, v, q_len)
        self._reserve(group, tokens)
        # Every step would wait for its status on CUDA. Reserved pages do not run out.
        free = group.reserved >= tokens or call == "append_draft"
        status = self._status(group, count, free)
        if call == "write":
            group.taken = max(group.taken, tokens)
        while True:
            batch = (count, _NOT_SET if q_len is not None else tokens, seq_ids, q_len)
            workspace = self._workspace_for(group, count, tokens if name == "step" else max(2, tokens))
            group.call(call, index, (q, k, v, out), batch, (scores, lse, None, status), *single, workspace)
            if status is None or not self._faults(status).any():
                break
            if (status & ~(_NAN | _EXHAUSTED | _BAD_LENGTH)).any():
                raise ValueError(f"layer: {layer} is not allowed twice for a sequence before advance()")
            if (status & _BAD_LENGTH).any():
                raise ValueError(
                    f"tokens: more than max_length, {self.max_length}, are not allowed in a sequence"
                )
            if (self._faults(status) & _NAN).any():
                raise ValueError("scores: NaN is not allowed; they must be numbers")
            lacking = (status & _EXHAUSTED) != 0
            group.add_slab()
            given = torch.full_like(status, tokens) if q_len is None else q_len
            q_len = torch.where(lacking, given, torch.zeros_like(given))
            status.zero_()
        if call == "append_draft":
            self._drafted[layer] = tokens
        else:
            self._count(layer, tokens)
        return (out, lse) if return_lse else out

    def _status(self, group, count, free=False):
        """Words of a call: where it may find no page, and where a CPU is to drop bad tokens."""
        if self.bad_tokens == "drop" and self.device.type == "cpu":
            return torch.zeros(count, dtype=torch.int32)
        return None if free else group.status(count)

    def _faults(self, status):
        """The bits of status words that are no matter of course."""
        return status & ~_NAN if self.bad_tokens == "drop" else status

    def _check_finite(self, layer, seq_ids, k, v, q_len):
        """Refuses bad tokens on the CPU where the call has a status, with which the library drops them."""
        group, _ = self._layer(layer)
        if self.bad_tokens == "drop" or self.device.type != "cpu" or not group.pooled:
            return
        if group.scorer not in _INSIDE:
            return
        for name, rows in (("key", k), ("value", v)):
            bad = ~torch.isfinite(rows).all(dim=3)
            if q_len is not None:
                bad &= (torch.arange(rows.shape[2]) < q_len[:, None])[:, None]
            if bad.any():
                entry, head, token = bad.nonzero()[0].tolist()
                sequence = entry if seq_ids is None else int(seq_ids[entry])
                position = group.call("length", sequence) + token
                raise ValueError(
                    f"{name} of entry {entry}, head {head}, position {position}: NaN or infinite is not "
                    "allowed; it must be finite numbers, since the scores of other keys depend on them; "
                    "bad_tokens='drop' skips such a token"
                )

    def _count(self, layer, tokens):
        if self._called is not None:
            self._called[layer] = max(tokens, self._called.get(layer, tokens))

    def accept(self, layer, tokens):
        """Takes the first `tokens` draft tokens of each sequence (an int, or [sequences] int32) as prefill
        would, and drops the others. Call it for each layer, then advance()."""
        group, index = self._layer(layer)
        if not torch.is_tensor(tokens):
            if tokens > self._drafted.get(layer, tokens):
                raise ValueError(
                    f"tokens: {tokens} is not allowed; it must be at most {self._drafted[layer]}, the draft "
                    "tokens of the layer"
                )
            tokens = torch.full((self.sequences,), tokens, dtype=torch.int32, device=self.device)
        elif tokens.shape != (self.sequences,):
            raise ValueError(
                f"tokens: shape {tuple(tokens.shape)} is not allowed; it must be [{self.sequences}], one "
                "number per sequence"
            )
        workspace = self._workspace_for(group, self.sequences, max(2, self.max_draft_tokens))
        group.taken = max(group.taken, self.max_draft_tokens)
        self._count(layer, -1)
        seq_ids = None
        while True:
            status = self._status(group, len(tokens))
            batch = (len(tokens), _NOT_SET, seq_ids, tokens)
            group.call("accept", index, (None,) * 4, batch, (None, None, None, status), workspace)
            if status is not None and (status & _BAD_LENGTH).any():
                raise ValueError(
                    f"tokens: more than were drafted, or than max_length, {self.max_length}, are not allowed"
                )
            if status is None or not (lacking := (status & _EXHAUSTED) != 0).any():
                return
            group.add_slab()
            names = torch.arange(self.sequences, dtype=torch.int32, device=self.device)
            seq_ids = (names if seq_ids is None else seq_ids)[lacking]
            tokens = tokens[lacking]

    @torch.no_grad()
    def attend(self, layer, q, *, seq_ids=None, return_lse=False):
        """Attention of q [B, Hq, 1, Dk] over the entries that sequences hold now. Changes nothing."""
        group, index = self._layer(layer)
        count = q.shape[0]
        # On CUDA an entry whose seq_id is not there leaves its rows as they are.
        make = torch.empty if self.device.type == "cpu" else torch.zeros
        out = make(count, 1, self.query_heads, self.value_dim, dtype=self.dtype, device=self.device)
        out = out.transpose(1, 2)
        lse = None
        if return_lse:
            lse = torch.full((count, self.query_heads, 1), -torch.inf, device=self.device)
        workspace = self._workspace_for(group, count, 1)
        batch = (count, _NOT_SET, seq_ids, None)
        group.call("attend", index, (q, None, None, out), batch, (None, lse, None, None), workspace)
        return (out, lse) if return_lse else out

    def _layer(self, layer):
        if layer not in self._of:
            raise ValueError(f"layer: {layer} is not allowed; it must be 0 to {len(self.policies) - 1}")
        return self._of[layer]

    def _scored(self, policy, group, k, v, hidden, seq_ids):
        """Scores [B, Hkv, n] of a policy's scorer."""
        if reads_hidden(policy):
            wanted = (k.shape[0], k.shape[2], policy.scorer.width)
            if hidden is None or hidden.shape != wanted:
                found = None if hidden is None else f"shape {tuple(hidden.shape)}"
                raise ValueError(
                    f"hidden: {found} is not allowed; a UtilityPredictor reads the hidden states {wanted}"
                )
            scores = policy.scorer(hidden)
        elif hidden is not None:
            raise ValueError("hidden: is not allowed with scores, or for a scorer that does not read it")
        elif isinstance(policy.scorer, WriteGateScorer):
            first = group.lengths[: len(k)] if seq_ids is None else group.lengths[seq_ids.long()]
            at = torch.arange(k.shape[2], device=self.device)
            scores = policy.scorer.at(k, first[:, None] + at)
        else:
            scores = policy.scorer(k, v)
        if scores.shape != k.shape[:3]:
            raise ValueError(
                f"scores of the scorer: shape {tuple(scores.shape)} is not allowed; it must be "
                f"{tuple(k.shape[:3])}"
            )
        return scores

    def _scores(self, policy, group, k, scores, q_len):
        """What the library is given: scores of the caller or of a scorer that runs before the call."""
        if group.scorer not in ("given", "selecting"):
            if scores is not None:
                raise ValueError("scores: are not allowed for a policy that has a scorer of its own")
            return None
        if scores is None:
            if not unscored(policy):
                raise ValueError(
                    "scores: None is not allowed; a policy that ranks keys needs a scorer or scores"
                )
            if k.shape[2] != 1:
                return torch.zeros(k.shape[:3], device=self.device)
            if self._zeros.shape != k.shape[:3]:
                self._zeros = torch.zeros(k.shape[:3], device=self.device)
            return self._zeros
        scores = _native.rows(scores.detach().float())
        if self.device.type == "cpu" and q_len is not None and len(q_len) == len(scores):
            beyond = torch.arange(scores.shape[-1]) >= q_len.view(-1, 1, 1)
            scores = scores.masked_fill(beyond, 0.0)  # whatever padding holds
        if self.device.type == "cpu" and scores.isnan().any():
            raise ValueError("scores: NaN is not allowed; they must be numbers")
        return scores

    def _workspace_for(self, group, count, tokens):
        """1 token stands for step and attend, which need less than a chunk of one."""
        key = (id(group), len(group.slabs), count, tokens, torch.get_num_threads())
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = group.call("workspace_bytes", count, tokens)
        at = int(tokens > 1)
        if self._workspaces[at].numel() < size:
            self._workspaces[at] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._workspaces[at]

    def _reserve(self, group, tokens):
        """On CUDA a step does not wait to see whether it found pages: 64 tokens have theirs beforehand. The
        library reserves none beyond max_length."""
        if not group.pooled or self.device.type != "cuda" or tokens > _RESERVED or group.reserved >= tokens:
            return
        if group.longest + _RESERVED > self.max_length:
            lengths = [group.call("length", sequence) for sequence in range(self.sequences)]
            group.longest = group.taken + max(lengths)
            if group.longest + _RESERVED > self.max_length:
                return
        while group.call("reserve", (_NOT_SET, _RESERVED, None, None)) > 0:
            group.add_slab()
        group.reserved = _RESERVED

    # ---- captured steps ------------------------------------------------------------------------------------

    def reserve_step(self):
        """Before a step of all sequences is captured, or runs again from a CUDA graph: its pages, for which
        this may wait, and its workspace. False where the step would have to look at its status."""
        for group in self._groups:
            self._reserve(group, 1)
            if group.pooled and group.reserved < 1:
                return False
            self._workspace_for(group, self.sequences, 1)
        return True

    def step_memory(self):
        """What a captured step reads beside the cache: while the same, the graph is good."""
        return self._workspaces[0], self._zeros

    def count_step(self):
        """After a graph of a step and its advance() has run: what those count."""
        for group in self._groups:
            group.taken = max(group.taken, 1)
            group.count_advance()

    def marks(self):
        """What calls count here; rewind(marks) takes back the calls of a capture, which run nothing."""
        counts = [(group.reserved, group.taken, group.longest) for group in self._groups]
        return counts, None if self._called is None else dict(self._called)

    def rewind(self, marks):
        for group, counts in zip(self._groups, marks[0]):
            group.reserved, group.taken, group.longest = counts
        self._called = marks[1]

    # ---- calls on sequences --------------------------------------------------------------------------------

    def advance(self, layer=None):
        """Counts the tokens that the layers took, once per chunk or step; or those of one layer
        (separate_layers). The layers took as many tokens."""
        if layer is not None and not self._separate:
            raise ValueError(f"layer: {layer} is not allowed; it must be None without separate_layers")
        called, self._called = self._called, {}
        if layer is not None:
            self._called = called
            if called:
                called.pop(layer, None)
        elif called and (len(called) < len(self.policies) or len(set(called.values())) > 1):
            self._called = called
            raise ValueError(
                f"advance: after {called} tokens by layer is not allowed; every layer takes the same tokens"
            )
        for group in self._groups if layer is None else [self._layer(layer)[0]]:
            group.call("advance", (_NOT_SET, _NOT_SET, None, None), None)
            group.count_advance()

    def clear(self, sequence):
        """Empties a sequence."""
        if self._called:
            self._called = None  # a token may have been taken by some layers only
        for group in self._groups:
            group.call("clear", sequence)
            group.reserved = 0

    def fork(self, source, target):
        """Sequence `target` becomes a copy of sequence `source`, without its draft tokens."""
        for group in self._groups:
            group.whole("fork", source, target)
            group.reserved = 0

    def reorder(self, sources):
        """Sequence i becomes a copy of sequence sources[i], all at once (beam search); int tensor or list."""
        sources = torch.as_tensor(sources, device=self.device).to(torch.int32).contiguous()
        for group in self._groups:
            group.whole("reorder", sources)
            group.reserved = 0

    def snapshot(self, sequence):
        """A sequence as bytes, without draft tokens and scorers' parameters."""
        blobs = [group.call("snapshot", sequence) for group in self._groups]
        return b"".join(struct.pack("<q", len(blob)) + blob for blob in blobs)

    def restore(self, sequence, blob):
        """Writes a snapshot of a cache with the same policies and shape to a sequence. A damaged one leaves
        it as it was, or empty where some layers only have taken a token."""
        parts, at = [], 0
        for _ in self._groups:
            size = struct.unpack_from("<q", blob, at)[0] if len(blob) >= at + 8 else -1
            parts.append(blob[at + 8 : at + 8 + size] if size >= 0 else b"")
            at += 8 + max(size, 0)
        if at != len(blob):
            raise ValueError(
                f"blob: {len(blob)} bytes are not allowed; they must be a snapshot of such a cache"
            )
        between = not self._called  # two tokens: the sequence can be saved
        if self._called:
            self._called = None  # as in clear()
        done = []
        for group, part in zip(self._groups, parts):
            before = group.call("snapshot", sequence) if len(self._groups) > 1 and between else None
            group.reserved, group.longest = 0, self.max_length  # at most
            try:
                group.whole("restore", sequence, part)
            except Exception:
                for other, old in done:
                    other.whole("restore", sequence, old)
                if not between:
                    self.clear(sequence)
                raise
            if before is not None:
                done.append((group, before))

    def lengths(self, layer=0):
        """Tokens seen by each sequence. On CUDA it waits for the stream."""
        group, _ = self._layer(layer)
        return [group.call("length", sequence) for sequence in range(self.sequences)]

    def usage(self, layer, sequence, head):
        """The Usage of one head. On CUDA it waits for the stream."""
        group, index = self._layer(layer)
        return Usage(*group.call("usage", index, sequence, head))

    def retained(self, layer, sequence, head):
        """The positions that one head holds, in the order of its entries; of a cache on the CPU."""
        if self.device.type != "cpu":
            raise NotImplementedError(f"retained on {self.device} is not there; use a cache on the CPU")
        group, index = self._layer(layer)
        return group.native.retained(index, sequence, head)

    def memory_bytes(self, *, entries_only=False):
        """Bytes that the cache holds: keys, values and all beside them (with entries_only neither page tables
        nor scorers' states), without the workspace."""
        at = 0 if entries_only else 2
        return sum(group.sizes[at] + len(group.slabs) * group.sizes[3] for group in self._groups)
