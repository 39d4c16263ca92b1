"""Evaluations of tiny random models against the models' own losses and against attention through the mask of
a policy; of the byte model against the numbers of examples/evaluate."""

import json
import math
import pathlib
import re
import subprocess
import sys

import pytest
import reference
import torch

import kvpolicy as kvp

transformers = pytest.importorskip("transformers", minversion="5.0")

from test_transformers import SYSTEMS, gates_of, model_of, scorers_of, tokens  # noqa: E402
from test_transformers import reference as masked_logits  # noqa: E402

from kvpolicy import evaluation  # noqa: E402
from kvpolicy.evaluation import __main__ as command  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]
BYTES = {"vocab_size": 256, "eos_token_id": None}
LENGTH = 60


def byte_model(**changes):
    return model_of("llama", **BYTES | changes)


def sample_of(sequences=2, length=LENGTH):
    """Random tokens, of which some are no text and some are digits of answers."""
    ids = tokens(length, batch=sequences)
    is_text = torch.rand(sequences, length, generator=torch.Generator().manual_seed(2)) > 0.2
    return evaluation.Sample(ids, torch.randint(1, 4, ids.shape), is_text, [[30, 41], [50]][:sequences])


def measure(model, sample, policies, budgets=(20,), **options):
    options = {"sinks": 2, "window": 6, "chunk": 16, "storage": torch.float32} | options
    return evaluation.evaluate(model, sample=sample, policies=policies, budgets=budgets, **options)


def expected(logits, sample):
    """The numbers of logits [sequences, length, vocab] by definition."""
    nll = torch.nn.functional.cross_entropy(
        logits[:, :-1].double().flatten(0, 1), sample.tokens[:, 1:].flatten(), reduction="none"
    ).view(len(logits), -1)
    is_text = sample.is_text[:, 1:]
    right = logits[:, :-1].argmax(-1) == sample.tokens[:, 1:]
    digits = [right[i, at - 1 : at + 3] for i, one in enumerate(sample.answers) for at in one]
    return {
        "nll_per_token": nll[is_text].mean().item(),
        "bits_per_byte": nll[is_text].sum().item() / math.log(2) / sample.sizes[:, 1:][is_text].sum().item(),
        "recall_exact": sum(one.all().item() for one in digits) / len(digits),
        "recall_first_digit": sum(one[0].item() for one in digits) / len(digits),
        "recall_digits": torch.cat(digits).double().mean().item(),
    }


def check(line, want):
    for name, value in want.items():
        assert line[name] == pytest.approx(value, rel=2e-5, abs=1e-9), name


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_the_full_cache_has_the_models_own_loss(family):
    model = model_of(family, **BYTES)
    sample = sample_of()
    with torch.no_grad():
        logits = model(sample.tokens).logits
    # Answers that are right: the tokens that the model takes for the most likely.
    sample.tokens[0, 30:34] = logits[0, 29:33].argmax(-1)
    with torch.no_grad():
        logits = model(sample.tokens).logits
    (line,) = measure(model, sample, ["full"])["results"]
    check(line, expected(logits, sample))
    assert line["policy"] == "dense" and line["budget"] == 0 and line["lookups"] == 3


@pytest.mark.parametrize("system", SYSTEMS)
def test_files_of_gates_run_once(tmp_path, system):
    """Losses are those of the mask; what a gate keeps is measured by layer and head."""
    model, sample = byte_model(), sample_of()
    scorers = gates_of(model, system)
    scorers.training_notes = {"seed": "3"}
    path = tmp_path / f"{system}.safetensors"
    scorers.save(path)
    found = measure(model, sample, [system], ("75%", "50%"), window=9, scorers=[path])
    (line,) = found["results"]
    check(line, expected(masked_logits(model, [scorers.policy(i) for i in range(3)], sample.tokens), sample))
    names = {"spkv": "SP-KV, tau 0.5", "wgkv": "WG-KV, tau 0.45", "lte": "LTE, cap 9"}
    names |= {"lte-uncapped": "LTE", "wgkv-capped": "WG-KV, tau 0.45, cap 7"}
    assert line["label"] == names.get(system, "DMS") and line["system"] == system.partition("-")[0]
    assert line["budget"] == 0 and line["training"] == {"seed": "3"} and "oracle_recall" not in line
    beyond = LENGTH - 16
    assert line["gate_density"] == pytest.approx([(rows - 16) / beyond for rows in line["rows"]], abs=1e-3)
    assert line["compression"] == pytest.approx(1 - line["rows_per_head"] / LENGTH)
    assert 0 < line["compression"] < 1 and f"{100 * line['compression']:.0f}%" in evaluation.table(found)


