"""Test what a gateway counts for planners about requests that arrive, wait, end and fail."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from tandem.core.clock import SystemClock
from tandem.core.config import SloConfig
from tandem.core.ids import GatewayId, RequestId
from tandem.core.request import Request, SamplingParams
from tandem.gateway.orchestration.demand import DemandCounter, DemandPublisher
from tandem.gateway.telemetry.usage import Usage
from tandem.scaling.demand_totals import DemandTotals
from tandem.sched.state.slo_targets import LatencyTargets
from tandem.stores.demand_store import DemandStore
from tests.unit.gateway.records import record

TARGETS = LatencyTargets.of(SloConfig(ttft_ms=200, itl_ms=50))


def request(num_tokens: int, model: str = "tiny") -> Request:
    return Request(
        id=RequestId("r"), model=model, prompt_tokens=(1,) * num_tokens, sampling=SamplingParams(max_tokens=4)
    )


@pytest.fixture
def counter() -> DemandCounter:
    return DemandCounter(TARGETS, dict)


def test_requests_count_on_arrival_and_attention_pairs_at_the_first_token(counter: DemandCounter) -> None:
    counter.on_admitted(request(10))
    assert counter.totals()["tiny"] == DemandTotals(num_requests=1, num_input_tokens=10)
    counter.on_first_token(request(10), 4)
    counted = counter.totals()["tiny"]
    # Six tokens behind four: each attends to the four, and to the six up to itself.
    assert (counted.num_cached_tokens, counted.num_prefill_pairs) == (4, 6 * 4 + 1 + 2 + 3 + 4 + 5 + 6)
    assert counted.num_served == 1
    counted.num_requests = 99
    assert counter.totals()["tiny"].num_requests == 1, "whoever asks has a copy"


def test_answers_count_when_they_end(counter: DemandCounter) -> None:
    counter.on_admitted(request(10))
    counter.answered(record(usage=Usage(10, 7, 2), first_token_s=0.201, num_gaps=6, num_late_gaps=2))
    counter.answered(record(usage=Usage(10, 3, 2), first_token_s=0.2, num_gaps=20, num_late_gaps=1))
    counted = counter.totals()["tiny"]
    assert (counted.num_output_tokens, counted.num_gaps, counted.num_late_gaps) == (10, 26, 3)
    assert (counted.num_late_ttft, counted.num_failed) == (1, 0)


@pytest.mark.parametrize(
    ("outcome", "first_token_s", "lane", "late", "failed"),
    [
        ("overloaded", None, "interactive", 0, 1),
        ("predicted_slo_miss", None, "interactive", 0, 1),
        ("no_worker", None, "interactive", 0, 1),
        ("deadline_exceeded", 9.0, "interactive", 0, 1),
        ("quota_exceeded", None, "interactive", 0, 0),
        ("invalid_request", None, "interactive", 0, 0),
        ("cancelled", 9.0, "interactive", 0, 0),
        ("worker_lost", 9.0, "interactive", 1, 0),
        ("finished", 9.0, "batch", 0, 0),
    ],
)
def test_failures_count_only_where_more_workers_would_have_helped(
    counter: DemandCounter, outcome: str, first_token_s: float | None, lane: str, late: int, failed: int
) -> None:
    counter.on_admitted(request(10))
    counter.answered(record(outcome=outcome, first_token_s=first_token_s, lane=lane))
    counted = counter.totals()["tiny"]
    assert (counted.num_late_ttft, counted.num_failed) == (late, failed)


def test_a_model_that_nobody_serves_is_not_counted(counter: DemandCounter) -> None:
    counter.answered(record(model=""))
    assert counter.totals() == {}


@pytest.mark.redis
async def test_the_demand_is_published_repeatedly_and_withdrawn_at_the_end(
    counter: DemandCounter, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.gateway.orchestration.demand.PERIOD_S", 0.01)
    reader = DemandStore(redis_url, "beat")
    beat = DemandPublisher(GatewayId("g1"), DemandStore(redis_url, "beat"), counter, SystemClock())
    await beat.start()
    counter.on_admitted(request(10))
    async with asyncio.timeout(20):
        while not [one for one in await reader.read() if one.totals.get("tiny") == DemandTotals(1, 10)]:
            await asyncio.sleep(0.005)
    (demand,) = await reader.read()
    assert math.isfinite(demand.lived_s), "a planner is to know since when it counts"
    await beat.stop()
    assert await reader.read() == ()
    await reader.close()


async def test_an_unreachable_redis_does_not_stop_the_publisher(
    counter: DemandCounter, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.gateway.orchestration.demand.PERIOD_S", 0.01)
    beat = DemandPublisher(GatewayId("g1"), DemandStore(f"unix://{tmp_path}/none.sock", "beat"), counter, SystemClock())
    await beat.start()
    await asyncio.sleep(0.05)
    assert beat._loop._task is not None and not beat._loop._task.done()
    await beat.stop()
