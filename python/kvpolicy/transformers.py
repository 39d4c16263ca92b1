"""Bounded generation with Hugging Face transformers: a KVPolicyCache as past_key_values of generate().

The module registers an attention function and a mask function under the name "kvpolicy". With a KVPolicyCache
the attention function calls the cache; with any other cache, or none, it is transformers' own "sdpa", or
plain PyTorch where a layer has a soft cap or learned sinks.
"""

import contextlib
import functools
import weakref

import torch
from torch.distributed.fsdp import FSDPModule

from kvpolicy.caches import FULL, Cache, observes, reads_hidden, unscored
from kvpolicy.files import Scorers
from kvpolicy.fits import check_fits, kv_heads_of
from kvpolicy.policy import Policy, Window

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers import Cache as _TransformersCache
    from transformers.cache_utils import CacheLayerMixin
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
except ImportError as error:
    raise ImportError("kvpolicy.transformers needs transformers: pip install transformers") from error

from kvpolicy import decode_graph

NAME = "kvpolicy"
_SOFT_CAP = "softcap"  # transformers' argument


class _Length(int):
    """A number of tokens that a KVPolicyCache gave: how the mask function knows whose mask it makes."""


class _Layer(CacheLayerMixin):
    """What transformers asks of one layer; the cache has the tokens of all."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache):
        super().__init__()
        self._cache = weakref.proxy(cache)  # a cycle would keep the memory of a dropped cache

    @property
    def is_croppable(self):
        return self._cache.is_croppable

    def lazy_initialization(self, key_states, value_states):
        """The first call of attention does it."""

    def update(self, key_states, value_states, *args, **kwargs):
        raise NotImplementedError("a layer of a KVPolicyCache takes no tokens of its own; update the cache")

    def get_seq_length(self):
        return self._cache.get_seq_length()

    def get_mask_sizes(self, query_length):
        return self._cache.get_mask_sizes(query_length)

    def get_max_length(self):
        return -1

    get_max_cache_shape = get_max_length


class KVPolicyCache(_TransformersCache):
    """A cache whose layers keep the keys that their policies keep, for generate() and forward().

    model             a decoder of transformers, or its config. Its attention implementation becomes
                      "kvpolicy". A UtilityPredictor reads the input of the model's attention, so the model
                      itself must be given: its attention modules get a hook
    policy            a Policy for all full-attention layers; or one per layer, a sequence or a function of
                      the layer's number, None for a layer that keeps its own attention. Layers with a
                      sliding window keep it, or a smaller one of a list. A policy that ranks keys has a
                      scorer.
    full_layers       numbers of layers that keep their own attention, full or sliding (hybrid models)
    max_draft_tokens  the most tokens that assisted decoding may take back, crop(); spare entries per head
    max_length        the most tokens of a sequence with full layers, gates without a budget or SnapKV;
                      default: what the model takes
    cuda_graph        whether decode steps on CUDA run as one graph, which the second step captures, where the
                      model is given and the step allows it (kvpolicy.decode_graph has the rules)
    storage           dtype of keys and values; None: the model's, else q, k and v are rounded to it, and the
                      result has the model's

    Positions are logical: get_seq_length() is the number of tokens seen, padding included. The first tokens
    set the batch, dtype and device. Left-padded batches, chunks of a prompt, beams (reorder_cache) and
    assisted decoding (activate_past_recording and crop: drafts evict when they are accepted) are supported;
    output_attentions, dropout, gradients and 4D masks are not. Of a model under tensor parallelism (`model`,
    not its config) each process caches its own KV heads, and takes their share of per-head numbers and of
    scorers. Raises ValueError, TypeError, RuntimeError or NotImplementedError with one sentence.
    """

    def __init__(
        self,
        model,
        policy,
        *,
        full_layers=(),
        max_draft_tokens=64,
        max_length=None,
        storage=None,
        cuda_graph=True,
    ):
        config = getattr(model, "config", model)
        config = config.get_text_config(decoder=True)
        self.windows = _windows_of(config)
        self.policies = _policies_of(policy, self.windows, full_layers)
        self.heads = _heads_of(model, config)
        if self.heads is not None:
            self.policies = [one.share(*self.heads) for one in self.policies]
        self.max_draft_tokens, self.storage = max_draft_tokens, storage
        self.max_length = max_length or getattr(config, "max_position_embeddings", None) or 32768
        config._attn_implementation = NAME
        served = cuda_graph and isinstance(model, torch.nn.Module) and decode_graph.serve(model)
        self.decode_graph = decode_graph.DecodeGraph() if served else None
        self.cache = None  # the kvpolicy.Cache, from the first tokens on
        self._make, self._numbers = None, None
        self._recording, self._seen, self._drafts, self._next = False, 0, 0, 0
        self.hidden = {}  # the input of attention by layer, from a module's call until attend takes it
        self.hidden_layers = [layer for layer, one in enumerate(self.policies) if reads_hidden(one)]
        if self.hidden_layers:
            _hand_over_hidden(model, self.hidden_layers, self.policies, config.hidden_size)
        super().__init__(layers=[_Layer(self) for _ in self.windows])

    @classmethod
    def from_pretrained(cls, path, model, *, budget=None, **options):
        """A cache with the policy and the trained scorers of a file (Scorers.save, train_scorer). `budget` is
        the most entries per head, sinks and window included: of KVpop 512 by default, of other systems what
        the file says, which for a gate may be no bound. Options are those of the class. Raises ValueError for
        scorers that do not fit the model: layers, KV heads, or the rotation that a scorer undoes."""
        scorers = Scorers.load(path).requires_grad_(False)
        config = getattr(model, "config", model).get_text_config(decoder=True)
        check_fits(scorers, config, path)
        if budget is None and scorers.system == "kvpop" and scorers.budget is None:
            budget = 512
        long_range = None if budget is None else budget - scorers.sinks - scorers.window
        if long_range is not None and long_range < 0:
            raise ValueError(
                f"budget: {budget} is not allowed; it must be at least sinks + window = "
                f"{scorers.sinks + scorers.window}"
            )
        share = _heads_of(model, config)
        if share is not None and scorers.layers:
            scorers = scorers.share(*share)
        if isinstance(model, torch.nn.Module):
            scorers.to(model.device)
        return cls(model, lambda layer: scorers.policy(layer, long_range), **options)

    # ---- what models ask -----------------------------------------------------------------------------------

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Hands the new keys and values to the attention function, which appends them."""
        if layer_idx != self._next:
            raise RuntimeError(
                f"layer_idx: {layer_idx} is not allowed; it must be {self._next}: layers follow each other, "
                f"and the model's attention implementation must be {NAME!r} (KVPolicyCache sets it in the "
                "config that it is given); after an error, reset() the cache"
            )
        key_states._kvpolicy = (self, layer_idx)
        return key_states, value_states

    def get_seq_length(self, layer_idx=0):
        return self._seen

    def get_mask_sizes(self, query_length, layer_idx=0):
        tokens = query_length if isinstance(query_length, int) else len(query_length)  # 4.x: cache_position
        return _Length(self._seen + tokens), 0

    @property
    def is_croppable(self):
        """Whether crop() can take tokens back: of a cache that has recorded from its first token on."""
        return (self._recording or not self._seen) and not any(map(observes, self.policies))

    @property
    def is_initialized(self):
        return self.cache is not None

    def memory_bytes(self):
        """Bytes that the cache holds."""
        return 0 if self.cache is None else self.cache.memory_bytes()

    # ---- attention -----------------------------------------------------------------------------------------

    def attend(self, layer, q, k, v, mask, numbers, window, sinks):
        """Appends the tokens of one layer, and attends. mask [B, T] bool, False for padding, or None."""
        if (window or None) != self.windows[layer]:
            raise NotImplementedError(
                f"sliding_window: {window} is not allowed; in the config it is {self.windows[layer]}"
            )
        if sinks is not None and observes(self.policies[layer]):
            raise NotImplementedError(
                "policy: one that ranks keys by received attention is not allowed with learned sinks; they "
                "take part of it"
            )
        if layer == 0:
            self._begin(q, k, v, numbers)
        elif numbers != self._numbers:
            raise NotImplementedError(
                f"scale and soft cap: {numbers} of layer {layer} are not allowed; they must be those of "
                f"layer 0, {self._numbers}"
            )
        tokens = q.shape[2]
        out = self._append(layer, q, k, v, mask, sinks, self._hidden_of(layer))
        self._next += 1
        if self._next == len(self.windows):
            if not self._recording:
                self.cache.advance()
            self._next, self._seen = 0, self._seen + tokens
            self._drafts = min(tokens, self.max_draft_tokens) if self._recording else 0
        return out

    def _begin(self, q, k, v, numbers):
        """Before the first layer: earlier drafts count as accepted; the first tokens make the cache."""
        if self._drafts:
            self._accept(self._drafts)
        if self.heads is not None and k.shape[1] != self.heads[1] - self.heads[0]:
            raise ValueError(
                f"k.size(1): {k.shape[1]} is not allowed; by the shard of its weights this process has KV "
                f"heads {self.heads[0]} to {self.heads[1] - 1}"
            )
        if self.cache is None:
            self._numbers = numbers
            sm_scale, logits_soft_cap = numbers
            self._make = functools.partial(
                Cache,
                self.policies,
                query_heads=q.shape[1],
                kv_heads=k.shape[1],
                head_dim=k.shape[3],
                value_dim=v.shape[3],
                dtype=self.storage or k.dtype,
                device=k.device,
                sm_scale=sm_scale,
                logits_soft_cap=logits_soft_cap,
                max_draft_tokens=self.max_draft_tokens if self._recording else 0,
                max_length=self.max_length,
                separate_layers=self._recording,
            )
            self.cache = self._make(sequences=k.shape[0])
        elif k.shape[0] != self.cache.sequences:
            raise ValueError(
                f"batch: {k.shape[0]} is not allowed; the cache holds {self.cache.sequences} sequences: "
                "make another KVPolicyCache"
            )

    def _hidden_of(self, layer):
        """The input of the layer's attention, [B, T, width]; None where no scorer reads it."""
        if layer not in self.hidden_layers:
            return None
        if layer not in self.hidden:
            raise RuntimeError(
                f"model: another than the cache was made for is not allowed; layer {layer} has a "
                "UtilityPredictor, which reads the input of that model's attention"
            )
        return self.hidden.pop(layer)

    def _append(self, layer, q, k, v, mask, sinks, hidden):
        """The calls of one layer; [B, T, Hq, Dv]."""
        calls = [("step" if q.shape[2] == 1 else "prefill", slice(None))]
        if self._recording:
            first = q.shape[2] - min(q.shape[2], self.max_draft_tokens)
            calls = [("append_draft", slice(first, None))]
            if first:
                calls.insert(0, ("prefill", slice(0, first)))
        parts = []
        for name, part in calls:
            rows = [x[:, :, part].to(self.cache.dtype) for x in (q, k, v)]
            seen = None if mask is None else mask[:, part]
            states = None if hidden is None else hidden[:, part]
            if name == "append_draft" and seen is not None and not seen.all():
                raise NotImplementedError("padding among draft tokens is not allowed; it must be before them")
            parts.append(_with_padding(getattr(self.cache, name), layer, rows, seen, sinks, states))
            if self._recording and name == "prefill":
                self.cache.advance(layer)
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).to(q.dtype)

    # ---- decode steps as a CUDA graph (kvpolicy.decode_graph) ----------------------------------------------

    @property
    def device(self):
        return self.cache.device

    def takes_steps(self, batch, device):
        """Whether a forward of one token per sequence is a step alone: no draft, no prompt's first token."""
        return (
            self.cache is not None
            and (self.cache.sequences, self.cache.device) == (batch, device)
            and not (self._recording or self._next)
        )

    def reserve_step(self):
        return self.cache.reserve_step()

    def step_memory(self):
        return self.cache, *self.cache.step_memory()

    def count_step(self):
        self.cache.count_step()
        self._seen += 1

    def marks(self):
        return self._seen, self.cache.marks()

    def rewind(self, marks):
        self._seen, inner = marks
        self._next = 0
        self.cache.rewind(inner)

    # ---- assisted decoding ---------------------------------------------------------------------------------

    def activate_past_recording(self):
        """From here on the last tokens of each forward are drafts, until crop() says how many stay."""
        if any(map(observes, self.policies)):
            raise NotImplementedError(
                "policy: one that ranks keys by received attention is not allowed in assisted decoding; each "
                "query changes its ranks"
            )
        if self._recording:
            return
        if self.max_draft_tokens < 1:
            raise ValueError(
                f"max_draft_tokens: {self.max_draft_tokens} is not allowed; it must be 1 or more"
            )
        if self._seen:
            raise RuntimeError(
                f"activate_past_recording: after {self._seen} tokens is not allowed; it must come before"
            )
        self._recording, self.cache = True, None

    def is_recording_past(self, layer_idx=0):
        return self._recording

    def crop(self, tokens_to_remove):
        """Takes back the last -tokens_to_remove tokens of the last forward, and accepts its others. A
        positive number is the length to keep, as in transformers 4."""
        tokens = int(tokens_to_remove)  # some versions count in a tensor
        remove = self._seen - tokens if tokens > 0 else -tokens
        if remove == 0 and not self._drafts:
            return
        if not 0 <= remove <= self._drafts:
            raise ValueError(
                f"tokens to remove: {remove} is not allowed; it must be at most {self._drafts}, the draft "
                "tokens of the last forward (activate_past_recording, max_draft_tokens)"
            )
        self._accept(self._drafts - remove)

    def _accept(self, accepted):
        for layer in range(len(self.windows)):
            self.cache.accept(layer, accepted)
            self.cache.advance(layer)
        self._seen, self._drafts = self._seen - self._drafts + accepted, 0

    # ---- sequences -----------------------------------------------------------------------------------------

    def reset(self):
        """Empties all sequences."""
        if self.cache is not None:
            for sequence in range(self.cache.sequences):
                self.cache.clear(sequence)
        self._seen, self._drafts, self._next = 0, 0, 0
        self.hidden.clear()

    def snapshot(self):
        """What the cache holds, for restore(), without draft tokens. On CUDA it waits for the stream."""
        if self._drafts:
            self._accept(self._drafts)
        sequences = 0 if self.cache is None else self.cache.sequences
        return self._seen, [self.cache.snapshot(sequence) for sequence in range(sequences)]

    def restore(self, state):
        """Goes back to a snapshot of this cache. A damaged one leaves all sequences as they were, or empty
        after a forward that failed."""
        seen, blobs = state
        if self.cache is None or len(blobs) != self.cache.sequences:
            raise ValueError(f"state: {len(blobs)} sequences are not allowed; they must be this cache's own")
        before = None if self._next else [self.cache.snapshot(sequence) for sequence in range(len(blobs))]
        try:
            for sequence, blob in enumerate(blobs):
                self.cache.restore(sequence, blob)
        except Exception:
            if before is None:
                self.reset()
            else:
                for sequence, blob in enumerate(before):
                    self.cache.restore(sequence, blob)
            raise
        self._seen, self._drafts, self._next = seen, 0, 0

    def reorder_cache(self, beam_idx):
        """Sequence i becomes a copy of sequence beam_idx[i]."""
        if self._drafts:
            self._accept(self._drafts)
        if self.cache is not None:
            self.cache.reorder(beam_idx)

    def batch_select_indices(self, indices):
        """Keeps the sequences `indices`, in that order."""
        if self._drafts:
            self._accept(self._drafts)
        if self.cache is None:
            return
        sources = torch.arange(self.cache.sequences)[indices.cpu()].tolist()
        blobs = {source: self.cache.snapshot(source) for source in set(sources)}
        self.cache = self._make(sequences=len(sources))
        for sequence, source in enumerate(sources):
            self.cache.restore(sequence, blobs[source])

    def batch_repeat_interleave(self, repeats):
        """Each sequence `repeats` times."""
        if self.cache is not None:
            self.batch_select_indices(torch.arange(self.cache.sequences).repeat_interleave(repeats))


