"""Test deferred telemetry: in order, complete, and outside the context of the request that deferred it."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import pytest

from tandem.core.clock import SystemClock
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.telemetry.deferred import AT_ONCE, DeferredCalls
from tandem.gateway.telemetry.request_metrics import RequestMetrics
from tandem.gateway.telemetry.request_recorder import RequestKind, RequestRecorder
from tandem.obs.logs.log_context import in_request, request_fields
from tandem.obs.metrics.metrics import Metrics
from tests.unit.gateway.scripted_worker import until
from tests.unit.gateway.watched import Records


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.gateway.telemetry.deferred.DELAY_S", 0.02)


class Receiver:
    """Collect the numbers that it receives."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def receive(self, number: int) -> None:
        if number < 0:
            raise RuntimeError(f"not {number}")
        self.received.append(number)


async def test_deferred_calls_are_made_soon_and_in_order() -> None:
    deferred, receiver = DeferredCalls(), Receiver()
    for number in range(3):
        deferred.later(partial(receiver.receive, number))
    assert receiver.received == []
    await until(lambda: receiver.received)
    assert receiver.received == [0, 1, 2]
    deferred.later(partial(receiver.receive, 3))
    await until(lambda: len(receiver.received) > 3)
    assert receiver.received == [0, 1, 2, 3]


async def test_deferred_calls_can_be_flushed_and_are_not_repeated() -> None:
    deferred, receiver = DeferredCalls(), Receiver()
    deferred.later(partial(receiver.receive, 0))
    deferred.do()
    deferred.do()
    assert receiver.received == [0]


async def test_many_calls_are_made_without_a_delay() -> None:
    deferred, receiver = DeferredCalls(), Receiver()
    for number in range(3 * AT_ONCE - 1):
        deferred.later(partial(receiver.receive, number))
        assert number - len(receiver.received) < AT_ONCE
    assert receiver.received == list(range(2 * AT_ONCE))


def test_a_call_deferred_without_a_running_loop_is_refused_and_made_later() -> None:
    deferred, receiver = DeferredCalls(), Receiver()
    with pytest.raises(RuntimeError):
        deferred.later(partial(receiver.receive, 1))

    async def again() -> None:
        deferred.later(partial(receiver.receive, 2))
        await until(lambda: receiver.received)

    asyncio.run(again())
    assert receiver.received == [1, 2]


async def test_a_failing_call_does_not_affect_the_others(caplog: pytest.LogCaptureFixture) -> None:
    deferred, receiver = DeferredCalls(), Receiver()
    for number in (0, -1, 1, -2, 2):
        deferred.later(partial(receiver.receive, number))
    deferred.do()
    assert receiver.received == [0, 1, 2]
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert caplog.text.count("Receiver.receive") >= 2


async def test_deferred_calls_run_outside_any_request_context() -> None:
    deferred, seen = DeferredCalls(), list[dict[str, str]]()
    with in_request("r-1"):
        for _ in range(AT_ONCE + 1):
            deferred.later(lambda: seen.append(request_fields()))
        await until(lambda: len(seen) > AT_ONCE)
    assert seen == [{}] * (AT_ONCE + 1)


async def test_calls_deferred_by_deferred_calls_are_made_too() -> None:
    deferred, receiver = DeferredCalls(), Receiver()

    def lead() -> None:
        deferred.later(partial(receiver.receive, 1))
        deferred.do()
        assert receiver.received == []

    deferred.later(lead)
    deferred.do()
    assert receiver.received == [1]


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
