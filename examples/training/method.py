"""What the training loop asks of a method."""

import kvpolicy as kvp
import torch
from kvpolicy.training import attend_with, rope_of
from torch import distributed
from torch.nn import functional
from transformers import get_cosine_schedule_with_warmup


class Method(torch.nn.Module):
    """A method: modules that are trained, the attention of a layer, and a loss.

    A subclass sets `name`, adds its options, builds its modules in __init__, and writes score, attend, loss,
    policy and save. Draws depend on --seed and the step alone, so that a run can resume.
    README.md in this folder has the steps of adding one."""

    name = ""

    @staticmethod
    def add_options(parser):
        """Adds the method's options to an argparse parser."""

    @classmethod
    def trains(cls, options):
        """Whether the model's own weights are trained."""
        return options.model == "scratch"

    def __init__(self, model, options):
        super().__init__()
        self.model, self.options = model, options
        self.model.requires_grad_(self.trains(options))
        config = model.config.get_text_config(decoder=True)
        self.layers = config.num_hidden_layers
        self.heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.width, self.windowed = config.hidden_size, set()
        self.step, self.steps = 0, 1
        self.scores, self.parts = {}, {}  # of the last pass, by layer: scores [B, Hkv, S]; masks or losses

    # ---- what a method writes ------------------------------------------------------------------------------

    @property
    def rope(self):
        """How the model rotates its keys, for scorers that look at keys before RoPE."""
        return rope_of(self.model.config)

    def own_parameters(self):
        """The parameters of gates and scorers."""
        return [p for name, p in self.named_parameters() if not name.startswith("model.")]

    def parameter_groups(self):
        """Groups of torch.optim: gates and scorers, and the model's weights where they are trained."""
        groups = [{"params": self.own_parameters(), "lr": self.options.rate}]
        if self.trains(self.options):
            weights = list(self.model.parameters())
            groups += self.decaying(weights, self.options.model_rate, self.options.weight_decay)
        return [group for group in groups if group["params"]]

    @staticmethod
    def decaying(parameters, rate, decay):
        """Groups of torch.optim of one learning rate, where matrices decay and vectors do not."""
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() <= 1]
        return [
            {"params": matrices, "lr": rate, "weight_decay": decay},
            {"params": vectors, "lr": rate, "weight_decay": 0.0},
        ]

    def schedule(self, optimizer):
        """The learning rates' schedule: warm-up and a cosine to 0, of all groups."""
        return get_cosine_schedule_with_warmup(optimizer, self.options.warmup, self.options.steps)

    def attend(self, inputs):
        """The attention of one layer in training, [B, Hq, S, Dv] in the dtype of q, from LayerInputs. Keeps
        what the loss needs in self.scores and self.parts, by layer."""
        raise NotImplementedError

    def loss(self, ids, weights):
        """{name: scalar}; "loss" is minimized, the rest is printed."""
        raise NotImplementedError

    def begin(self, ids, weights):
        """Called once before the first step, with the first training sample, the same on all ranks: to set
        initial weights."""

    def begin_step(self, step, steps):
        """Called before the forward pass of a step: to move schedules."""
        self.step, self.steps = step, steps

    def graph_key(self):
        """What Python decides in the pass of this step, hashable, such as the budget. Passes of a key launch
        the same kernels, and can run as one CUDA graph. None: the pass reads numbers of its step in Python,
        such as a seed, or synchronizes with the device."""
        return None

    def end_step(self):
        """Called after the optimizer's step: to move controllers."""

    def policy(self, layer):
        """The policy of one layer after training: hard gates."""
        raise NotImplementedError

    def measure(self, samples):
        """Measures of a finished run beyond evaluate(), a dictionary for "measures" of metrics.json.
        `samples`: the held-out ones, (ids, weights) each."""
        return {}

    def save(self, path, notes):
        """Writes the trained gates or scorers; `notes` go into the file."""
        raise NotImplementedError

    # ---- what methods share --------------------------------------------------------------------------------

    @property
    def rank(self):
        """The number of this process among those of torchrun: processes have samples of their own, and so
        draws of their own."""
        return distributed.get_rank() if distributed.is_initialized() else 0

    def forward(self, ids, weights):
        """The losses of one batch: ids [B, S] int64, weights [B, S] float32. A module's forward, so that
        DistributedDataParallel can wrap the method."""
        self.scores, self.parts = {}, {}
        return self.loss(ids, weights)

    def logits(self, ids, attend):
        """Logits [B, S, V] of a pass whose attention is `attend`, a function of LayerInputs."""
        with attend_with(self.model, self.between_windows(attend)):
            return self.model(input_ids=ids, use_cache=False).logits

    def hidden_states(self, ids, attend):
        """Hidden states [B, S, width] before the output layer, of a pass whose attention is `attend`."""
        with attend_with(self.model, self.between_windows(attend)):
            return self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state

    def between_windows(self, attend):
        """`attend` in layers of full attention; a layer with a window of its own keeps that. Raises
        ValueError for a model without layers of full attention."""

        def by_layer(inputs):
            if inputs.window is None:
                return attend(inputs)
            self.windowed.add(inputs.layer)
            if len(self.windowed) == self.layers:
                raise ValueError(
                    f"--model: {self.options.model} is not allowed; each of its layers has a window of its "
                    "own, and gates need a layer of full attention"
                )
            return self.dense(inputs)

        return by_layer

    @staticmethod
    def dense(inputs):
        """Causal attention, of the layer's own window where it has one."""
        mask = None
        if inputs.window is not None:
            mask = kvp.build_mask(kvp.Policy(kvp.Window(inputs.window)), inputs.k[..., 0])
        return kvp.attend(inputs.q, inputs.k, inputs.v, mask, **inputs.numbers)

    def attend_hard(self, inputs):
        """The attention of one layer under its policy; keeps the mask in self.parts."""
        policy = self.policy(inputs.layer)
        scores = self.score(inputs) if policy.ranked else inputs.k[..., 0]
        mask = kvp.build_mask(policy, scores)
        self.scores[inputs.layer], self.parts[inputs.layer] = scores, mask
        return kvp.attend(inputs.q, inputs.k, inputs.v, mask, **inputs.numbers)

    def score(self, inputs):
        """Scores [B, Hkv, S] of the keys of a layer."""
        raise NotImplementedError

    @staticmethod
    def next_token_loss(logits, ids, weights):
        """The weighted mean cross-entropy, in nats, of each token given those before it."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        # The next tokens of all positions: no copy of the logits without the last.
        targets = torch.cat((ids[:, 1:], ids[:, :1]), 1).flatten()
        nll = functional.cross_entropy(wide.flatten(0, 1), targets, reduction="none").view(ids.shape)
        weights = weights[:, 1:]
        return (nll[:, :-1] * weights).sum() / weights.sum().clamp(min=1.0)

    @torch.no_grad()
    def evaluate(self, ids, weights):
        """Measures of one held-out batch under the policy: nll, dense nll, the share of causal pairs that
        queries see, and answers() where there are some."""
        self.scores, self.parts = {}, {}
        logits = self.logits(ids, self.attend_hard)
        hard = self.next_token_loss(logits, ids, weights)
        pairs = torch.stack([kvp.density(mask).mean() for mask in self.parts.values()])
        dense = self.next_token_loss(self.logits(ids, self.dense), ids, weights)
        found = {"nll": hard.item(), "nll_dense": dense.item(), "visible": pairs.mean().item()}
        return {**found, **self.answers(logits, ids, weights)}

    @staticmethod
    def answers(logits, ids, weights):
        """{"answers": the share of answers that are the most probable tokens}; {} without answers. Answers
        are the tokens of the largest weight, where not all weigh the same: digits of retrieval queries, or
        what a task asks for."""
        asked = weights[:, 1:] == weights.max()
        if asked.all():
            return {}
        right = logits[:, :-1].argmax(-1) == ids[:, 1:]
        return {"answers": right[asked].double().mean().item()}

    def cached(self):
        """The share of keys that caches hold after the last pass under the policy."""
        held = [kvp.live_keys(mask)[..., -1].double().mean() for mask in self.parts.values()]
        length = next(iter(self.parts.values())).expiry.shape[-1]
        return torch.stack(held).mean().item() / length

    def broken(self):
        """Where the last pass has a score that is not finite, as a phrase; None: nowhere. -infinity is the
        entry of a key without a score."""
        for layer, scores in sorted(self.scores.items()):
            bad = scores.detach().isnan() | (scores.detach() == float("inf"))
            heads = bad.any(-1).any(0).nonzero().flatten().tolist()
            if heads:
                return f"the scores of layer {layer}, head {heads[0]} are not finite"
        for name, parameter in self.named_parameters():
            if not parameter.detach().isfinite().all():
                return f"{name} is not finite"
        return None
