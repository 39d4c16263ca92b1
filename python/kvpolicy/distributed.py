"""One sequence on several GPUs: masks, attention with its gradients, and the future-attention target over a
torch.distributed process group.

SequenceShards says which tokens each rank holds. The functions take this rank's share of q, k, v, scores and
masks, and give this rank's share of what the functions of the same names in kvpolicy give for the whole
sequence. Every rank of the group calls them, and takes part in the backward pass.

attend gathers keys and values of all ranks, and adds up their gradients where the keys are. With grouped
query heads K and V are small beside Q and the output: no rank sends those. They are gathered again for the
backward pass, so that between the two a rank keeps its share alone, and the mask. A few KV heads are gathered
at a time, while a GPU attends to those before: their memory is a fraction of all keys, and most of the time
on the links is hidden. A ring of shares, merged by LSE, would hold one share in place of a few heads, and
rescale the outputs once per rank in return.

future_mass sums over the queries of all ranks, and its maximum over query heads does not split into sums. So
q and k change hands once: from a share of the tokens with all heads to all tokens with a share of the KV
heads. A rank beyond the number of KV heads has no work in it.
"""

import weakref

import torch
from torch import distributed as dist

from kvpolicy import attention, masks
from kvpolicy.masks import Mask

_LAYOUTS = ("contiguous", "zigzag")
_REQUIRED = ("q", "k", "v", "scores")


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _bytes(tensor):
    """The same memory as bytes, which every backend of torch.distributed moves."""
    return tensor.view(-1).view(torch.uint8)


_host_groups = weakref.WeakKeyDictionary()


def _host_group(group):
    """A group of the same ranks that moves CPU tensors: the group itself, or one of gloo."""
    group = dist.group.WORLD if group is None else group
    if "cpu" in dist.get_backend_config(group):
        return group
    if group not in _host_groups:
        ranks = dist.get_process_group_ranks(group)
        _host_groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _host_groups[group]


