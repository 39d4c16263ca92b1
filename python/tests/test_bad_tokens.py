"""Tokens whose key or value is NaN or infinite, and processes that fork, on the CPU."""

import multiprocessing
import os
import sys
import time

import pytest
import torch

import kvpolicy as kvp

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 16, 48
LSTM = kvp.KVpop(1, 6, 8, kvp.mLSTMScorer(KV_HEADS, DIM, delay=6))
CONV = kvp.LTE(1, 16, 20, kvp.ConvScorer(KV_HEADS, DIM, delay=16))


def cache_of(policy, **options):
    return kvp.Cache(
        policy, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, sequences=1, max_length=TOKENS, **options
    )


def rows():
    torch.manual_seed(3)
    return [torch.randn(1, heads, TOKENS, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def feed(cache, tensors, cuts):
    at = 0
    for n in cuts:
        part = [x[:, :, at : at + n] for x in tensors]
        (cache.step if n == 1 else cache.prefill)(0, *part)
        cache.advance()
        at += n


def retained(cache):
    return [sorted(cache.retained(0, 0, head)) for head in range(KV_HEADS)]


@pytest.mark.parametrize("policy, bad", [(LSTM, 2), (CONV, 20)], ids=["mlstm", "conv"])
@pytest.mark.parametrize("argument", [1, 2], ids=["k", "v"])
def test_a_bad_token_is_refused_when_it_comes(policy, bad, argument):
    tensors = rows()
    tensors[argument][0, 1, bad, 3] = torch.nan
    cache = cache_of(policy)
    feed(cache, tensors, [1] * bad)
    with pytest.raises(ValueError, match=f"head 1, position {bad}: NaN or infinite"):
        cache.step(0, *(x[:, :, bad : bad + 1] for x in tensors))
    tensors[argument][0, 1, bad, 3] = 0.0
    feed(cache, [x[:, :, bad:] for x in tensors], [1] * (TOKENS - bad))  # as if nothing had been
    whole = cache_of(policy)
    with pytest.raises(ValueError, match="position"):
        spoilt = [x.clone() for x in tensors]
        spoilt[argument][0, 0, bad, 0] = torch.inf
        whole.prefill(0, *spoilt)
    feed(whole, tensors, [TOKENS])
    assert retained(whole) == retained(cache)


@pytest.mark.parametrize("policy, bad", [(LSTM, 2), (CONV, 20)], ids=["mlstm", "conv"])
def test_dropped_tokens_rank_last(policy, bad):
    tensors = rows()
    tensors[1][0, :, bad, 3] = torch.nan
    kept = []
    for cuts in ([1] * TOKENS, [TOKENS], [7, 1, 20, 1, 1, 18]):
        cache = cache_of(policy, bad_tokens="drop")
        feed(cache, tensors, cuts)
        kept.append(retained(cache))
    assert kept[0] == kept[1] == kept[2]
    assert all(bad not in positions for positions in kept[0])


def test_a_paged_cache_refuses_and_drops_too():
    policy = kvp.KVpop(1, 6, kvp.UNLIMITED, kvp.mLSTMScorer(KV_HEADS, DIM, delay=6))
    tensors = rows()
    tensors[2][0, 1, 9, 3] = torch.nan
    cache = cache_of(policy)
    with pytest.raises(ValueError, match="value of entry 0, head 1, position 9: NaN or infinite"):
        cache.prefill(0, *tensors)
    cache = cache_of(policy, bad_tokens="drop")
    feed(cache, tensors, [TOKENS])
    assert retained(cache)[0] == list(range(TOKENS))


def test_what_bad_tokens_may_be():
    with pytest.raises(ValueError, match="bad_tokens: 'keep' is not allowed"):
        cache_of(LSTM, bad_tokens="keep")


def use(cache, tensors):
    cache.prefill(0, *tensors)
    cache.advance()
    return cache.usage(0, 0, 0).size


def child(cache, tensors):
    sys.exit(17 if use(cache, tensors) > 0 else 1)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_children_of_fork_use_and_leave_an_inherited_cache(threads):
    cache, tensors = cache_of(LSTM), [x[:, :, :8].contiguous() for x in rows()]
    use(cache, tensors)
    ended = 0
    for _ in range(60):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                code = 17 if use(cache, tensors) > 0 else 1
                del cache
            finally:
                os._exit(code)
        deadline = time.monotonic() + 20
        while True:
            done, status = os.waitpid(process, os.WNOHANG)
            if done or time.monotonic() > deadline:
                break
            time.sleep(0.002)
        if not done:
            os.kill(process, 9)
            os.waitpid(process, 0)
        ended += done != 0 and os.waitstatus_to_exitcode(status) == 17
    assert ended == 60


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_processes_of_multiprocessing_that_fork(threads):
    cache, tensors = cache_of(LSTM), [x[:, :, :8].contiguous() for x in rows()]
    use(cache, tensors)
    processes = [
        multiprocessing.get_context("fork").Process(target=child, args=(cache, tensors)) for _ in range(8)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [17] * 8
