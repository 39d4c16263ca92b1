"""Scorers as modules: scores of keys from keys and values, [B, Hkv, S, Dk] and [B, Hkv, S, Dv].

Parameters have the names, shapes and order of the library's files (docs/training/files.md). The computation
reads them as float32, whatever their dtype; their gradients have their dtype.
"""

import copy
import dataclasses
from typing import Optional

import torch
from torch import nn

from kvpolicy import _native
from kvpolicy._native import Operator

# ---- operators ---------------------------------------------------------------------------------------------

# sizes: hidden, d_qk, d_v, delay, rope_layout, rope_dims, norm. numbers: gate_softcap, rope_base. With
# dropout its seed follows the sizes, its rate the numbers.
_SCORER = "str kind, int[] sizes, float[] numbers, Tensor? frequencies"
_SEQUENCES = "Tensor? lengths, Tensor? cu_seqlens"


def _real(rows):
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def _wide_parameters(parameters):
    """As the library reads them; an empty tensor stands for a parameter that is left out."""
    return [
        (p if p.dtype == torch.float32 and p.is_contiguous() else p.float().contiguous())
        if p.numel()
        else None
        for p in parameters
    ]


def _score(k, v, parameters, kind, sizes, numbers, frequencies, lengths, cu_seqlens):
    # Tokens beyond a sequence's length, and keys that do not leave the window of an mLSTM, are not scored.
    make = torch.empty if sizes[3] == 0 and lengths is None else torch.zeros
    *sequence, _ = k.shape
    scores = make(*sequence, dtype=_real(k), device=k.device)
    scorer = (kind, sizes, numbers, frequencies)
    wide = _wide_parameters(parameters)
    _native.call("score", k, scorer, k, v, wide, (lengths, None, cu_seqlens), scores)
    return scores


def _score_fake(k, *_others):
    return torch.empty(k.shape[:-1], dtype=_real(k), device=k.device)


def _score_backward(
    d_scores, k, v, parameters, kind, sizes, numbers, frequencies, lengths, cu_seqlens, inputs
):
    real = _real(k)
    scorer = (kind, sizes, numbers, frequencies)
    rows = [torch.zeros(x.shape if inputs else 0, dtype=real, device=x.device) for x in (k, v)]
    sums = [torch.zeros(p.shape, dtype=real, device=k.device) for p in parameters]
    _native.call(
        "score_backward",
        k,
        scorer,
        k,
        v,
        _wide_parameters(parameters),
        (lengths, None, cu_seqlens),
        _native.rows(d_scores),
        *(rows if inputs else (None, None)),
        [s if s.numel() else None for s in sums],
    )
    return rows[0].to(k.dtype), rows[1].to(v.dtype), [s.to(p.dtype) for s, p in zip(sums, parameters)]


def _score_backward_fake(
    d_scores, k, v, parameters, kind, sizes, numbers, frequencies, lengths, cu_seqlens, inputs
):
    rows = [torch.empty(x.shape if inputs else 0, dtype=x.dtype, device=x.device) for x in (k, v)]
    return *rows, [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in parameters]


_score_backward_operator = Operator(
    "score_backward",
    f"(Tensor d_scores, Tensor k, Tensor v, Tensor[] parameters, {_SCORER}, {_SEQUENCES}, bool inputs) "
    "-> (Tensor, Tensor, Tensor[])",
    _score_backward,
    _score_backward_fake,
    refusal="the gradient of a scorer (a second derivative)",
    at_list=3,
)


def _score_setup(ctx, inputs, output):
    k, v, parameters, *ctx.scorer, frequencies, lengths, cu_seqlens = inputs
    ctx.save_for_backward(k, v, frequencies, lengths, cu_seqlens, *parameters)


def _score_gradient(ctx, d_scores):
    k, v, frequencies, lengths, cu_seqlens, *parameters = ctx.saved_tensors
    inputs = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
    d_k, d_v, d_parameters = _score_backward_operator(
        d_scores, k, v, parameters, *ctx.scorer, frequencies, lengths, cu_seqlens, inputs
    )
    rows = (d_k, d_v) if inputs else (None, None)
    return *rows, d_parameters


_score_operator = Operator(
    "score",
    f"(Tensor k, Tensor v, Tensor[] parameters, {_SCORER}, {_SEQUENCES}) -> Tensor",
    _score,
    _score_fake,
    _score_gradient,
    _score_setup,
    of=(0, 1, 2),
    at_list=2,
)


