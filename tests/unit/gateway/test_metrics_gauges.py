"""Test that gauges report the state of a gateway's parts under the listed metric names."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.admission.quota import UNIT, QuotaLimits
from tandem.admission.request_queue import ModelFlow
from tandem.admission.tenant import Tenant
from tandem.admission.tenant_queue import FlowKey
from tandem.core.clock import SystemClock
from tandem.core.errors import ErrorKind
from tandem.core.events import Failed
from tandem.core.ids import GatewayId, TenantId
from tandem.core.lane import Lane
from tandem.core.worker_load import WorkerLoad
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.gauges import (
    watch_answers,
    watch_dispatch,
    watch_grammars,
    watch_prefixes,
    watch_quotas,
    watch_redis,
)
from tandem.gateway.prefix.prefix_index_client import PrefixIndexClient
from tandem.gateway.telemetry.endpoint_metrics import endpoint_metrics
from tandem.gateway.telemetry.request_metrics import RequestMetrics
from tandem.gateway.telemetry.request_recorder import RequestKind, RequestRecorder
from tandem.gateway.tenants.quotas import TenantQuotas
from tandem.obs.metrics.instruments import all_instruments
from tandem.obs.metrics.metrics import Metrics
from tandem.routing import circuit_breaker
from tandem.stores.redis_client import RedisHealth
from tests.unit.gateway.rig import Rig, StartRig
from tests.unit.gateway.scripted_worker import BLOCK_SIZE, until

TENANTS = ("acme", "globex")


def gauges(metrics: Metrics) -> dict[str, Any]:
    return {family.instrument.name: dict(family.points) for family in metrics.collect()}


async def test_the_gauges_of_the_worker_pool(start_rig: StartRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "BURST_S", 0.0)
    rig = await start_rig(max_retries=10)
    metrics = Metrics()
    watch_dispatch(metrics, rig.dispatch)
    waiting = await rig.open()
    before = gauges(metrics)
    assert before["tandem.queued_requests"] == {("interactive",): 1, ("standard",): 0, ("batch",): 0}
    assert (before["tandem.ready"], before["tandem.served_models"]) == ({(): 0}, {(): 0})
    worker = await rig.add("m", "mixed")
    worker.after_submit = lambda job: [Failed(job.key, ErrorKind.INTERNAL, "broken")] if len(worker.jobs) < 5 else ()
    await until(lambda: len(worker.jobs) >= 3)
    await until(lambda: gauges(metrics)["tandem.worker.breaker"][("m",)] in (0.5, 1.0))
    after = gauges(metrics)
    assert after["tandem.live_workers"] == {("prefill",): 0, ("decode",): 0, ("mixed",): 1}
    assert (after["tandem.ready"], after["tandem.served_models"]) == ({(): 1}, {(): 1})
    waiting.close()


async def test_the_fairness_index_is_that_of_each_model_and_lane(rig: Rig) -> None:
    """One tenant is charged three times as much as the other. The samples are later than those of the driver."""
    metrics, queue = Metrics(), rig.dispatch.director.queue
    watch_dispatch(metrics, rig.dispatch)
    assert "tandem.fairness_index" not in gauges(metrics), "nothing was requested"
    callers = [RequestContext(request_id=name, received_at=0.0, tenant=Tenant(id=TenantId(name))) for name in TENANTS]
    streams = [await rig.open(caller=caller) for caller in callers]
    (model,) = queue.models()
    flows = [ModelFlow(model, FlowKey(Lane.INTERACTIVE, TenantId(name))) for name in TENANTS]
    now = rig.clock.now()
    for second in range(50):
        queue.sample(now + 2 + second)
        for flow, num_tokens in zip(flows, (300, 100), strict=True):
            queue.add_remote_usage(flow, num_tokens)
    assert gauges(metrics)["tandem.fairness_index"] == {
        (model, "interactive"): pytest.approx(0.8, abs=0.01), (model, "standard"): 1.0, (model, "batch"): 1.0
    }  # fmt: skip
    for stream in streams:
        stream.close()


async def test_an_endpoint_picker_sees_the_queue_and_the_blocks_of_all_workers(rig: Rig) -> None:
    recorder = RequestRecorder(rig.clock, RequestMetrics(Metrics()))
    metrics = endpoint_metrics(rig.dispatch, recorder)
    waiting = await rig.open()
    caller = RequestContext(request_id="r", received_at=rig.clock.now())
    with (
        pytest.raises(asyncio.CancelledError),
        recorder.admission("a", RequestKind("chat", caller.tenant.lane, False), caller),
        recorder.admission("b", RequestKind("chat", caller.tenant.lane, False), caller),
    ):
        queued = gauges(metrics)
        assert queued == {"vllm:num_requests_waiting": {(): 1}, "vllm:num_requests_running": {(): 1}}
        raise asyncio.CancelledError
    waiting.close()
    first, second = await rig.add("m", "mixed"), await rig.add("n", "mixed")
    for worker, num_free, num_reserved in ((first, 40, 8), (second, 4, 8)):
        worker.load = WorkerLoad(num_blocks=64, num_free_blocks=num_free, num_reserved_blocks=num_reserved)
        worker.break_streams()  # it is described again, with its load
    await until(lambda: gauges(metrics).get("vllm:kv_cache_usage_perc") == {(): 0.75})
    assert gauges(metrics)["vllm:cache_config_info"] == {(str(BLOCK_SIZE), "128"): 1}


async def test_the_scrape_addresses_of_workers(rig: Rig) -> None:
    silent, worker = await rig.add("silent", "mixed"), await rig.add("m", "mixed")
    assert not silent.metrics_address
    worker.metrics_address = "127.0.0.1:9100"
    late = await rig.add("late", "decode")
    late.metrics_address = "127.0.0.1:9101"
    worker.break_streams()  # it is described again
    await until(lambda: len(rig.dispatch.scrape_targets()) == 2)
    assert {view.ref.id: (address, view.pool, view.model) for address, view in rig.dispatch.scrape_targets()} == {
        "m": ("127.0.0.1:9100", "mixed", "tiny"),
        "late": ("127.0.0.1:9101", "decode", "tiny"),
    }


async def test_the_gauges_of_open_requests() -> None:
    metrics, clock = Metrics(), SystemClock()
    recorder = RequestRecorder(clock, RequestMetrics(metrics))
    watch_answers(metrics, recorder)
    caller = RequestContext(request_id="r", received_at=clock.now())
    lane = caller.tenant.lane
    with (
        pytest.raises(asyncio.CancelledError),
        recorder.admission("a", RequestKind("chat", lane, False), caller),
    ):
        assert gauges(metrics)["tandem.open_requests"] == {(): 1}
        assert gauges(metrics)["tandem.tenant.open_requests"] == {("open",): 1}
        raise asyncio.CancelledError
    assert gauges(metrics)["tandem.open_requests"] == {(): 0}
    assert "tandem.tenant.open_requests" not in gauges(metrics)


def test_the_gauge_of_waiting_grammars() -> None:
    metrics = Metrics()
    watch_grammars(metrics, lambda: 3)
    assert gauges(metrics) == {"tandem.waiting_grammars": {(): 3}}


def test_the_gauges_of_redis() -> None:
    metrics, health = Metrics(), RedisHealth()
    watch_redis(metrics, health)
    assert gauges(metrics) == {"tandem.redis.up": {(): 1}}
    for store in ("quotas", "quotas", "registry"):
        health.failed(store, "GET", TimeoutError())
    assert gauges(metrics) == {"tandem.redis.up": {(): 0}, "tandem.redis.errors": {("quotas",): 2, ("registry",): 1}}


def test_the_gauges_of_quotas() -> None:
    metrics = Metrics()
    quotas = TenantQuotas(GatewayId("g"), *[SimpleNamespace()] * 2, SystemClock())  # type: ignore[arg-type]
    watch_quotas(metrics, quotas)
    account = quotas._state(TenantId("acme"), QuotaLimits(60, 100, 0))
    assert gauges(metrics) == {"tandem.quotas.shared": {(): 1}}, "nobody has been told yet what is left"
    account.levels = account.levels._replace(requests=45 * UNIT, tokens=-5)
    assert gauges(metrics)["tandem.tenant.quota.left"] == {("acme", "requests"): 0.75, ("acme", "tokens"): 0.0}
    quotas.is_reachable = False
    assert gauges(metrics)["tandem.quotas.shared"] == {(): 0}


def test_the_gauges_of_the_prefix_index() -> None:
    metrics = Metrics()
    index = PrefixIndexClient(SimpleNamespace(), SimpleNamespace(), 1, SystemClock())  # type: ignore[arg-type]
    watch_prefixes(metrics, index)
    index.false_hits.num_predicted, index.false_hits.num_missed = 30, 10
    named = {name: points[()] for name, points in gauges(metrics).items()}
    assert named["tandem.prefix.predicted_tokens"] == 30 and named["tandem.prefix.stale_hit_tokens"] == 10
    assert named["tandem.prefix.index.reachable"] == 1
    assert named["tandem.prefix.index.blocks"] == named["tandem.prefix.index.workers"] == 0
    prefixes = {instrument.name for instrument in all_instruments() if instrument.name.startswith("tandem.prefix.")}
    of_workers = ("queried_tokens", "hit_tokens", "remote_hit_tokens", "file_hit_tokens")
    worker_s = {f"tandem.prefix.{name}" for name in of_workers}
    assert {*named} == prefixes - worker_s
