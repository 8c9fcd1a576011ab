"""The API server of the planner's tests, the simulated cluster around it, and its planners."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tandem.core.ray_worker_groups import WorkerGroup
from tests.unit.planner.api_servers import ApiServer, api_server
from tests.unit.planner.rig import SINGLE, MakePlanner, Planner
from tests.unit.planner.world import World

__all__ = ["api_server", "make_planner", "planner", "world"]


@pytest.fixture
def world(api_server: ApiServer) -> Iterator[World[Any]]:
    """Yield a simulated cluster, in which nothing that is forbidden may have happened when the test ends."""
    made = World(api_server.objects)
    yield made
    assert made.violations == []


@pytest.fixture
async def make_planner(api_server: ApiServer, world: World[Any]) -> AsyncIterator[MakePlanner]:
    """Yield a function that makes the planner of a name; planners are closed when the test ends."""
    async with AsyncExitStack() as stack:

        def make(name: str, groups: tuple[WorkerGroup, ...] = SINGLE) -> Planner:
            made = Planner(world, api_server.connect, name, groups)
            stack.push_async_callback(made.close)
            return made

        yield make


@pytest.fixture
async def planner(make_planner: MakePlanner) -> Planner:
    return make_planner("p1")
