"""Test which pods count as draining although this planner did not drain them."""

from __future__ import annotations

import pytest

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.worker_load import WorkerLoad
from tandem.planner.pod_drain import ADOPT_S, PodDrain
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
