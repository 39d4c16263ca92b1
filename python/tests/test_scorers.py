"""Scorers against the papers' formulas, their initial weights, and their files."""

import pathlib

import pytest
import reference
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kvpolicy as kvp

H, DK, DV, S = 2, 16, 8, 37
SCORERS = pathlib.Path(__file__).parents[2] / "examples/models/byte-llama/scorers"


def make(kind, **options):
    if kind == "linear":
        return kvp.LinearScorer(H, DK, DV)
    if kind == "mlp":
        return kvp.MLPScorer(H, DK, 24, DV)
    if kind == "write_gate":
        return kvp.WriteGateScorer(H, DK, 24, DV, rope=kvp.Rope(**options))
    if kind == "conv":
        delay = options.pop("delay", 13)
        return kvp.ConvScorer(H, DK, DV, delay=delay, rope=kvp.Rope(**options) if options else None)
    return kvp.mLSTMScorer(H, DK, DV, delay=5, d_qk=16, d_v=8, **options)


CASES = [
    ("linear", {}),
    ("mlp", {}),
    ("mlstm", {}),
    ("mlstm", {"norm": True, "skip": True, "gate_softcap": 0.0}),
    ("mlstm", {"norm": "layer"}),
    ("write_gate", {"base": 100.0}),
    ("write_gate", {"layout": "interleaved", "base": 100.0, "dims": 8}),
    ("conv", {}),
    ("conv", {"base": 100.0}),
    ("conv", {"delay": 6}),
]


def randomize(scorer):
    """Weights that none of the formula's terms is small for: multiples of 2^-12 below 2."""
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.4).clamp(-1.5, 1.5).mul(4096).round() / 4096)
        if isinstance(scorer, kvp.mLSTMScorer):
            scorer.b_f += 1
    return scorer


def formula(scorer, k, v, parameters, real=torch.float32, **stored):
    named = dict(zip(scorer.names, parameters)) | stored
    if scorer.kind == "mlstm":
        return reference.mlstm(k, v, scorer.delay, scorer.gate_softcap, scorer.norm, **named)
    rope = {}
    if scorer.rope is not None:
        rope = {
            "layout": scorer.rope.layout,
            "base": scorer.rope.base,
            "dims": scorer.rope.dims,
            "real": real,
        }
    if scorer.kind == "conv":
        return reference.conv(k, v, scorer.delay, **named, **rope)
    return getattr(reference, scorer.kind)(k, v, **named, **rope)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_scores_and_gradients_are_the_formula(kind, options, dtype, device, compiled):
    compiled(dtype, "scorer")
    scorer = randomize(make(kind, **options)).to(device)
    k, v = (torch.randn(2, H, S, d, device=device).to(dtype).requires_grad_() for d in (DK, DV))
    scores = scorer(k, v)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    assert scores.dtype == real and scores.shape == (2, H, S)
    weights = torch.randn(2, H, S)
    exact = by_formula(scorer, k, v, weights, real)
    rounded = by_formula(scorer, k, v, weights, real, stored=dtype) if kind == "conv" else exact
    close = closeness(kind, dtype, device)
    scored = S - scorer.delay if kind == "conv" else S  # the others are -infinity
    mine, theirs, near = (x[..., :scored] for x in (scores, exact["scores"], rounded["scores"]))
    close(mine, theirs, "scores", near)
    if scorer.sizes()[3]:
        assert (scores[..., S - scorer.delay :] == (-torch.inf if kind == "conv" else 0)).all()
    (scores * weights.to(device)).sum().backward()
    for name in scorer.names:
        if getattr(scorer, name) is not None:
            close(getattr(scorer, name).grad, exact[name], name, rounded[name])
    close(k.grad, exact["k"], "k", rounded["k"], dtype)
    if kind != "write_gate":
        close(v.grad, exact["v"], "v", rounded["v"], dtype)
    else:
        assert (v.grad == 0).all()