def _heads_of(model, config):
    """(first, last): the KV heads that this process has of a model under tensor parallelism; None: all. The
    weight of a key projection says it, a DTensor that is sharded by its rows."""
    if not isinstance(model, torch.nn.Module):
        return None
    weights = (weight for name, weight in model.named_parameters() if name.endswith("k_proj.weight"))
    weight = next(weights, None)
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None:
        return None
    if "tp" in (mesh.mesh_dim_names or ()):
        dim = mesh.mesh_dim_names.index("tp")
    elif mesh.ndim > 1 or any(isinstance(module, FSDPModule) for module in model.modules()):
        return None  # FSDP gathers weights, so each process has all heads
    else:
        dim = 0
    rank, ranks, heads = mesh.get_local_rank(dim), mesh.size(dim), kv_heads_of(config)
    if not weight.placements[dim].is_shard(0) or ranks == 1:
        return None
    if heads % ranks:
        raise ValueError(
            f"tensor parallelism of {ranks} processes is not allowed; their number must divide the {heads} "
            "KV heads"
        )
    return rank * heads // ranks, (rank + 1) * heads // ranks


def _hand_over_hidden(model, layers, policies, width):
    """Gives the attention modules of `layers` a hook that leaves their input with the cache of the call."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model: {type(model).__name__} is not allowed; a UtilityPredictor reads hidden states, so it "
            "must be the model itself"
        )
    found = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if layer in layers and "attention" in type(module).__name__.lower():
            found.setdefault(layer, module)
    for layer in layers:
        if layer not in found:
            raise NotImplementedError(
                f"model: {type(model).__name__} is not allowed; no attention module says that it is layer "
                f"{layer}, whose input a UtilityPredictor reads"
            )
        if policies[layer].scorer.width != width:
            raise ValueError(
                f"width: {policies[layer].scorer.width} is not allowed; it must be {width}, the model's "
                "hidden size"
            )
        if _leave_hidden not in found[layer]._forward_pre_hooks.values():
            found[layer].register_forward_pre_hook(_leave_hidden, with_kwargs=True)


def _leave_hidden(module, arguments, options):
    """Leaves the input of an attention module with a KVPolicyCache that reads it."""
    for one in (*arguments, *options.values()):
        if isinstance(one, KVPolicyCache) and module.layer_idx in one.hidden_layers:
            hidden = options.get("hidden_states")
            one.hidden[module.layer_idx] = arguments[0] if hidden is None else hidden


def _windows_of(config):
    """The sliding window of each layer, None for full attention. Raises NotImplementedError for a model with
    other layers."""
    if getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True):
        raise NotImplementedError(f"{config.model_type}: is not allowed; the model must be a causal decoder")
    if getattr(config, "num_kv_shared_layers", 0):
        raise NotImplementedError(
            f"{config.model_type}: layers that share keys are not allowed; each has its own"
        )
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        if not getattr(config, "use_sliding_window", True):
            window = None
        types = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    other = set(types) - {"full_attention", "sliding_attention"}
    if other:
        raise NotImplementedError(
            f"{config.model_type}: layers of type {', '.join(sorted(other))} are not allowed; they must be "
            "full_attention or sliding_attention"
        )
    return [window if one == "sliding_attention" else None for one in types]


def _policies_of(policy, windows, full_layers):
    """A Policy for each layer."""
    unknown = [layer for layer in full_layers if not 0 <= layer < len(windows)]
    if unknown:
        raise ValueError(f"full_layers: {unknown[0]} is not allowed; it must be 0 to {len(windows) - 1}")
    for_all = isinstance(policy, Policy) or callable(policy)
    if not for_all and len(policy) != len(windows):
        raise ValueError(
            f"policy: {len(policy)} policies are not allowed; they must be one per layer, {len(windows)}"
        )
    policies = []
    for layer, window in enumerate(windows):
        own = FULL if window is None else Policy(Window(window))
        if layer in full_layers or (for_all and window is not None):
            policies.append(own)
            continue
        one = policy if isinstance(policy, Policy) else policy(layer) if callable(policy) else policy[layer]
        one = own if one is None else one
        if not isinstance(one, Policy):
            raise TypeError(f"policy of layer {layer}: {one!r} is not allowed; it must be a kvpolicy.Policy")
        within = one.instance == "window" and max(one.sinks) == 0 and max(one.windows) <= (window or 0)
        if window is not None and not within:
            raise ValueError(
                f"policy of layer {layer}: {one!r} is not allowed; the layer sees the last {window} keys "
                f"only, so it must be a Window of at most {window}"
            )
        scored = unscored(one) or observes(one) or one.scorer is not None or one.own_parts
        if not scored:
            raise ValueError(
                f"policy of layer {layer}: {one!r} is not allowed; it ranks keys, so it needs a scorer"
            )
        policies.append(one)
    return policies


def _with_padding(call, layer, rows, mask, sinks, hidden):
    """A call of Cache with the tokens that are no padding, which come first for it; [B, T, Hq, Dv], 0 at
    padding. Learned sinks add exp(s) to each softmax's sum: o sigmoid(LSE - s)."""
    options = {"hidden": hidden}
    if mask is not None:
        lengths, order = _lengths_and_order(mask)
        options["q_len"] = lengths
        if order is not None:
            at = order[:, None, :, None]
            rows = [torch.gather(x, 2, at.expand(-1, x.shape[1], -1, x.shape[3])) for x in rows]
            if hidden is not None:
                at = order[:, :, None].expand(-1, -1, hidden.shape[2])
                options["hidden"] = torch.gather(hidden, 1, at)
    out = call(layer, *rows, return_lse=sinks is not None, **options)
    if sinks is not None:
        out, lse = out
        share = torch.sigmoid(lse - sinks.detach().float()[None, :, None])
        out = (out * share[..., None]).to(out.dtype)
    out = out.transpose(1, 2)
    if mask is not None and order is not None:
        out = torch.zeros_like(out).scatter(1, order[:, :, None, None].expand_as(out), out)
    return out.contiguous()


