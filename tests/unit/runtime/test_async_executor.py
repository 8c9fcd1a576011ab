"""Test overlapping steps with the CPU as device: chained steps, failures in the middle, and offloaded blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.core.config import Bytes, ModelConfig
from tandem.core.ids import BlockId, HostSlot, SeqId
from tandem.core.request import SamplingParams
from tandem.engine.ports import DeviceLost
from tandem.runtime.async_executor import AsyncExecutor
from tandem.runtime.device_stream import StreamMark
from tandem.runtime.input_batch import Batch, build_batch
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.model_loader import AnyExecutor
from tandem.runtime.slice_work import PreparedSlice
from tandem.sched.state.step_plan import Sampling, ScheduledSlice, SliceResult, StepPlan, StepResult
from tandem_kernels.contract import AttentionBatch, SamplingRows
from tests.executor_logits import executor_logits
from tests.unit.runtime.conftest import break_logits, fail_at_token, load

_PROMPT = (5, 6, 7, 8, 9, 10, 11)
_GREEDY = SamplingParams(max_tokens=50, temperature=0)
_ALL_KINDS = {
    "greedy": _GREEDY,
    "sampled": SamplingParams(max_tokens=50, temperature=1.2, seed=3),
    "filtered": SamplingParams(max_tokens=50, temperature=0.9, top_k=9, top_p=0.8, min_p=0.02, seed=2**64 - 5),
    "penalised": replace(_GREEDY, presence_penalty=0.5, frequency_penalty=0.3),
    "told": replace(_GREEDY, logprobs=3),
    "biased": replace(_GREEDY, logit_bias=((3, 4.0), (8, -9.0))),
}


def _load(directory: Path, depth: int = 2, dtype: Any = "float64", **engine: Any) -> AnyExecutor:
    sizes = {"block_size": 4, "kv_cache_memory": Bytes(1 << 17), "max_num_seqs": 8}
    return load(directory, ModelConfig(dtype=dtype), kernels="reference", plan_depth=depth, **(sizes | engine))


@pytest.fixture
def executor(model_dir: Path) -> AsyncExecutor:
    executor = _load(model_dir)
    assert isinstance(executor, AsyncExecutor)
    return executor


def _slice(
    seq: int, tokens: Sequence[int] = _PROMPT, start: int = 0, params: SamplingParams = _GREEDY, index: int = 0
) -> ScheduledSlice:
    """Return a slice in blocks that no other sequence uses."""
    blocks = tuple(BlockId(seq * 6 + i) for i in range(-(-(start + len(tokens)) // 4)))
    output = tuple(tokens[len(_PROMPT) :]) if params.needs_history else ()
    prompt = _PROMPT if params.needs_history else ()
    return ScheduledSlice(
        SeqId(seq), start, len(tokens), tuple(tokens), blocks, Sampling(params, 0, index, prompt, output)
    )


def _chained(seq: int, start: int, params: SamplingParams = _GREEDY) -> ScheduledSlice:
    piece = _slice(seq, (0,), start, params, start + 1 - len(_PROMPT))
    return replace(piece, tokens=(), chained=True)


def _ids(result: SliceResult) -> list[int]:
    assert result.error is None, result.error
    return [token.id for token in result.tokens]


def _at_once(executor: AnyExecutor, seq: int, params: SamplingParams, count: int) -> list[int]:
    """Return outputs of which each token is sampled after computing the whole prompt anew."""
    tokens: list[int] = []
    for number in range(count):
        piece = _slice(seq, (*_PROMPT, *tokens), params=params, index=number)
        tokens += _ids(executor.execute(StepPlan(number, (piece,))).slices[0])
    return tokens


def _overlapping(executor: AsyncExecutor, seqs: Sequence[tuple[int, SamplingParams]], count: int) -> list[list[int]]:
    """Return outputs of sequences of which each plan is launched before the previous one is collected."""
    executor.launch(StepPlan(0, tuple(_slice(seq, params=params) for seq, params in seqs)))
    steps: list[StepResult] = []
    for number in range(1, count):
        place = len(_PROMPT) + number - 1
        executor.launch(StepPlan(number, tuple(_chained(seq, place, params) for seq, params in seqs)))
        steps.append(executor.collect())
    steps.append(executor.collect())
    assert [step.number for step in steps] == list(range(count))
    return [[_ids(step.slices[i])[0] for step in steps] for i in range(len(seqs))]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_chained_steps_sample_the_same_tokens_as_single_steps(model_dir: Path, graphs: bool) -> None:
    deep = _load(model_dir, cuda_graphs=graphs)
    assert isinstance(deep, AsyncExecutor)
    plain = _load(model_dir, depth=1)
    kinds = [_ALL_KINDS[name] for name in ("greedy", "sampled", "filtered")]
    right = [_at_once(plain, seq, params, 9) for seq, params in enumerate(kinds)]
    assert _overlapping(deep, list(enumerate(kinds)), 9) == right
    assert len({tuple(output) for output in right}) == 3


def test_device_and_host_sample_the_same_tokens_in_one_batch(model_dir: Path) -> None:
    """Sample with all kinds of parameters in one step, in which rows of the device and of the host alternate."""
    plain, deep = _load(model_dir, depth=1), _load(model_dir)
    kinds = [_ALL_KINDS[name] for name in ("told", "greedy", "penalised", "filtered", "biased", "sampled")]
    plan = StepPlan(0, tuple(_slice(seq, params=params) for seq, params in enumerate(kinds)))
    assert deep.execute(plan) == plain.execute(plan)
    assert deep.execute(plan).slices[0].tokens[0].top, "what is told of a token is there"


def test_choices_share_a_row_and_guesses_have_their_own(model_dir: Path) -> None:
    plain, deep = _load(model_dir, depth=1), _load(model_dir)
    several = _slice(1, params=_ALL_KINDS["sampled"])
    assert several.sampling is not None
    several = replace(several, sampling=replace(several.sampling, choice=2, num_choices=4))
    right = _at_once(plain, 3, _GREEDY, 5)
    wrong = [*right[:3], (right[3] + 1) % 50]
    guessing = replace(_slice(2, (*_PROMPT, *wrong)), num_drafted=4)
    results = deep.execute(StepPlan(0, (several, _slice(0), guessing))).slices
    assert results == plain.execute(StepPlan(0, (several, _slice(0), guessing))).slices
    assert len(set(_ids(results[0]))) > 1 and _ids(results[2]) == right[:4]


def test_a_step_cannot_be_chained_to_a_token_that_the_host_has_not_sampled(executor: AsyncExecutor) -> None:
    params = _ALL_KINDS["told"]
    executor.launch(StepPlan(0, (_slice(1, params=params),)))
    executor.launch(StepPlan(1, (_chained(1, 7, params), _slice(2))))
    first = _ids(executor.collect().slices[0])
    bad, good = executor.collect().slices
    assert bad.error is not None and "host" in bad.error and _ids(good)
    # Once the token is sampled, the host knows it.
    executor.launch(StepPlan(2, (_slice(1, first, 7, params, 1),)))
    assert _ids(executor.collect().slices[0])


def test_guesses_cannot_be_chained_to_before_it_is_known_which_were_right(executor: AsyncExecutor) -> None:
    executor.launch(StepPlan(0, (replace(_slice(1), num_drafted=2),)))
    executor.launch(StepPlan(1, (_chained(1, 7),)))
    assert _ids(executor.collect().slices[0])
    assert executor.collect().slices[0].error is not None


def test_a_chained_step_may_follow_a_chunk(executor: AsyncExecutor) -> None:
    right = _at_once(executor, 4, _GREEDY, 2)
    executor.launch(StepPlan(0, (_slice(1), _slice(2))))
    executor.launch(StepPlan(1, (_chained(2, 7), _slice(3), _chained(1, 7))))
    executor.collect()
    assert [_ids(result) for result in executor.collect().slices] == [right[1:], right[:1], right[1:]]


def test_a_chain_passes_over_a_plan_that_does_not_name_it(executor: AsyncExecutor) -> None:
    right = _at_once(executor, 1, _GREEDY, 2)
    executor.launch(StepPlan(0, (_slice(2),)))
    executor.launch(StepPlan(1, (_slice(3),)))
    executor.collect()
    executor.launch(StepPlan(2, (_chained(2, 7),)))
    executor.collect()
    assert _ids(executor.collect().slices[0]) == right[1:]


def test_at_most_two_plans_are_in_flight_and_execute_requires_none(executor: AsyncExecutor) -> None:
    executor.launch(StepPlan(0, (_slice(1),)))
    with pytest.raises(ValueError, match="not collected"):
        executor.execute(StepPlan(1, (_slice(2),)))
    executor.launch(StepPlan(1, (_slice(2),)))
    with pytest.raises(ValueError, match="in flight"):
        executor.launch(StepPlan(2, (_slice(3),)))
    assert [executor.collect().number for _ in range(2)] == [0, 1]


def test_what_is_chained_to_a_row_that_is_not_finite_fails_with_it(
    executor: AsyncExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device continues with an arbitrary token in the sequence's own blocks, and its result is discarded."""
    right = _at_once(executor, 5, _GREEDY, 2)
    with monkeypatch.context() as patch:
        break_logits(patch, executor)
        executor.launch(StepPlan(0, (_slice(1), _slice(2))))
    forward, seen = executor.model.forward, []

    def watched(batch: Batch, cache: KVCache) -> torch.Tensor:
        seen.append(batch.tokens.tolist())
        return forward(batch, cache)

    monkeypatch.setattr(executor.model, "forward", watched)
    executor.launch(StepPlan(1, (_chained(1, 7), _chained(2, 7))))
    assert seen == [[0, right[0]]], "an id that a device can look up"
    bad, good = executor.collect().slices
    assert bad.error is not None and "finite" in bad.error and _ids(good) == right[:1]
    bad, good = executor.collect().slices
    assert bad.error is not None and not bad.tokens and _ids(good) == right[1:]
    executor.launch(StepPlan(2, (_chained(1, 8),)))
    assert executor.collect().slices[0].error is not None