def test_dropout_of_conv(device):
    """One seed drops the same numbers in both passes; another seed, and evaluation, do not."""
    scorer = randomize(make("conv")).to(device)
    k, v = (torch.randn(2, H, S, d, device=device) for d in (DK, DV))
    plain = scorer(k, v)
    scorer.dropout, scorer.dropout_seed = 0.5, 7
    dropped = scorer(k, v)
    assert torch.equal(dropped, scorer(k, v)) and not torch.equal(dropped, plain)
    assert torch.equal(scorer.eval()(k, v), plain)
    scorer.train().dropout_seed = 8
    assert not torch.equal(dropped, scorer(k, v))
    scorer.dropout = 1.0
    with pytest.raises(ValueError, match="dropout.rate: 1 is not allowed"):
        scorer(k, v)


def test_gradient_under_dropout():
    scorer = randomize(make("conv"))
    scorer.dropout, scorer.dropout_seed = 0.5, 7
    k, v = (torch.randn(1, H, 20, d, dtype=torch.float64, requires_grad=True) for d in (DK, DV))
    assert torch.autograd.gradcheck(lambda k, v: scorer(k, v)[..., :7], (k, v), eps=1e-6, atol=1e-7)


def by_formula(scorer, k, v, weights, real, **stored):
    """{name: number} in float64: the formula's scores, and the gradients of their sum times `weights`."""
    named = {"k": k, "v": v} | {name: getattr(scorer, name) for name in scorer.names}
    named = {
        name: x if x is None else x.detach().cpu().double().requires_grad_() for name, x in named.items()
    }
    k, v, *parameters = named.values()
    scores = formula(scorer, k, v, parameters, real, **stored)
    (scores * weights).sum().backward()
    gradients = {name: x if x is None else x.grad for name, x in named.items()}
    return gradients | {"scores": scores.detach()}


# Errors of 16-bit rows on CUDA, relative to a norm, in units of u = 2^-9 (bfloat16). Weights, and backwards
# gradients of hidden numbers, are rounded to 16 bits: each off by at most u of itself, independently, of mean
# square u / sqrt(3). A sum of products is then off by u / sqrt(3) in the norm; an activation's slope of up to
# 1.13 and the second rounding backwards make it 2 u / sqrt(3). Few numbers in a norm take twice that and
# more: 3 u and 4 u. An mLSTM rounds six times (projections, features, values, chunks, states, products):
# sqrt(6 / 3) u where values agree, more where they cancel, so 5 u and 10 u, and 5e-3 of a term of its scores.
#
# A convolution has about 20 roundings on the way to a gradient, and its sums are large beside the width of
# SiLU's slope: how far a rounding moves slopes depends on the few sums near 0. So its errors may be twice
# those of the formula whose factors are rounded (reference.conv), and a u more. That formula lacks three of
# the roundings, of the slopes and of the last layer's gradients. With all of them, and all else in float64,
# errors of 800 draws were below 0.9 of the bound.
UNITS = {
    "linear": (3, 4, 0.0),
    "mlp": (3, 4, 0.0),
    "write_gate": (3, 4, 0.0),
    "mlstm": (5, 10, 5e-3),
}


