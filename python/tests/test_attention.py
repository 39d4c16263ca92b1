"""attend, causal_lse and future_mass against the formulas."""

import math

import pytest
import reference
import torch

import kvpolicy as kvp

# Errors of one dtype relative to float64: rounding of inputs' products (bf16 2^-8, fp16 2^-11), and of sums.
TOLERANCE = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (2e-5, 2e-5),
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (3e-2, 3e-2),
}


def rows(shape, dtype, device):
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def check(q, k, v, mask=None, device=None, dtype=torch.float64, **options):
    """Outputs and gradients are those of the formula in float64."""
    rtol, atol = TOLERANCE[dtype]
    formula = dict(options)
    if "cu_seqlens" in formula:
        formula["segments"] = formula.pop("cu_seqlens").cpu()
    if "logits_soft_cap" in formula:
        formula["soft_cap"] = formula.pop("logits_soft_cap")
    if "starts" in formula:
        formula["starts"] = formula["starts"].cpu()
    if mask is not None:
        formula |= {name: x.detach().cpu() for name, x in mask._asdict().items() if x is not None}
    exact = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    bias = None
    if mask is not None and mask.log_bias is not None:
        bias = formula["log_bias"] = formula["log_bias"].double().requires_grad_()
    want, want_lse = reference.attention(*exact, **formula)
    out, lse = kvp.attend(q, k, v, mask, return_lse=True, **options)
    assert out.dtype == dtype and lse.dtype == torch.float32 and out.shape == want.shape
    torch.testing.assert_close(out.detach().cpu().double(), want.detach(), rtol=rtol, atol=atol)
    torch.testing.assert_close(
        lse.detach().cpu().double(), want_lse.detach(), rtol=max(rtol, 1e-6), atol=max(atol, 1e-6)
    )
    weights = torch.randn_like(want)
    (want * weights).sum().backward(retain_graph=True)
    (out * weights.to(dtype).to(out.device)).sum().backward(retain_graph=True)
    # Weights come from lse, which is float32 and below 8 here.
    rtol, atol = max(rtol, 2**-21), max(atol, 2**-21)
    compare(q, k, v, exact, mask, bias, rtol, atol)
    # Once more, through lse.
    weights = torch.randn_like(want_lse)
    seen = torch.isfinite(want_lse.detach())
    for x in (q, k, v, *exact, *(() if bias is None else (bias, mask.log_bias))):
        x.grad = None
    want_lse.masked_select(seen).mul(weights[seen]).sum().backward()
    lse.masked_select(seen.to(lse.device)).mul(weights[seen].float().to(lse.device)).sum().backward()
    v.grad = torch.zeros_like(v) if v.grad is None else v.grad
    exact[2].grad = torch.zeros_like(exact[2])
    compare(q, k, v, exact, mask, bias, rtol, atol)


def compare(q, k, v, exact, mask, bias, rtol, atol):
    for mine, theirs in zip((q, k, v), exact):
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(
            mine.grad.cpu().double(), theirs.grad, rtol=rtol, atol=atol * max(1, scale)
        )
    if bias is not None:
        scale = max(1, bias.grad.abs().max().item())
        torch.testing.assert_close(
            mask.log_bias.grad.cpu().double(), bias.grad, rtol=rtol, atol=max(atol, 1e-6) * scale
        )


def masked(device, keys=70, heads=2, batch=2):
    """A mask with keys of all kinds, and a log-bias."""
    scores = torch.randn(batch, heads, keys, device=device)
    expiry = kvp.build_mask(kvp.KVpop(2, 5, 6), scores).expiry
    expiry[0, 0, 3] = 0  # seen by no query
    bias = torch.randn(batch, heads, keys, device=device).requires_grad_()
    return kvp.Mask(expiry, bias, torch.tensor([3, 5][:heads], dtype=torch.int32, device=device))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [(64, 64), (80, 40)])
