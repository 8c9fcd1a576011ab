"""Test which pods count as draining although this planner did not drain them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.worker_load import WorkerLoad
from tandem.planner.pod_drain import ADOPT_S, LOST_S, PodDrain
from tandem.planner.pod_watch import Pod
from tandem.scaling.worker_state import WorkerState
from tests.unit.planner.world import Tick

POD = Pod("a", "decode", "10.0.0.1", is_ending=False)


def worker(load: WorkerLoad | None) -> WorkerState:
    ref = WorkerRef(WorkerId("w"), Incarnation(1), "10.0.0.1:5")
    return WorkerState(ref=ref, model="m", pool="decode", role="decode", load=load)


DRAINED = worker(WorkerLoad(num_blocks=64, draining=True))


@pytest.mark.parametrize(("then", "is_draining"), [(worker(WorkerLoad(num_blocks=64)), False), (worker(None), True)])
def test_a_drain_of_somebody_else_counts_until_it_is_undone(then: WorkerState, is_draining: bool) -> None:
    clock = Tick()
    pods = PodDrain(None, clock)  # type: ignore[arg-type] - `look` calls no worker
    for _ in range(2):
        assert not pods.look([POD], [DRAINED])["a"].is_draining
        clock.at += ADOPT_S / 2
    assert pods.look([POD], [DRAINED])["a"].is_draining
    assert pods.look([POD], [then])["a"].is_draining is is_draining


PODS = [POD, Pod("b", "decode", "10.0.0.2", is_ending=False), Pod("c", "decode", "10.0.0.3", is_ending=False)]
WIDE = replace(worker(WorkerLoad(num_blocks=64)), hosts=("10.0.0.1", "10.0.0.2"))


def test_a_worker_belongs_to_the_pods_of_all_its_ranks() -> None:
    pod_drain = PodDrain(None, Tick(), ["decode"])  # type: ignore[arg-type]
    views = pod_drain.look(PODS, [WIDE])
    assert [(view.num_jobs, view.spanning_worker) for view in views.values()] == [(0, "w"), (0, "w"), (None, "")]
    silent = replace(WIDE, load=None, hosts=(), problem="it does not answer")
    assert [view.num_jobs for view in pod_drain.look(PODS, [silent]).values()] == [0, 0, None], "its hosts are known"


@pytest.mark.parametrize(("hosts", "spanning"), [((), ["decode"]), ((), []), (WIDE.hosts, ["decode"])])
def test_no_pod_is_lost_that_may_belong_to_a_silent_worker(hosts: tuple[str, ...], spanning: list[str]) -> None:
    clock = Tick()
    pod_drain = PodDrain(None, clock, spanning)  # type: ignore[arg-type]
    for _ in range(2):
        views = pod_drain.look(PODS, [replace(WIDE, hosts=hosts)])
        clock.at += LOST_S
    assert views["a"].is_lost is False and views["c"].is_lost is bool(hosts or not spanning)