def closeness(kind, dtype, device):
    """close(mine, exact, name, rounded, dtype of mine): numbers one by one where float32 or float64
    arithmetic rounds, norms where 16-bit arithmetic does; `rounded`, of conv alone, is the number of the
    formula with rounded factors. Sums of at most 100 products of float32 are off by 100 * 2^-24 = 6e-6 of
    their terms, three of them in a row and exponentials of them by 2e-5."""
    bound = 1e-9 if dtype == torch.float64 else 2e-5

    def close(mine, theirs, name, rounded, kept=torch.float32):
        mine = mine.detach().cpu().double()
        if dtype == torch.bfloat16 and device.type == "cuda":
            if kind == "conv":
                allowed = 2 * (rounded - theirs).norm() + 2**-9 * theirs.norm()
            else:
                scores, gradients, floor = UNITS[kind]
                units = scores if name == "scores" else gradients
                allowed = units * 2**-9 * theirs.norm() + floor * theirs.numel() ** 0.5
            assert (mine - theirs).norm() <= allowed, f"{name}: {(mine - theirs).norm()} of {allowed}"
            return
        # Gradients of parameters are float32, those of rows have the rows' dtype, float64 rows' scores
        # float64.
        kept = dtype if name == "scores" else kept
        rounding = {torch.bfloat16: 2**-8, torch.float32: 2**-23}.get(kept, 0.0)
        allowed = max(bound if name == "scores" else 10 * bound, 0.0 if name == "scores" else rounding)
        scale = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(mine, theirs, rtol=allowed, atol=allowed * scale)

    return close


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_gradient_in_double(kind, options):
    """Rows in steps of 1e-6; parameters are read as float32, so in exact steps of 2^-12 with an error of the
    formula below 2^-24 times the third derivative."""
    scorer = randomize(make(kind, **options))
    length = 16 if kind == "conv" else 8
    k, v = (torch.randn(1, H, length, d, dtype=torch.float64).requires_grad_() for d in (DK, DV))

    def there(scores):  # differences of infinities are none
        return torch.where(scores.isinf(), 0.0, scores)

    assert torch.autograd.gradcheck(lambda k, v: there(scorer(k, v)), (k, v), eps=1e-6, atol=1e-7)
    names = [name for name in scorer.names if getattr(scorer, name) is not None]
    values = [getattr(scorer, name).detach().double().requires_grad_() for name in names]

    def function(*parameters):
        given = dict(zip(names, parameters))
        parameters = [given.get(name, torch.empty(0)) for name in scorer.names]
        numbers = (scorer.kind, *scorer.call_numbers(), None, None)
        return there(torch.ops.kvpolicy.score(k.detach(), v.detach(), parameters, *numbers))

    assert torch.autograd.gradcheck(function, values, eps=2**-12, atol=2e-5, rtol=2e-4)


def test_lengths_and_segments(device):
    for kind, options in CASES[1:3]:
        scorer = randomize(make(kind, **options)).to(device)
        k, v = (torch.randn(2, H, S, d, device=device) for d in (DK, DV))
        lengths = torch.tensor([S, 9], dtype=torch.int32, device=device)
        scores = scorer(k, v, lengths=lengths)
        alone = scorer(k[1:, :, :9].contiguous(), v[1:, :, :9].contiguous())
        torch.testing.assert_close(scores[1:, :, :9], alone, rtol=1e-5, atol=1e-5)
        assert (scores[1, :, 9:] == 0).all()
        edges = torch.tensor([0, 11, S], dtype=torch.int32, device=device)
        packed = scorer(k, v, cu_seqlens=edges)
        alone = scorer(k[:, :, 11:].contiguous(), v[:, :, 11:].contiguous())
        torch.testing.assert_close(packed[:, :, 11:], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
@pytest.mark.parametrize("batch, length", [(0, 5), (2, 0), (0, 0)])
def test_no_batch_entries_or_tokens(kind, options, batch, length, device):
    scorer = make(kind, **options).to(device)
    k, v = (torch.zeros(batch, H, length, dim, device=device, requires_grad=True) for dim in (DK, DV))
    scores = scorer(k, v)
    assert scores.shape == (batch, H, length)
    scores.sum().backward()
    assert k.grad.shape == k.shape and v.grad.shape == v.shape
    assert all((parameter.grad == 0).all() for parameter in scorer.parameters())


def test_a_bfloat16_module_has_bfloat16_gradients():
    scorer = make("mlp").bfloat16()
    scorer(torch.randn(1, H, 9, DK), torch.randn(1, H, 9, DV)).sum().backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in scorer.parameters())