# ---- modules -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rope:
    """How cached keys were rotated, for scorers that look at keys before RoPE.

    layout       "half_split" (pair i is x[i], x[i + dims / 2]: Hugging Face's Llama and Qwen), "interleaved"
                 (x[2 i], x[2 i + 1]), or None for keys without RoPE
    base         theta
    dims         the first numbers of a key that are rotated; 0 for all
    frequencies  [dims / 2] float32 on the device of the keys, where they are not base^(-2 i / dims)
    """

    layout: Optional[str] = "half_split"
    base: float = 10000.0
    dims: int = 0
    frequencies: Optional[torch.Tensor] = None

    def __post_init__(self):
        if self.layout not in _LAYOUTS:
            raise ValueError(f"layout: {self.layout!r} is not allowed; it must be one of {_LAYOUTS}")

    @property
    def layout_number(self):
        return _LAYOUTS.index(self.layout)

    def undo(self, k, positions):
        """Keys [B, Hkv, T, D] before RoPE, float32, from those after it at positions [B, T] int64."""
        k = k.float()
        dims = self.dims or k.shape[-1]
        rates = self.frequencies
        if rates is None:
            at = torch.arange(0, dims, 2, dtype=torch.float64, device=k.device)
            rates = (float(self.base) ** (-at / dims)).float()
        at = positions[:, None, :, None].double()
        angles = at * rates.double()
        # As the library and engines have it: one product in float32, as far as that counts positions.
        angles = torch.where(at <= 2**24, angles.float().double(), angles)
        cos, sin = angles.cos().float(), angles.sin().float()
        turned, rest = k[..., :dims], k[..., dims:]
        if self.layout == "half_split":
            x, y = turned.chunk(2, -1)
            turned = torch.cat((x * cos + y * sin, y * cos - x * sin), -1)
        else:
            x, y = turned[..., ::2], turned[..., 1::2]
            turned = torch.stack((x * cos + y * sin, y * cos - x * sin), -1).flatten(-2)
        return torch.cat((turned, rest), -1)


# In the order of the library's rope_layout.
_LAYOUTS = (None, "interleaved", "half_split")
_UNROTATED = Rope(None)


def _check_size(name, value):
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: {value!r} is not allowed; it must be a whole number above 0")


def _share_of(scorer, names, first, last):
    """A copy of a scorer with the rows `first` up to but not including `last` of the parameters `names`, and
    all of the others."""
    if not 0 <= first < last <= scorer.heads:
        raise ValueError(
            f"heads: {first} to {last} are not allowed; they must be some of 0 to {scorer.heads}"
        )
    part = copy.copy(scorer)
    part._parameters = {}
    for name, p in scorer._parameters.items():
        rows = p[first:last] if p is not None and name in names else p
        part._parameters[name] = p if p is None else nn.Parameter(rows.detach().clone(), p.requires_grad)
    part.heads = last - first
    return part


class Scorer(nn.Module):
    """What scorers share. `names` are the parameters in the library's order; an optional one may be None."""

    kind = ""
    names = ()

    def __init__(self, heads, head_dim, value_dim=None):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        for name, value in (("heads", heads), ("head_dim", head_dim), ("value_dim", self.value_dim)):
            _check_size(name, value)
        self.gate_softcap, self.rope, self.norm = 0.0, None, False

    @property
    def input_size(self):
        return self.head_dim + self.value_dim

    def sizes(self):
        """hidden, d_qk, d_v, delay; 0 for those that the scorer lacks."""
        return [0, 0, 0, 0]

    @property
    def norm_number(self):
        """The library's number of `norm`, where there is one."""
        return int(self.norm == "layer")

    def call_numbers(self):
        """The operator's sizes, numbers and frequencies."""
        rope = self.rope or _UNROTATED
        sizes = [*self.sizes(), rope.layout_number, rope.dims, self.norm_number]
        return sizes, [self.gate_softcap, float(rope.base)], rope.frequencies

    def pass_numbers(self):
        """Those of a forward pass in the module's mode."""
        return self.call_numbers()

    def _apply(self, move, *arguments, **options):
        super()._apply(move, *arguments, **options)
        if self.rope is not None and self.rope.frequencies is not None:
            moved = move(self.rope.frequencies).float()
            self.rope = dataclasses.replace(self.rope, frequencies=moved)
        return self

    def share(self, first, last):
        """The scorer of KV heads `first` up to but not including `last`: of one rank that holds these. Its
        parameters are copies."""
        return _share_of(self, self._parameters, first, last)

    def _add(self, **shapes):
        for name, shape in shapes.items():
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.zeros(shape)))

    def forward(self, k, v, *, lengths=None, cu_seqlens=None):
        """Scores [B, Hkv, S], float32 (float64 for float64 rows), from k [B, Hkv, S, Dk] and v [B, Hkv, S,
        Dv] of one dtype, as they are cached (keys after RoPE); the last dimension is contiguous. lengths [B]
        and cu_seqlens [segments + 1], int32, as in build_mask: entries beyond a length are 0. Gradients reach
        parameters, k and v. On CUDA the work is enqueued on the current stream."""
        parameters = [getattr(self, name) for name in self.names]
        parameters = [k.new_empty(0, dtype=torch.float32) if p is None else p for p in parameters]
        return _score_operator(k, v, parameters, self.kind, *self.pass_numbers(), lengths, cu_seqlens)