class SequenceShards:
    """Which tokens of a sequence each rank of a process group holds.

    length  tokens of the whole sequence, at least one per piece
    layout  "contiguous": of one piece per rank, rank r holds piece r. "zigzag": of two pieces per rank, it
            holds piece r and the r-th from the end, in this order; each rank then sees as many earlier keys.
            Pieces differ by at most one token, and the first ones are the longer ones
    group   a process group, or a DeviceMesh of one dimension; None: the default group

    Under a causal mask, or gates that keep a share of all keys, later queries see more keys: "zigzag" gives
    ranks equal work. Under a budget they see as many, and "contiguous" does.

    Each call begins with one number per rank, which travels between the hosts and waits for no stream:
    whether the rank has new dtypes, shapes or numbers, or found a problem. Where a rank has, the ranks
    compare them, and all raise what one of them found.
    """

    def __init__(self, length, *, layout="contiguous", group=None):
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "SequenceShards without a process group is not allowed; call "
                "torch.distributed.init_process_group first"
            )
        if layout not in _LAYOUTS:
            raise ValueError(f"layout: {layout!r} is not allowed; it must be one of {_LAYOUTS}")
        self.length, self.layout = length, layout
        self.group = group.get_group() if hasattr(group, "get_group") else group
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        pieces = self.ranks if layout == "contiguous" else 2 * self.ranks
        if isinstance(length, bool) or not isinstance(length, int) or length < pieces:
            raise ValueError(
                f"length: {length!r} is not allowed; it must be a whole number of at least {pieces} tokens, "
                f"one per piece of {self.ranks} ranks in the {layout} layout"
            )
        edges = [i * (length // pieces) + min(i, length % pieces) for i in range(pieces + 1)]
        ranges = list(zip(edges, edges[1:]))
        self._of_rank = [
            [ranges[rank]] if layout == "contiguous" else [ranges[rank], ranges[-1 - rank]]
            for rank in range(self.ranks)
        ]
        counts = [sum(last - first for first, last in own) for own in self._of_rank]
        self._most = max(counts)
        # Whether rows in the order of ranks are in the order of the sequence.
        self._ordered = layout == "contiguous" and min(counts) == self._most
        self._indices, self._agreed = {}, set()
        self.pieces = self._of_rank[self.rank]
        """[(first, last)]: this rank's tokens, from `first` up to but not including `last`."""
        self.tokens = counts[self.rank]
        """How many they are."""

    def positions(self, device=None):
        """[tokens] int64: the positions of this rank's tokens, for position_ids."""
        return torch.cat([torch.arange(*piece, device=device) for piece in self.pieces])

    def shard(self, tensor, dim=2):
        """This rank's share of a tensor of the whole sequence: a view if contiguous, else a copy."""
        if tensor.shape[dim] != self.length:
            raise ValueError(
                f"tensor.size({dim}): {tensor.shape[dim]} is not allowed; it must be all {self.length} tokens"
            )
        parts = [tensor.narrow(dim, first, last - first) for first, last in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def gather(self, tensor, dim=2):
        """The tensor of the whole sequence, from all ranks' shares. Its gradient is for what every rank
        computes alike from the whole, such as a loss of gathered scores: a share takes its part of it, and
        nothing is added up."""
        if tensor.shape[dim] != self.tokens:
            raise ValueError(f"tensor.size({dim}): {self._refused(tensor.shape[dim])}")
        return _Gather.apply(self, tensor, dim)

    def _refused(self, tokens):
        return (
            f"{tokens} is not allowed; rank {self.rank} of {self.ranks} holds {self.tokens} of the "
            f"{self.length} tokens"
        )

    # ---- rows: tensors [tokens, ...], contiguous -----------------------------------------------------------

    def _index(self, device):
        """(slots, order) on a device: the position of each slot in the order of ranks, whose shares are
        padded to equal size; and the slot of each position."""
        if device not in self._indices:
            slots = torch.zeros(self.ranks, self._most, dtype=torch.int64)
            order = torch.empty(self.length, dtype=torch.int64)
            for rank, own in enumerate(self._of_rank):
                at = torch.cat([torch.arange(*piece) for piece in own])
                slots[rank, : len(at)] = at
                order[at] = rank * self._most + torch.arange(len(at))
            self._indices[device] = slots.flatten().to(device), order.to(device)
        return self._indices[device]

    def start_gather(self, rows):
        """Sends [tokens, ...]; the result is a function that waits for [length, ...]."""
        if self.ranks == 1:
            return lambda: rows
        if self.tokens < self._most:
            rows = torch.cat((rows, rows.new_zeros(self._most - self.tokens, *rows.shape[1:])))
        whole = rows.new_empty(self.ranks * self._most, *rows.shape[1:])
        work = dist.all_gather_into_tensor(_bytes(whole), _bytes(rows), group=self.group, async_op=True)

        def finish():
            work.wait()
            return whole if self._ordered else whole.index_select(0, self._index(rows.device)[1])

        return finish

    def start_sum(self, rows):
        """Sends [length, ...]; the result is a function that waits for [tokens, ...], the sum over ranks of
        this rank's share. The sum is made in float32 or more, in the order of ranks, so that its bits do not
        depend on the backend."""
        if self.ranks == 1:
            return lambda: rows
        if not self._ordered:
            rows = rows.index_select(0, self._index(rows.device)[0])
        received = torch.empty_like(rows)
        work = self._exchange(received, rows, async_op=True)

        def finish():
            work.wait()
            parts = received.unflatten(0, (self.ranks, self._most))[:, : self.tokens]
            return parts.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)

        return finish

    def _exchange(self, received, rows, async_op=False):
        """Sends the i-th of `ranks` equal parts of rows to rank i; received has a part from each."""
        return dist.all_to_all_single(_bytes(received), _bytes(rows), group=self.group, async_op=async_op)

    # ---- heads ---------------------------------------------------------------------------------------------

    def heads_of(self, kv_heads, rank=None):
        """(first, last): the KV heads of a rank where it has a share of the heads and all tokens."""
        rank = self.rank if rank is None else rank
        size, longer = divmod(kv_heads, self.ranks)
        first = rank * size + min(rank, longer)
        return first, first + size + (rank < longer)

    def to_heads(self, x, kv_heads):
        """[B, own KV heads * G, length, D] from [B, kv_heads * G, tokens, D]."""
        if self.ranks == 1:
            return x
        batch, heads, _, dim = x.shape
        group, most = heads // kv_heads, -(-kv_heads // self.ranks)
        x = x.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3, 4)
        sent = x.new_zeros(self.ranks, most, group, batch, self._most, dim)
        for rank in range(self.ranks):
            first, last = self.heads_of(kv_heads, rank)
            sent[rank, : last - first, ..., : self.tokens, :] = x[first:last]
        first, last = self.heads_of(kv_heads)
        received = torch.empty_like(sent)
        self._exchange(received, sent)
        own = received[:, : last - first].permute(3, 1, 2, 0, 4, 5)
        own = own.reshape(batch, (last - first) * group, self.ranks * self._most, dim)
        return own.index_select(2, self._index(x.device)[1])

    def from_heads(self, y, kv_heads, group=1):
        """[B, kv_heads * group, tokens] from [B, own KV heads * group, length]."""
        if self.ranks == 1:
            return y
        batch, most = y.shape[0], -(-kv_heads // self.ranks)
        first, last = self.heads_of(kv_heads)
        y = y.index_select(2, self._index(y.device)[0]).unflatten(2, (self.ranks, self._most))
        sent = y.new_zeros(self.ranks, most, group, batch, self._most)
        sent[:, : last - first] = y.unflatten(1, (last - first, group)).permute(3, 1, 2, 0, 4)
        received = torch.empty_like(sent)
        self._exchange(received, sent)
        parts = []
        for rank in range(self.ranks):
            first, last = self.heads_of(kv_heads, rank)
            parts.append(received[rank, : last - first, ..., : self.tokens])
        return torch.cat(parts).permute(2, 0, 1, 3).reshape(batch, kv_heads * group, self.tokens)

    # ---- checks --------------------------------------------------------------------------------------------

    def check(self, call, shares, *, numbers=None, trial=None, **whole):
        """Raises on all ranks what one of them finds: a tensor of `shares` that is no share (tokens are its
        third dimension), tensors of several dtypes, or ones that differ between ranks beyond their tokens.
        `whole` are the same tensors on all ranks, and `numbers` the same arguments of other types. Those that
        are None do not count, but for q, k, v and scores. trial() raises what else is wrong with new ones."""
        shares = {name: x for name, x in shares.items() if x is not None or name in _REQUIRED}
        whole = {name: x for name, x in whole.items() if x is not None}
        problem, found = self._problem(shares, whole), None
        if problem is None:
            found = {
                name: (_name(x.dtype), [*x.shape[:2], *x.shape[3:]], x.device.type)
                for name, x in shares.items()
            }
            found |= {name: (_name(x.dtype), list(x.shape), x.device.type) for name, x in whole.items()}
            found |= {name: repr(value) for name, value in (numbers or {}).items()}
        key = call, repr(found)
        is_new = key not in self._agreed  # so is every problem, since it has nothing found
        if problem is None and is_new and trial is not None:
            problem = _raised_by(trial)
        if not self._on_any_rank(is_new):
            return
        of_ranks = [(problem, found)] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(of_ranks, (problem, found), group=_host_group(self.group))
        for problem, _ in of_ranks:
            if problem is not None:
                raise problem
        first = of_ranks[0][1]
        for rank, (_, other) in enumerate(of_ranks):
            for name in first | other:
                here, there = first.get(name), other.get(name)
                if here != there:
                    types = isinstance(here, tuple) and isinstance(there, tuple) and here[0] != there[0]
                    raise (TypeError if types else ValueError)(
                        f"{name} on rank {rank}: {_described(there)} is not allowed; it must be as on rank "
                        f"0, {_described(here)}"
                    )
        self._agreed.add(key)

    def _on_any_rank(self, flag):
        """Whether the flag of one rank is set."""
        if self.ranks == 1:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32, device="cpu")
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=_host_group(self.group))
        return bool(flags.item())

    def _problem(self, shares, whole):
        """An exception, or None."""
        problem = self._problem_of_shares(shares)
        if problem is not None:
            return problem
        for name, x in whole.items():
            if not isinstance(x, torch.Tensor):
                return TypeError(f"{name}: {type(x).__name__} is not allowed; it must be a tensor")
        batch = next(iter(shares.values())).shape[0]
        return _raised_by(
            lambda: _check_sequences(self, batch, whole.get("lengths"), whole.get("cu_seqlens"))
        )

    def _problem_of_shares(self, shares):
        """An exception, or None."""
        first, keys = next(iter(shares)), shares.get("k")
        for name, x in shares.items():
            if not isinstance(x, torch.Tensor):
                return TypeError(f"{name}: {type(x).__name__} is not allowed; it must be a tensor")
            wanted = 4 if name in ("q", "k", "v") else 3
            if x.dim() != wanted:
                return ValueError(f"{name}.dim(): {x.dim()} is not allowed; it must be {wanted}")
            if x.shape[2] != self.tokens:
                return ValueError(f"{name}.size(2): {self._refused(x.shape[2])}")
            if wanted == 4 and x.dtype != shares[first].dtype:
                return TypeError(
                    f"{name}: {_name(x.dtype)} is not allowed; it must be {_name(shares[first].dtype)}, as "
                    f"{first}"
                )
        if keys is not None and shares["q"].shape[1] % max(keys.shape[1], 1):
            return ValueError(
                f"q.size(1): {shares['q'].shape[1]} is not allowed; it must be a multiple of the KV heads, "
                f"{keys.shape[1]}"
            )
        for name in ("v", "expiry", "log_bias"):
            if keys is not None and name in shares and shares[name].shape[:2] != keys.shape[:2]:
                return ValueError(
                    f"{name}: {list(shares[name].shape[:2])} batch entries and heads are not allowed; they "
                    f"must be k's, {list(keys.shape[:2])}"
                )
        return None