def test_a_step_that_fails_is_run_slice_by_slice_between_two_that_overlap(
    executor: AsyncExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices that can be computed continue their chain; the others end theirs."""
    right = _at_once(executor, 5, _GREEDY, 3)
    fail_at_token(monkeypatch, executor, 13)
    executor.launch(StepPlan(0, (_slice(1),)))
    executor.launch(StepPlan(1, (_chained(1, 7), _slice(2, (13, 13)), _slice(3))))
    assert _ids(executor.collect().slices[0]) == right[:1]
    executor.launch(StepPlan(2, (_chained(1, 8), _chained(2, 2), _chained(3, 7))))
    one, two, three = executor.collect().slices
    assert (_ids(one), two.error, _ids(three)) == (right[1:2], "RuntimeError: no memory", right[:1])
    one, two, three = executor.collect().slices
    assert (_ids(one), _ids(three)) == (right[2:], right[1:2]) and two.error is not None


def test_a_lost_device_is_reported_before_any_slice_is_retried(
    executor: AsyncExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost:
        def wait(self) -> None:
            raise DeviceLost("an illegal address")

    def fail(batch: Batch, cache: KVCache) -> torch.Tensor:
        calls.append(len(batch.tokens))
        raise RuntimeError("an illegal address")

    calls: list[int] = []
    monkeypatch.setattr(executor.model, "forward", fail)
    monkeypatch.setattr(executor._stream, "mark", Lost)
    with pytest.raises(DeviceLost):
        executor.launch(StepPlan(0, (_slice(1), _slice(2))))
    assert len(calls) == 1


@pytest.mark.parametrize("where", ["mark", "wait"])
def test_a_lost_device_is_reported_wherever_it_shows(
    executor: AsyncExecutor, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """On a GPU no event can be recorded any more either."""
    monkeypatch.setattr(executor.model, "forward", _raise(RuntimeError("an illegal address")))
    lost = _raise(DeviceLost("an illegal address"))
    monkeypatch.setattr(executor._stream, "mark", lost if where == "mark" else lambda: SimpleNamespace(wait=lost))
    with pytest.raises(DeviceLost):
        executor.launch(StepPlan(0, (_slice(1),)))


def test_an_error_of_no_slice_is_raised_once_the_device_is_idle(
    executor: AsyncExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are given to others then. A compiler's error, for instance, is no RuntimeError."""
    waits: list[str] = []
    right = executor.execute(StepPlan(0, (_slice(1),)))
    with monkeypatch.context() as patch:
        patch.setattr(executor.model, "forward", _raise(ArithmeticError("no resources")))
        patch.setattr(executor._stream, "mark", lambda: SimpleNamespace(wait=lambda: waits.append("waited")))
        with pytest.raises(ArithmeticError, match="no resources"):
            executor.launch(StepPlan(1, (_slice(1),)))
        patch.setattr(executor.cache, "copy", _raise(ArithmeticError("no copies")))
        with pytest.raises(ArithmeticError, match="no copies"):
            executor.launch(StepPlan(2, (_slice(1),)))
    assert waits == ["waited"] * 2
    assert executor.execute(StepPlan(0, (_slice(1),))) == right


def _raise(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def test_digests_are_those_of_the_step_s_own_writes(model_dir: Path) -> None:
    """Digests of slices and of served prefixes are right while the next step writes to other blocks."""
    plain, deep = _load(model_dir, depth=1), _load(model_dir)
    assert isinstance(deep, AsyncExecutor)
    piece = replace(_slice(1), digest_blocks=(BlockId(7), BlockId(6)))
    right, _ = plain.execute(StepPlan(0, (piece, _slice(2)))).slices
    deep.launch(StepPlan(0, (piece, _slice(2))))
    deep.launch(StepPlan(1, (_chained(1, 7), replace(_chained(2, 7), digest_blocks=(BlockId(12),)))))
    first = deep.collect().slices[0]
    assert (first.digests, _ids(first)) == (right.digests, _ids(right))
    assert [digest.block for digest in deep.collect().slices[1].digests] == [12]
    several = tuple(replace(_slice(seq), digest_blocks=(BlockId(6 * seq),)) for seq in (3, 4, 5))
    assert deep.execute(StepPlan(3, several)) == plain.execute(StepPlan(3, several))
    prefix_fetch = StepPlan(2, (), digests=((BlockId(6), 0),))
    assert deep.execute(prefix_fetch).digests == plain.execute(prefix_fetch).digests == right.digests[1:]


def test_blocks_are_offloaded_and_onloaded_while_steps_overlap(model_dir: Path) -> None:
    deep = _load(model_dir, host_cache_memory=Bytes(1 << 13))
    assert isinstance(deep, AsyncExecutor) and deep.num_host_slots == 4
    right = _at_once(deep, 0, _GREEDY, 2)
    deep.launch(StepPlan(0, (_slice(1),)))
    out = tuple((BlockId(6 + i), HostSlot(3 - i)) for i in range(2))
    deep.launch(StepPlan(1, (_slice(2),), spills=out))
    deep.collect()
    back = tuple((HostSlot(3 - i), BlockId(18 + i)) for i in range(2))
    deep.launch(StepPlan(2, (_slice(3, right[:1], 7, _GREEDY, 1),), fills=back))
    deep.collect()
    assert _ids(deep.collect().slices[0]) == right[1:]


def test_a_plan_that_only_copies_is_collected_once_its_copies_are_made(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = _load(model_dir, host_cache_memory=Bytes(1 << 13))
    assert isinstance(deep, AsyncExecutor)
    events: list[str] = []
    monkeypatch.setattr(deep.cache, "copy", lambda *_: events.append("copied"))

    class Mark(StreamMark):
        def __init__(self) -> None:
            events.append("marked")

        def wait(self) -> None:
            events.append("waited")

    monkeypatch.setattr(deep._stream, "mark", Mark)
    deep.launch(StepPlan(0, (), spills=((BlockId(1), HostSlot(0)),)))
    assert events == ["copied", "marked"]
    deep.collect()
    assert events == ["copied", "marked", "waited"]


def test_plans_may_be_larger_than_the_first_staging_memory(
    executor: AsyncExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = _at_once(executor, 4, _GREEDY, 2)
    executor._staging._make(4)
    executor.launch(StepPlan(0, (_slice(1),)))
    executor.launch(StepPlan(1, (_chained(1, 7), *(_slice(seq) for seq in (2, 3)))))
    assert _ids(executor.collect().slices[0]) == right[:1]
    assert [_ids(result) for result in executor.collect().slices] == [right[1:], right[:1], right[:1]]


def test_kv_in_float8_is_the_same_whatever_chunks_and_company(model_dir: Path) -> None:
    """The logits are also close to those of a pool in the model's own dtype."""
    wide = _load(model_dir, depth=1, dtype="float32", max_model_len=64)
    narrow = [_load(model_dir, depth, "float32", kv_cache_dtype="float8_e4m3fn", max_model_len=64) for depth in (1, 2)]
    exact, *rounded = (executor_logits(one, _slice(0)) for one in (wide, *narrow))
    assert torch.equal(*rounded) and not torch.equal(exact, rounded[0])
    assert float((exact - rounded[0]).abs().max()) < 0.05 * float(exact.abs().max())
    parts = (_slice(1, _PROMPT[:3]), _slice(1, _PROMPT[3:], 3))
    for one in narrow:
        (whole,) = one.execute(StepPlan(0, (_slice(2),))).slices
        one.execute(StepPlan(1, (replace(parts[0], sampling=None), _slice(3))))
        assert one.execute(StepPlan(2, (_slice(4), parts[1]))).slices[1].tokens == whole.tokens


def test_sampling_numbers_arrive_as_the_kernel_reads_them(
    executor: AsyncExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SamplingRows] = []

    def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        seen.append(rows)
        return logits.argmax(1)

    monkeypatch.setattr(executor, "_sample", sample)
    cold, warm = _GREEDY, _ALL_KINDS["filtered"]
    executor.execute(StepPlan(0, (_slice(1, params=cold), _slice(2, params=warm, index=5))))
    (rows,) = seen
    assert rows.temperature.tolist() == [0.0, 0.9] and rows.top_p.tolist() == [1.0, 0.8]
    assert rows.log_min_p.exp().tolist() == pytest.approx([0.0, 0.02]) and rows.top_k.tolist() == [0, 9]
    assert rows.seed.tolist() == [0, -5] and rows.index.tolist() == [0, 5] and rows.choice.tolist() == [0, 0]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_part_of_a_step_is_aligned_for_the_kernels(executor: AsyncExecutor, count: int) -> None:
    """Each part has the same values as in a separate allocation."""
    pieces = [_slice(seq, _PROMPT[: count + seq]) for seq in range(count)]
    works = [PreparedSlice(piece, piece.tokens) for piece in pieces]
    staged = executor._staging.stage(works, [(BlockId(7), 3)] * count)
    plain = build_batch(pieces, [piece.tokens for piece in pieces], 4)
    batch, sampling = staged.batch, staged.sampling
    assert batch is not None
    mine = (batch.tokens, batch.positions, batch.slots, *_tensors(batch.attention))
    for one, other in zip(mine, (plain.tokens, plain.positions, plain.slots, *_tensors(plain.attention)), strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype
    rest = (staged.sampled_rows, staged.picks, sampling.temperature, sampling.top_p, sampling.log_min_p, sampling.seed)
    for tensor in (*mine, *rest, sampling.index, sampling.choice, sampling.top_k, staged.digest_blocks):
        assert (tensor.data_ptr() - executor._staging._device.data_ptr()) % 16 == 0 and tensor.is_contiguous()
    assert staged.sampled_rows.tolist() == plain.sampled_rows and staged.digest_indices.tolist() == [3] * count


def _tensors(attention: AttentionBatch) -> tuple[torch.Tensor, ...]:
    return attention.query_starts, attention.context_lens, attention.block_tables