def test_attend_through_a_mask(dtype, head_dim, device, compiled):
    compiled(dtype)
    dim, value_dim = head_dim
    q = rows((2, 6, 70, dim), dtype, device)
    k, v = rows((2, 2, 70, dim), dtype, device), rows((2, 2, 70, value_dim), dtype, device)
    check(q, k, v, masked(device), device, dtype)


def test_attend_causal_soft_cap_and_strides(device):
    dtype = torch.float32
    # [B, S, H, D], as projections write it.
    q, k, v = (
        torch.randn(2, 33, heads, 64, device=device).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)
    )
    check(q, k, v, None, device, dtype, logits_soft_cap=2.0)
    plain = kvp.attend(q, k, v)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(plain, dense, rtol=1e-5, atol=1e-5)


def test_attend_packed_and_continued(device):
    q, k, v = (rows((2, heads, 50, 64), torch.float32, device) for heads in (4, 2, 2))
    edges = torch.tensor([0, 7, 8, 50], dtype=torch.int32, device=device)
    scores = torch.randn(2, 2, 50, device=device)
    mask = kvp.build_mask(kvp.KVpop(1, 3, 4), scores, cu_seqlens=edges)
    check(q, k, v, mask, device, torch.float32, cu_seqlens=edges)
    q = rows((2, 4, 5, 64), torch.float32, device)
    starts = torch.tensor([45, 20], dtype=torch.int32, device=device)
    check(
        q,
        k.detach().requires_grad_(),
        v.detach().requires_grad_(),
        masked(device, 50),
        device,
        torch.float32,
        starts=starts,
    )


def test_lengths_leave_the_rest_zero(device):
    q, k, v = (rows((2, heads, 40, 64), torch.float32, device) for heads in (4, 2, 2))
    lengths = torch.tensor([40, 9], dtype=torch.int32, device=device)
    out, lse = kvp.attend(q, k, v, lengths=lengths, return_lse=True)
    assert (out[1, :, 9:] == 0).all() and (lse[1, :, 9:] == 0).all()
    alone = kvp.attend(q[1:, :, :9].contiguous(), k[1:, :, :9].contiguous(), v[1:, :, :9].contiguous())
    torch.testing.assert_close(out[1:, :, :9], alone, rtol=1e-5, atol=1e-6)
    out.sum().backward()
    assert (q.grad[1, :, 9:] == 0).all() and (k.grad[1, :, 9:] == 0).all()


EMPTY = [(0, 5), (2, 0), (0, 0)]


