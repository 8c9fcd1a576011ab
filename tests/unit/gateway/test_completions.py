"""Test completions of several prompts under cancellation, and their usage sums, without a protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import msgspec
import pytest

from tandem.core.clock import SystemClock
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished, FinishReason, PromptLogprobs, SampledToken, Token
from tandem.core.ids import JobKey, RequestId
from tandem.core.lane import Lane
from tandem.core.request import Request
from tandem.gateway.context.interfaces import ServedModel
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.openai.output_spec import OutputSpecFactory
from tandem.gateway.openai.request_schema import CompletionBody
from tandem.gateway.output.text_stream import ChoiceEnd
from tandem.gateway.serving.completions import CompletionService
from tandem.gateway.serving.echo import PromptScores
from tandem.gateway.serving.merge import merge_streams
from tandem.gateway.telemetry.request_metrics import RequestMetrics
from tandem.gateway.telemetry.request_record import RequestRecord
from tandem.gateway.telemetry.request_recorder import RequestKind, RequestRecorder
from tandem.gateway.telemetry.token_timing import TokenTiming
from tandem.gateway.telemetry.usage import UsageCounter
from tandem.gateway.text.text_model import TextModel
from tandem.obs.metrics.metrics import HistogramSeries, Metrics
from tandem.orchestration.phase_ledger import PhaseLedger
from tests.unit.gateway.instant import instant_events

CALLER = RequestContext(request_id="r", received_at=0.0)


class OneTokenStream:
    """Yield one token and then nothing, and count how often it is closed."""

    path = "remote"
    num_attempts = 1
    workers = ("p1", "d1")
    reasons: ClassVar[dict[str, object]] = {}
    rate_limits: ClassVar[dict[str, str]] = {}

    def __init__(self, request: Request) -> None:
        self.num_closes = 0
        self._events = instant_events(request, [5])

    async def __aiter__(self) -> AsyncIterator[Token | PromptLogprobs | Finished]:
        yield self._events[0]
        await asyncio.Event().wait()

    def finish(self, choice: int) -> None:
        raise AssertionError(choice)

    def close(self) -> None:
        self.num_closes += 1


class Records:
    """Keep the request records that an observer receives."""

    def __init__(self) -> None:
        self.taken: list[RequestRecord] = []

    def answered(self, record: RequestRecord) -> None:
        self.taken.append(record)


class SlowDispatch:
    """Take a while to open the `slow_at`-th request."""

    def __init__(self, served: ServedModel, slow_at: int = -1) -> None:
        self.opened: list[OneTokenStream] = []
        self.never: TandemError | None = None
        self.waiting = asyncio.Event()
        self._served = served
        self._slow_at = slow_at

    def models(self) -> list[ServedModel]:
        return [self._served]

    def ready(self) -> str | None:
        return None

    def num_queued(self) -> dict[Lane, int]:
        return {}

    def problem(self) -> str | None:
        return None

    def check_feasible(self, requests: Sequence[Request], caller: RequestContext) -> None:
        if self.never is not None:
            raise self.never

    async def open(self, request: Request, caller: RequestContext, ledger: PhaseLedger) -> OneTokenStream:
        if len(self.opened) == self._slow_at:
            self.waiting.set()
            await asyncio.Event().wait()
        self.opened.append(OneTokenStream(request))
        return self.opened[-1]


@pytest.fixture
def served(make_text: Callable[..., TextModel]) -> ServedModel:
    return ServedModel(name="tiny", max_model_len=100, text=make_text(), created=0)


def several(num_prompts: int = 3) -> CompletionBody:
    return msgspec.convert({"model": "tiny", "prompt": ["a", "b", "c"][:num_prompts]}, CompletionBody)


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_all_prompts_are_closed_when_the_client_leaves(served: ServedModel, num_prompts: int) -> None:
    dispatch, records = SlowDispatch(served), Records()
    with ThreadPoolExecutor(1) as executor:
        recorder = RequestRecorder(SystemClock(), RequestMetrics(Metrics()), observers=[records])
        answers = CompletionService(dispatch, executor, recorder, OutputSpecFactory())
        seen = asyncio.Event()

        async def read() -> None:
            async with await answers.complete(several(num_prompts), CALLER) as answer:
                async for _ in answer.parts():
                    seen.set()

        task = asyncio.create_task(read())
        await seen.wait()
        task.cancel()
        await asyncio.wait({task})
    assert task.cancelled()
    assert [stream.num_closes for stream in dispatch.opened] == [1] * num_prompts
    assert recorder.num_open == 0
    assert [(record.endpoint, record.outcome) for record in records.taken] == [("completion", "cancelled")]


@pytest.mark.parametrize(
    ("timeout_s", "outcome"), [(None, "cancelled"), (1000.0, "cancelled"), (0.01, "deadline_exceeded")]
)
async def test_a_client_that_leaves_at_its_deadline_has_not_cancelled(timeout_s: float | None, outcome: str) -> None:
    records, clock = Records(), SystemClock()
    recorder = RequestRecorder(clock, RequestMetrics(Metrics()), observers=[records])
    caller = RequestContext(request_id="r", received_at=clock.now() - 1, timeout_s=timeout_s)
    kind = RequestKind("completion", Lane.INTERACTIVE, is_streamed=False)
    with recorder.admission("cmpl-1", kind, caller) as recording:
        recording.end(asyncio.CancelledError(), UsageCounter(1, recording.pace), is_complete=False)
    assert [record.outcome for record in records.taken] == [outcome]


async def test_prompts_that_were_admitted_are_closed_when_the_client_leaves_while_others_wait(
    served: ServedModel,
) -> None:
    dispatch, recorder = SlowDispatch(served, slow_at=2), RequestRecorder(SystemClock(), RequestMetrics(Metrics()))
    with ThreadPoolExecutor(1) as executor:
        task = asyncio.create_task(
            CompletionService(dispatch, executor, recorder, OutputSpecFactory()).complete(several(), CALLER)
        )
        await dispatch.waiting.wait()
        task.cancel()
        await asyncio.wait({task})
    assert [stream.num_closes for stream in dispatch.opened] == [1] * 2
    assert recorder.num_open == 0


async def test_prompts_that_can_never_all_be_admitted_cause_one_refusal(served: ServedModel) -> None:
    dispatch, records, metrics = SlowDispatch(served), Records(), Metrics()
    dispatch.never = TandemError(ErrorKind.INVALID_REQUEST, "too many", reason="concurrency")
    recorder = RequestRecorder(SystemClock(), RequestMetrics(metrics), observers=[records])
    with ThreadPoolExecutor(1) as executor, pytest.raises(TandemError, match="too many"):
        await CompletionService(dispatch, executor, recorder, OutputSpecFactory()).complete(several(), CALLER)
    assert dispatch.opened == [] and recorder.num_open == 0
    assert [(record.outcome, record.reason) for record in records.taken] == [("invalid_request", "concurrency")]
    refusals = [family.points for family in metrics.collect() if family.instrument.name == "tandem.admissions"]
    assert refusals == [{("refused", "concurrency", "interactive", CALLER.tenant.id): 1}]


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