def _lengths_and_order(mask):
    """Tokens that are no padding by sequence, [B] int32, and the order [B, T] that has them first, None for
    one token. Both stay with the mask, which all layers share."""
    found = getattr(mask, "_kvpolicy_order", None)
    if found is None:
        lengths, order = mask.sum(-1, dtype=torch.int32), None
        if mask.shape[1] > 1:
            order = torch.sort(mask.to(torch.int8), dim=1, descending=True, stable=True).indices
        found = mask._kvpolicy_order = lengths, order
    return found


class _WithoutGradient(torch.autograd.Function):
    """A forward pass below autograd."""

    @staticmethod
    def forward(ctx, run, *tensors):
        return run()

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("KVPolicyCache: a gradient through it is not there; train without a cache")


def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    sliding_window=None,
    s_aux=None,
    **kwargs,
):
    """The attention function of AttentionInterface: query [B, Hq, T, D], key and value [B, Hkv, T, D].
    Returns ([B, T, Hq, D], None)."""
    cache, layer = getattr(key, "_kvpolicy", (None, None))
    logits_soft_cap = kwargs.pop(_SOFT_CAP, None)
    if cache is None:
        for observe in _observers:
            observe(query, key, value, scaling, logits_soft_cap, s_aux)
        if logits_soft_cap is None and s_aux is None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, **kwargs
            )
        causal = kwargs.get("is_causal", getattr(module, "is_causal", True))
        return _dense(
            query, key, value, attention_mask, dropout, scaling, logits_soft_cap, s_aux, causal
        ), None
    for name, refused in (
        ("output_attentions", bool(kwargs.get("output_attentions"))),
        ("position_bias", kwargs.get("position_bias") is not None),
        ("dropout", bool(dropout)),
        ("a 4D attention_mask", attention_mask is not None and attention_mask.dim() != 2),
        ("is_causal=False", kwargs.get("is_causal") is False or not getattr(module, "is_causal", True)),
    ):
        if refused:
            raise NotImplementedError(f"{name} is not allowed with a KVPolicyCache; leave it out")
    numbers = (scaling or 0.0, logits_soft_cap or 0.0)

    def run():
        return cache.attend(layer, query, key, value, attention_mask, numbers, sliding_window, s_aux)

    tensors = [x for x in (query, key, value) if x.requires_grad]
    return _WithoutGradient.apply(run, *tensors) if tensors and torch.is_grad_enabled() else run(), None