def test_bounded_losses_are_those_of_the_mask():
    model = byte_model()
    sample, scorers = sample_of(), scorers_of(model, "mlstm")
    log_gammas = [scorers.log_gamma(layer).detach() for layer in range(3)]
    policies = {
        "window": lambda setting: kvp.StreamingLLM(setting.sinks, setting.budget - setting.sinks),
        "trained": lambda setting: lambda layer: kvp.KVpop(
            setting.sinks,
            setting.window,
            setting.long_range,
            kvp.Decay(log_gamma=log_gammas[layer]),
            scorers.layers[layer],
        ),
        "own numbers": kvp.StreamingLLM(1, 9),
        "by name": "keynorm",
    }
    found = measure(model, sample, policies)
    setting = evaluation.Setting(20, 2, 6, LENGTH, 0)
    lines = {one["policy"]: one for one in found["results"]}
    assert list(lines) == ["own numbers", "window", "trained", "by name"]
    for name, policy in policies.items():
        if name == "by name":
            policy = kvp.KVpop(2, 6, 12, evaluation.KeyNorm())
        elif not isinstance(policy, kvp.Policy):
            policy = policy(setting)
        by_layer = [policy if isinstance(policy, kvp.Policy) else policy(layer) for layer in range(3)]
        logits = masked_logits(model, by_layer, sample.tokens)
        check(lines[name], expected(logits, sample))
        assert lines[name]["rows_per_head"] == (10 if name == "own numbers" else 20)
    assert lines["window"]["compression"] == 1 - 20 / LENGTH
    assert lines["window"]["cache_mib"] == 3 * 2 * 20 * (16 + 16) * 4 / 2**20
    text = evaluation.table(found)
    assert text.count("\n") == 7 and "own numbers" in text


def test_observed_policies_and_answers_in_a_prompt():
    """H2O and TOVA take a text as decoded tokens; SnapKV's prompt is dense."""
    model, sample = byte_model(), sample_of(1)
    found = measure(model, sample, ["h2o", "tova", "snapkv-prompt"], budgets=[40], sinks=0, window=1)
    h2o, tova, snapkv = found["results"]
    assert h2o["rows_per_head"] == tova["rows_per_head"] == 40
    # A prompt of 45 tokens leaves 40, and 15 are decoded.
    assert snapkv["rows_per_head"] == 55
    by_steps = measure(model, sample, {"h2o": lambda s: kvp.H2O(20, 19)}, budgets=[40], chunk=1)
    check(h2o, {"nll_per_token": by_steps["results"][0]["nll_per_token"]})
    assert sum(h2o["rows"]) == 40 * 6 and len(h2o["kept_by_position"]) == 3 * 64


def attended(model, sample, modeling):
    """What each layer attends with: its module, queries and keys in float64."""
    rows, eager = [], modeling.eager_attention_forward

    def record(module, query, key, value, *rest, **options):
        rows.append((module, query.double(), key.double()))
        return eager(module, query, key, value, *rest, **options)

    transformers.AttentionInterface.register("record", record)
    transformers.AttentionMaskInterface.register(
        "record", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    )
    model.config._attn_implementation = "record"
    with torch.no_grad():
        model(sample.tokens)
    return rows


@pytest.mark.parametrize("beta", [1.0, math.inf])
def test_the_oracle_is_the_future_attention(beta):
    model, sample = byte_model(), sample_of(1)
    rows = attended(model, sample, transformers.models.llama.modeling_llama)
    (policy,) = evaluation.policies.chosen([f"oracle-{beta:g}"], [], 6, model)
    observed = evaluation._observe(model, sample.tokens[0], 6, [policy], torch.float32)
    scores = observed.scores[beta]
    for layer, (_, q, k) in enumerate(rows):
        want = reference.future_mass(q, k, 6, beta=beta)
        got = scores[layer][:, : LENGTH - 6].double()
        torch.testing.assert_close(got, want[0, :, : LENGTH - 6], rtol=1e-4, atol=1e-4)
    (line,) = measure(model, sample, [f"oracle-{beta:g}"])["results"]
    given = [kvp.KVpop(2, 6, 12, evaluation.GivenScores(one)) for one in scores]
    check(line, expected(masked_logits(model, given, sample.tokens), sample))