def test_norms_by_name(tmp_path):
    """Of h = (2, 2): an RMS norm is (1, 1), a LayerNorm (0, 0). One feature, so that h is the mean value."""
    scorers = {norm: kvp.mLSTMScorer(1, 2, delay=0, d_qk=2, d_v=2, norm=norm) for norm in (True, "layer")}
    k, v = torch.randn(1, 1, 4, 2), torch.full((1, 1, 4, 2), 2.0)
    for norm, want in ((True, 2 / (4 + 1e-6) ** 0.5), ("layer", 0.0)):
        with torch.no_grad():
            scorers[norm].w_v.copy_(torch.tensor([[[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]]))
            scorers[norm].readout.fill_(1)
        want = 2 * torch.nn.functional.silu(torch.tensor(want))
        torch.testing.assert_close(scorers[norm](k, v), want.expand(1, 1, 4), rtol=1e-5, atol=1e-6)
    assert scorers[True].norm == "rms" and kvp.mLSTMScorer(1, 2, delay=0).norm is False
    with pytest.raises(ValueError, match="norm: 'batch' is not allowed; it must be 'rms', 'layer' or False"):
        kvp.mLSTMScorer(1, 2, delay=0, norm="batch")
    file = tmp_path / "norm.safetensors"
    kvp.Scorers([scorers["layer"]], window=3).save(file)
    assert kvp.Scorers.load(file).layers[0].norm == "layer"
    with safe_open(file, framework="pt") as old:
        metadata, tensors = old.metadata(), {name: old.get_tensor(name) for name in old.keys()}
    assert metadata["norm"] == "layer"
    save_file(tensors, file, metadata=metadata | {"norm": "1"})  # as files have said it before
    assert kvp.Scorers.load(file).layers[0].norm == "rms"
    save_file(tensors, file, metadata=metadata | {"norm": "batch"})
    with pytest.raises(ValueError, match="norm batch is not allowed; it must be one of 0, 1, layer"):
        kvp.Scorers.load(file)


def test_parameter_groups_give_the_decay_a_rate_of_its_own():
    scorers = kvp.Scorers([kvp.MLPScorer(H, DK, 8) for _ in range(2)], window=5)
    assert scorers.gamma_range == (0.999, 0.999999)
    groups = scorers.parameter_groups(1e-3)
    assert sum(len(group["params"]) for group in groups) == len(list(scorers.parameters()))
    assert groups[-1] == {"params": [scorers.alpha], "lr": 0.03, "weight_decay": 0.0}
    assert {p.dim() for p in groups[0]["params"]} == {3} and groups[0]["weight_decay"] == 1e-4
    torch.optim.AdamW(groups)
    fixed = kvp.Scorers([kvp.MLPScorer(H, DK, 8)], window=5, gamma_range=None)
    assert len(fixed.parameter_groups(1e-3)) == 2
    with pytest.raises(ValueError, match="decay_rate: -1 is not allowed"):
        scorers.parameter_groups(1e-3, decay_rate=-1)


def test_initial_weights():
    """E.5: a score of 0 for every key; projections near the identity; gates that forget slowly."""
    k, v = torch.randn(1, 4, 20, 16), torch.randn(1, 4, 20, 16)
    mlstm = kvp.mLSTMScorer(4, 16, delay=3, norm=True, skip=True)
    for scorer in (kvp.LinearScorer(4, 16), kvp.MLPScorer(4, 16, 8), mlstm):
        assert (scorer(k, v) == 0).all()
    assert mlstm.d_qk == 16 and mlstm.d_v == 8
    identity = torch.eye(8, 32).expand(4, 8, 32)
    assert (mlstm.w_q - identity).abs().max() < 0.1
    assert (mlstm.w_v - torch.roll(identity, 16, -1)).abs().max() < 0.1
    assert mlstm.b_f.tolist() == [3.0, 4.0, 5.0, 6.0] and (mlstm.norm_gain == 1).all()
    assert abs(kvp.MLPScorer(4, 16, 512).w1.std().item() - 32**-0.5) < 0.01


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_files_round_trip(kind, options, tmp_path):
    scorers = kvp.Scorers(
        [randomize(make(kind, **options)) for _ in range(3)], window=5, sinks=2, gamma_range=(0.99, 0.999)
    )
    scorers.alpha.data.normal_()
    scorers.training_notes["rate"] = "0.001"
    scorers.save(tmp_path / "a.safetensors")
    again = kvp.Scorers.load(tmp_path / "a.safetensors")
    assert again.state_dict().keys() == scorers.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], x) for name, x in scorers.state_dict().items())
    assert (again.window, again.sinks, again.training_notes) == (5, 2, {"rate": "0.001"})
    assert again.layers[0].call_numbers()[0] == scorers.layers[0].call_numbers()[0]
    assert again.gamma_range == (0.99, 0.999) and again.layers[0].sizes() == scorers.layers[0].sizes()
    policy = again.policy(1, 7)
    assert policy.scorer is again.layers[1] and policy.budgets == (7,)
    k, v = torch.randn(1, H, S, DK), torch.randn(1, H, S, DV)
    assert kvp.build_mask(policy, policy.scorer(k, v)).expiry.shape == (1, H, S)