_observers = []


@contextlib.contextmanager
def observe_with(observe):
    """Calls observe(query, key, value, scaling, soft cap, learned sinks) in each layer of a forward without a
    KVPolicyCache, where the attention implementation is "kvpolicy"."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)


def _dense(q, k, v, mask, dropout, scaling, logits_soft_cap, sinks, causal):
    """Softmax attention with a soft cap and learned sinks, in plain PyTorch."""
    groups = q.shape[1] // k.shape[1]
    k, v = repeat_kv(k, groups), repeat_kv(v, groups)
    logits = (q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if logits_soft_cap:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    if mask is None and causal and q.shape[2] > 1:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if sinks is not None:
        logits = torch.cat((logits, sinks.float()[None, :, None, None].expand(*logits.shape[:-1], 1)), -1)
    weights = torch.softmax(logits, -1)[..., : k.shape[2]].nan_to_num()
    weights = torch.nn.functional.dropout(weights, dropout, dropout > 0).to(v.dtype)
    return (weights @ v).transpose(1, 2).contiguous()


def mask(**arguments):
    """The mask function of AttentionMaskInterface. For a KVPolicyCache: which of the new tokens are no
    padding, [B, T] bool, or None for all; else the mask of "sdpa"."""
    length = arguments["kv_length"]
    if not isinstance(length, _Length):
        return sdpa_mask(**arguments)
    if arguments.get("use_vmap") or not arguments.get("allow_is_causal_skip", True):
        raise NotImplementedError(
            "a mask other than causal is not allowed with a KVPolicyCache; leave it out"
        )
    padding = arguments.get("attention_mask")
    if padding is None:
        return None
    tokens = arguments.get("q_length")
    tokens = len(arguments["cache_position"]) if tokens is None else tokens
    if padding.shape[1] not in (tokens, int(length)):
        raise ValueError(
            f"attention_mask.size(1): {padding.shape[1]} is not allowed; it must be {tokens} new tokens or "
            f"all {int(length)}"
        )
    padding = padding[:, padding.shape[1] - tokens :].bool()
    # On CUDA a look at the mask waits for the GPU: a chunk of a prompt is worth it, a step is not.
    looks = padding.device.type == "cpu" or (tokens > 1 and not torch.cuda.is_current_stream_capturing())
    return None if looks and padding.all() else padding


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