class LinearScorer(Scorer):
    """r = a . [k; v] + b per KV head. weight [heads, Dk + Dv], bias [heads]; both start at 0."""

    kind = "linear"
    names = ("weight", "bias")

    def __init__(self, heads, head_dim, value_dim=None, *, bias=True):
        super().__init__(heads, head_dim, value_dim)
        self._add(weight=(heads, self.input_size), bias=(heads,) if bias else None)


class MLPScorer(Scorer):
    """r = w2 . SiLU(W1 [k; v] + b1) + b2 per KV head (KVpop, eq. 35). w1 [heads, hidden, Dk + Dv], b1 [heads,
    hidden], w2 [heads, hidden], b2 [heads]. w1 starts normal with variance 1 / (Dk + Dv), the rest at 0."""

    kind = "mlp"
    names = ("w1", "b1", "w2", "b2")

    def __init__(self, heads, head_dim, hidden, value_dim=None):
        super().__init__(heads, head_dim, value_dim)
        _check_size("hidden", hidden)
        self.hidden = hidden
        self._add(w1=(heads, hidden, self.input_size), b1=(heads, hidden), w2=(heads, hidden), b2=(heads,))
        nn.init.normal_(self.w1, std=self.input_size**-0.5)

    def sizes(self):
        return [self.hidden, 0, 0, 0]


class WriteGateScorer(Scorer):
    """WG-KV's write gate (3.2): g = sigmoid(r) with, per KV head,

        r = w2 . GELU(W1 [RMSNorm(k before RoPE); RMSNorm(k after RoPE)] + b1) + b2

    from the cached key alone, whose rotation `rope` is undone for its position; the value is not read. Shapes
    and initial weights as MLPScorer's, with 2 Dk in place of Dk + Dv."""

    kind = "write_gate"
    names = ("w1", "b1", "w2", "b2")

    def __init__(self, heads, head_dim, hidden, value_dim=None, *, rope):
        super().__init__(heads, head_dim, value_dim)
        _check_size("hidden", hidden)
        if not isinstance(rope, Rope) or rope.layout is None:
            raise ValueError(f"rope: {rope!r} is not allowed; it must be a Rope with a layout")
        self.hidden, self.rope = hidden, rope
        size = 2 * head_dim
        self._add(w1=(heads, hidden, size), b1=(heads, hidden), w2=(heads, hidden), b2=(heads,))
        nn.init.normal_(self.w1, std=size**-0.5)

    def sizes(self):
        return [self.hidden, 0, 0, 0]

    def at(self, k, positions):
        """Scores [B, Hkv, T], float32, of cached keys [B, Hkv, T, D] at positions [B, T] int64, where forward
        takes those of a sequence from its first on. Products of torch, on any device."""
        rows = torch.cat([_normalized(x) for x in (self.rope.undo(k, positions), k.float())], -1)
        inner = torch.einsum("bhtx,hjx->bhtj", rows, self.w1.float()) + self.b1.float()[:, None]
        scores = torch.einsum("bhtj,hj->bht", nn.functional.gelu(inner), self.w2.float())
        return scores + self.b2.float()[:, None]


def _normalized(rows):
    """RMSNorm without gains."""
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)