def test_the_oracle_knows_learned_sinks():
    """A sink takes part of each query's attention."""
    model = model_of("gpt_oss", layer_types=["full_attention"] * 3, **BYTES)
    sample = sample_of(1)
    rows = attended(model, sample, transformers.models.gpt_oss.modeling_gpt_oss)
    (policy,) = evaluation.policies.chosen(["oracle-1"], [], 6, model)
    observed = evaluation._observe(model, sample.tokens[0], 6, [policy], torch.float32)
    at = torch.arange(LENGTH)
    assert len(rows) == 3
    for layer, (module, q, k) in enumerate(rows):
        sinks = module.sinks.detach().double()
        logits = reference.logits_of(q, k).masked_fill(at[:, None] < at, -math.inf)
        share = torch.softmax(
            torch.cat((logits, sinks[:, None, None].expand(*logits.shape[:-1], 1)), -1), -1
        )[..., :LENGTH]
        share = torch.where(at[:, None] >= at + 6, share, 0.0).sum(2) / (LENGTH - at - 6).clamp(min=1)
        want = torch.log(1e-8 + share.view(2, -1, LENGTH)).amax(1)
        got = observed.scores[1.0][layer][:, : LENGTH - 6].double()
        torch.testing.assert_close(got, want[:, : LENGTH - 6], rtol=1e-4, atol=1e-4)


def test_on_a_device(device):
    """The numbers of the CPU, but for positions, which a cache on CUDA does not list."""
    model, sample = byte_model(), sample_of(1)
    names = ["dense", "streaming", "keynorm", "h2o", "snapkv", "oracle-2"]
    want = measure(model, sample, names, budgets=[40])["results"]
    found = measure(model.to(device), sample, names, budgets=[40], speed=2)["results"]
    for line, other in zip(found, want):
        assert line["nll_per_token"] == pytest.approx(other["nll_per_token"], rel=1e-3), line["policy"]
        assert line["rows"] == other["rows"] and line["tokens_per_s"] > 0
        assert ("kept_by_position" in line) == (device.type == "cpu")
    context, questions = tokens(30)[0], [tokens(5, seed=3)[0]]
    policy = kvp.StreamingLLM(2, 6)
    options = {"max_new_tokens": 5, "pad_token_id": 0}
    (got,) = evaluation.answer(model, None, context, questions, policy, **options)
    (other,) = evaluation.answer(byte_model(), None, context, questions, policy, **options)
    assert torch.equal(got.cpu(), other)


def test_decode_speed_and_storage():
    model, sample = byte_model(), sample_of(1)
    full, bounded = measure(model, sample, ["dense", "streaming"], speed=4, storage=torch.bfloat16)["results"]
    assert full["tokens_per_s"] > 0 and bounded["tokens_per_s"] > 0
    assert bounded["rows_per_head"] == 20 and full["rows_per_head"] == LENGTH
    assert bounded["cache_mib"] == 3 * 2 * 20 * (16 + 16) * 2 / 2**20
    exact = measure(model, sample, ["streaming"])["results"][0]
    assert bounded["nll_per_token"] == pytest.approx(exact["nll_per_token"], abs=0.2)
    assert bounded["nll_per_token"] != exact["nll_per_token"]


def test_timed_steps_follow_three_others(monkeypatch):
    """The first of them takes the most likely token after the sequence."""
    model, sample = byte_model(), sample_of(1)
    calls, clocks = [], []
    forward, clock = evaluation._forward, evaluation.time.perf_counter

    def counted(model, ids, cache, **options):
        logits = forward(model, ids, cache, **options)
        calls.append((ids, logits[0, -1].argmax().item()))
        return logits

    def timed():
        clocks.append(len(calls))
        return clock()

    monkeypatch.setattr(evaluation, "_forward", counted)
    monkeypatch.setattr(evaluation.time, "perf_counter", timed)
    (line,) = measure(model, sample, ["streaming"], speed=4)["results"]
    steps = [call for call in calls if call[0].shape[1] == 1]
    assert len(steps) == 3 + 4 and line["tokens_per_s"] > 0
    assert clocks == [len(calls) - 4, len(calls)]
    following = [best for _, best in calls[-8:-1]]
    assert [ids.item() for ids, _ in steps] == following


def test_no_cuda_graph_where_a_scorer_counts_its_calls(monkeypatch):
    model, sample, made = byte_model(), sample_of(1), []

    class Recorded(kvp.KVPolicyCache):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(evaluation, "KVPolicyCache", Recorded)
    measure(model, sample, ["streaming", "oracle-1"])
    given = kvp.KVpop(2, 6, 8, evaluation.GivenScores(torch.zeros(2, LENGTH)))
    options = {"max_new_tokens": 2, "pad_token_id": 0}
    evaluation.answer(model, None, tokens(20)[0], [tokens(5)[0]], given, **options)
    assert [cache.decode_graph is None for cache in made] == [False, True, True]


