"""Test the check of a worker over several machines."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.core.config import Config, EngineConfig, WorkerConfig
from tandem.doctor.finding import Finding
from tandem.doctor.own_addresses import check_nodes
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns


def judged(host: str = "10.0.0.5", **engine: Any) -> Finding:
    shared = {"tensor_parallel": 4, "nnodes": 2, **engine}
    return check_nodes(Config(engine=EngineConfig(**shared), worker=WorkerConfig(host=host)))


def test_a_worker_of_one_machine_needs_no_other() -> None:
    assert_skips(judged(nnodes=1), "nodes", "engine.nnodes is 1")


@pytest.mark.parametrize(
    ("engine", "where"),
    [({}, "at port 29501"), ({"master_addr": "10.0.0.4", "node_rank": 1}, "at 10.0.0.4:29501")],
)
def test_machines_that_find_the_first_one(engine: dict[str, Any], where: str) -> None:
    ranks = "2 of the 4 ranks are on each of 2 machines"
    assert_fine(judged(**engine), "nodes", f"{ranks}; the first machine accepts the others {where}")


def test_machines_that_do_not() -> None:
    assert_warns(judged("127.0.0.1"), "nodes", "a loopback address", "set worker.host")
    assert_warns(judged(master_addr="localhost", node_rank=1), "nodes", "this machine itself", "engine.master_addr")
    unknown = judged(master_addr="no.such.invalid", node_rank=1)
    assert_fails(unknown, "nodes", "cannot be resolved", "engine.master_addr")
