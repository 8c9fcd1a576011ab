"""Fifty workers and three gateways that are struck at random, and few workers with few seats: while some workers are
left, every request ends once and well, with every token in its place, and nothing is left anywhere; and each kind of
fault is one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tandem.core.events import Finished
from tandem.orchestration.commands import Command, MoveOutcome, ReportMove
from tandem.orchestration.director import RequestDirector
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cluster.faults import Fault, FaultKind
from tests.effort import effort
from tests.simulation.clusters import scheduled, slow_spec, traces_of
from tests.simulation.faults import CONFIG, GATEWAY, KINDS, Scenario, crowded_scenario, run, scenario

AGAIN = "TANDEM_FAULT_SEED"
"""The environment variable that names one seed, for `test_random_faults` to try it alone."""


def seeds() -> st.SearchStrategy[int]:
    again = os.environ.get(AGAIN)
    return st.integers(0, 2**32) if again is None else st.just(int(again))


def check(seed: int, scenario: Callable[[int], Scenario] = scenario) -> None:
    try:
        run(scenario(seed))
    except Exception as error:
        error.add_note(f"again: {AGAIN}={seed} python -m pytest tests/simulation/test_faults.py -k random")
        raise


@settings(effort(16), phases=[Phase.generate])
@given(seed=seeds())
def test_random_faults(seed: int) -> None:
    """A failing seed is not shrunk, because a smaller number is no simpler script."""
    check(seed)


@settings(effort(32), phases=[Phase.generate])
@given(seed=seeds())
def test_random_faults_while_requests_preempt_each_other(seed: int) -> None:
    check(seed, crowded_scenario)


def test_crowded_scenarios_preempt_park_and_move(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: Counter[MoveOutcome] = Counter()
    rebalance = RequestDirector.rebalance

    def watched(director: RequestDirector, now: float) -> list[Command]:
        commands = rebalance(director, now)
        outcomes.update(command.outcome for command in commands if isinstance(command, ReportMove))
        return commands

    monkeypatch.setattr(RequestDirector, "rebalance", watched)
    runs = [run(crowded_scenario(seed)) for seed in range(24)]
    workers = [worker for cluster, _ in runs for worker in cluster.workers]
    assert sum(worker.engine.num_preempted for worker in workers) > 20
    assert any(worker.engine.books().num_host_blocks for worker in workers)
    assert outcomes[MoveOutcome.RESUMED] and outcomes[MoveOutcome.MOVED], outcomes


@pytest.mark.parametrize("seed", [307, 393, 2226, 4524])
def test_seeds_that_have_found_something(seed: int) -> None:
    """The first two a request whose booking was given up before its prefill was asked for, the others a message that
    waited behind a cut link for a worker that was killed meanwhile."""
    check(seed)


def test_a_seed_is_one_script_and_one_run() -> None:
    assert scenario(3).faults == scenario(3).faults != scenario(4).faults
    assert run(scenario(3))[0].digest == run(scenario(3))[0].digest != run(scenario(4))[0].digest


def test_the_scripts_have_every_kind_and_spare_one_worker_of_each_pool() -> None:
    faults = [fault for seed in range(20) for fault in scenario(seed).faults]
    assert {fault.kind for fault in faults} == {*KINDS, "lose registry"}
    assert not {fault.worker for fault in faults if fault.kind != "lose registry"} & {0, 20, 44}


def lone(kind: FaultKind, *, lasts_s: float, at_s: float = 0.1) -> tuple[SimCluster, ClientTrace]:
    """One prefill and one decode worker, one request that both have begun, and one fault of the decode worker."""
    cluster, (trace,) = struck([0.0], Fault(at_s=at_s, kind=kind, worker=1, other=0, lasts_s=lasts_s))
    return cluster, trace


def struck(due_s: list[float], fault: Fault) -> tuple[SimCluster, list[ClientTrace]]:
    """Requests at these times to one prefill and one decode worker; what became of them, and that nothing is left."""
    spec = replace(slow_spec(), config=CONFIG, max_run=1)
    workers = ((replace(spec, pool="prefill"), 1), (replace(spec, pool="decode"), 1))
    cluster = SimCluster(ClusterSpec(workers=workers, gateway=GATEWAY))
    schedule = [scheduled(i, at_s, (5,) * 20, 100) for i, at_s in enumerate(due_s)]
    return cluster, traces_of(cluster, schedule, faults=[fault])


def longest_gap(trace: ClientTrace) -> float:
    return max(trace.gaps_s)


def test_a_worker_that_is_stopped_for_a_moment_stalls_its_streams_and_goes_on() -> None:
    _, calm = lone("slow", lasts_s=0.1)
    _, trace = lone("stall", at_s=1.0, lasts_s=2.0)
    assert isinstance(trace.outcome, Finished) and len(trace.token_times) == 100
    assert 2.0 <= longest_gap(trace) < 2.1 and longest_gap(calm) < 0.1


def test_messages_on_a_briefly_cut_link_arrive_when_it_is_mended() -> None:
    _, trace = lone("cut gateways", at_s=1.0, lasts_s=2.0)
    assert isinstance(trace.outcome, Finished) and len(trace.token_times) == 100
    assert 1.9 <= longest_gap(trace) <= 2.1


@pytest.mark.parametrize("kind", ["kill", "drain"])
def test_a_worker_that_has_ended_begins_a_new_life(kind: FaultKind) -> None:
    cluster, _ = lone(kind, at_s=0.0, lasts_s=1.0)
    assert [worker.ref.incarnation for worker in cluster.workers] == [1, 2]


def test_kv_over_a_link_that_is_cut_arrives_after_it_was_mended() -> None:
    _, trace = lone("cut peer", at_s=0.0, lasts_s=1.0)
    assert isinstance(trace.outcome, Finished) and trace.token_times[-1] > 1.0


def test_workers_between_which_kv_is_lost_are_used_together_when_they_reach_each_other_again() -> None:
    """The first request loses its KV after four seconds."""
    fault = Fault(at_s=0.0, kind="cut peer", worker=1, other=0, lasts_s=20.0)
    _, traces = struck([0.0, 8.0, 30.0], fault)
    paths = {trace.id: trace.path for trace in traces if isinstance(trace.outcome, Finished)}
    assert paths == {
        "r0": "fallback;reason=no_decode_worker;retries=1",
        "r1": "fallback;reason=no_link_between_the_workers",
        "r2": "remote",
    }
