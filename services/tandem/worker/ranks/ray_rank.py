"""A rank as a Ray actor in its replica's placement group; never speaks to it but to start and to end it.

All of a group's bundles are on one machine, where ranks meet; see `worker.rank_line`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.core.config import Config

SLOT: dict[str, float] = {"CPU": 1}
"""What one rank takes of a machine: a slot and not a core."""


def slot(config: Config) -> dict[str, float]:
    """What Ray sets aside for one rank: with CUDA a GPU too, the only one that its process sees."""
    return SLOT | {"GPU": 1} if config.model.device == "cuda" else dict(SLOT)


class _Rank:
    def follow(self, config: Config, directory: str, rank: int) -> int:
        from tandem.worker.rank_process import run

        return run(config, Path(directory), rank)


class RankActor:
    """A `worker.rank_group.RankProcess`. Ray ends it with the replica that owns it, however that ends."""

    def __init__(self, config: Config, group: PlacementGroup, directory: Path, rank: int) -> None:
        wanted = slot(config)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        remote: Any = ray.remote(_Rank)
        options = {"num_cpus": wanted["CPU"], "num_gpus": wanted.get("GPU", 0)}
        self._actor = remote.options(scheduling_strategy=strategy, **options).remote()
        self._end = self._actor.follow.remote(config, str(directory), rank)

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


def launch_actors(config: Config) -> Callable[[Path, int], RankActor]:
    """A `worker.rank_group.Launch`, in a replica whose placement group has a bundle for each rank."""
    group = ray.util.get_current_placement_group()
    return lambda directory, rank: RankActor(config, group, directory, rank)
