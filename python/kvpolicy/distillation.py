"""Losses that keep a sparse student close to its dense teacher (KVpop, algorithm 1 and F; WG-KV, 3.3)."""

import torch

from kvpolicy import _native
from kvpolicy._native import Operator
from kvpolicy.losses import loss_gradient, loss_of, loss_setup


def _wide(rows):
    """Rows as the library reads them: on the CPU 16-bit ones as float32."""
    wide = rows.device.type == "cpu" and rows.dtype in (torch.bfloat16, torch.float16)
    return _native.rows(rows.float() if wide else rows)[:, None]


def _top_logits(logits, count, lengths):
    shape = (logits.shape[0], 1, *logits.shape[1:-1], count)
    rows, make = _wide(logits), _native.outputs_of(lengths)
    values = make(*shape, dtype=rows.dtype, device=logits.device)
    indices = make(*shape, dtype=torch.int32, device=logits.device)
    _native.call("top_logits", logits, rows, (lengths, None, None), values, indices)
    return values[:, 0].to(logits.dtype), indices[:, 0]


def _top_logits_fake(logits, count, _lengths):
    shape = (*logits.shape[:-1], count)
    return (
        torch.empty(shape, dtype=logits.dtype, device=logits.device),
        torch.empty(shape, dtype=torch.int32, device=logits.device),
    )


_top_logits_operator = Operator(
    "top_logits",
    "(Tensor logits, int count, Tensor? lengths) -> (Tensor, Tensor)",
    _top_logits,
    _top_logits_fake,
    refusal="a teacher's logits",
)


def top_logits(logits, count=256, *, lengths=None):
    """The `count` largest logits of each token, largest first (equal ones by rising index), and their
    indices, int32: [B, S, count] each, from logits [B, S, V]. So a teacher's logits can be stored. No
    gradient. At most 4096 on CUDA, where the work is enqueued on the current stream."""
    if count < 1:
        raise ValueError(f"count: {count} is not allowed; it must be 1 or more")
    return _top_logits_operator(logits.detach(), count, lengths)


def _distill(student, teacher, indices, kind, top, temperature, reverse, scale, over_all, lengths):
    rows = _wide(student)
    d_student = _native.outputs_of(lengths)(*rows.shape, dtype=rows.dtype, device=student.device)
    record = torch.zeros(2, dtype=torch.int64, device=student.device)
    _native.call(
        "distill",
        student,
        kind,
        _wide(teacher),
        rows,
        None if indices is None else indices[:, None],
        (lengths, None, None),
        (top, temperature, reverse, scale, over_all),
        d_student,
        record,
    )
    real = torch.float64 if student.dtype == torch.float64 else torch.float32
    return loss_of(record, real), d_student[:, 0].to(student.dtype)


def _distill_fake(student, *_others):
    real = torch.float64 if student.dtype == torch.float64 else torch.float32
    return torch.empty((), dtype=real, device=student.device), torch.empty(
        student.shape, dtype=student.dtype, device=student.device
    )


_distill_operator = Operator(
    "distill",
    "(Tensor student, Tensor teacher, Tensor? indices, str kind, int top, float temperature, bool reverse, "
    "float scale, bool over_all, Tensor? lengths) -> (Tensor, Tensor)",
    _distill,
    _distill_fake,
    loss_gradient,
    loss_setup,
    of=(0,),
)


def top_distillation(
    teacher,
    student,
    *,
    top=256,
    temperature=1.0,
    reverse=False,
    scale=1.0,
    student_softmax="top",
    lengths=None,
):
    """The divergence of a student from a teacher over the teacher's `top` logits, the mean over tokens. With
    p and s the softmaxes of teacher's and student's logits / temperature over that set:

        scale * mean of sum p (log p - log s),      reverse: scale * mean of sum s (log s - log p)

    So the student's logits outside the set have no effect. With student_softmax "all" s is its softmax over
    all logits, and mass outside the set counts, in the gradient too; not with `reverse`, which would need the
    teacher's there.

    student  logits [B, S, V], bfloat16, float16, float32 (float64 on the CPU)
    teacher  logits of the same shape and dtype, or (values, indices) of top_logits, whose count is then
             `top`; a constant
    lengths  [B] int32: tokens beyond do not count

    Returns a scalar, with a gradient to student, which is rounded to the student's dtype: give a loss of
    float16 logits a scale of about the number of tokens. No factor of temperature^2 is applied. On CUDA `top`
    is at most 4096, and the work is enqueued on the current stream. A NaN logit raises ValueError on the
    CPU."""
    if student_softmax not in ("top", "all"):
        raise ValueError(f"student_softmax: {student_softmax!r} is not allowed; it must be 'top' or 'all'")
    values, indices = teacher if isinstance(teacher, (tuple, list)) else (teacher, None)
    over_all = student_softmax == "all"
    loss, _ = _distill_operator(
        student, values.detach(), indices, "top", top, temperature, reverse, scale, over_all, lengths
    )
    return loss


def l2_distillation(teacher, student, *, scale=1.0, lengths=None):
    """scale * mean over tokens and dimensions of (student - teacher)^2, for hidden states [B, S, D] of one
    dtype (WG-KV). The teacher is a constant. Other arguments as in top_distillation."""
    loss, _ = _distill_operator(student, teacher.detach(), None, "l2", 1, 1.0, False, scale, False, lengths)
    return loss