@pytest.mark.parametrize(("batch", "length"), EMPTY, ids=str)
def test_no_batch_entries_or_tokens(batch, length, device):
    q, k, v = (rows((batch, heads, length, 16), torch.float32, device) for heads in (4, 2, 2))
    bias = torch.zeros(batch, 2, length, device=device, requires_grad=True)
    expiry = torch.zeros(batch, 2, length, dtype=torch.int32, device=device)
    for mask in (None, kvp.Mask(expiry, bias)):
        out, lse = kvp.attend(q, k, v, mask, return_lse=True)
        # The gradient of a sum is an expanded number: its strides are 0.
        (gradient,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
        assert gradient.shape == q.shape
        (out.sum() + lse.sum()).backward()
        assert all(x.grad.shape == x.shape for x in (q, k, v))
    assert bias.grad.shape == bias.shape
    q, k = q.detach(), k.detach()
    assert kvp.causal_lse(q, k).shape == (batch, 4, length)
    assert kvp.future_mass(q, k, 3).shape == (batch, 2, length)
    lse = torch.zeros((), device=device).expand(batch, 4, length)
    assert kvp.future_mass(q, k, [1, 3], lse=lse).shape == (batch, 2, length)
    assert kvp.received_mass(q, k, kvp.Mask(expiry)).shape == (batch, 2, length)


def test_gradient_in_double():
    q, k, v = (rows((1, heads, 6, 8), torch.float64, "cpu") for heads in (2, 1, 1))
    expiry = torch.tensor([[[6, 3, 9, 4, 6, 7]]], dtype=torch.int32)
    # The bias is read as float32: steps of 2^-10 from multiples of 2^-10 are exact, and the error of the
    # formula is below 2^-20.
    bias = (torch.randint(-1024, 1024, (1, 1, 6)) / 1024).double().requires_grad_()
    start = torch.tensor([1], dtype=torch.int32)

    def function(q, k, v, bias):
        return kvp.attend(q, k, v, kvp.Mask(expiry, bias, start), logits_soft_cap=3.0)

    assert torch.autograd.gradcheck(function, (q, k, v, bias.detach()), eps=1e-6, atol=1e-7)
    assert torch.autograd.gradcheck(
        function, (q.detach(), k.detach(), v.detach(), bias), eps=2**-10, atol=1e-5
    )


MASSES = [
    {},
    {"look_ahead": 4},
    {"beta": 2.0, "aggregate": "mean"},
    {"beta": math.inf},
    {"normalize": False, "epsilon": 1e-4},
]


@pytest.mark.parametrize("options", MASSES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_future_mass_is_the_formula(options, dtype, device, compiled):
    compiled(dtype)
    q, k = (torch.randn(2, heads, 60, 64, device=device).to(dtype) for heads in (4, 2))
    target = kvp.future_mass(q, k, 5, **options)
    formula = dict(options)
    formula["mean"] = formula.pop("aggregate", "max") == "mean"
    want = reference.future_mass(q.cpu().double(), k.cpu().double(), 5, **formula)
    assert target.dtype == torch.float32
    # exp of fp32 logits and of an fp32 lse; 16-bit products are exact in fp32.
    torch.testing.assert_close(target.cpu().double(), want, rtol=2e-4, atol=2e-4)
    lse = kvp.causal_lse(q, k)
    _, want = reference.attention(q.cpu().double(), k.cpu().double(), k.cpu().double())
    torch.testing.assert_close(lse.cpu().double(), want, rtol=1e-5, atol=1e-5)


def test_windows_by_head(device):
    q, k = (torch.randn(1, heads, 30, 64, device=device) for heads in (4, 2))
    both = kvp.future_mass(q, k, [3, 9])
    for head, window in enumerate((3, 9)):
        torch.testing.assert_close(both[:, head], kvp.future_mass(q, k, window)[:, head])


def test_deterministic_gradients(device):
    q, k, v = (rows((1, heads, 100, 64), torch.bfloat16, device) for heads in (4, 2, 2))
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (
            torch.autograd.grad(kvp.attend(q, k, v).float().square().sum(), (q, k, v)) for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_refusals():
    q, k, v = (torch.randn(1, heads, 9, 16) for heads in (4, 2, 2))
    with pytest.raises(ValueError, match="heads"):
        kvp.attend(q[:, :3], k, v)
    with pytest.raises(TypeError, match="k: bfloat16 is not allowed; it must be float32"):
        kvp.attend(q, k.bfloat16(), v)
    with pytest.raises(TypeError, match="one of bfloat16, float16, float32, float64"):
        kvp.attend(q.long(), k, v)
    with pytest.raises(ValueError, match=r"q.stride\(-1\)"):
        kvp.attend(q.transpose(-1, -2).contiguous().transpose(-1, -2), k, v)
    with pytest.raises(ValueError, match="head_dim|dim"):
        kvp.attend(*(x[..., :12].contiguous() for x in (q, k, v)))
    with pytest.raises(ValueError, match="expiry"):
        kvp.attend(q, k, v, kvp.Mask(torch.zeros(1, 2, 8, dtype=torch.int32)))
    with pytest.raises(ValueError, match="beta"):
        kvp.future_mass(q, k, 2, beta=0.5)
    with pytest.raises(ValueError, match="aggregate"):
        kvp.future_mass(q, k, 2, aggregate="sum")
    q.requires_grad_()
    with pytest.raises(NotImplementedError, match="future_mass|causal_lse"):
        kvp.future_mass(q, k, 2).sum().backward()