class ConvScorer(Scorer):
    """LTE's scorer (3.1.1, A): three convolutions over a key's neighbors, per KV head. With y_0 = [k before
    RoPE; v], 0 before a sequence's first token, and for l = 1, 2, 3:

        y_l[t] = SiLU(b_l + sum over j = -1, 0, 1 of W_l[j] y_{l-1}[t + 2 j]),      r_t = readout . y_3[t] +
        bias

    so that r_t sees tokens t - 6 to t + 6. The last `delay` keys of a sequence have no score: their entry is
    -inf, u = 0. The default scores all keys that have their 6 later neighbors, for LTE's sums over all keys;
    the policy's window as delay scores those that leave it. Scores are the same. Shapes: w_l [heads, C_l, 3,
    C_(l-1)] with C_0 = Dk + Dv and C_l = C_(l-1) // 2, b_l [heads, C_l], readout [heads, C_3], readout_bias
    [heads]. w_l starts normal with variance 2 / (3 C_(l-1)) and readout_bias at 1, so that gates start open
    (3.1.2); the rest at 0. `rope`: None for keys without RoPE.

    `dropout`, an attribute: in training mode each number of y_1, y_2 and y_3 is 0 with this probability,
    at least 0 and below 1, and else divided by 1 - dropout. The same `dropout_seed`, 0 to 2^31 - 1, drops
    the same ones."""

    kind = "conv"
    names = ("w1", "b1", "w2", "b2", "w3", "b3", "readout", "readout_bias")

    def __init__(self, heads, head_dim, value_dim=None, *, delay=6, rope=None):
        super().__init__(heads, head_dim, value_dim)
        if delay < 6:
            raise ValueError(
                f"delay: {delay} is not allowed; it must be 6 or more: a score sees 6 keys ahead"
            )
        if rope is not None and not isinstance(rope, Rope):
            raise ValueError(f"rope: {rope!r} is not allowed; it must be a Rope, or None")
        self.delay, self.rope = delay, rope
        self.dropout, self.dropout_seed = 0.0, 0
        channels = [self.input_size >> layer for layer in range(4)]
        if channels[3] < 1:
            raise ValueError(f"head_dim: {head_dim} is not allowed; Dk + Dv is halved three times")
        for layer in (1, 2, 3):
            shape = (heads, channels[layer], 3, channels[layer - 1])
            self._add(**{f"w{layer}": shape, f"b{layer}": shape[:2]})
            nn.init.normal_(getattr(self, f"w{layer}"), std=(2 / (3 * shape[3])) ** 0.5)
        self._add(readout=(heads, channels[3]), readout_bias=(heads,))
        nn.init.ones_(self.readout_bias)

    def sizes(self):
        return [0, 0, 0, self.delay]

    def pass_numbers(self):
        sizes, numbers, frequencies = self.call_numbers()
        if self.training and self.dropout:
            _native.check_seed("dropout_seed", self.dropout_seed, 2**31 - 1)
            sizes, numbers = [*sizes, self.dropout_seed], [*numbers, float(self.dropout)]
        return sizes, numbers, frequencies


class UtilityPredictor(nn.Module):
    """SP-KV's utility predictor (2.1, listing 1): u = sigmoid(r) with, for all heads of a layer from one
    hidden layer, r_h = w2_h . SiLU(W1 x + b1) + b2_h of the hidden state x. w1 [hidden, width], b1 [hidden],
    w2 [heads, hidden], b2 [heads]. w1 starts normal with variance 1 / width and b2 at 5, so that gates start
    open; the rest at 0.

    It is two products of torch, on any device."""

    kind = "utility"

    def __init__(self, heads, width, hidden):
        super().__init__()
        for name, value in (("heads", heads), ("width", width), ("hidden", hidden)):
            _check_size(name, value)
        self.heads, self.width, self.hidden = heads, width, hidden
        self.w1 = nn.Parameter(torch.randn(hidden, width) * width**-0.5)
        self.b1 = nn.Parameter(torch.zeros(hidden))
        self.w2 = nn.Parameter(torch.zeros(heads, hidden))
        self.b2 = nn.Parameter(torch.full((heads,), 5.0))

    def share(self, first, last):
        """As Scorer.share; the hidden layer is that of all heads."""
        return _share_of(self, ("w2", "b2"), first, last)

    def forward(self, states):
        """Scores [B, Hkv, S], float32 (float64 for float64 states), from hidden states [B, S, width]. The
        first product has the states' dtype, under autocast too."""
        real = _real(states)
        with torch.autocast(states.device.type, enabled=False):
            inner = nn.functional.linear(states, self.w1.to(states.dtype)).to(real) + self.b1.to(real)
            scores = nn.functional.linear(nn.functional.silu(inner), self.w2.to(real), self.b2.to(real))
        return scores.transpose(1, 2).contiguous()


