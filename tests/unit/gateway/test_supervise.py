"""Test the gateway's background tasks: an unexpected failure of one round is logged, and the task continues."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.admission.api_keys import hash_text, key_digest
from tandem.admission.request_queue import RequestQueue
from tandem.core.clock import SystemClock
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished, FinishReason
from tandem.core.ids import GatewayId
from tandem.gateway.context import supervise
from tandem.gateway.context.supervise import BackgroundLoop
from tandem.gateway.tenants import fairness_sync
from tandem.gateway.tenants.authenticator import ApiKeyAuthenticator
from tandem.gateway.tenants.fairness_sync import FairnessSync
from tandem.gateway.tenants.quotas import TenantQuotas
from tandem.gateway.tenants.tenants_watch import TenantsWatch, read_tenants
from tandem.gateway.workers.pool_events import PlacementsChanged
from tandem.orchestration import director
from tandem.orchestration.director import deadline_error
from tandem.wire.worker_codec import decode_update
from tests.unit.gateway.rig import Rig, collect, failure, one_worker, token
from tests.unit.gateway.scripted_worker import until


class UnexpectedError(Exception):
    """What no part of the gateway expects."""


class FailsOnce:
    """Fail at the first call, then do what `then` does. `num_calls` counts both."""

    def __init__(self, then: Callable[..., Any]) -> None:
        self.num_calls = 0
        self._then = then

    def __call__(self, *arguments: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == 1:
            raise UnexpectedError
        return self._then(*arguments)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "PAUSE_S", 0.01)


def assert_logged_once(caplog: pytest.LogCaptureFixture, work: str) -> None:
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1 and work in errors[0].getMessage()
    assert errors[0].exc_info is not None and "UnexpectedError" in caplog.text and "Traceback" in caplog.text


async def test_a_round_that_fails_is_followed_by_another(caplog: pytest.LogCaptureFixture) -> None:
    async def next_s() -> float:
        return 0.01

    step = FailsOnce(next_s)
    loop = BackgroundLoop("the work", step)
    await loop.start()
    await until(lambda: step.num_calls >= 3)
    await loop.stop()
    assert_logged_once(caplog, "the work")


async def test_a_cancelled_task_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> float:
        await asyncio.Event().wait()
        return 0.0

    loop = BackgroundLoop("the work", work)
    await loop.start()
    await asyncio.sleep(0)
    await asyncio.wait_for(loop.stop(), 10)
    assert not caplog.records


async def test_the_ticker_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tick = FailsOnce(rig.dispatch.director.on_timer)
    monkeypatch.setattr(rig.dispatch.director, "on_timer", tick)
    await until(lambda: tick.num_calls)
    assert (await failure(await rig.open(timeout_s=0.01))).kind is ErrorKind.DEADLINE
    assert_logged_once(caplog, "the tick")


async def test_one_request_that_cannot_be_seen_to_holds_up_no_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = await rig.open(timeout_s=60.0)

    def look(left_s: float, prefill_s: float) -> TandemError | None:
        if left_s > 1.0:
            raise UnexpectedError
        return deadline_error(left_s, prefill_s)

    monkeypatch.setattr(director, "deadline_error", look)
    assert (await failure(await rig.open(timeout_s=0.01))).kind is ErrorKind.DEADLINE
    assert "the gateway failed" in (await failure(first)).message
    await until(lambda: f"request {first.state.request.id} because" in caplog.text)
    first.close()


async def test_workers_are_looked_for_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    discover = FailsOnce(rig.fleet._discover)
    monkeypatch.setattr(rig.fleet, "_discover", discover)
    await until(lambda: discover.num_calls)
    await rig.pair()
    assert_logged_once(caplog, "worker discovery")


async def test_a_worker_that_was_not_understood_is_watched_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await one_worker(rig)
    request = await rig.running()
    key, watched = request.state.key, len(worker.positions)
    monkeypatch.setattr("tandem.gateway.workers.worker_link.decode_update", FailsOnce(decode_update))
    await until(lambda: len(worker.positions) > watched)
    worker.publish(token(key, 0), Finished(key, FinishReason.STOP, 1, 0))
    assert await collect(request) == [0]
    assert_logged_once(caplog, "worker m@")


class Shared:
    """Share nothing between gateways."""

    ttl_s = 0.04

    async def beat(self, gateway: GatewayId) -> int:
        return 3

    async def exchange(self, served: object) -> list[Any]:
        return []

    async def withdraw(self, gateway: GatewayId) -> None:
        """Nobody is left."""

    async def close(self) -> None:
        """Nothing is open."""


async def test_the_heartbeat_of_quotas_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    shared: Any = Shared()
    shared.beat = FailsOnce(shared.beat)
    quotas = TenantQuotas(GatewayId("g"), shared, shared, SystemClock())
    await quotas.start()
    await until(lambda: quotas._num_gateways == 3)
    await quotas.stop()
    assert_logged_once(caplog, "the quota heartbeat")


async def test_lines_are_kept_fair_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(fairness_sync, "PERIOD_S", 0.01)
    shared: Any = Shared()
    shared.exchange = FailsOnce(shared.exchange)
    share = FairnessSync(RequestQueue(4), shared)
    await share.start()
    await until(lambda: shared.exchange.num_calls >= 3)
    await share.stop()
    assert_logged_once(caplog, "the exchange")


async def test_the_tenants_file_that_was_not_taken_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, digest = tmp_path / "tenants.yaml", key_digest("tdm_one")
    path.write_text("tenants: {acme: {keys: []}}")
    door = ApiKeyAuthenticator(read_tenants(path, "off"), lambda: 0)
    path.write_text(f"tenants: {{acme: {{keys: [{{hash: '{hash_text(digest)}'}}]}}}}")
    monkeypatch.setattr(door, "update", FailsOnce(door.update))
    watch = TenantsWatch(path, "off", door)
    await watch.start()
    await until(lambda: digest in door._tenants.keys)
    await watch.stop()
    assert_logged_once(caplog, "the tenants file")


async def test_a_worker_whose_update_could_not_be_applied_sends_it_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await one_worker(rig)
    request = await rig.running()
    key, watched = request.state.key, len(worker.positions)
    apply = FailsOnce(rig.dispatch.director.on_worker_events)
    monkeypatch.setattr(rig.dispatch.director, "on_worker_events", apply)
    worker.publish(token(key, 0), Finished(key, FinishReason.STOP, 1, 0))
    await until(lambda: len(worker.positions) > watched)
    assert worker.positions[-1] == {key: 0}
    worker.publish(token(key, 0), Finished(key, FinishReason.STOP, 1, 0))
    assert await collect(request) == [0]
    assert_logged_once(caplog, "worker m@")


async def test_a_worker_whose_positions_could_not_be_found_is_watched_at_the_next_try(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.dispatch.director, "positions", FailsOnce(rig.dispatch.director.positions))
    await one_worker(rig)


async def test_an_event_that_cannot_be_processed_delays_no_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await one_worker(rig)
    request = await rig.running()
    key = request.state.key
    await until(rig.fleet._events.empty)  # a report among them may place requests too
    monkeypatch.setattr(rig.dispatch.director, "place_queued", FailsOnce(rig.dispatch.director.place_queued))
    rig.fleet._events.put_nowait(PlacementsChanged())
    worker.publish(token(key, 0), Finished(key, FinishReason.STOP, 1, 0))
    assert await collect(request) == [0]
    assert_logged_once(caplog, "PlacementsChanged")