def test_utility_predictor(device, tmp_path):
    """SP-KV, listing 1: plain products; gates start open; files round trip."""
    predictor = kvp.UtilityPredictor(H, 12, 20).to(device)
    states = torch.randn(2, S, 12, device=device)
    assert (predictor(states) == 5).all()
    torch.nn.init.normal_(predictor.w2)
    inner = torch.nn.functional.silu(states @ predictor.w1.T + predictor.b1)
    torch.testing.assert_close(predictor(states), (inner @ predictor.w2.T + predictor.b2).transpose(1, 2))
    half = predictor(states.bfloat16())
    assert half.dtype == torch.float32 and half.shape == (2, H, S)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(predictor(states.bfloat16()), half)
    # Inputs and weights are rounded to bfloat16: 2 u / sqrt(3) in the norm, u = 2^-9; twice that for few
    # numbers.
    exact = predictor(states).detach()
    assert (half.detach() - exact).norm() <= 3 * 2**-9 * exact.norm()
    scorers = kvp.Scorers([predictor.cpu()], window=4, gamma_range=None)
    scorers.save(tmp_path / "a.safetensors")
    again = kvp.Scorers.load(tmp_path / "a.safetensors")
    assert torch.equal(again.layers[0].w2, predictor.w2) and again.layers[0].width == 12