class mLSTMScorer(Scorer):
    """KVpop's scorer with a memory (3.3, E; Hedgehog features, projected values). With x_t = [k_t; v_t]:

        q~ = phi(Wq x), k~ = phi(Wk x), v~ = Wv x,      phi(y) = [softmax(y); softmax(-y)]
        log i = cap(w_i . x + b_i),     log f = log sigmoid(cap(w_f . x + b_f)),  cap(y) = c tanh(y / c)
        C_t = f_t C_{t-1} + i_t k~_t v~_t^T,            z_t = f_t z_{t-1} + i_t k~_t
        h = q~_u C_q / (q~_u . z_q),                    r_u = a . SiLU(Norm(h)) + b + s . x_u

    for the key u = q - delay. `delay` is the policy's window (0 scores each key at insertion); the last
    `delay` keys of a sequence do not leave the window, and their scores are 0. `norm` says what Norm is:
    "rms" (or True) an RMS norm over the d_v values of a head, "layer" a LayerNorm (xLSTM's, without a bias),
    each with a gain; False leaves it out. `skip` adds s. Shapes: w_q and w_k [heads, d_qk / 2, X], w_v
    [heads, d_v, X], w_i, w_f and skip [heads, X], b_i, b_f and readout_bias [heads], norm_gain and readout
    [heads, d_v], X = Dk + Dv.
    Parameters start as in E.5: projections near the identity, gates that forget slowly, scores of 0.
    """

    kind = "mlstm"
    names = (
        "w_q",
        "w_k",
        "w_v",
        "w_i",
        "b_i",
        "w_f",
        "b_f",
        "norm_gain",
        "readout",
        "readout_bias",
        "skip",
    )

    def __init__(
        self,
        heads,
        head_dim,
        value_dim=None,
        *,
        delay,
        d_qk=None,
        d_v=None,
        gate_softcap=15.0,
        norm=False,
        skip=False,
    ):
        super().__init__(heads, head_dim, value_dim)
        self.d_qk = head_dim if d_qk is None else d_qk
        self.d_v = self.value_dim // 2 if d_v is None else d_v
        if self.d_qk < 2 or self.d_qk % 2:
            raise ValueError(f"d_qk: {self.d_qk} is not allowed; it must be even and above 0")
        if self.d_v < 1:
            raise ValueError(f"d_v: {self.d_v} is not allowed; it must be above 0")
        norms = {True: "rms", "rms": "rms", "layer": "layer", False: False, None: False}
        if not isinstance(norm, (bool, str, type(None))) or norm not in norms:
            raise ValueError(f"norm: {norm!r} is not allowed; it must be 'rms', 'layer' or False")
        self.norm = norms[norm]
        if delay < 0:
            raise ValueError(f"delay: {delay} is not allowed; it must be 0 or more")
        self.delay, self.gate_softcap = delay, float(gate_softcap)
        size = self.input_size
        self._add(
            w_q=(heads, self.d_qk // 2, size),
            w_k=(heads, self.d_qk // 2, size),
            w_v=(heads, self.d_v, size),
            w_i=(heads, size),
            b_i=(heads,),
            w_f=(heads, size),
            b_f=(heads,),
            norm_gain=(heads, self.d_v) if self.norm else None,
            readout=(heads, self.d_v),
            readout_bias=(heads,),
            skip=(heads, size) if skip else None,
        )
        self._initialize(noise=0.01, forget_first=3.0, forget_last=6.0)

    def sizes(self):
        return [0, self.d_qk, self.d_v, self.delay]

    @torch.no_grad()
    def _initialize(self, noise, forget_first, forget_last):
        for weights in (self.w_q, self.w_k, self.w_v, self.w_i, self.w_f):
            nn.init.normal_(weights, std=noise)
        for weights in (self.w_q, self.w_k):
            for row in range(weights.shape[1]):
                weights[:, row, row % self.head_dim] += 1
        for row in range(self.d_v):
            self.w_v[:, row, self.head_dim + row % self.value_dim] += 1
        self.b_f.copy_(torch.linspace(forget_first, forget_last, self.heads))
        if self.norm_gain is not None:
            self.norm_gain.fill_(1)
