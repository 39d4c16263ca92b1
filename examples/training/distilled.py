"""What methods share whose student follows a dense teacher, as KVpop's and StreamLLM+'s do (KVpop,
algorithm 1, line 13; F)."""

import copy
import math

import kvpolicy as kvp
import torch
from kvpolicy.training import attend_with
from method import Method
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR


class Distilled(Method):
    """A method whose model, as it is when the run starts, is the teacher: dense and frozen."""

    @staticmethod
    def add_options(parser):
        """KVpop's numbers (table 3), but for the length of the run."""
        parser.set_defaults(model_rate=8e-5, warmup=100, weight_decay=1e-4)
        add = parser.add_argument
        add("--last-rate", type=float, default=8e-5, help="the scorers' learning rate at the end")
        add("--sinks", type=int, default=4)
        add(
            "--budgets",
            type=int,
            nargs="+",
            default=[1024, 512, 256],
            help="KV entries per head; steps alternate between them, and one number is a fixed budget",
        )
        add("--top", type=int, default=256, help="the teacher's largest logits, over which the KL is taken")
        add("--kl-temperature", type=float, default=1.0)
        add("--reverse-kl", action="store_true", help="KL(student || teacher)")
        add(
            "--full-softmax",
            action="store_true",
            help="the student's softmax over all logits in the KL, so that mass outside the teacher's counts",
        )

    def __init__(self, model, options):
        super().__init__(model, options)
        least = self.least_entries()
        for entries in options.budgets:
            if not least < entries < options.tokens:
                raise ValueError(
                    f"--budgets: {entries} is not allowed; it must be above {least}, sinks and window, and "
                    f"below --tokens {options.tokens}"
                )
        self.entries = options.budgets[0]  # per KV head, of the current pass
        self.teacher = None
        if self.trains(options):
            self.teacher = copy.deepcopy(model).requires_grad_(False).eval()
            if next(model.parameters()).device.type == "cuda" and not options.fp32:
                for parameter in self.teacher.parameters():  # not the frequencies of RoPE, which are buffers
                    parameter.data = parameter.data.bfloat16()

    def least_entries(self):
        """A budget must be above this."""
        return self.options.sinks

    def begin_step(self, step, steps):
        super().begin_step(step, steps)
        self.entries = self.options.budgets[step % len(self.options.budgets)]

    def own_parameters(self):
        """Those of the scorers."""
        return [p for name, p in self.named_parameters() if name.startswith("scorers.")]

    def parameter_groups(self):
        groups = super().parameter_groups()
        own = {id(p) for p in self.own_parameters()}
        for group in groups:
            group["constant"] = id(group["params"][0]) not in own
            group.setdefault("weight_decay", self.options.weight_decay)
        return groups

    def schedule(self, optimizer):
        """Scorers: warm-up, then a cosine to --last-rate. The model's weights: a constant rate (table 3)."""
        options = self.options
        floor = min(1.0, options.last_rate / options.rate) if options.rate else 1.0

        def falling(step):
            if step < options.warmup:
                return step / options.warmup
            done = (step - options.warmup) / max(1, options.steps - options.warmup)
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

        def constant(_step):
            return 1.0

        return LambdaLR(optimizer, [constant if g["constant"] else falling for g in optimizer.param_groups])

    @torch.no_grad()
    def dense_logits(self, ids):
        """The teacher's logits [B, S, V], of attention over all keys. Frozen models are their own
        teachers."""
        teacher = self.model if self.teacher is None else self.teacher
        with attend_with(teacher, self.all_keys):
            return teacher(input_ids=ids, use_cache=False).logits

    def all_keys(self, inputs):
        """Causal attention, by PyTorch where it can."""
        if inputs.logits_soft_cap or inputs.window is not None:
            return self.dense(inputs)
        rows = inputs.q, inputs.k, inputs.v
        return functional.scaled_dot_product_attention(
            *rows, is_causal=True, scale=inputs.sm_scale, enable_gqa=True
        )

    def largest(self, logits):
        """The teacher's largest logits and their indices, [B, S, top] each."""
        return kvp.top_logits(logits, min(self.options.top, logits.shape[-1]))

    def divergence(self, teacher, logits):
        """KL(teacher || student) over the teacher's largest logits, the mean over tokens, in nats."""
        options = self.options
        values, indices = teacher
        over = {"student_softmax": "all"} if options.full_softmax else {}
        return kvp.top_distillation(
            (values.to(logits.dtype), indices),
            logits,
            top=values.shape[-1],
            temperature=options.kl_temperature,
            reverse=options.reverse_kl,
            **over,
        )

    @torch.no_grad()
    def evaluate(self, ids, weights):
        """The teacher's next-token loss, and of each budget the sparse student's, its KL to the teacher,
        the share of causal pairs that queries see, and answers() where there are some."""
        dense = self.dense_logits(ids)
        numbers = {"nll_dense": self.next_token_loss(dense, ids, weights).item()}
        numbers |= {f"{name}_dense": value for name, value in self.answers(dense, ids, weights).items()}
        for entries in self.options.budgets:
            self.entries = entries
            found = self.evaluate_policy(ids, weights, dense)
            numbers |= {f"{name}_{entries}": value for name, value in found.items()}
        return numbers

    def evaluate_policy(self, ids, weights, dense):
        """The measures of one budget; `dense` are the teacher's logits."""
        self.scores, self.parts = {}, {}
        logits = self.logits(ids, self.attend_hard)
        pairs = torch.stack([kvp.density(mask).mean() for mask in self.parts.values()])
        return {
            "nll": self.next_token_loss(logits, ids, weights).item(),
            "kl": self.divergence(self.largest(dense), logits).item(),
            "visible": pairs.mean().item(),
            **self.answers(logits, ids, weights),
        }