@pytest.mark.parametrize("layout", ["half_split", "interleaved"])
def test_write_gate_at_positions(device, layout):
    """Keys at their positions, in any chunks, have the scores of the sequence."""
    for rope in (kvp.Rope(layout, 50.0), kvp.Rope(layout, dims=DK // 2), kvp.Rope(layout, 7.0, DK)):
        scorer = randomize(kvp.WriteGateScorer(H, DK, 8, DV, rope=rope)).to(device)
        k = torch.randn(2, H, S, DK, device=device)
        want = scorer(k, torch.zeros(2, H, S, DV, device=device))
        at = torch.arange(S, device=device).expand(2, S)
        found = torch.cat([scorer.at(k[:, :, part], at[:, part]) for part in (slice(0, 5), slice(5, S))], -1)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_rope_by_frequencies(device):
    """The same as by a base; the frequencies are in the file."""
    rates = 100.0 ** (-torch.arange(0, DK, 2, device=device) / DK)
    by_base, by_rates = (
        kvp.WriteGateScorer(H, DK, 8, rope=rope).to(device)
        for rope in (kvp.Rope(base=100.0), kvp.Rope(frequencies=rates))
    )
    randomize(by_base)
    by_rates.load_state_dict(by_base.state_dict())
    k = torch.randn(1, H, S, DK, device=device)
    torch.testing.assert_close(by_base(k, k), by_rates(k, k), rtol=1e-4, atol=1e-4)


ROPE = kvp.Rope("half_split", 500.0)
SYSTEMS = {
    "kvpop": (lambda: kvp.LinearScorer(H, DK, DV), {"budget": 6}, 6),
    "spkv": (lambda: kvp.UtilityPredictor(H, 12, 20), {"threshold": 0.25}, None),
    "wgkv": (lambda: kvp.WriteGateScorer(H, DK, 8, DV, rope=ROPE), {"threshold": 0.1, "budget": 9}, 9),
    "lte": (lambda: kvp.ConvScorer(H, DK, DV, delay=14, rope=ROPE), {"budget": 5}, 5),
    "dms": (lambda: kvp.MLPScorer(H, DK, 8, DV), {}, None),
    "streaming": (None, {}, 0),
}


def trained(system):
    """Scorers of two layers with random weights, window 14 and 2 sinks."""
    make_one, options, _ = SYSTEMS[system]
    layers = [randomize(make_one()) for _ in range(2)] if make_one else []
    scorers = kvp.Scorers(layers, window=14, sinks=2, system=system, gamma_range=None, **options)
    scorers.training_notes = {"model": "byte-llama", "recipe": "frozen", "seed": "7"}
    return scorers


@pytest.mark.parametrize("system", SYSTEMS)
def test_files_of_systems(tmp_path, system):
    """A file has the policy; a share has it too."""
    scorers = trained(system)
    scorers.save(tmp_path / "a.safetensors")
    again = kvp.Scorers.load(tmp_path / "a.safetensors")
    for one in (again, again.share(0, H)):
        assert (one.system, one.threshold, one.budget) == (system, scorers.threshold, scorers.budget)
        assert (one.window, one.sinks, one.training_notes) == (14, 2, scorers.training_notes)
        assert one.state_dict().keys() == scorers.state_dict().keys()
        assert all(torch.equal(one.state_dict()[name], x) for name, x in scorers.state_dict().items())
    policy, budget = again.policy(1), SYSTEMS[system][2]
    assert (policy.windows, policy.sinks) == ((14,), (2,))
    assert policy.budgets == ((kvp.UNLIMITED,) if budget is None else (budget,))
    assert policy.scorer is (again.layers[1] if again.layers else None)
    gates = {"lte": "gate_above", "dms": "gate_evict", "kvpop": "top_k", "streaming": "window"}
    assert policy.instance == gates.get(system, "gate_at_least")
    tau = torch.logit(torch.tensor(scorers.threshold, dtype=torch.float64)).item()
    assert policy.thresholds == pytest.approx((tau,))
    if system not in ("dms", "streaming"):
        assert again.policy(0, 3).budgets == (3,)
    if again.layers:
        part = again.share(1, H)
        name = list(part.layers[0]._parameters)[-1]
        assert part.heads == H - 1
        assert torch.equal(getattr(part.layers[0], name), getattr(again.layers[0], name)[1:])


@pytest.mark.parametrize("system", [name for name in SYSTEMS if name != "streaming"])
def test_small_files(tmp_path, system):
    """Matrices are in bfloat16, the rest as it was; a file that is read again has the same numbers."""
    scorers = trained(system)
    scorers.save(tmp_path / "a.safetensors", small=True)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        dtypes = {key: file.get_slice(key).get_dtype() for key in file.keys()}
    matrices = {
        *("w1", "w3", "w_q", "w_k", "w_v"),
        *(["w2"] if system in ("lte", "spkv") else []),
    }
    for name, dtype in dtypes.items():
        assert (dtype == "BF16") == (name.rpartition(".")[2] in matrices), name
    again = kvp.Scorers.load(tmp_path / "a.safetensors")
    assert all(
        torch.equal(again.state_dict()[name], x.bfloat16().float() if dtypes[name] == "BF16" else x)
        for name, x in scorers.state_dict().items()
    )
    again.save(tmp_path / "b.safetensors", small=True)
    assert (tmp_path / "b.safetensors").stat().st_size == (tmp_path / "a.safetensors").stat().st_size
    assert kvp.Scorers.load(tmp_path / "b.safetensors").training_notes == scorers.training_notes


def test_files_without_a_policy_are_kvpop(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = tmp_path / "a.safetensors"
    trained("wgkv").save(path)
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {n: file.get_tensor(n) for n in file.keys()}
    for change, found in (
        ({"policy": "h2o"}, "system: 'h2o' is not allowed; it must be one of kvpop, spkv"),
        ({"threshold": "1.5"}, "threshold: 1.5 is not allowed; it must be a probability"),
        ({"threshold": "half"}, "threshold: 'half' is not allowed; it must be a number"),
        ({"window": "many"}, "window: 'many' is not allowed; it must be a whole number"),
        ({"policy": "dms", "threshold": "0.5"}, "budget: 9 is not allowed for dms; it must be None"),
        ({"policy": "lte"}, "threshold: 0.1 is not allowed for lte; it must be 0.5"),
    ):
        save_file(tensors, path, metadata | change)
        with pytest.raises(ValueError, match=f"a.safetensors: {found}"):
            kvp.Scorers.load(path)
    old = {key: value for key, value in metadata.items() if key not in ("policy", "threshold", "budget")}
    save_file(tensors, path, old)
    assert kvp.Scorers.load(path).system == "kvpop"
    with pytest.raises(ValueError, match="budget: None is not allowed for kvpop"):
        kvp.Scorers.load(path).policy(0)


@pytest.mark.parametrize("name", ["kvpop-mlp", "kvpop", "kvpop-immediate"])
def test_trained_files_are_read(name):
    scorers = kvp.Scorers.load(SCORERS / f"{name}.safetensors")
    assert len(scorers.layers) == 6 and scorers.window == 64 and scorers.score_quantiles.shape == (6, 2, 257)
    k, v = torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)
    scorer = scorers.layers[3]
    parameters = [getattr(scorer, n) for n in scorer.names]
    want = formula(scorer, k.double(), v.double(), [p if p is None else p.double() for p in parameters])
    torch.testing.assert_close(scorer(k, v).double(), want, rtol=1e-4, atol=1e-4)
    log_gamma = scorers.log_gamma(2)
    assert log_gamma.shape == (2,) and (log_gamma <= 0).all()


SHAPES = {  # of the models: layers, KV heads, head_dim, width, theta
    "byte-llama": (6, 2, 64, 256, 10000.0),
    "smollm2-135m": (30, 3, 64, 576, 100000.0),
}


@pytest.mark.parametrize(
    "path",
    sorted(SCORERS.parents[1].glob("*/scorers/*.safetensors")),
    ids=lambda path: f"{path.parents[1].name}-{path.stem}",
)
def test_files_that_ship_fit_their_model(path):
    """They are of the model's shape and rotation, say how they were trained, and give finite scores."""
    layers, heads, head_dim, width, theta = SHAPES[path.parents[1].name]
    scorers = kvp.Scorers.load(path)
    assert len(scorers.layers) == layers and scorers.heads == heads
    assert scorers.training_notes["seed"] == "1" and "steps" in scorers.training_notes
    for layer, scorer in enumerate(scorers.layers):
        rope = getattr(scorer, "rope", None)
        assert rope is None or (rope.layout, rope.base, rope.dims) == ("half_split", theta, 0)
        unbounded = scorers.system == "kvpop" and scorers.budget is None
        assert scorers.policy(layer, 64 if unbounded else None).windows == (scorers.window,)
    if scorers.reads_hidden:
        scores = scorers.layers[-1](torch.randn(1, 200, width))
    else:
        scores = scorers.layers[-1](*torch.randn(2, 1, heads, 200, head_dim))
    assert scores.shape == (1, heads, 200)
    scored = 200 - (scorers.window if scorers.system == "lte" else 0)  # LTE scores a key that leaves
    assert scores[..., :scored].isfinite().all()


@pytest.mark.parametrize(
    "name, kind",
    [
        ("spkv", kvp.UtilityPredictor),
        ("wgkv", kvp.WriteGateScorer),
        ("wgkv-sparse", kvp.WriteGateScorer),
        ("dms", kvp.LinearScorer),
        ("lte", kvp.ConvScorer),
    ],
)
def test_trained_gates_are_read(name, kind):
    scorers = kvp.Scorers.load(SCORERS / f"{name}.safetensors")
    assert (scorers.system, len(scorers.layers)) == (name.split("-")[0], 6)
    assert all(type(scorer) is kind for scorer in scorers.layers)
    notes = scorers.training_notes
    assert notes["model"] == "byte" and float(notes["held_out_answers"]) > 0.97
    assert scorers.policy(5).windows == (scorers.window,)


@pytest.mark.parametrize(
    "name, value",
    [
        *(("layers", "99999999999"), ("layers", "0"), ("heads", "99999999999"), ("hidden", "-1")),
        *(("window", "0"), ("sinks", "-1"), ("budget", "-1"), ("threshold", "nan"), ("threshold", None)),
        *(("rope_base", "0"), ("rope_dims", "17"), ("delay", "1e3"), ("policy", "none")),
    ],
)
def test_damaged_files_are_refused(name, value, tmp_path):
    """In a sentence that names the file, and before anything of a size that only the metadata claims."""
    path = tmp_path / "a.safetensors"
    gate = kvp.WriteGateScorer(H, DK, 24, rope=kvp.Rope())
    kvp.Scorers([gate], window=5, system="wgkv", threshold=0.1, budget=3).save(path)
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}
    metadata.pop(name)
    save_file(tensors, path, metadata=metadata | ({} if value is None else {name: value}))
    with pytest.raises(ValueError, match="a.safetensors: .*is not allowed"):
        kvp.Scorers.load(path)


def test_a_cut_file_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    kvp.Scorers([kvp.LinearScorer(H, DK)], window=5, system="dms").save(path)
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="a.safetensors: .*whole safetensors"):
            kvp.Scorers.load(path)