def _raised_by(call):
    """The exception that call() raises, or None."""
    try:
        call()
    except Exception as error:
        return error.with_traceback(None)  # whose frames would keep tensors
    return None


def _described(found):
    if found is None or isinstance(found, str):
        return str(found)
    return f"{found[0]} {found[1]} on {found[2]}"


def _whole(shards, tensor, dim=2):
    rows = tensor.detach().movedim(dim, 0).contiguous()
    return shards.start_gather(rows)().movedim(0, dim).contiguous()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shards, tensor, dim):
        ctx.shards, ctx.dim = shards, dim
        return _whole(shards, tensor, dim)

    @staticmethod
    def backward(ctx, gradient):
        return None, ctx.shards.shard(gradient, ctx.dim).contiguous(), None


def _segment_expiry(shards, expiry, cu_seqlens, batch, heads):
    """Expiries that end with the packed segment of their key: queries of the next one do not see it."""
    at = torch.arange(shards.length, dtype=torch.int32, device=cu_seqlens.device)
    ends = cu_seqlens[1:]
    ends = ends[torch.searchsorted(ends, at, right=True).clamp(max=len(ends) - 1)]
    ends = ends.expand(batch, heads, shards.length)
    return ends.contiguous() if expiry is None else torch.minimum(expiry, ends)


