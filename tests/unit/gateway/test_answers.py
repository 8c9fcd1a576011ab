"""An answer of several prompts in the face of cancellation, and what it adds up; without a protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import msgspec
import pytest

from tandem.core.clock import SystemClock
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished, FinishReason, PromptScored, SampledToken, Token
from tandem.core.ids import JobKey, RequestId, WorkerId
from tandem.core.lane import Lane
from tandem.core.request import Request
from tandem.flow.ledger import PhaseLedger
from tandem.gateway.answers import Answers
from tandem.gateway.caller import Caller
from tandem.gateway.chronicle import Chronicles
from tandem.gateway.completion import Ending
from tandem.gateway.echo import PromptScores
from tandem.gateway.manner import Manners
from tandem.gateway.measures import Measures
from tandem.gateway.merge import merged
from tandem.gateway.openai_schema import CompletionBody
from tandem.gateway.pace import Pace
from tandem.gateway.ports import ScrapeTarget, ServedModel
from tandem.gateway.record import AnswerRecord
from tandem.gateway.standing import Standing
from tandem.gateway.text import TextModel
from tandem.gateway.usage import Tally
from tandem.obs.metrics import Buckets, Metrics
from tandem.routing.breaker import BreakerState
from tandem.routing.view import Pool
from tests.unit.gateway.instant import instant_events

CALLER = Caller(request_id="r", came_at=0.0)


class SlowToClose:
    """Says a token and then nothing; its close takes a while, and tells whether it came to its end."""

    path = "remote"
    num_attempts = 1
    workers = ("p1", "d1")
    reasons: ClassVar[dict[str, object]] = {}
    standing = Standing()

    def __init__(self, request: Request) -> None:
        self.is_closed = False
        self._events = instant_events(request, [5])

    async def __aiter__(self) -> AsyncIterator[Token | PromptScored | Finished]:
        yield self._events[0]
        await asyncio.Event().wait()

    def finish(self, choice: int) -> None:
        raise AssertionError(choice)

    async def aclose(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        self.is_closed = True


class Records:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.taken: list[AnswerRecord] = []

    def answered(self, records: Sequence[AnswerRecord]) -> None:
        self.taken += records


class SlowDispatch:
    """Takes a while to open the `slow_at`-th request."""

    def __init__(self, served: ServedModel, slow_at: int = -1) -> None:
        self.opened: list[SlowToClose] = []
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

    def scrape_targets(self) -> list[ScrapeTarget]:
        return []

    def breakers(self) -> dict[WorkerId, BreakerState]:
        return {}

    def problem(self) -> str | None:
        return None

    def num_live(self) -> dict[Pool, int]:
        return {"mixed": 1}

    def foresee(self, requests: Sequence[Request], caller: Caller) -> None:
        if self.never is not None:
            raise self.never

    async def open(self, request: Request, caller: Caller, ledger: PhaseLedger) -> SlowToClose:
        if len(self.opened) == self._slow_at:
            self.waiting.set()
            await asyncio.Event().wait()
        self.opened.append(SlowToClose(request))
        return self.opened[-1]


@pytest.fixture
def served(make_text: Callable[..., TextModel]) -> ServedModel:
    return ServedModel(name="tiny", max_model_len=100, text=make_text(), created=0)


def several() -> CompletionBody:
    return msgspec.convert({"model": "tiny", "prompt": ["a", "b", "c"]}, CompletionBody)


@pytest.mark.parametrize("num_cancels", [1, 2])
async def test_all_prompts_are_closed_to_the_end_though_the_closing_is_cancelled(
    served: ServedModel, num_cancels: int
) -> None:
    dispatch, records = SlowDispatch(served), Records()
    with ThreadPoolExecutor(1) as executor:
        chronicles = Chronicles(SystemClock(), Measures(Metrics()), observers=[records])
        answers = Answers(dispatch, executor, chronicles, Manners())
        seen = asyncio.Event()

        async def read() -> None:
            async with await answers.complete(several(), CALLER) as answer:
                async for _ in answer.parts():
                    seen.set()

        task = asyncio.create_task(read())
        await seen.wait()
        for _ in range(num_cancels):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait({task})
    assert task.cancelled()
    assert [stream.is_closed for stream in dispatch.opened] == [True] * 3
    assert chronicles.num_open == 0
    assert [(record.endpoint, record.outcome) for record in records.taken] == [("completion", "cancelled")]


async def test_prompts_that_were_admitted_are_closed_when_the_client_leaves_while_others_wait(
    served: ServedModel,
) -> None:
    dispatch, chronicles = SlowDispatch(served, slow_at=2), Chronicles(SystemClock(), Measures(Metrics()))
    with ThreadPoolExecutor(1) as executor:
        task = asyncio.create_task(Answers(dispatch, executor, chronicles, Manners()).complete(several(), CALLER))
        await dispatch.waiting.wait()
        task.cancel()
        await asyncio.wait({task})
    assert [stream.is_closed for stream in dispatch.opened] == [True] * 2
    assert chronicles.num_open == 0


async def test_prompts_that_would_never_all_be_admitted_are_one_refusal(served: ServedModel) -> None:
    dispatch, records, metrics = SlowDispatch(served), Records(), Metrics()
    dispatch.never = TandemError(ErrorKind.INVALID_REQUEST, "too many", reason="concurrency")
    chronicles = Chronicles(SystemClock(), Measures(metrics), observers=[records])
    with ThreadPoolExecutor(1) as executor, pytest.raises(TandemError, match="too many"):
        await Answers(dispatch, executor, chronicles, Manners()).complete(several(), CALLER)
    assert dispatch.opened == [] and chronicles.num_open == 0
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

    stream = merged([source(number) for number in range(3)])
    seen = {await anext(stream) for _ in range(30)}
    await stream.aclose()
    assert seen == {0, 1, 2} and sorted(closed) == [0, 1, 2]


async def test_a_merger_that_nobody_reads_does_not_run_ahead_for_ever() -> None:
    produced = 0

    async def source() -> AsyncGenerator[int, None]:
        nonlocal produced
        while True:
            produced += 1
            yield produced

    stream = merged([source(), source()])
    await anext(stream)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert produced < 100
    await stream.aclose()


def test_scores_may_come_again_but_not_from_elsewhere() -> None:
    scores = PromptScores([1, 2, 3])
    key = JobKey(RequestId("r"), 1)
    scored = [SampledToken(2, -1.0), SampledToken(3, -2.0)]
    for first, tokens in ((1, scored), (2, scored[1:]), (1, scored[:1])):
        scores.take(PromptScored(key, first, tuple(tokens)))
    assert [token.logprob for token in scores.complete()] == [None, -1.0, -2.0]
    for first in (0, 2):
        with pytest.raises(TandemError) as caught:
            scores.take(PromptScored(key, first, tuple(scored)))
        assert caught.value.kind is ErrorKind.INTERNAL
    with pytest.raises(TandemError):
        PromptScores([1, 2]).complete()


def test_a_tally_counts_a_prompts_cache_once_for_all_of_its_choices() -> None:
    pace = Pace(lambda: 0.0, Buckets(()), 0.0, lambda at: None)
    tally = Tally(2, pace)
    for num_tokens in (10, 20):
        tally.admitted(num_tokens)
    for num_tokens in range(1, 41):
        pace.left(3)
        assert (tally.usage().num_prompt, tally.usage().num_output, tally.usage().num_cached) == (30, num_tokens, None)
    pace.left(1)
    pace.end()
    assert (pace.num_of(3), pace.num_of(1), pace.num_of(0), tally.usage().num_output) == (40, 1, 0, 41)
    for choice, cached in ((0, 8), (1, 8), (2, None), (3, 16)):
        tally.ended(Ending(FinishReason.STOP, 4, cached, choice))
    assert (tally.usage().num_output, tally.usage().num_cached, len(tally.reasons)) == (16, 24, 4)