def test_refusals(tmp_path):
    scorer = make("mlp")
    k, v = torch.randn(1, H, 9, DK), torch.randn(1, H, 9, DV)
    with pytest.raises(TypeError, match="v: bfloat16"):
        scorer(k, v.bfloat16())
    with pytest.raises(ValueError, match="numel"):
        scorer(k, torch.randn(1, H, 9, DV + 8))
    with pytest.raises(ValueError, match="v"):
        scorer(k, v[:, :, :8])
    with pytest.raises(ValueError, match="NaN"):
        scorer(k, torch.full_like(v, float("nan")).requires_grad_()).sum().backward()
    for make_one in (
        lambda: kvp.MLPScorer(0, 8, 8),
        lambda: kvp.MLPScorer(2, 8, 0),
        lambda: kvp.mLSTMScorer(2, 8, delay=-1),
        lambda: kvp.WriteGateScorer(2, 8, 8, rope=None),
        lambda: kvp.WriteGateScorer(2, 8, 8, rope=kvp.Rope(None)),
        lambda: kvp.ConvScorer(2, 8, delay=5),
        lambda: kvp.Rope("sideways"),
        lambda: kvp.UtilityPredictor(2, 0, 8),
        lambda: kvp.mLSTMScorer(2, 8, delay=1, d_qk=3),
        lambda: kvp.Scorers([], window=3),
        lambda: kvp.Scorers([scorer], window=3, gamma_range=(0.9, 1.1)),
        lambda: kvp.Scorers([scorer], window=3, system="h2o"),
        lambda: kvp.Scorers([scorer], window=3, system="streaming"),
        lambda: kvp.Scorers([], window=3, system="spkv"),
        lambda: kvp.Scorers([scorer], window=3, system="dms", budget=4),
        lambda: kvp.Scorers([scorer], window=3, system="spkv", threshold=2.0),
        lambda: kvp.Scorers([scorer], window=3, system="spkv", gamma_range=(0.9, 1.0)),
        lambda: kvp.Scorers([scorer], window=3, system="dms").policy(0, 5),
    ):
        with pytest.raises(ValueError, match="is not allowed|are not allowed"):
            make_one()
    other = tmp_path / "other.safetensors"
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, other)
    with pytest.raises(ValueError, match="it must be kvpolicy-scorers-1"):
        kvp.Scorers.load(other)
    kvp.Scorers([scorer], window=3).save(other)
    from safetensors import safe_open

    with safe_open(other, "pt") as file:
        metadata, tensors = file.metadata(), {n: file.get_tensor(n) for n in file.keys()}
    tensors["layers.0.w2"] = tensors["layers.0.w2"][:1]
    save_file(tensors, other, metadata)
    with pytest.raises(ValueError, match=r"layers.0.w2 of shape \(1, 24\)"):
        kvp.Scorers.load(other)
