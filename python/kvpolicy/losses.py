"""Losses of scorers."""

from typing import NamedTuple

import torch

from kvpolicy import _native
from kvpolicy._native import Operator
from kvpolicy.masks import _POLICY, _native_policy, _wide, numbers_of


class BoundaryResult(NamedTuple):
    """loss: a scalar of the scores' dtype. counts: int64 [4]: examples (sampled positions at which the
    boundary key and the new key differ), sampled positions, examples whose new key the teacher keeps,
    examples that the student decides as the teacher."""

    loss: torch.Tensor
    counts: torch.Tensor


def loss_of(record, dtype):
    """The scalar loss of a record that the library wrote: the bits of a float64, then counts."""
    return record[:1].view(torch.float64).reshape(()).to(dtype, copy=True)


def loss_setup(ctx, inputs, output):
    """The gradient of an operator that returns (loss, gradient of its first argument)."""
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def loss_gradient(ctx, d_loss, _d_gradient):
    (gradient,) = ctx.saved_tensors
    return (d_loss.to(gradient.dtype) * gradient,)


_NUMBERS = (
    "float temperature, float omega_min, float margin_temperature, bool balance, float balance_least, "
    "float balance_most, int count, float late, float scale, int seed"
)


def _boundary_loss(scores, log_gamma, target, instance, sinks, windows, budgets, thresholds, *rest):
    *numbers, lengths = rest
    wide = _wide(scores)
    heads = scores.shape[1]
    d_scores = torch.zeros(scores.shape, dtype=wide.dtype, device=scores.device)
    d_log_gamma = None
    if log_gamma is not None:
        d_log_gamma = torch.zeros(heads, dtype=torch.float64, device=scores.device)
    record = torch.zeros(5, dtype=torch.int64, device=scores.device)
    _native.call(
        "boundary_loss",
        scores,
        _native_policy(instance, sinks, windows, budgets, thresholds),
        wide,
        _native.rows32(target),
        None if log_gamma is None else log_gamma.float().contiguous(),
        (lengths, None, None),
        tuple(numbers),
        d_scores,
        d_log_gamma,
        record,
    )
    loss = loss_of(record, wide.dtype)
    if log_gamma is None:
        d_log_gamma = torch.empty(0, dtype=torch.float64, device=scores.device)
    else:
        d_log_gamma = d_log_gamma.to(log_gamma.dtype)
    return loss, record[1:].clone(), d_scores.to(scores.dtype), d_log_gamma


def _boundary_fake(scores, log_gamma, *_others):
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32

    def empty(shape, dtype):
        return torch.empty(shape, dtype=dtype, device=scores.device)

    d_log_gamma = empty(0, torch.float64) if log_gamma is None else empty(log_gamma.shape, log_gamma.dtype)
    return empty((), wide), empty(4, torch.int64), empty(scores.shape, scores.dtype), d_log_gamma


def _boundary_setup(ctx, inputs, output):
    ctx.save_for_backward(output[2], output[3])
    ctx.decays = inputs[1] is not None
    ctx.mark_non_differentiable(output[1], output[2], output[3])


def _boundary_gradient(ctx, d_loss, *_others):
    d_scores, d_log_gamma = ctx.saved_tensors
    scale = d_loss.to(d_scores.dtype)
    d_log_gamma = d_loss.to(d_log_gamma.dtype) * d_log_gamma if ctx.decays else None
    return scale * d_scores, d_log_gamma


_boundary_operator = Operator(
    "boundary_loss",
    f"(Tensor scores, Tensor? log_gamma, Tensor target, {_POLICY}, {_NUMBERS}, Tensor? lengths) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _boundary_loss,
    _boundary_fake,
    _boundary_gradient,
    _boundary_setup,
    of=(0, 1),
)


def boundary_loss(
    policy,
    scores,
    target,
    *,
    temperature=1.0,
    omega_min=0.0,
    margin_temperature=1.0,
    balance=True,
    balance_limits=(0.25, 4.0),
    count=None,
    late=0.5,
    seed=0,
    scale=1.0,
    lengths=None,
):
    """KVpop's boundary loss (eq. 7, B.4 to B.6): trains scores on the comparison that decides which key a
    cache evicts. At a query q, with t_new = q - w, t_bnd the worst of the `budget` keys that a cache with the
    target's scores holds after q's update, y = +1 where it holds t_new and else -1, and effective scores
    r_t + (q - t) log gamma:

        loss = scale * mean of omega_margin omega_balance softplus(-y (r_new(q) - r_bnd(q)) / temperature)

    policy   a Policy of Sink, Window, TopKBudget and Decay
    scores   [B, Hkv, S] of the student, bfloat16, float16, float32 (float64 on the CPU)
    target   [B, Hkv, S] of the teacher (future_mass); a constant
    omega_min, margin_temperature    weights by the teacher's margin (B.4); omega_min = 1 turns them off
    balance, balance_limits          weights of keeps and drops (B.5), clipped
    count, late, seed                positions drawn per sequence and head, the share drawn late (B.6); None:
                                     all positions, each once
    lengths  [B] int32

    Returns a BoundaryResult. Gradients reach scores and the Decay's log_gamma. On CUDA the work is enqueued
    on the current stream; without examples the loss is 0. NaN and infinite scores at keys that leave the
    window raise ValueError on the CPU; on CUDA they spoil the result.
    """
    if policy.instance != "top_k":
        raise NotImplementedError(
            f"policy: {policy!r} is not allowed; boundary_loss takes Sink, Window, TopKBudget and Decay"
        )
    _native.check_seed("seed", seed)
    log_gamma = policy.log_gamma
    if log_gamma is not None:
        log_gamma = log_gamma.to(scores.device).expand(scores.shape[1])
    loss, counts, _, _ = _boundary_operator(
        scores,
        log_gamma,
        target.detach(),
        *numbers_of(policy),
        temperature,
        omega_min,
        margin_temperature,
        balance,
        *balance_limits,
        2**31 - 1 if count is None else count,
        late,
        scale,
        seed,
        lengths,
    )
    return BoundaryResult(loss, counts)
