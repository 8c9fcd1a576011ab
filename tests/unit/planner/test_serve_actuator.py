"""Test what the Serve actuator knows about replicas that Serve runs and intends to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.core.ids import PlannerId, ServeId
from tandem.planner.actuator import ActuatorFailed
from tandem.planner.serve_actuator import ServeActuator
from tandem.stores.replica_targets import TargetRecord
from tests.unit.planner.test_seeing import worker

ME = PlannerId("p1")


@dataclass
class StoredTargets:
    """Targets in a Redis that may lose them, and the replicas that one or more Serves intend to run."""

    published: TargetRecord | None = None
    meant: dict[str, int] = field(default_factory=dict)
    others: dict[str, dict[str, int]] = field(default_factory=dict)

    async def read(self, model: str) -> TargetRecord | None:
        return self.published

    async def publish(self, record: TargetRecord) -> PlannerId:
        self.published = record
        return record.planner

    async def deployed(self, model: str) -> dict[str, dict[ServeId, int]]:
        found = {"head-1": self.meant, **self.others}
        roles = {role for numbers in found.values() for role in numbers}
        return {
            role: {ServeId(serve): numbers[role] for serve, numbers in found.items() if role in numbers}
            for role in roles
        }


def actuator(targets: StoredTargets) -> ServeActuator:
    unused: Any = None
    return ServeActuator(ME, targets, unused, {"prefill": 0, "decode": 1})  # type: ignore[arg-type]


async def starting(of: ServeActuator, num_decode: int) -> dict[str, int]:
    decoding = [worker(f"d{number}", "decode") for number in range(num_decode)]
    return await of.starting("m", [worker("p1", "prefill"), worker("p2", "prefill"), *decoding])


async def test_deployed_replicas_override_the_published_target() -> None:
    published = TargetRecord(model="m", planner=ME, replicas={"prefill": 2, "decode": 5}, reasons=())
    assert await starting(actuator(StoredTargets(published, {"decode": 8})), 3) == {"prefill": 0, "decode": 5}
    assert await starting(actuator(StoredTargets(published)), 3) == {"prefill": 0, "decode": 2}


async def test_a_target_is_published_with_the_minimums() -> None:
    targets = StoredTargets()
    assert await actuator(targets).publish_target("m", {"prefill": 0, "decode": 2}, ("because",)) == ME
    assert targets.published is not None and targets.published.minimums == {"prefill": 0, "decode": 1}


async def test_a_redis_that_has_forgotten_all_is_no_fleet_of_those_who_are_back() -> None:
    """Of eight workers three have registered again; a target of three would make Serve end five."""
    targets = StoredTargets(meant={"prefill": 2, "decode": 8})
    mine = actuator(targets)
    assert await starting(mine, 8) == {"prefill": 0, "decode": 0}
    targets.meant = {"prefill": 2}
    assert await starting(mine, 3) == {"prefill": 0, "decode": 5}
    targets.meant = {"prefill": 2, "decode": 7}
    assert await starting(mine, 7) == {"prefill": 0, "decode": 0}


async def test_a_fleet_of_two_serves_is_held() -> None:
    """Each Serve would take the sum for its own number."""
    targets = StoredTargets(meant={"prefill": 2, "decode": 3}, others={"head-2": {"decode": 2}})
    mine = actuator(targets)
    with pytest.raises(ActuatorFailed, match=r"2 Serves have decode workers of m.* \(head-1, head-2\)"):
        await starting(mine, 5)
    targets.others = {"head-2": {"mixed": 1}}
    assert await starting(mine, 3) == {"prefill": 0, "decode": 0, "mixed": 1}, "one for each role"