def _check_sequences(shards, batch, lengths, cu_seqlens):
    """What the whole sequence's numbers must be; values on the CPU alone."""
    for name, x in (("lengths", lengths), ("cu_seqlens", cu_seqlens)):
        if x is not None and x.dtype != torch.int32:
            raise TypeError(f"{name}: {_name(x.dtype)} is not allowed; it must be int32")
    if lengths is not None:
        if lengths.shape != (batch,):
            raise ValueError(
                f"lengths: shape {list(lengths.shape)} is not allowed; it must be [{batch}], one per batch "
                "entry"
            )
        if lengths.device.type == "cpu" and ((lengths < 0) | (lengths > shards.length)).any():
            raise ValueError(
                f"lengths: {lengths.tolist()} are not allowed; they must be 0 to {shards.length}, the tokens "
                "of the whole sequence"
            )
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu":
        edges = cu_seqlens.tolist()
        if len(edges) < 2 or edges[0] != 0 or edges[-1] != shards.length or edges != sorted(edges):
            raise ValueError(
                f"cu_seqlens: {edges} is not allowed; it must rise from 0 to {shards.length}, the tokens of "
                "the whole sequence"
            )


# ---- attend ------------------------------------------------------------------------------------------------


# Bytes of keys and values that travel together, at least: many enough for the links, few enough that most of
# them travel while a GPU attends to others.
_TOGETHER = 1 << 26


