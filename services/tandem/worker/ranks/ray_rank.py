"""Run a rank as a Ray actor in the placement group of its replica.

A group has a bundle for each of the worker's engine.nnodes machines. Ray may place several bundles on one machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.core.addresses import format_host, is_loopback
from tandem.core.config import Config
from tandem.worker.addresses import default_route_address

SLOT: dict[str, float] = {"CPU": 1}
"""Ray resources of one rank: a scheduling slot, which does not limit the rank to one core."""


def slot(config: Config) -> dict[str, float]:
    """Return the Ray resources of one rank: a CPU, and with CUDA also a GPU, the only one that its process sees."""
    return SLOT | {"GPU": 1} if config.model.device == "cuda" else dict(SLOT)


def node_address(wildcard: str) -> str:
    """Return this machine's address in Ray's network. Where that is a loopback address, as under `tandem serve`, return
    the address on the default route, preferably of the address family of `wildcard` ("0.0.0.0" or "::")."""
    address = str(ray.util.get_node_ip_address())
    return default_route_address(wildcard) if is_loopback(address) else address


class _Rank:
    def follow(self, config: Config, address: str, rank: int) -> int:
        from tandem.worker.rank_process import run

        if config.engine.nnodes > 1:
            own = f"{format_host(node_address(config.worker.host))}:0"
            config = replace(config, worker=replace(config.worker, advertise_address=own))
        return run(config, address, rank)


class RankActor:
    """Run rank number `rank` as a Ray actor, which the constructor starts in its machine's bundle of the placement
    group `group`. `address`: where the rank connects to the first rank.

    Implements `worker.ranks.rank_group.RankProcess`. Ray ends the actor when the replica that owns it ends, also after
    a crash.
    """

    def __init__(self, config: Config, group: PlacementGroup, address: str, rank: int) -> None:
        resources = slot(config)
        bundle = rank // config.engine.ranks_per_node
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        remote: Any = ray.remote(_Rank)
        options = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0)}
        self._actor = remote.options(scheduling_strategy=strategy, **options).remote()
        self._end = self._actor.follow.remote(config, address, rank)

    def ended(self) -> str | None:
        if not ray.wait([self._end], timeout=0)[0]:
            return None
        try:
            return f"it returned {ray.get(self._end)}"
        except ray.exceptions.RayError as error:
            return str(error).splitlines()[0]

    def stop(self, timeout_s: float) -> None:
        ray.wait([self._end], timeout=timeout_s)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor)


def launch_actors(config: Config) -> Callable[[str, int], RankActor]:
    """Return a function that starts each rank as a Ray actor, of the type `worker.ranks.rank_group.Launch`. Must be
    called in a replica whose placement group has a bundle per machine."""
    group = ray.util.get_current_placement_group()
    return lambda address, rank: RankActor(config, group, address, rank)
