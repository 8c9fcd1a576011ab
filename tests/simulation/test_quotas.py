"""Test tenants' terms at a simulated gateway: refusals, their reasons, and that no reservation is left."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tandem.admission.tenant import Tenant
from tandem.core.config import GatewayConfig
from tandem.core.errors import TandemError
from tandem.core.ids import TenantId
from tandem.core.lane import Lane
from tandem.core.slo import Slo
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.simulate import simulate
from tandem.workload.mix import Mix, scheduled_requests
from tandem.workload.request_class import RequestClass
from tests.simulation.clusters import slow_spec, traces_of

A = TenantId("a")
GROUP = RequestClass("one", 1.0, (50, 50), (4, 4), tenant="a")


def spec_of(**terms: object) -> ClusterSpec:
    tenants = {A: Tenant(id=A, **terms)}  # type: ignore[arg-type]
    return ClusterSpec(workers=((slow_spec(), 1),), gateway=GatewayConfig(), tenants=tenants)


def run(spec: ClusterSpec, rate: float, count: int, group: RequestClass = GROUP) -> list[ClientTrace]:
    return traces_of(SimCluster(spec), scheduled_requests(Mix((group,)), 1, count, rate))


def reasons(traces: list[ClientTrace]) -> Counter[str]:
    return Counter(trace.outcome.reason for trace in traces if isinstance(trace.outcome, TandemError))


def test_tokens_beyond_the_quota_are_refused_and_no_more() -> None:
    """All at once: of 540 tokens, 54 each, ten requests may be open."""
    traces = run(spec_of(tokens_per_minute=540), 0.0, 30)
    assert reasons(traces) == {"tokens_per_minute": 20}
    errors = [trace.outcome for trace in traces if isinstance(trace.outcome, TandemError)]
    assert all(error.retry_after_s is not None and 0 < error.retry_after_s <= 60 for error in errors)


def test_a_minute_grants_the_quota_whatever_is_requested() -> None:
    """Three minutes of ten times the quota: the first bucket and what came into it since."""
    traces = run(spec_of(requests_per_minute=6), 1.0, 180)
    served = [trace for trace in traces if trace.is_complete]
    minutes = traces[-1].due_s / 60
    assert 6 * minutes <= len(served) <= 6 * (1 + minutes)


def test_what_has_ended_makes_room_for_others() -> None:
    traces = run(spec_of(max_concurrency=1), 2.0, 40)
    assert set(reasons(traces)) == {"concurrency"} and sum(trace.is_complete for trace in traces) > 1


@pytest.mark.parametrize(
    ("terms", "reason"),
    [({"tokens_per_minute": 40}, "tokens_per_minute"), ({"max_prompt_tokens": 49}, "max_prompt_tokens")],
)
def test_a_prompt_beyond_its_tenants_terms_is_never_served(terms: dict[str, int], reason: str) -> None:
    assert reasons(run(spec_of(**terms), 1.0, 5)) == {reason: 5}


def test_a_tenant_without_a_key_is_refused() -> None:
    traces = run(spec_of(), 1.0, 3, replace(GROUP, tenant="b"))
    assert [isinstance(trace.outcome, TandemError) for trace in traces] == [True] * 3


def test_a_tenant_gets_no_better_lane_than_its_own() -> None:
    """Its ceiling puts it behind another's standard lane, whichever it requests."""
    other = TenantId("b")
    tenants = {A: Tenant(id=A, lane=Lane.BATCH), other: Tenant(id=other, lane=Lane.STANDARD)}
    spec = ClusterSpec(workers=((slow_spec(), 1),), gateway=GatewayConfig(), tenants=tenants)
    groups = tuple(RequestClass(name, 0.5, (200, 200), (2, 2), tenant=name) for name in "ab")
    traces = traces_of(SimCluster(spec), scheduled_requests(Mix(groups), 1, 60, 0.0))
    first = {name: sorted(t.token_times[0] for t in traces if t.tenant == name) for name in "ab"}
    assert first["b"][-1] < first["a"][8]


def test_the_report_counts_refusals_by_reason() -> None:
    report, _ = simulate(spec_of(tokens_per_minute=540), scheduled_requests(Mix((GROUP,)), 1, 30, 0.0), Slo())
    assert report.errors == {"quota_exceeded (tokens_per_minute)": 20}