def _head_groups(shards, k, v):
    """KV heads, as slices, whose keys and values travel together."""
    heads = k.shape[1]
    size = k.shape[0] * heads * shards.length * (k.shape[-1] + v.shape[-1]) * k.element_size()
    count = max(1, min(heads, size // _TOGETHER))
    edges = [i * heads // count for i in range(count + 1)]
    return [slice(first, last) for first, last in zip(edges, edges[1:])]


def _gathered(shards, k, v):
    """(heads, (k, v)) for groups of KV heads: keys and values of all tokens, [B, h, length, D]. The next
    group's travel meanwhile. A token's rows follow one another, so that nothing is copied at the end."""

    def start(heads):
        rows = torch.cat((k[:, heads], v[:, heads]), -1)
        return shards.start_gather(rows.permute(2, 0, 1, 3).contiguous())

    groups = _head_groups(shards, k, v)
    following = start(groups[0])
    for i, heads in enumerate(groups):
        finish = following
        following = start(groups[i + 1]) if i + 1 < len(groups) else None
        rows = finish().permute(1, 2, 0, 3)
        yield heads, (rows[..., : k.shape[-1]], rows[..., k.shape[-1] :])


def _pieces(shards, q, lengths):
    """[(rows of q, keys, (lengths, starts, None))] of this rank's pieces: queries follow `starts` keys."""
    pieces, at = [], 0
    for first, last in shards.pieces:
        own = None
        if lengths is not None:
            own = (lengths - first).clamp(0, last - first).to(torch.int32)
        starts = torch.full((q.shape[0],), first, dtype=torch.int32, device=q.device) if first else None
        pieces.append((slice(at, at + last - first), slice(0, last), (own, starts, None)))
        at += last - first
    return pieces


def _of(heads, keys, mask):
    """The part of a mask of all keys."""
    expiry, log_bias, bias_from = mask
    parts = [None if x is None else x[:, heads, keys] for x in (expiry, log_bias)]
    return *parts, None if bias_from is None else bias_from[heads]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shards, numbers, q, k, v, expiry, log_bias, bias_from, lengths):
        """expiry is of all keys."""
        ctx.bias_type = None if log_bias is None else log_bias.dtype
        mask = expiry, None if log_bias is None else _whole(shards, log_bias), bias_from
        make = torch.empty if lengths is None else torch.zeros
        out = make((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
        lse = make(q.shape[:-1], dtype=torch.float32, device=q.device)
        group, pieces = q.shape[1] // k.shape[1], _pieces(shards, q, lengths)
        for heads, whole in _gathered(shards, k, v):
            query_heads = slice(heads.start * group, heads.stop * group)
            for rows, keys, sequences in pieces:
                attention.attend_into(
                    out[:, query_heads, rows],
                    lse[:, query_heads, rows],
                    q[:, query_heads, rows],
                    *(x[:, :, keys] for x in whole),
                    _of(heads, keys, mask),
                    sequences,
                    numbers,
                )
        ctx.save_for_backward(out, lse, q, k, v, *mask, lengths)
        ctx.shards, ctx.numbers = shards, numbers
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        if d_out is None and d_lse is None:
            return (None,) * 9
        shards = ctx.shards
        out, lse, q, k, v, *mask, lengths = ctx.saved_tensors
        key_dim, value_dim = k.shape[-1], v.shape[-1]
        d_k, d_v = torch.empty_like(k), torch.empty_like(v)
        d_out, out, v = attention.with_lse_gradient(d_out, d_lse, out, v)
        make = torch.empty if lengths is None else torch.zeros
        d_q = make(q.shape, dtype=q.dtype, device=q.device)
        d_log_bias = None
        if mask[1] is not None:
            real = torch.promote_types(q.dtype, torch.float32)
            d_log_bias = torch.zeros(mask[1].shape, dtype=real, device=q.device)
        numbers = (*ctx.numbers, torch.are_deterministic_algorithms_enabled())
        group, pieces = q.shape[1] // k.shape[1], _pieces(shards, q, lengths)
        travelling = []

        def arrive():
            heads, finish = travelling.pop(0)
            rows = finish().permute(1, 2, 0, 3)
            d_k[:, heads], d_v[:, heads] = rows[..., :key_dim], rows[..., key_dim:][..., :value_dim]

        for heads, whole in _gathered(shards, k, v):
            query_heads = slice(heads.start * group, heads.stop * group)
            sums = _Sums(whole)
            # The last piece first: it has the most keys.
            for rows, keys, sequences in reversed(pieces):
                bias = None if d_log_bias is None else torch.empty_like(d_log_bias[:, heads, keys])
                saved = (x[:, query_heads, rows] for x in (out, lse, d_out))
                attention.attend_backward_into(
                    (d_q[:, query_heads, rows], *sums.next(keys), bias),
                    tuple(saved),
                    q[:, query_heads, rows],
                    *(x[:, :, keys] for x in whole),
                    _of(heads, keys, mask),
                    sequences,
                    numbers,
                )
                sums.add()
                if bias is not None:
                    d_log_bias[:, heads, keys] += bias
            travelling.append((heads, shards.start_sum(sums.rows)))
            if len(travelling) > 1:
                arrive()
        arrive()
        if d_log_bias is not None:
            rows = shards.start_sum(d_log_bias.permute(2, 0, 1).contiguous())()
            d_log_bias = rows.permute(1, 2, 0).to(ctx.bias_type)
        return None, None, d_q, d_k, d_v, None, d_log_bias, None, None


class _Sums:
    """Gradients of all keys by this rank's queries: rows [length, B, h, Dk + Dv], piece after piece."""

    def __init__(self, whole):
        k, v = whole
        self.key_dim = k.shape[-1]
        self.rows = k.new_empty(k.shape[2], *k.shape[:2], k.shape[-1] + v.shape[-1])
        self.written, self.piece = 0, None

    def next(self, keys):
        """(d_k, d_v) of the first keys for a piece to write; the first piece has the most."""
        if self.written:
            self.piece = self.rows.new_empty(keys.stop, *self.rows.shape[1:])
        else:
            self.rows[keys.stop :] = 0
            self.piece = self.rows[: keys.stop]
        rows = self.piece.permute(1, 2, 0, 3)
        return rows[..., : self.key_dim], rows[..., self.key_dim :]

    def add(self):
        if self.written:
            self.rows[: len(self.piece)] += self.piece
        self.written += 1


def attend(
    shards,
    q,
    k,
    v,
    mask=None,
    *,
    lengths=None,
    cu_seqlens=None,
    sm_scale=None,
    logits_soft_cap=0.0,
    return_lse=False,
):
    """kvpolicy.attend of a sequence whose tokens lie on several ranks.

    shards      a SequenceShards, alike on all ranks; n = shards.tokens
    q, k, v     this rank's share: [B, Hq, n, Dk], [B, Hkv, n, Dk], [B, Hkv, n, Dv]
    mask        a Mask with this rank's share of expiry [B, Hkv, n] and log_bias [B, Hkv, n], and all of
                bias_from [Hkv]; expiries are positions in the whole sequence. None: causal attention
    lengths     [B] int32: tokens per sequence, of the whole; out and lse are 0 beyond
    cu_seqlens  [segments + 1] int32: edges of packed segments in the whole

    Returns this rank's share of out [B, Hq, n, Dv], and lse [B, Hq, n] float32 with return_lse. Gradients of
    out and lse reach q, k, v and mask.log_bias: those of k, v and log_bias are sums over all ranks' queries,
    so a loss is the sum of the ranks' losses. Between the passes a rank holds its share of q, k, v, out, and
    the whole mask; within them, keys and values of all ranks as well, of a few KV heads at a time. Dtypes,
    errors and streams as kvpolicy.attend's. torch.compile does not trace it.
    """
    mask = Mask(None) if mask is None else mask
    shares = {"q": q, "k": k, "v": v, "expiry": mask.expiry, "log_bias": mask.log_bias}
    shards.check("attend", shares, bias_from=mask.bias_from, lengths=lengths, cu_seqlens=cu_seqlens)
    expiry = None if mask.expiry is None else _whole(shards, mask.expiry)
    if cu_seqlens is not None:
        expiry = _segment_expiry(shards, expiry, cu_seqlens, *k.shape[:2])
    numbers = (sm_scale or 0.0, logits_soft_cap)
    out, lse = _Attend.apply(shards, numbers, q, k, v, expiry, mask.log_bias, mask.bias_from, lengths)
    return (out, lse) if return_lse else out


# ---- future_mass -------------------------------------------------------------------------------------------


def _first_token(*tensors):
    """A call of all heads on it raises on every rank, on those without heads of their own too."""
    return [x[:, :, :1].contiguous() for x in tensors]


@torch.no_grad()
def causal_lse(shards, q, k, *, lengths=None, sm_scale=None, logits_soft_cap=0.0):
    """kvpolicy.causal_lse of a sequence on several ranks: this rank's share of the dense causal normalizer,
    [B, Hq, n] float32, from its share of q [B, Hq, n, Dk] and k [B, Hkv, n, Dk]. lengths [B] int32 are of the
    whole. No gradient."""
    options = {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap}

    def trial():
        attention.causal_lse(*_first_token(q, k), **options)

    shards.check("causal_lse", {"q": q, "k": k}, numbers=options, trial=trial, lengths=lengths)
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    own_q, own_k = shards.to_heads(q, kv_heads), shards.to_heads(k, kv_heads)
    lse = torch.empty(own_q.shape[:3], dtype=torch.float32, device=q.device)
    if own_k.shape[1]:
        lse = attention.causal_lse(own_q, own_k, lengths=lengths, **options)
    return shards.from_heads(lse, kv_heads, group)


@torch.no_grad()
def future_mass(shards, q, k, window, *, lse=None, lengths=None, **options):
    """kvpolicy.future_mass of a sequence on several ranks: this rank's share of the target, [B, Hkv, n]
    float32, from its share of q [B, Hq, n, Dk], k [B, Hkv, n, Dk] and lse [B, Hq, n] (default: causal_lse).
    lengths [B] int32 are of the whole; options are kvpolicy.future_mass's. No gradient."""
    window = list(window) if isinstance(window, tuple) else window
    shares = {"q": q, "k": k, "lse": lse}

    def trial():
        own_lse = None if lse is None else _first_token(lse)[0].float()
        attention.future_mass(*_first_token(q, k), window, lse=own_lse, **options)

    shards.check(
        "future_mass", shares, numbers={"window": window, **options}, trial=trial, lengths=lengths
    )
    kv_heads = k.shape[1]
    first, last = shards.heads_of(kv_heads)
    own_lse = None
    if lse is not None:
        own_lse = shards.to_heads(lse.float()[..., None], kv_heads)[..., 0].contiguous()
    own_q, own_k = shards.to_heads(q, kv_heads), shards.to_heads(k, kv_heads)
    target = torch.empty(own_k.shape[:3], dtype=torch.float32, device=k.device)
    if last > first:
        if not isinstance(window, int) and len(window) > 1:
            window = list(window)[first:last]
        target = attention.future_mass(own_q, own_k, window, lse=own_lse, lengths=lengths, **options)
    return shards.from_heads(target, kv_heads)


# ---- masks -------------------------------------------------------------------------------------------------


def _scores_of(shards, scores, lengths, cu_seqlens):
    shards.check("build_mask", {"scores": scores}, lengths=lengths, cu_seqlens=cu_seqlens)
    return shards.gather(scores)


def build_mask(shards, policy, scores, *, lengths=None, cu_seqlens=None):
    """kvpolicy.build_mask of a sequence on several ranks: this rank's share of the expiries [B, Hkv, n],
    which are positions in the whole sequence, from its share of the scores [B, Hkv, n]. lengths and
    cu_seqlens are of the whole. Ranks gather the scores, and each builds the whole mask: B Hkv S numbers."""
    with torch.no_grad():
        whole = _scores_of(shards, scores, lengths, cu_seqlens)
    mask = masks.build_mask(policy, whole, lengths=lengths, cu_seqlens=cu_seqlens)
    return Mask(shards.shard(mask.expiry).contiguous())


def build_log_bias(shards, policy, gate, scores, *, lengths=None, cu_seqlens=None):
    """kvpolicy.build_log_bias of a sequence on several ranks: this rank's share of the Mask, from its share
    of the scores [B, Hkv, n], which its gradient reaches. lengths and cu_seqlens are of the whole."""
    whole = _scores_of(shards, scores, lengths, cu_seqlens)
    mask = masks.build_log_bias(policy, gate, whole, lengths=lengths, cu_seqlens=cu_seqlens)
    expiry, log_bias = (shards.shard(x).contiguous() for x in mask[:2])
    return Mask(expiry, log_bias, mask.bias_from)
