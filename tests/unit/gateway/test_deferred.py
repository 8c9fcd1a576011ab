"""What answers leave to be done: in order, all of it, and never with what one of them was."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from tandem.core.clock import SystemClock
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.telemetry.deferred import AT_ONCE, MAX_WAITING, TURN_S, DeferredBatches, for_each
from tandem.gateway.telemetry.request_metrics import RequestMetrics
from tandem.gateway.telemetry.request_recorder import RequestKind, RequestRecorder
from tandem.obs.logs.log_context import InRequest, request_fields
from tandem.obs.metrics.metrics import Metrics
from tests.unit.gateway.scripted_worker import until
from tests.unit.gateway.watched import Records


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.gateway.telemetry.deferred.DELAY_S", 0.02)


class Times:
    """It is later only where somebody takes time."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at


class Told:
    """`goes`: what it was told together, each of which takes so many turns."""

    def __init__(self, times: Times | None = None, num_turns: float = 0.0) -> None:
        self._times = times or Times()
        self._num_turns = num_turns
        self.goes: list[list[int]] = []
        self.has_heard = asyncio.Event()
        self.each = for_each(self.hear_one)

    @property
    def heard(self) -> list[int]:
        return [number for go in self.goes for number in go]

    def hear(self, numbers: Sequence[int]) -> None:
        self.goes.append(list(numbers))
        self.has_heard.set()
        self._times.at += self._num_turns * TURN_S

    def hear_one(self, number: int) -> None:
        if number < 0:
            raise RuntimeError(f"not {number}")
        self.hear([number])

    def fail(self, numbers: Sequence[int]) -> None:
        raise RuntimeError(f"not {numbers}")


async def test_what_is_left_is_done_soon_and_in_order() -> None:
    deferred, told = DeferredBatches(Times().now), Told()
    for number in range(3):
        deferred.later(told.hear, number)
    assert told.heard == []
    await asyncio.wait_for(told.has_heard.wait(), 30.0)
    assert told.goes == [[0, 1, 2]]
    told.has_heard.clear()
    deferred.later(told.hear, 3)
    await asyncio.wait_for(told.has_heard.wait(), 30.0)
    assert told.goes == [[0, 1, 2], [3]]


async def test_it_can_be_done_at_once_and_is_not_done_again() -> None:
    deferred, told = DeferredBatches(Times().now), Told()
    deferred.later(told.hear, 0)
    deferred.do()
    deferred.do()
    assert told.heard == [0]


async def test_no_more_waits_than_may() -> None:
    deferred, told = DeferredBatches(Times().now), Told()
    for number in range(MAX_WAITING - 1):
        deferred.later(told.hear, number)
    assert told.heard == []
    for number in range(MAX_WAITING - 1, 10 * MAX_WAITING):
        deferred.later(told.hear, number)
        assert number + 1 - len(told.heard) < MAX_WAITING
    assert told.heard == list(range(len(told.heard)))


async def test_those_that_wait_are_not_done_all_at_once_where_others_wait_for_the_loop() -> None:
    times = Times()
    deferred, told = DeferredBatches(times.now), Told(times, 1.0)
    for number in range(3 * AT_ONCE):
        deferred.later(told.hear, number)
    seen = [0]
    while seen[-1] < 3 * AT_ONCE:
        await asyncio.sleep(0)
        if len(told.heard) > seen[-1]:
            seen.append(len(told.heard))
    assert seen == [0, AT_ONCE, 2 * AT_ONCE, 3 * AT_ONCE]


async def test_works_share_a_turn_until_it_is_over() -> None:
    times = Times()
    deferred, long, short = DeferredBatches(times.now), Told(times, 0.7), Told(times, 0.2)
    for number in range(AT_ONCE):
        deferred.later(short.hear, number)
        deferred.later(short.each, number)
        deferred.later(long.hear, number)
        deferred.later(long.each, number)
    seen: list[tuple[int, int]] = [(0, 0)]
    while seen[-1] != (2 * AT_ONCE, 2 * AT_ONCE):
        await asyncio.sleep(0)
        now = len(long.heard), len(short.heard)
        if now != seen[-1]:
            seen.append(now)
    assert seen == [(0, 0), (0, 2 * AT_ONCE), (2 * AT_ONCE, 2 * AT_ONCE)]


async def test_others_come_between_the_parts_of_what_is_much() -> None:
    times = Times()
    deferred, small, large = DeferredBatches(times.now), Told(times, 1.0), Told(times, 1.0)
    for number in range(2 * AT_ONCE):
        deferred.later(large.hear, number)
    deferred.later(small.hear, 0)
    for _ in range(2):
        deferred._do_some()
    assert len(large.heard) == AT_ONCE and small.heard == [0]
    deferred.do()
    assert large.heard == list(range(2 * AT_ONCE))


def test_where_nothing_runs_it_is_refused_and_done_in_time_later() -> None:
    deferred, told = DeferredBatches(Times().now), Told()
    with pytest.raises(RuntimeError):
        deferred.later(told.hear, 1)

    async def again() -> None:
        deferred.later(told.hear, 2)
        await asyncio.wait_for(told.has_heard.wait(), 30.0)

    asyncio.run(again())
    assert told.heard == [1, 2]


async def test_what_fails_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    deferred, told = DeferredBatches(Times().now), Told()
    for number in (0, -1, 1, -2, 2):
        deferred.later(told.each, number)
        deferred.later(told.fail, number)
        deferred.later(told.hear, number + 10)
    deferred.do()
    assert told.goes == [[0], [1], [2], [10, 9, 11, 8, 12]]
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 3
    assert caplog.text.count("Told.hear_one") >= 2 and "Told.fail" in caplog.text


async def test_it_is_done_in_nobody_s_name() -> None:
    deferred, seen = DeferredBatches(Times().now), list[dict[str, str]]()
    is_done = asyncio.Event()

    def look(_: Sequence[None]) -> None:
        seen.append(request_fields())
        is_done.set()

    with InRequest("r-1"):
        deferred.later(look, None)
        await asyncio.wait_for(is_done.wait(), 30.0)
    assert seen == [{}]


async def test_what_it_leads_to_is_done_at_once_after_all_of_its_kind() -> None:
    deferred, told = DeferredBatches(Times().now), Told()

    def lead(numbers: Sequence[int]) -> None:
        for number in numbers:
            told.hear([-number])
            deferred.later(told.hear, number)
            deferred.do()

    deferred.later(lead, 1)
    deferred.later(lead, 2)
    deferred.do()
    assert told.goes == [[-1], [-2], [1, 2]]
    deferred.do()
    assert told.heard == [-1, -2, 1, 2]


@pytest.mark.parametrize("how", ["the last one ends", "in time"])
async def test_of_an_answer_that_has_ended_all_are_told_soon_and_at_once_where_no_other_is_open(how: str) -> None:
    told = Records()
    recorder = RequestRecorder(SystemClock(), RequestMetrics(Metrics()), observers=[told])
    caller = RequestContext(request_id="r", received_at=recorder.clock.now())
    asked = RequestKind("chat", caller.tenant.lane, False)
    with pytest.raises(TandemError, match="second"), recorder.admission("a", asked, caller):
        with pytest.raises(TandemError, match="first"), recorder.admission("b", asked, caller):
            raise TandemError(ErrorKind.OVERLOADED, "first")
        assert recorder.num_open == 1 and told.taken == []
        if how == "in time":
            await until(lambda: told.taken)
        assert len(told.taken) == (0 if how == "the last one ends" else 1)
        raise TandemError(ErrorKind.OVERLOADED, "second")
    assert [record.error for record in told.taken] == ["first", "second"]
