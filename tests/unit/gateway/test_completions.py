"""Test completions of several prompts under cancellation, and their usage sums, without a protocol."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import pytest

from tandem.core.clock import SystemClock
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import FinishReason, PromptLogprobs, SampledToken
from tandem.core.ids import JobKey, RequestId
from tandem.core.lane import Lane
from tandem.core.request import Request
from tandem.gateway.context.interfaces import ServedModel
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.openai.request_schema import CompletionBody
from tandem.gateway.output.text_stream import ChoiceEnd
from tandem.gateway.serving.completions import NUM_ENCODERS
from tandem.gateway.serving.echo import Echo, PromptScores
from tandem.gateway.serving.merge import merge_streams
from tandem.gateway.telemetry.request_record import MAX_ERROR_CHARS
from tandem.gateway.telemetry.request_recorder import RequestKind
from tandem.gateway.telemetry.token_timing import TokenTiming
from tandem.gateway.telemetry.usage import UsageCounter
from tandem.gateway.text.text_model import TextModel
from tandem.obs.metrics.metrics import HistogramSeries
from tests.unit.gateway.conftest import ScriptedDispatch, ScriptedStream
from tests.unit.gateway.instant import instant_events
from tests.unit.gateway.scripted_worker import until
from tests.unit.gateway.watched import Watched

CALLER = RequestContext(request_id="r", received_at=0.0)
PROMPTS = ["a", "b", "c"]


@pytest.fixture
def dispatch(make_text: Callable[..., TextModel]) -> ScriptedDispatch:
    return ScriptedDispatch([ServedModel(name="tiny", max_model_len=100, text=make_text(), created=0)])


@pytest.fixture
def seen(dispatch: ScriptedDispatch) -> Iterator[Watched]:
    with ThreadPoolExecutor(1) as encoders:
        yield Watched(SystemClock(), dispatch, encoders)


def stall(dispatch: ScriptedDispatch, slow_at: int | None = None) -> list[ScriptedStream]:
    """Open streams of one token that do not end, and take a while to open the `slow_at`-th request; return the list to
    which each opened stream is added.
    """
    opened: list[ScriptedStream] = []

    def script(request: Request) -> ScriptedStream:
        opened.append(ScriptedStream([instant_events(request, [5])[0], asyncio.Event()]))
        dispatch.hold_open = len(opened) == slow_at
        return opened[-1]

    dispatch.script = script
    return opened


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_all_prompts_are_closed_when_the_client_leaves(
    seen: Watched, dispatch: ScriptedDispatch, num_prompts: int
) -> None:
    opened, has_begun = stall(dispatch), asyncio.Event()
    body = msgspec.convert({"model": "tiny", "prompt": PROMPTS[:num_prompts]}, CompletionBody)

    async def read() -> None:
        async with await seen.answers.complete(body, CALLER) as answer:
            async for _ in answer.parts():
                has_begun.set()

    task = asyncio.create_task(read())
    await has_begun.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert [(stream.num_closes, stream.finished_choices) for stream in opened] == [(1, [])] * num_prompts
    assert seen.recorder.num_open == 0
    assert [(record.endpoint, record.outcome) for record in seen.records.taken] == [("completion", "cancelled")]


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_a_complete_answer_leaves_no_generator_to_the_event_loop(
    seen: Watched, dispatch: ScriptedDispatch, num_prompts: int
) -> None:
    """The event loop would make a task for each generator that nothing has closed."""
    dispatch.script = lambda request: ScriptedStream(instant_events(request, [5, 6]))
    body = msgspec.convert({"model": "tiny", "prompt": PROMPTS[:num_prompts], "max_tokens": 2}, CompletionBody)
    before, left = sys.get_asyncgen_hooks(), list[object]()
    sys.set_asyncgen_hooks(finalizer=left.append)
    try:
        async with await seen.answers.complete(body, CALLER) as answer, contextlib.aclosing(answer.parts()) as parts:
            found = [part async for part in parts]
    finally:
        sys.set_asyncgen_hooks(*before)
    assert sum(isinstance(part, ChoiceEnd) for part in found) == num_prompts
    assert left == []


@pytest.mark.parametrize(
    ("timeout_s", "outcome"), [(None, "cancelled"), (1000.0, "cancelled"), (0.01, "deadline_exceeded")]
)
async def test_a_client_that_leaves_at_its_deadline_has_not_cancelled(
    seen: Watched, timeout_s: float | None, outcome: str
) -> None:
    caller = RequestContext(request_id="r", received_at=seen.clock.now() - 1, timeout_s=timeout_s)
    kind = RequestKind("completion", Lane.INTERACTIVE, is_streamed=False)
    with seen.recorder.admission("cmpl-1", kind, caller) as recording:
        recording.end(asyncio.CancelledError(), UsageCounter(1, recording.pace), is_complete=False)
    assert [record.outcome for record in seen.records.taken] == [outcome]


async def test_prompts_that_were_admitted_are_closed_when_the_client_leaves_while_others_wait(
    seen: Watched, dispatch: ScriptedDispatch
) -> None:
    opened = stall(dispatch, slow_at=2)
    task = seen.complete(prompt=PROMPTS)
    await until(lambda: len(dispatch.requests) == 3)
    task.cancel()
    await asyncio.wait({task})
    assert [(stream.num_closes, stream.finished_choices) for stream in opened] == [(1, [])] * 2
    assert seen.recorder.num_open == 0


async def test_prompts_that_can_never_all_be_admitted_cause_one_refusal(
    seen: Watched, dispatch: ScriptedDispatch
) -> None:
    dispatch.never = TandemError(ErrorKind.INVALID_REQUEST, "too many", reason="concurrency")
    with pytest.raises(TandemError, match="too many"):
        await seen.complete(prompt=PROMPTS)
    assert dispatch.requests == [] and seen.recorder.num_open == 0
    assert [(record.outcome, record.reason) for record in seen.records.taken] == [("invalid_request", "concurrency")]
    refusals = seen.family("tandem.admissions").points
    assert refusals == {("refused", "concurrency", "interactive", CALLER.tenant.id): 1}


@pytest.mark.parametrize(("prompt", "reason"), [("a", "no_worker"), ("a" * 9000, "tokenization")])
async def test_a_request_refused_before_its_admission_counts_as_refused(
    seen: Watched, dispatch: ScriptedDispatch, monkeypatch: pytest.MonkeyPatch, prompt: str, reason: str
) -> None:
    if reason == "no_worker":
        dispatch.served = []
    monkeypatch.setattr(seen.answers._encoding, "_max_waiting", 0)
    turns = [asyncio.create_task(seen.answers._encoding.begin(CALLER.tenant.id)) for _ in range(NUM_ENCODERS)]
    await asyncio.sleep(0)
    with pytest.raises(TandemError):
        await seen.complete(prompt=prompt)
    assert seen.family("tandem.admissions").points == {("refused", reason, "interactive", CALLER.tenant.id): 1}
    for turn in turns:
        turn.cancel()


async def test_a_large_body_refused_before_it_is_read_counts_as_refused(
    seen: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seen.answers._large_bodies, "_max_waiting", 0)
    turn = await seen.answers.begin_large(CALLER.tenant, 4 << 20)
    waiting = asyncio.create_task(seen.answers.begin_large(CALLER.tenant, 1 << 20))
    await asyncio.sleep(0)
    with pytest.raises(TandemError):
        await seen.answers.begin_large(CALLER.tenant, 1 << 20)
    assert seen.family("tandem.admissions").points == {("refused", "large_bodies", "interactive", CALLER.tenant.id): 1}
    turn.end()
    (await waiting).end()


@pytest.mark.parametrize("num_tokens", [1, 1024, 4500])
async def test_others_have_turns_while_a_long_prompt_is_echoed(
    seen: Watched, dispatch: ScriptedDispatch, num_tokens: int
) -> None:
    dispatch.served = [replace(dispatch.served[0], max_model_len=8192)]
    dispatch.script = lambda request: ScriptedStream(instant_events(request, [5]))
    body = CompletionBody(model="tiny", prompt=[7] * num_tokens, echo=True, max_tokens=1)
    num_turns = 0

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async with await seen.answers.complete(body, CALLER) as answer, contextlib.aclosing(answer.parts()) as parts:
        other = asyncio.create_task(take_turns())
        echo = await anext(parts)
        other.cancel()
    assert isinstance(echo, Echo) and len(echo.deltas) == num_tokens and num_turns == num_tokens // 1024


async def test_a_record_keeps_the_beginning_of_an_error_that_quotes_much(seen: Watched) -> None:
    """The console keeps many records, and a span that is too large takes a whole batch with it."""
    with pytest.raises(TandemError):
        await seen.complete(model="x" * 1_000_000)
    (record,) = seen.records.taken
    (span,) = seen.spans
    assert record.error == span.status.description and record.error.startswith("the model 'xxx")
    assert len(record.error) == MAX_ERROR_CHARS


async def test_an_invalid_request_is_no_refusal(seen: Watched) -> None:
    with pytest.raises(TandemError, match="temperature"):
        await seen.complete(temperature=9)
    assert "tandem.admissions" not in [family.instrument.name for family in seen.metrics.collect()]


async def test_the_beginning_of_a_long_user_names_the_session(seen: Watched, dispatch: ScriptedDispatch) -> None:
    dispatch.script = lambda request: ScriptedStream(instant_events(request, [5]))
    await seen.complete(user="ab" * 1_000_000)
    assert dispatch.callers[0].session == "ab" * 512


async def test_the_retries_of_all_prompts_count(seen: Watched, dispatch: ScriptedDispatch) -> None:
    def script(request: Request) -> ScriptedStream:
        stream = ScriptedStream(instant_events(request, [5]))
        stream.num_attempts = len(dispatch.requests)
        return stream

    dispatch.script = script
    await seen.complete(prompt=PROMPTS)
    assert seen.records.taken[0].num_attempts == 3
    assert seen.family("tandem.request.retries").points == {(): 1 + 2}


async def test_a_merger_left_early_closes_its_sources() -> None:
    closed: list[int] = []

    async def source(number: int) -> AsyncGenerator[int, None]:
        try:
            while True:
                yield number
                await asyncio.sleep(0)
        finally:
            closed.append(number)

    stream = merge_streams([source(number) for number in range(3)])
    seen = {await anext(stream) for _ in range(30)}
    await stream.aclose()
    assert seen == {0, 1, 2} and sorted(closed) == [0, 1, 2]


async def test_a_merger_that_nobody_reads_stops_reading_its_sources() -> None:
    produced = 0

    async def source() -> AsyncGenerator[int, None]:
        nonlocal produced
        while True:
            produced += 1
            yield produced

    stream = merge_streams([source(), source()])
    await anext(stream)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert produced < 100
    await stream.aclose()


def test_scores_may_be_repeated_but_must_be_contiguous() -> None:
    scores = PromptScores([1, 2, 3])
    key = JobKey(RequestId("r"), 1)
    scored = [SampledToken(2, -1.0), SampledToken(3, -2.0)]
    for first, tokens in ((1, scored), (2, scored[1:]), (1, scored[:1])):
        scores.take(PromptLogprobs(key, first, tuple(tokens)))
    assert [token.logprob for token in scores.complete()] == [None, -1.0, -2.0]
    for first in (0, 2):
        with pytest.raises(TandemError) as caught:
            scores.take(PromptLogprobs(key, first, tuple(scored)))
        assert caught.value.kind is ErrorKind.INTERNAL
    with pytest.raises(TandemError):
        PromptScores([1, 2]).complete()


def test_the_usage_counts_cached_prompt_tokens_once_for_all_choices() -> None:
    pace = TokenTiming(lambda: 0.0, HistogramSeries(()), 0.0, lambda at: None)
    tally = UsageCounter(2, pace)
    for num_tokens in (10, 20):
        tally.admitted(num_tokens)
    for num_tokens in range(1, 41):
        pace.on_token_sent(3)
        assert (tally.usage().num_prompt, tally.usage().num_output, tally.usage().num_cached) == (30, num_tokens, None)
    pace.on_token_sent(1)
    pace.end()
    assert (pace.num_of(3), pace.num_of(1), pace.num_of(0), tally.usage().num_output) == (40, 1, 0, 41)
    for choice, cached in ((0, 8), (1, 8), (2, None), (3, 16)):
        tally.ended(ChoiceEnd(FinishReason.STOP, 4, cached, choice))
    assert (tally.usage().num_output, tally.usage().num_cached, len(tally.reasons)) == (16, 24, 4)
