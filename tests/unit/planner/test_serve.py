"""What Serve runs and means to run, as its actuator knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tandem.core.ids import Incarnation, PlannerId, WorkerId, WorkerRef
from tandem.planner.serve import ServeActuator
from tandem.planner.worker_state import WorkerState
from tandem.stores.targets import TargetRecord

ME = PlannerId("p1")


@dataclass
class Told:
    """Targets in a Redis that may forget them."""

    said: TargetRecord | None = None
    meant: dict[str, int] = field(default_factory=dict)

    async def read(self, model: str) -> TargetRecord | None:
        return self.said

    async def deployed(self, model: str) -> dict[str, int]:
        return self.meant


def worker(number: int, role: str) -> WorkerState:
    return WorkerState(
        ref=WorkerRef(WorkerId(f"{role}-{number}"), Incarnation(1), "w:1"), model="m", pool=role, role=role
    )


def actuator(targets: Told) -> ServeActuator:
    unused: Any = None
    return ServeActuator(ME, targets, unused)  # type: ignore[arg-type]


async def starting(of: ServeActuator, num_decode: int) -> dict[str, int]:
    decoding = [worker(number, "decode") for number in range(num_decode)]
    return await of.starting("m", [worker(1, "prefill"), worker(2, "prefill"), *decoding])


async def test_what_serve_means_to_have_goes_before_what_it_was_told() -> None:
    said = TargetRecord(model="m", planner=ME, replicas={"prefill": 2, "decode": 5}, reasons=())
    assert await starting(actuator(Told(said, {"decode": 8})), 3) == {"prefill": 0, "decode": 5}
    assert await starting(actuator(Told(said)), 3) == {"prefill": 0, "decode": 2}


async def test_a_redis_that_has_forgotten_all_is_no_fleet_of_those_who_are_back() -> None:
    """Of eight three have registered anew; Serve told three is Serve told to end five."""
    targets = Told(meant={"prefill": 2, "decode": 8})
    mine = actuator(targets)
    assert await starting(mine, 8) == {"prefill": 0, "decode": 0}
    targets.meant = {"prefill": 2}
    assert await starting(mine, 3) == {"prefill": 0, "decode": 5}
    targets.meant = {"prefill": 2, "decode": 7}
    assert await starting(mine, 7) == {"prefill": 0, "decode": 0}
