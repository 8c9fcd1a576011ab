"""Test that plans become results slice by slice, and that a slice that cannot be computed fails alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core.config import Bytes
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import SampledToken
from tandem.core.grammar import Grammar
from tandem.core.ids import BlockId, HostSlot, SeqId
from tandem.core.request import SamplingParams
from tandem.runtime.async_executor import AsyncExecutor
from tandem.runtime.model_loader import AnyExecutor
from tandem.sched.state.step_plan import Sampling, ScheduledSlice, SliceResult, StepPlan
from tests.executor_logits import executor_logits
from tests.unit.runtime.conftest import break_logits, fail_at_token, load

_GREEDY = Sampling(SamplingParams(max_tokens=8, temperature=0), 0, 0)
_PROMPT = (5, 6, 7, 8, 9, 10, 11)


_ON_DEVICE: dict[str, Any] = {"kernels": "reference", "plan_depth": 2, "max_num_seqs": 8}
"""What makes the CPU the device of a `AsyncExecutor`."""


def _executor(directory: Path, **engine: Any) -> AnyExecutor:
    return load(directory, **({"block_size": 4, "kv_cache_memory": Bytes(1 << 16)} | engine))


@pytest.fixture(params=["at once", "device", "device without graphs"])
def executor(model_dir: Path, request: pytest.FixtureRequest) -> AnyExecutor:
    if request.param == "at once":
        return _executor(model_dir)
    executor = _executor(model_dir, **_ON_DEVICE, cuda_graphs=request.param == "device")
    assert isinstance(executor, AsyncExecutor)
    return executor


def _slice(seq: int, tokens: tuple[int, ...] = _PROMPT, start: int = 0, base: int = 0) -> ScheduledSlice:
    """A slice whose blocks begin at `base` of the pool, four tokens each."""
    blocks = tuple(BlockId(base + i) for i in range(-(-(start + len(tokens)) // 4)))
    return ScheduledSlice(SeqId(seq), start, len(tokens), tokens, blocks, _GREEDY)


def _chained(seq: int, start: int, base: int = 0) -> ScheduledSlice:
    return replace(_slice(seq, (0,), start, base), tokens=(), chained=True)


def _run(executor: AnyExecutor, number: int, *slices: ScheduledSlice) -> tuple[SliceResult, ...]:
    result = executor.execute(StepPlan(number, slices))
    assert result.number == number
    assert [r.seq for r in result.slices] == [s.seq for s in slices]
    return result.slices


def _token(result: SliceResult) -> int:
    assert result.error is None, result.error
    (token,) = result.tokens
    return token.id


def test_pool_fits_its_memory(executor: AnyExecutor) -> None:
    region = executor.cache.region
    assert executor.layout.block_bytes == 2 * 2 * 2 * 4 * 8 * 4
    assert executor.num_blocks == (1 << 16) // executor.layout.block_bytes
    assert (region.num_blocks, region.block_bytes) == (executor.num_blocks, executor.layout.block_bytes)
    assert (region.head_start, region.head_stop) == (0, 2)
    assert region.address % 4096 == 0


def test_unsampled_slices_yield_no_token(executor: AnyExecutor) -> None:
    chunk = replace(_slice(1, _PROMPT[:4]), sampling=None)
    (result,) = _run(executor, 1, chunk)
    assert result == SliceResult(SeqId(1))
    (rest,) = _run(executor, 2, _slice(1, _PROMPT[4:], 4))
    (whole,) = _run(executor, 3, _slice(2, base=8))
    assert _token(rest) == _token(whole)


def test_chained_slice_takes_the_last_token(executor: AnyExecutor) -> None:
    first = _token(_run(executor, 1, _slice(1))[0])
    chained = _token(_run(executor, 2, _chained(1, 7))[0])
    single = _token(_run(executor, 3, _slice(2, (*_PROMPT, first), base=8))[0])
    assert chained == single


def test_chained_over_a_plan_that_does_not_name_the_sequence(executor: AnyExecutor) -> None:
    first = _token(_run(executor, 1, _slice(1))[0])
    _run(executor, 2, _slice(2, base=8))
    chained = _token(_run(executor, 3, _chained(1, 7))[0])
    assert chained == _token(_run(executor, 4, _slice(3, (*_PROMPT, first), base=16))[0])


def test_tokens_of_sequences_that_are_gone_are_forgotten(executor: AnyExecutor) -> None:
    _run(executor, 1, _slice(1))
    for number in (2, 3, 4):
        _run(executor, number, _slice(2, base=8))
    (result,) = _run(executor, 5, _chained(1, 7))
    assert result.error is not None and "no token" in result.error


def test_a_failed_slice_breaks_its_chain(executor: AnyExecutor) -> None:
    _run(executor, 1, _slice(1))
    (bad,) = _run(executor, 2, replace(_chained(1, 7), blocks=()))
    assert bad.error is not None
    (after,) = _run(executor, 3, _chained(1, 7))
    assert after.error is not None


def _guessing(seq: int, tokens: tuple[int, ...], num_drafted: int, start: int = 0, base: int = 0) -> ScheduledSlice:
    return replace(_slice(seq, tokens, start, base), num_drafted=num_drafted)


def _greedy(executor: AnyExecutor, count: int) -> list[int]:
    """Return the greedy continuation of the prompt, sampled token by token in blocks that no test uses."""
    tokens, number = [_token(_run(executor, 1, _slice(90, base=40))[0])], 2
    while len(tokens) < count:
        tokens.append(_token(_run(executor, number, _chained(90, 6 + len(tokens), base=40))[0]))
        number += 1
    return tokens


@pytest.mark.parametrize("num_right", range(5))
def test_draft_tokens_are_verified_until_one_is_wrong(executor: AnyExecutor, num_right: int) -> None:
    right = _greedy(executor, 6)
    guesses = [token if i < num_right else (token + 1) % 50 for i, token in enumerate(right[1:5])]
    _run(executor, 10, _slice(1))
    company = _slice(2, base=16)
    alone = _token(_run(executor, 11, company)[0])
    result, other = _run(executor, 12, _guessing(1, (right[0], *guesses), 4, start=7), company)
    assert [token.id for token in result.tokens] == right[1 : 2 + num_right]
    assert _token(other) == alone
    # What the wrong guesses left behind is written over.
    place = 8 + num_right
    last = result.tokens[-1].id
    (after,) = _run(executor, 13, _slice(1, (last,), start=place))
    chained = _run(executor, 14, _chained(1, place + 1))[0]
    single = _token(_run(executor, 15, _slice(3, (*_PROMPT, *right[: 2 + num_right]), base=24))[0])
    assert _token(after) == single
    assert _token(chained) == _token(_run(executor, 16, _chained(3, place + 1, base=24))[0])


def test_each_guess_is_judged_with_its_own_random_number(executor: AnyExecutor) -> None:
    """Sampled tokens are the same with and without draft tokens."""
    params = SamplingParams(max_tokens=8, seed=3)
    tokens: list[int] = []
    for index in range(5):
        piece = replace(_slice(1, (*_PROMPT, *tokens), base=8), sampling=Sampling(params, 1, index))
        tokens.append(_token(_run(executor, index, piece)[0]))
    piece = replace(_guessing(2, (*_PROMPT, *tokens[:4]), 4), sampling=Sampling(params, 1, 0))
    (result,) = _run(executor, 9, piece)
    assert [token.id for token in result.tokens] == tokens


_SPOILED = {
    "block outside": lambda s: replace(s, blocks=(BlockId(0), BlockId(10_000))),
    "negative block": lambda s: replace(s, blocks=(BlockId(0), BlockId(-1))),
    "too few blocks": lambda s: replace(s, blocks=s.blocks[:1]),
    "token outside": lambda s: replace(s, tokens=(*_PROMPT[:-1], 50)),
    "negative token": lambda s: replace(s, tokens=(*_PROMPT[:-1], -1)),
    "count mismatch": lambda s: replace(s, num_tokens=3),
    "nothing to do": lambda s: replace(s, num_tokens=0, tokens=()),
    "beyond the model": lambda s: replace(s, start=126, blocks=tuple(BlockId(i) for i in range(40))),
    "foreign digest": lambda s: replace(s, digest_blocks=(BlockId(20),)),
    "all guessed": lambda s: replace(s, num_drafted=len(_PROMPT)),
    "fewer than no guesses": lambda s: replace(s, num_drafted=-1),
    "guesses without a draw": lambda s: replace(s, num_drafted=2, sampling=None),
    "guess outside": lambda s: replace(s, tokens=(*_PROMPT[:-1], 50), num_drafted=1),
    "scored token outside": lambda s: replace(s, scored=(1, 50)),
    "more scored than computed": lambda s: replace(s, scored=(1,) * 8),
    "guesses scored": lambda s: replace(s, scored=(1,) * 7, num_drafted=1),
    "never sampled": lambda s: replace(s, tokens=(), num_tokens=1, chained=True),
}


@pytest.mark.parametrize("spoil", _SPOILED.values(), ids=_SPOILED.keys())
def test_bad_slice_fails_alone(executor: AnyExecutor, spoil: object) -> None:
    good = _slice(2, base=8)
    alone = _token(_run(executor, 1, good)[0])
    bad, fine = _run(executor, 2, spoil(_slice(1)), good)  # type: ignore[operator]
    assert bad.error and not (bad.tokens or bad.digests or bad.scores)
    assert _token(fine) == alone


def test_empty_plan(executor: AnyExecutor) -> None:
    assert _run(executor, 1) == ()


def test_failure_inside_the_step_is_pinned_to_its_slice(executor: AnyExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    good = _slice(2, base=8)
    alone = _token(_run(executor, 1, good)[0])
    fail_at_token(monkeypatch, executor, 13)
    bad, fine = _run(executor, 2, _slice(1, (13, 13)), good)
    assert bad.error == "RuntimeError: no memory"
    assert _token(fine) == alone


def test_infinite_logits_fail_their_slice_only(executor: AnyExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    break_logits(monkeypatch, executor)
    bad, fine = _run(executor, 1, _slice(1), _slice(2, base=8))
    assert bad.error is not None and "finite" in bad.error
    assert fine.error is None


def test_garbage_of_an_earlier_owner_does_not_leak(executor: AnyExecutor) -> None:
    clean = _token(_run(executor, 1, _slice(1))[0])
    executor.cache.pool.fill_(float("nan"))
    first = _token(_run(executor, 2, _slice(1))[0])
    second = _run(executor, 3, _chained(1, 7), _slice(2, (3,), base=8))
    assert first == clean
    assert all(result.error is None for result in second)


def test_digests_follow_the_blocks_and_their_place(executor: AnyExecutor) -> None:
    piece = replace(_slice(1), digest_blocks=(BlockId(0),))
    (first,) = _run(executor, 1, piece)
    (digest,) = first.digests
    assert digest.block == 0
    assert digest.heads == executor.cache.digest([BlockId(0)], [0])[0]
    assert all(0 <= word < 1 << 64 for word in digest.heads) and len(set(digest.heads)) == 2
    moved = replace(_slice(2, base=8), digest_blocks=(BlockId(9), BlockId(8)))
    (second,) = _run(executor, 2, moved)
    assert [d.block for d in second.digests] == [9, 8]
    assert second.digests[1].heads == digest.heads, "same tokens, same place in the prompt"


def test_blocks_are_offloaded_before_others_are_onloaded_and_slices_read_them(model_dir: Path) -> None:
    executor = _executor(model_dir, host_cache_memory=2 << 10)
    (first,) = _run(executor, 1, _slice(1))
    block, other = BlockId(0), BlockId(9)
    content = executor.cache.pool[block].clone()
    executor.execute(StepPlan(2, (), spills=((block, HostSlot(1)),)))
    executor.cache.pool[block].fill_(7.0)
    swap = StepPlan(3, (), spills=((block, HostSlot(0)),), fills=((HostSlot(1), block), (HostSlot(0), other)))
    assert executor.execute(swap).slices == ()
    assert torch.equal(executor.cache.pool[block], content) and bool((executor.cache.pool[other] == 7.0).all())
    assert first.error is None


def test_settings_that_cannot_be_are_refused(model_dir: Path) -> None:
    with pytest.raises(TandemError, match="kv_cache_memory"):
        _executor(model_dir, kv_cache_memory=100)
    with pytest.raises(TandemError, match="host_cache_memory must hold"):
        _executor(model_dir, host_cache_memory=100)
    assert _executor(model_dir).num_host_slots == 0
    assert _executor(model_dir, host_cache_memory=3 << 10).num_host_slots == 3
    with pytest.raises(TandemError, match="max_model_len=129"):
        _executor(model_dir, max_model_len=129)
    assert _executor(model_dir, max_model_len=64).max_model_len == 64
    assert _executor(model_dir).max_model_len == 128
    one_block = {"kv_cache_memory": 1 << 10}
    with pytest.raises(TandemError, match=r"max_model_len=5 .*kv_cache_memory.* 4 tokens"):
        _executor(model_dir, max_model_len=5, **one_block)
    assert _executor(model_dir, **one_block).max_model_len == 4, "a request without max_tokens must fit the pool"


def test_a_grammar_without_masks_fails_its_slice_only(executor: AnyExecutor) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, grammar=Grammar("regex", "a*"))
    bad, fine = _run(executor, 1, replace(_slice(1), sampling=Sampling(params, 0, 0, _PROMPT)), _slice(2, base=8))
    assert bad.error is not None and "grammar" in bad.error
    assert fine.error is None


@pytest.mark.parametrize("cut", range(1, len(_PROMPT) + 1))
def test_scores_do_not_depend_on_chunks_or_company(executor: AnyExecutor, cut: int) -> None:
    """Each row is scored as if it were the last one, and sampling is not changed by scoring."""
    logprobs = torch.log_softmax(executor_logits(executor, _slice(9, base=24)).double(), -1)
    pieces = [(0, cut), (cut, len(_PROMPT))][: 1 + (cut < len(_PROMPT))]
    found: list[SampledToken] = []
    for number, (start, stop) in enumerate(pieces):
        scored = _PROMPT[start + 1 : stop + 1]
        piece = replace(_slice(1, _PROMPT[start:stop], start), scored=scored, num_top=2)
        if stop < len(_PROMPT):
            piece = replace(piece, sampling=None)
        result, other = _run(executor, number, piece, _slice(2, base=8))
        assert other.scores == () and _token(other) == int(logprobs[-1].argmax())
        found += result.scores
    assert result.tokens[0].id == int(logprobs[-1].argmax())
    assert [score.id for score in found] == list(_PROMPT[1:])
    for row, score in zip(logprobs, found, strict=False):
        assert score.logprob == pytest.approx(float(row[score.id]), abs=1e-5)
        assert [token for token, _ in score.top] == row.topk(2).indices.tolist()


def test_a_grammar_beyond_its_bounds_is_the_client_s_fault(
    executor: AnyExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise TandemError(ErrorKind.INVALID_REQUEST, "too much work")

    monkeypatch.setattr(executor._logits_processor, "_allowed", refuse)
    params = SamplingParams(max_tokens=8, temperature=0, grammar=Grammar("regex", "a*"))
    bad, fine = _run(executor, 1, replace(_slice(1), sampling=Sampling(params, 0, 0, _PROMPT)), _slice(2, base=8))
    assert (bad.error, bad.error_kind) == ("too much work", ErrorKind.INVALID_REQUEST)
    assert fine.error is None
