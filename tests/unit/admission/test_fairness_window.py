"""Test Jain's index of the tenants that waited during the last minute."""

from __future__ import annotations

import pytest

from tandem.admission.fairness_window import MIN_SAMPLES, WINDOW_S, FairnessWindow, jain_index
from tandem.admission.request_queue import RequestQueue
from tandem.admission.tenant_queue import FlowKey
from tandem.core.ids import RequestId, TenantId
from tandem.core.lane import Lane
from tests.unit.admission.requests import request

A, B, C = (FlowKey(Lane.INTERACTIVE, TenantId(name)) for name in "abc")


@pytest.mark.parametrize(
    ("values", "index"), [((), 1.0), ((3,), 1.0), ((0, 0), 1.0), ((2, 2, 2), 1.0), ((5, 0), 0.5), ((3, 1), 0.8)]
)
def test_jain_s_index(values: tuple[float, ...], index: float) -> None:
    assert jain_index(values) == pytest.approx(index)


def fill(window: FairnessWindow, began: int, num: int, rates: dict[FlowKey, float]) -> float:
    for second in range(began, began + num):
        window.add(second, {flow_key: 1000 + rate * second for flow_key, rate in rates.items()})
    return began + num - 1.0


def test_tenants_count_that_waited_for_half_of_the_window() -> None:
    window = FairnessWindow()
    now = fill(window, 0, MIN_SAMPLES - 1, {A: 30, B: 10})
    assert window.index(Lane.INTERACTIVE, now) == 1.0, "not yet"
    window.add(now + 1, {A: 1000 + 30 * (now + 1), B: 1000 + 10 * (now + 1), C: 1e9})
    assert window.index(Lane.INTERACTIVE, now + 1) == pytest.approx(0.8)
    assert window.index(Lane.BATCH, now + 1) == 1.0, "each lane by itself"


def test_what_is_older_than_the_window_does_not_count() -> None:
    window = FairnessWindow()
    fill(window, 0, 60, {A: 30, B: 10})
    now = fill(window, 60, 61, {A: 20, B: 20})
    assert window.index(Lane.INTERACTIVE, now) == pytest.approx(1.0)
    now = fill(window, 121, 60, {A: 50})
    assert window.index(Lane.INTERACTIVE, now) == 1.0, "the other one does not wait any more"
    fill(window, 181, 40, {A: 50, B: 25})
    assert window.index(Lane.INTERACTIVE, 220) == pytest.approx(0.9)
    assert window.index(Lane.INTERACTIVE, 220 + WINDOW_S) == 1.0, "nothing was recorded since"


def test_a_tenant_that_got_nothing_back_counts_as_nothing() -> None:
    window = FairnessWindow()
    assert window.index(Lane.INTERACTIVE, fill(window, 0, 60, {A: 30, B: -1})) == pytest.approx(0.5)


def waiting(queue: RequestQueue, name: str, tenant: str, weight: float) -> None:
    one = request(name, tenant, 10)
    queue.enter(one, queue.item_for(one, weight))


@pytest.mark.parametrize(("weight", "index"), [(1.0, 0.8), (3.0, 1.0)])
def test_a_queue_measures_charges_of_all_gateways_by_weight_and_no_lift(weight: float, index: float) -> None:
    """Tenant b has a third of what a is charged. It waits a second time, when its counter is lifted."""
    queue = RequestQueue(100, kv_time_tokens=1000)
    waiting(queue, "a", "a", weight)
    waiting(queue, "a-waits", "a", weight)
    queue.send(RequestId("a"))
    queue.charge_kv_time(RequestId("a"), 5000.0)
    waiting(queue, "b", "b", 1.0)
    waiting(queue, "b-waits", "b", 1.0)
    queue.send(RequestId("b"))
    for tick in range(20 * 40):
        queue.sample(tick / 20)
        if tick == 20 * 20:
            assert queue.fairness(20.0)["m", Lane.INTERACTIVE] == 1.0, "20 samples, although there were 400 ticks"
            queue.send(RequestId("b-waits"))
            queue.send(RequestId("a-waits"))
            waiting(queue, "b-again", "b", 1.0)
            waiting(queue, "a-again", "a", weight)
        if tick % 20 == 0:
            queue.charge_kv_time(RequestId("a"), 20.0)
            queue.charge_kv_time(RequestId("b"), 10.0)
            for flow_key, _ in [one for one in queue.served() if one[0].flow_key.tenant == "a"]:
                queue.add_remote_usage(flow_key, 10)
    assert queue.fairness(40.0)["m", Lane.INTERACTIVE] == pytest.approx(index, abs=0.02)
    assert queue.fairness(40.0)["m", Lane.BATCH] == 1.0
