"""Test what the Serve actuator knows about replicas that Serve runs and intends to run."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.core.ids import PlannerId, ServeId
from tandem.planner.actuator import ActuatorFailed
from tandem.planner.serve_actuator import ServeActuator
from tandem.stores.replica_targets import TargetRecord
from tests.unit.planner.test_seeing import silent, worker
from tests.unit.planner.test_two_serves import Board

ME = PlannerId("p1")


def deployed(serve: str = "head-1", **numbers: int) -> dict[tuple[str, ServeId], tuple[float, int]]:
    """Return how many replicas of each role a Serve intends to run, as the board has it."""
    return {(role, ServeId(serve)): (0.0, number) for role, number in numbers.items()}


def actuator(board: Board) -> ServeActuator:
    targets: Any = board
    unused: Any = None
    return ServeActuator(ME, targets, unused, {"prefill": 0, "decode": 1})


async def starting(of: ServeActuator, num_decode: int) -> dict[str, int]:
    decoding = [silent(f"d{number}", "decode") for number in range(num_decode)]
    return await of.starting("m", [worker("p1", "prefill"), worker("p2", "prefill"), *decoding])


async def test_deployed_replicas_override_the_published_target() -> None:
    record = TargetRecord(model="m", planner=ME, replicas={"prefill": 2, "decode": 5}, reasons=())
    board = Board(published=(0.0, record), serves=deployed(decode=8))
    assert await starting(actuator(board), 3) == {"prefill": 0, "decode": 5}
    board.serves = {}
    assert await starting(actuator(board), 3) == {"prefill": 0, "decode": 2}


async def test_a_target_is_published_with_the_minimums() -> None:
    board = Board()
    assert await actuator(board).publish_target("m", {"prefill": 0, "decode": 2}, ("because",)) == ME
    assert board.published is not None and board.published[1].minimums == {"prefill": 0, "decode": 1}


async def test_a_redis_that_has_forgotten_all_is_no_fleet_of_those_who_are_back() -> None:
    """Of eight workers three have registered again; a target of three would make Serve end five."""
    board = Board(serves=deployed(prefill=2, decode=8))
    mine = actuator(board)
    assert await starting(mine, 8) == {"prefill": 0, "decode": 0}
    board.serves = deployed(prefill=2)
    assert await starting(mine, 3) == {"prefill": 0, "decode": 5}
    board.serves = deployed(prefill=2, decode=7)
    assert await starting(mine, 7) == {"prefill": 0, "decode": 0}


async def test_a_fleet_of_two_serves_is_held() -> None:
    """Each Serve would take the sum for its own number."""
    board = Board(serves=deployed(prefill=2, decode=3) | deployed("head-2", decode=2))
    mine = actuator(board)
    with pytest.raises(ActuatorFailed, match=r"2 Serves have decode workers of m.* \(head-1, head-2\)"):
        await starting(mine, 5)
    board.serves = deployed(prefill=2, decode=3) | deployed("head-2", mixed=1)
    assert await starting(mine, 3) == {"prefill": 0, "decode": 0, "mixed": 1}, "one for each role"
