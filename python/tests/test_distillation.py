"""Distillation losses against the formulas."""

import pytest
import reference
import torch

import kvpolicy as kvp

B, S, V = 2, 7, 33


def close(loss, student, want, exact, dtype):
    """Values are float32 (float64 of float64); gradients are rounded to the student's dtype."""
    bound = 1e-10 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(loss.detach().cpu().double(), want.detach(), rtol=bound, atol=bound)
    loss.backward()
    want.backward()
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(dtype, bound)
    torch.testing.assert_close(
        student.grad.cpu().double(), exact.grad, rtol=rounding, atol=max(bound, 2**-24) / (B * S)
    )


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


OPTIONS = [
    {},
    {"reverse": True},
    {"temperature": 2.0},
    {"top": 5},
    {"top": 5, "temperature": 2.0, "student_softmax": "all"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_top_distillation_is_the_formula(dtype, options, device, compiled):
    compiled(dtype, "scorer")
    # Distinct logits: with ties the set of the largest is the library's own.
    teacher = torch.stack([torch.randperm(V) for _ in range(B * S)]).reshape(B, S, V).div(8).to(device, dtype)
    student = torch.randn(B, S, V, device=device).to(dtype).requires_grad_()
    exact = student.detach().cpu().double().requires_grad_()
    formula = {"top": 256, "temperature": 1.0} | options
    want = reference.top_distillation(teacher.cpu().double(), exact, **formula)
    loss = kvp.top_distillation(teacher, student, **options)
    close(loss, student, want, exact, dtype)
    # The same from stored logits.
    stored = kvp.top_logits(teacher, min(V, formula["top"]))
    values, indices = torch.topk(teacher.float(), min(V, formula["top"]), -1)
    assert torch.equal(stored[0].float(), values) and torch.equal(stored[1].long(), indices)
    again = kvp.top_distillation(stored, student, **options)
    torch.testing.assert_close(again.detach(), loss.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_l2_is_the_formula(dtype, device, compiled):
    compiled(dtype, "scorer")
    teacher = torch.randn(B, S, V, device=device).to(dtype)
    student = torch.randn(B, S, V, device=device).to(dtype).requires_grad_()
    exact = student.detach().cpu().double().requires_grad_()
    want = 3 * (exact - teacher.cpu().double()).square().mean()
    close(kvp.l2_distillation(teacher, student, scale=3.0), student, want, exact, dtype)


def test_gradients_in_double():
    teacher = torch.randn(1, 3, 9, dtype=torch.float64)
    student = torch.randn(1, 3, 9, dtype=torch.float64, requires_grad=True)
    for loss in (kvp.top_distillation, kvp.l2_distillation):
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss(teacher, x), student, eps=1e-6, atol=1e-8)
    for options in ({"reverse": True}, {"student_softmax": "all"}):
        assert torch.autograd.gradcheck(
            lambda x, options=options: kvp.top_distillation(teacher, x, top=4, temperature=2.0, **options),
            student,
        )


def test_mass_outside_the_set(device):
    """99.8% of the student's mass is on logits that the teacher's top two leave out."""
    teacher = torch.tensor([[[3.0, 2.0, -5.0, -5.0]]], device=device)
    student = torch.tensor([[[3.0, 2.0, 9.0, 9.0]]], device=device, requires_grad=True)
    assert kvp.top_distillation(teacher, student, top=2).abs() < 1e-6
    loss = kvp.top_distillation(teacher, student, top=2, student_softmax="all")
    inside, s = student.detach()[..., :2].logsumexp(-1), student.detach().softmax(-1)
    torch.testing.assert_close(loss.detach(), (student.detach().logsumexp(-1) - inside).mean())
    assert 6.3 < loss < 6.5
    loss.backward()
    p = torch.tensor([0.7310586, 0.2689414, 0.0, 0.0], device=device)
    torch.testing.assert_close(student.grad[0, 0], s[0, 0] - p)


def test_tokens_beyond_a_length_do_not_count(device):
    teacher, student = torch.randn(B, S, V, device=device), torch.randn(B, S, V, device=device)
    student.requires_grad_()
    lengths = torch.tensor([S, 2], dtype=torch.int32, device=device)
    loss = kvp.l2_distillation(teacher, student, lengths=lengths)
    apart = (student - teacher).detach().square()
    want = torch.cat((apart[0], apart[1, :2])).mean()
    torch.testing.assert_close(loss.detach(), want)
    loss.backward()
    assert (student.grad[1, 2:] == 0).all() and (student.grad[1, :2] != 0).all()


def test_refusals():
    teacher, student = torch.randn(1, 3, 9), torch.randn(1, 3, 9)
    with pytest.raises(ValueError, match="teacher|student"):
        kvp.l2_distillation(teacher[..., :8].contiguous(), student)
    with pytest.raises(TypeError, match="teacher: float64 is not allowed; it must be float32"):
        kvp.l2_distillation(teacher.double(), student)
    with pytest.raises(ValueError, match="temperature"):
        kvp.top_distillation(teacher, student, temperature=0.0)
    with pytest.raises(ValueError, match="student_softmax: 'set' is not allowed; it must be 'top' or 'all'"):
        kvp.top_distillation(teacher, student, student_softmax="set")
    with pytest.raises(ValueError, match="reverse: true is not allowed"):
        kvp.top_distillation(teacher, student, reverse=True, student_softmax="all")
    with pytest.raises(ValueError, match="NaN"):
        kvp.top_distillation(teacher, student * float("nan"))
