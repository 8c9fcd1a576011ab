"""Test deferred telemetry: in order, complete, and outside the context of the request that deferred it."""

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


class ManualClock:
    """Advance only where a receiver takes time."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at


class Receiver:
    """Collect the batches that it receives in `goes`; each takes `num_turns` turns of the clock."""

    def __init__(self, clock: ManualClock | None = None, num_turns: float = 0.0) -> None:
        self._times = clock or ManualClock()
        self._num_turns = num_turns
        self.goes: list[list[int]] = []
        self.has_received = asyncio.Event()
        self.each = for_each(self.receive_one)

    @property
    def received(self) -> list[int]:
        return [number for go in self.goes for number in go]

    def receive(self, numbers: Sequence[int]) -> None:
        self.goes.append(list(numbers))
        self.has_received.set()
        self._times.at += self._num_turns * TURN_S

    def receive_one(self, number: int) -> None:
        if number < 0:
            raise RuntimeError(f"not {number}")
        self.receive([number])

    def fail(self, numbers: Sequence[int]) -> None:
        raise RuntimeError(f"not {numbers}")


async def test_deferred_work_is_done_soon_and_in_order() -> None:
    deferred, receiver = DeferredBatches(ManualClock().now), Receiver()
    for number in range(3):
        deferred.later(receiver.receive, number)
    assert receiver.received == []
    await asyncio.wait_for(receiver.has_received.wait(), 30.0)
    assert receiver.goes == [[0, 1, 2]]
    receiver.has_received.clear()
    deferred.later(receiver.receive, 3)
    await asyncio.wait_for(receiver.has_received.wait(), 30.0)
    assert receiver.goes == [[0, 1, 2], [3]]


async def test_deferred_work_can_be_flushed_and_is_not_repeated() -> None:
    deferred, receiver = DeferredBatches(ManualClock().now), Receiver()
    deferred.later(receiver.receive, 0)
    deferred.do()
    deferred.do()
    assert receiver.received == [0]


async def test_the_deferred_queue_is_bounded() -> None:
    deferred, receiver = DeferredBatches(ManualClock().now), Receiver()
    for number in range(MAX_WAITING - 1):
        deferred.later(receiver.receive, number)
    assert receiver.received == []
    for number in range(MAX_WAITING - 1, 10 * MAX_WAITING):
        deferred.later(receiver.receive, number)
        assert number + 1 - len(receiver.received) < MAX_WAITING
    assert receiver.received == list(range(len(receiver.received)))


async def test_a_long_queue_is_split_so_that_other_tasks_run() -> None:
    clock = ManualClock()
    deferred, receiver = DeferredBatches(clock.now), Receiver(clock, 1.0)
    for number in range(3 * AT_ONCE):
        deferred.later(receiver.receive, number)
    seen = [0]
    while seen[-1] < 3 * AT_ONCE:
        await asyncio.sleep(0)
        if len(receiver.received) > seen[-1]:
            seen.append(len(receiver.received))
    assert seen == [0, AT_ONCE, 2 * AT_ONCE, 3 * AT_ONCE]


async def test_kinds_of_work_share_a_turn_until_its_time_is_over() -> None:
    clock = ManualClock()
    deferred, long, short = DeferredBatches(clock.now), Receiver(clock, 0.7), Receiver(clock, 0.2)
    for number in range(AT_ONCE):
        deferred.later(short.receive, number)
        deferred.later(short.each, number)
        deferred.later(long.receive, number)
        deferred.later(long.each, number)
    seen: list[tuple[int, int]] = [(0, 0)]
    while seen[-1] != (2 * AT_ONCE, 2 * AT_ONCE):
        await asyncio.sleep(0)
        now = len(long.received), len(short.received)
        if now != seen[-1]:
            seen.append(now)
    assert seen == [(0, 0), (0, 2 * AT_ONCE), (2 * AT_ONCE, 2 * AT_ONCE)]


async def test_other_work_runs_between_the_batches_of_a_long_queue() -> None:
    clock = ManualClock()
    deferred, small, large = DeferredBatches(clock.now), Receiver(clock, 1.0), Receiver(clock, 1.0)
    for number in range(2 * AT_ONCE):
        deferred.later(large.receive, number)
    deferred.later(small.receive, 0)
    for _ in range(2):
        deferred._do_some()
    assert len(large.received) == AT_ONCE and small.received == [0]
    deferred.do()
    assert large.received == list(range(2 * AT_ONCE))


def test_work_deferred_without_a_running_loop_is_refused_and_done_later() -> None:
    deferred, receiver = DeferredBatches(ManualClock().now), Receiver()
    with pytest.raises(RuntimeError):
        deferred.later(receiver.receive, 1)

    async def again() -> None:
        deferred.later(receiver.receive, 2)
        await asyncio.wait_for(receiver.has_received.wait(), 30.0)

    asyncio.run(again())
    assert receiver.received == [1, 2]


async def test_a_failing_receiver_does_not_affect_the_others(caplog: pytest.LogCaptureFixture) -> None:
    deferred, receiver = DeferredBatches(ManualClock().now), Receiver()
    for number in (0, -1, 1, -2, 2):
        deferred.later(receiver.each, number)
        deferred.later(receiver.fail, number)
        deferred.later(receiver.receive, number + 10)
    deferred.do()
    assert receiver.goes == [[0], [1], [2], [10, 9, 11, 8, 12]]
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 3
    assert caplog.text.count("Receiver.receive_one") >= 2 and "Receiver.fail" in caplog.text


async def test_deferred_work_runs_outside_any_request_context() -> None:
    deferred, seen = DeferredBatches(ManualClock().now), list[dict[str, str]]()
    is_done = asyncio.Event()

    def look(_: Sequence[None]) -> None:
        seen.append(request_fields())
        is_done.set()

    with InRequest("r-1"):
        deferred.later(look, None)
        await asyncio.wait_for(is_done.wait(), 30.0)
    assert seen == [{}]


async def test_work_deferred_by_deferred_work_is_flushed_too() -> None:
    deferred, receiver = DeferredBatches(ManualClock().now), Receiver()

    def lead(numbers: Sequence[int]) -> None:
        for number in numbers:
            receiver.receive([-number])
            deferred.later(receiver.receive, number)
            deferred.do()

    deferred.later(lead, 1)
    deferred.later(lead, 2)
    deferred.do()
    assert receiver.goes == [[-1], [-2], [1, 2]]
    deferred.do()
    assert receiver.received == [-1, -2, 1, 2]


@pytest.mark.parametrize("how", ["the last one ends", "in time"])
async def test_observers_get_a_record_soon_and_at_once_when_no_request_is_open(how: str) -> None:
    observer = Records()
    recorder = RequestRecorder(SystemClock(), RequestMetrics(Metrics()), observers=[observer])
    caller = RequestContext(request_id="r", received_at=recorder.clock.now())
    request_kind = RequestKind("chat", caller.tenant.lane, False)
    with pytest.raises(TandemError, match="second"), recorder.admission("a", request_kind, caller):
        with pytest.raises(TandemError, match="first"), recorder.admission("b", request_kind, caller):
            raise TandemError(ErrorKind.OVERLOADED, "first")
        assert recorder.num_open == 1 and observer.taken == []
        if how == "in time":
            await until(lambda: observer.taken)
        assert len(observer.taken) == (0 if how == "the last one ends" else 1)
        raise TandemError(ErrorKind.OVERLOADED, "second")
    assert [record.error for record in observer.taken] == ["first", "second"]
