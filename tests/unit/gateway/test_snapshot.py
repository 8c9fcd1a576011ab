"""Test the snapshot of a gateway: its workers, the KV flows of requests between them, and the queue, without probes."""

from __future__ import annotations

from tandem.core.clock import SystemClock
from tandem.core.errors import ErrorKind
from tandem.core.events import Finished, FinishReason, KVReceived
from tandem.core.ids import GatewayId, WorkerId
from tandem.gateway.console.snapshot import take_snapshot
from tandem.gateway.console.view import GatewaySnapshot
from tandem.gateway.telemetry.kv_flows import Flow
from tests.unit.gateway.rig import Rig, busy_pair, collect, token
from tests.unit.gateway.scripted_worker import until


def snapshot_of(rig: Rig) -> GatewaySnapshot:
    return take_snapshot(GatewayId("gw-1"), rig.dispatch, rig.fleet, SystemClock(), 0.0)


async def test_a_gateway_without_workers_names_what_is_missing(rig: Rig) -> None:
    seen = snapshot_of(rig)
    assert (seen.missing, seen.known, seen.live, seen.flows, dict(seen.num_open)) == ("no live worker", [], [], (), {})


async def test_probes_are_neither_requests_nor_flows(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    seen = snapshot_of(rig)
    assert seen.missing is None and set(seen.known) == {prefill.ref, decode.ref}
    assert {worker.ref for worker in seen.live} == set(seen.known) and [model.name for model in seen.models] == ["tiny"]
    assert seen.flows == () and dict(seen.num_open) == {}


async def test_kv_that_moves_for_a_client_is_a_flow(rig: Rig) -> None:
    prefill, decode, request = await busy_pair(rig)
    seen = snapshot_of(rig)
    assert dict(seen.num_open) == {("open", False): 1} and seen.now >= seen.began_at
    key = request.state.key
    prefill.publish(KVReceived(key, 1, 48, 16, 0, 0.1, 0.1, 0.1, source=decode.ref), token(key, 0))
    decode.publish(KVReceived(key, 1, 64, 0, 64, 0.1, 0.1, 0.1), token(key, 0), token(key, 1), token(key, 2))
    decode.publish(Finished(key, FinishReason.LENGTH, 3, 0))
    assert await collect(request) == [0, 1, 2]
    await until(lambda: len(snapshot_of(rig).flows) == 2)
    p, d = WorkerId("p"), WorkerId("d")
    assert set(snapshot_of(rig).flows) == {Flow(p, d, "handoff", 1, 64), Flow(d, p, "prefix", 1, 48)}
    request.close()
    await until(lambda: not snapshot_of(rig).num_open)


async def test_queued_requests_are_reported_separately(rig: Rig) -> None:
    await rig.pair()
    for worker in rig.workers:
        worker.on_submit = lambda job: (ErrorKind.OVERLOADED, "full")
    request = await rig.open()
    await until(lambda: dict(snapshot_of(rig).num_open) == {("open", True): 1})
    request.close()