def test_answers_start_from_the_context():
    """Each as if the context had been read for it alone."""
    model = byte_model()
    context, questions = tokens(40)[0], [tokens(5, seed=3)[0], tokens(9, seed=4)[0]]
    policy = kvp.KVpop(2, 6, 8, evaluation.KeyNorm())
    answers = evaluation.answer(model, None, context, questions, policy, max_new_tokens=6, pad_token_id=0)
    for question, found in zip(questions, answers):
        ids = torch.cat((context, question))
        for token in found:
            logits = masked_logits(model, [policy] * 3, ids[None])
            assert logits[0, -1].argmax() == token
            ids = torch.cat((ids, token[None]))
    with pytest.raises(TypeError, match=r"questions\[0\]: str is not allowed without a tokenizer"):
        evaluation.answer(model, None, context, ["why?"], policy)


class Words:
    """A tokenizer of words and single digits, as from transformers."""

    def __call__(self, text, **options):
        found = [part.span() for part in re.finditer(r"\d|\s?[^\d\s]+|\s", text)]
        return {"input_ids": [sum(text[a:b].encode()) % 200 for a, b in found], "offset_mapping": found}


def test_samples_in_other_tokens(tmp_path):
    lines = ["the key is @AB:1234 and ä word", "so @AB:1234 it was, said the man"]
    data = [one.encode()[:30] for one in lines]
    facts = {"sequences": 2, "length": 30, "digits": 4}
    facts |= {"answers": [[15], [7]], "lines": [[[11, 19]], [[3, 11]]]}
    (tmp_path / "eval.bin").write_bytes(b"".join(data))
    (tmp_path / "eval.json").write_text(json.dumps(facts))
    by_byte = evaluation.Sample.held_out(tmp_path)
    assert by_byte.tokens.shape == (2, 30) and by_byte.answers == [[15], [7]]
    assert bytes(by_byte.tokens[1].tolist()) == data[1]
    assert (~by_byte.is_text).sum(-1).tolist() == [8, 8]
    joined = evaluation.Sample.held_out(tmp_path, Words(), joined=2)
    assert joined.tokens.shape[0] == 1 and joined.sizes.sum() == 60
    for at in joined.answers[0]:
        before = int(joined.sizes[0, :at].sum())
        assert b"".join(data)[before : before + 4] == b"1234"
        assert (joined.sizes[0, at : at + 4] == 1).all()
        assert not joined.is_text[0, at : at + 4].any()
    assert len(joined.answers[0]) == 2
    text = evaluation.Sample.from_text("ä word of 12", Words(), 3)
    assert text.sizes.tolist() == [[2, 5, 3], [1, 1, 1]]
    assert joined.first(tokens=20).length == 20


# Bits per byte, the share of first digits and MiB that examples/evaluate --sequences 1 --budgets 256 writes.
EXAMPLE = {
    "dense": (0.9395, 1.0, 12.0),
    "streaming": (1.0602, 0.125, 0.75),
    "keynorm": (1.2188, 0.812, 0.75),
    "oracle-2": (0.9825, 1.0, 0.75),
    "kvpop": (1.0773, 0.906, 0.75),
    "kvpop-mlp": (1.0846, 0.812, 0.75),
}
# The oracle recall of kvpop there.
RECALL = {
    "1": [0.439, 0.438, 0.75, 0.729, 0.376, 0.655, 0.552, 0.677, 0.525, 0.433, 0.594, 0.736],
    "2": [0.578, 0.392, 0.719, 0.833, 0.339, 0.608, 0.484, 0.626, 0.406, 0.472, 0.502, 0.692],
}


def test_the_numbers_of_the_example():
    """The byte model on its first held-out sequence: the same sample, entries in bf16, other roundings."""
    folder = ROOT / "examples" / "models" / "byte-llama"
    model, tokenizer = evaluation.load(folder)
    found = evaluation.evaluate(
        model,
        tokenizer,
        sample=evaluation.Sample.held_out(folder, tokenizer),
        policies=list(EXAMPLE),
        scorers=[folder / "scorers" / "kvpop.safetensors", folder / "scorers" / "kvpop-mlp.safetensors"],
        sequences=1,
        budgets=[256],
    )
    assert [one["policy"] for one in found["results"]] == list(EXAMPLE)
    for line in found["results"]:
        if line["policy"] == "kvpop":
            got = line["oracle_recall"]
            assert got["1"]["mean"] == pytest.approx(RECALL["1"], abs=0.01)
            assert got["2"]["mean"] == pytest.approx(RECALL["2"], abs=0.01)
            assert got["2"]["chance"] == [0.15] * 12
        bits, first, mib = EXAMPLE[line["policy"]]
        assert line["bits_per_byte"] == pytest.approx(bits, abs=1e-3), line["policy"]
        assert line["recall_first_digit"] == pytest.approx(first, abs=0.04), line["policy"]
        assert line["lookups"] == 32 and line["cache_mib"] == mib


