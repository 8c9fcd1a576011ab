"""A simulated gateway holds the product's director: sessions, deadlines, link probes, stale prefix hits and failed
prefix fetches have the effects that they have in a real cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tandem.core.config import Config, EngineConfig, GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished, Token
from tandem.core.ids import JobKey, RequestId, WorkerRef
from tandem.core.request import Job, ResumeJob
from tandem.orchestration.commands import Command
from tandem.orchestration.director import RequestDirector
from tandem.orchestration.known_workers import DISCOVERY_PERIOD_S
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cluster.faults import Fault
from tandem.sim.cluster.worker import SimWorker
from tandem.sim.cost.executor import token_at
from tests.simulation.clusters import gpu_spec, prompt, run, scheduled, slow_spec, traces_of
from tests.simulation.faults import CONFIG, GATEWAY


@pytest.mark.parametrize(("session", "num_used"), [("", 2), ("talk", 1)])
def test_requests_of_one_session_stay_at_one_worker(session: str, num_used: int) -> None:
    """Their prompts have nothing in common, so only the session ties them together."""
    cluster = SimCluster(ClusterSpec(workers=((slow_spec(), 2),), gateway=GatewayConfig()))
    run(cluster, [replace(scheduled(i, 3.0 * i, prompt(i, 64)), session=session) for i in range(12)])
    assert sum(worker.num_prefill_tokens > 0 for worker in cluster.workers) == num_used


def test_more_requests_than_seats_wait_at_the_gateway_and_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[TandemError] = []
    on_result = RequestDirector.on_submit_result

    def noted(
        director: RequestDirector, worker: WorkerRef, key: JobKey, error: TandemError | None, now: float
    ) -> list[Command]:
        refusals.extend([] if error is None else [error])
        return on_result(director, worker, key, error, now)

    monkeypatch.setattr(RequestDirector, "on_submit_result", noted)
    config = Config(engine=EngineConfig(max_num_seqs=2))
    workers = ((slow_spec("prefill"), 1), (slow_spec("decode", config=config), 2))
    spec = ClusterSpec(workers=workers, gateway=GatewayConfig(queue_timeout_s=600.0))
    run(SimCluster(spec), [scheduled(i, 0.01 * i, prompt(i, 64), max_tokens=30) for i in range(30)])
    assert refusals == []


def test_a_request_that_cannot_meet_its_clients_deadline_is_refused_or_ended() -> None:
    """The prompt of the fourth takes longer than its client waits. The fifth ends while it decodes."""
    spec = ClusterSpec(workers=((slow_spec(), 1),), gateway=GatewayConfig(early_rejection="on"))
    schedule = [scheduled(i, 0.0, prompt(i, 2000)) for i in range(3)]
    schedule.append(replace(scheduled(3, 1.0, prompt(3, 2000)), timeout_s=2.0))
    schedule.append(replace(scheduled(4, 60.0, prompt(4, 50), max_tokens=200), timeout_s=2.0))
    *served, refused, late = traces_of(SimCluster(spec), schedule)
    assert [type(trace.outcome) for trace in served] == [Finished] * 3
    assert isinstance(refused.outcome, TandemError) and refused.outcome.kind is ErrorKind.SLO_MISS
    assert refused.ended_at == 1.0
    assert isinstance(late.outcome, TandemError) and late.outcome.kind is ErrorKind.DEADLINE
    assert late.token_times and 62.0 <= late.ended_at < 62.1


def test_a_new_worker_is_used_with_others_once_a_probe_has_moved_a_block() -> None:
    """The pairs of the first workers count as tested; the second request waits for the probe of the new pair."""
    spec = replace(slow_spec(), config=CONFIG, max_run=1)
    workers = ((replace(spec, pool="prefill"), 1), (replace(spec, pool="decode"), 1))
    cluster = SimCluster(ClusterSpec(workers=workers, gateway=GATEWAY))
    met_s = 1.1 + DISCOVERY_PERIOD_S
    schedule = [scheduled(i, at_s, prompt(i, 20)) for i, at_s in enumerate([0.0, met_s + 0.001, met_s + 1.0])]
    tokens: list[Token] = []
    traces: list[ClientTrace] = []
    kill = Fault(at_s=1.0, kind="kill", worker=1, lasts_s=0.1)
    cluster.run(schedule, traces.append, (), [kill], tokens.append)
    cluster.check()
    assert [trace.path for trace in traces] == ["remote"] * 3
    first, waited, last = (trace.ttft_s for trace in sorted(traces, key=lambda trace: trace.id))
    assert first == pytest.approx(last, rel=0.01) and waited > last + 0.02
    assert {token.key.request for token in tokens} == {"r0", "r1", "r2"}, "no client receives a probe's tokens"


def test_what_was_evicted_a_moment_ago_is_a_stale_hit() -> None:
    """The third prompt is the first one again, whose eviction the gateway does not know yet."""
    spec = ClusterSpec(workers=((replace(slow_spec(), num_blocks=50), 1),), gateway=GatewayConfig(), index_delay_s=5.0)
    cluster = SimCluster(spec)
    run(cluster, [scheduled(i, at_s, prompt(i % 2, 600)) for i, at_s in enumerate([0.0, 8.0, 12.0])])
    accuracy = cluster._network.index.accuracy
    assert accuracy.num_predicted == 592 and accuracy.num_missed >= 400


def fetched(monkeypatch: pytest.MonkeyPatch, faults: list[Fault]) -> list[RequestId]:
    """Run twelve conversations of two turns. Return the second turns for which the prefill worker is to fetch the
    answer of the first turn from the first decode worker, the only one that has it."""
    workers = ((gpu_spec("prefill", max_num_batched_tokens=8192), 1), (gpu_spec("decode"), 2))
    cluster = SimCluster(ClusterSpec(workers=workers, gateway=GatewayConfig()))
    schedule = [scheduled(i, 0.1 * i, prompt(i, 2000), 1200) for i in range(12)]
    for i in range(12):
        answer = tuple(token_at(i, 0, index) for index in range(1200))
        schedule.append(scheduled(12 + i, 30 + 0.3 * i, (*prompt(i, 2000), *answer, *range(100))))
    found: list[RequestId] = []
    submit = cluster._network.submit

    def watched(worker: SimWorker, job: Job, *rest: Any) -> None:
        prefix = None if isinstance(job, ResumeJob) else job.prefix
        if prefix is not None and prefix.source == cluster.workers[1].ref:
            found.append(job.request.id)
        submit(worker, job, *rest)

    monkeypatch.setattr(cluster._network, "submit", watched)
    assert all(trace.is_complete for trace in traces_of(cluster, schedule, faults=faults))
    return found


def test_prefix_fetches_that_fail_are_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two failures in a row the link is left out for a second, and then tried again."""
    assert fetched(monkeypatch, []) == ["r12", "r15", "r17", "r18", "r20", "r22"]
    cut = Fault(at_s=20.0, kind="cut peer", worker=0, other=1, lasts_s=60.0)
    assert fetched(monkeypatch, [cut]) == ["r12", "r15", "r20"]
