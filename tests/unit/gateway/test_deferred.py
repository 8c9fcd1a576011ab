"""Test deferred telemetry: in order, complete, and outside the context of the request that deferred it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from tandem.core.clock import SystemClock
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.telemetry.deferred import AT_ONCE, DeferredBatches, for_each
from tandem.gateway.telemetry.request_metrics import RequestMetrics
from tandem.gateway.telemetry.request_recorder import RequestKind, RequestRecorder
from tandem.obs.logs.log_context import InRequest, request_fields
from tandem.obs.metrics.metrics import Metrics
from tests.unit.gateway.scripted_worker import until
from tests.unit.gateway.watched import Records


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.gateway.telemetry.deferred.DELAY_S", 0.02)


class Receiver:
    """Collect the batches that it receives in `goes`."""

    def __init__(self) -> None:
        self.goes: list[list[int]] = []
        self.has_received = asyncio.Event()
        self.each = for_each(self.receive_one)

    @property
    def received(self) -> list[int]:
        return [number for go in self.goes for number in go]

    def receive(self, numbers: Sequence[int]) -> None:
        self.goes.append(list(numbers))
        self.has_received.set()

    def receive_one(self, number: int) -> None:
        if number < 0:
            raise RuntimeError(f"not {number}")
        self.receive([number])

    def fail(self, numbers: Sequence[int]) -> None:
        raise RuntimeError(f"not {numbers}")


async def test_deferred_work_is_done_soon_and_in_order() -> None:
    deferred, receiver = DeferredBatches(), Receiver()
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
    deferred, receiver = DeferredBatches(), Receiver()
    deferred.later(receiver.receive, 0)
    deferred.do()
    deferred.do()
    assert receiver.received == [0]


async def test_many_items_are_processed_without_a_delay() -> None:
    deferred, receiver = DeferredBatches(), Receiver()
    for number in range(3 * AT_ONCE - 1):
        deferred.later(receiver.receive, number)
    assert [len(go) for go in receiver.goes] == [AT_ONCE, AT_ONCE]
    deferred.do()
    assert receiver.received == list(range(3 * AT_ONCE - 1))


def test_work_deferred_without_a_running_loop_is_refused_and_done_later() -> None:
    deferred, receiver = DeferredBatches(), Receiver()
    with pytest.raises(RuntimeError):
        deferred.later(receiver.receive, 1)

    async def again() -> None:
        deferred.later(receiver.receive, 2)
        await asyncio.wait_for(receiver.has_received.wait(), 30.0)

    asyncio.run(again())
    assert receiver.received == [1, 2]


async def test_a_failing_receiver_does_not_affect_the_others(caplog: pytest.LogCaptureFixture) -> None:
    deferred, receiver = DeferredBatches(), Receiver()
    for number in (0, -1, 1, -2, 2):
        deferred.later(receiver.each, number)
        deferred.later(receiver.fail, number)
        deferred.later(receiver.receive, number + 10)
    deferred.do()
    assert receiver.goes == [[0], [1], [2], [10, 9, 11, 8, 12]]
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 3
    assert caplog.text.count("Receiver.receive_one") >= 2 and "Receiver.fail" in caplog.text


async def test_deferred_work_runs_outside_any_request_context() -> None:
    deferred, seen = DeferredBatches(), list[dict[str, str]]()
    is_done = asyncio.Event()

    def look(_: Sequence[None]) -> None:
        seen.append(request_fields())
        is_done.set()

    with InRequest("r-1"):
        deferred.later(look, None)
        await asyncio.wait_for(is_done.wait(), 30.0)
    assert seen == [{}]


async def test_work_deferred_by_deferred_work_is_flushed_too() -> None:
    deferred, receiver = DeferredBatches(), Receiver()

    def lead(numbers: Sequence[int]) -> None:
        for number in numbers:
            deferred.later(receiver.receive, number)

    deferred.later(lead, 1)
    deferred.later(lead, 2)
    deferred.do()
    assert receiver.goes == [[1, 2]]
    deferred.do()
    assert receiver.goes == [[1, 2]]


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