def test_shipped_gates_under_a_cap():
    """LTE's file on the first held-out sequence: nearly all answers, of entries that no head has too many
    of."""
    folder = ROOT / "examples" / "models" / "byte-llama"
    model, tokenizer = evaluation.load(folder)
    file = folder / "scorers" / "lte.safetensors"
    found = evaluation.evaluate(
        model,
        tokenizer,
        sample=evaluation.Sample.held_out(folder, tokenizer),
        policies=["lte"],
        scorers=[file],
        sequences=1,
    )
    (line,) = found["results"]
    scorers = kvp.Scorers.load(file)
    assert line["recall_exact"] >= 0.9
    assert max(line["rows"]) <= scorers.sinks + scorers.budget + scorers.window < 4096 / 7
    assert min(line["rows"]) < max(line["rows"])


def test_the_command(tmp_path, capsys):
    byte_model().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a text of some length " * 9)
    given = [tmp_path / "model", "--text", tmp_path / "text.txt", "--tokens", 90]
    given += ["--policy", "full,streaming", "--budget", "25%,30", "--sinks", 2, "--window", 8]
    given += ["--out", tmp_path / "out.json"]
    given = list(map(str, given))
    line = [sys.executable, "-m", "kvpolicy.evaluation", *given]
    ran = subprocess.run(line, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert [one["budget"] for one in found["results"]] == [0, 67, 30]
    assert found["sequences"] == 2 and found["length"] == 90 and found["model"] == "model"
    assert ran.stdout == evaluation.table(found)
    published = json.loads((ROOT / "benchmarks/results/evaluation_byte-llama.json").read_text())
    assert set(published) <= set(found) and set(published["results"][0]) == set(found["results"][0])
    for arguments, sentence in (
        ([f"{tmp_path}/none"], "none is not allowed; it must be a folder with a config.json"),
        (given[:1], "model is not allowed; it must be a folder with eval.bin and eval.json"),
        ([*given, "--budget", "10"], r"must leave more than sinks \+ window = 10"),
        ([*given, "--tokens", "900"], "text: 198 tokens are not allowed"),
        ([*given, "--policy", "best"], "policies: best is not allowed"),
        ([*given[:1], "--text", "no.txt"], "--text: .* it must be a file"),
        ([*given, "--held-out", "x"], "--text: is not allowed with --held-out"),
        ([*given, "--chunk", "0"], "--chunk: 0 is not allowed"),
        ([*given, "--out", "no/such/out.json"], "--out: no/such/out.json is not allowed"),
    ):
        with pytest.raises(SystemExit) as ended:
            command.main(arguments)
        assert re.search(sentence, ended.value.code), ended.value.code
        assert "\n" not in ended.value.code
    capsys.readouterr()


def test_refusals(tmp_path):
    model, sample = byte_model(), sample_of(1)
    with pytest.raises(TypeError, match="takes either text or sample"):
        evaluation.evaluate(model)
    with pytest.raises(ValueError, match="budgets: 100% is not allowed"):
        measure(model, sample, ["dense"], budgets=["100%"])
    with pytest.raises(TypeError, match=r"policies\['a'\]: 3 is not allowed"):
        measure(model, sample, {"a": 3})
    with pytest.raises(TypeError, match="it must be a name, or in a dict"):
        measure(model, sample, [kvp.FULL])
    with pytest.raises(ValueError, match="tokens: 61 is not allowed; it must be 2 to 60"):
        measure(model, sample, ["dense"], tokens=61)
    scorers_of(model).save(tmp_path / "kvpop.safetensors")
    with pytest.raises(ValueError, match="read keys after 6 tokens"):
        measure(model, sample, ["kvpop"], scorers=[tmp_path / "kvpop.safetensors"], window=5)
    line = measure(model, sample, ["kvpop"], scorers=[tmp_path / "kvpop.safetensors"])["results"][0]
    assert line["label"] == "KVpop" and line["training"] == {}
    assert list(line["oracle_recall"]) == ["1", "2"]
    with pytest.raises(TypeError, match="only tokens of a vocabulary of 256 are bytes"):
        evaluation.evaluate(model_of("llama"), text="a text")
