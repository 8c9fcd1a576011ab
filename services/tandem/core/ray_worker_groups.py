"""Parse the setting that maps worker groups of a RayCluster to roles."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

ROLES = ("prefill", "decode")


class WorkerGroup(NamedTuple):
    """A worker group of a RayCluster, and the role (`prefill` or `decode`) of its workers.

    `num_workers`: number of workers in each pod. `num_pods`: number of pods of each worker; more than 1 for workers
    whose ranks are on several pods. `num_spare`: number of idle pods that are kept ready to replace workers.
    """

    role: str
    name: str
    num_workers: int = 1
    num_pods: int = 1
    num_spare: int = 0

    def pods_for(self, num_workers: int) -> int:
        """Return the number of pods that `num_workers` workers take, without the spare pods."""
        return math.ceil(num_workers / self.num_workers) * self.num_pods

    def room_of(self, num_pods: int) -> int:
        """Return the number of workers for which `num_pods` pods, the spare ones among them, have room."""
        return max(0, num_pods - self.num_spare) // self.num_pods * self.num_workers


def read_groups(text: str) -> tuple[WorkerGroup, ...] | None:
    """Parse the setting `planner.groups`, such as `prefill=GROUP:1/4,decode=GROUP:2+1` (one worker in four pods; two
    workers in a pod and one spare pod).

    Returns None for a malformed text or one that repeats a role or a group.
    """
    groups = [_read(part.strip()) for part in text.split(",")]
    found = tuple(group for group in groups if group is not None)
    is_whole = len(found) == len(groups)
    is_clear = len({group.role for group in found}) == len({group.name for group in found}) == len(found)
    return found if is_whole and is_clear else None


_GROUP = re.compile(
    r"(?P<role>\w+)=(?P<name>[a-z0-9.-]+)(:(?P<workers>[1-9]\d?))?(/(?P<pods>[1-9]\d?))?(\+(?P<spare>\d{1,3}))?",
    re.ASCII,
)


def _read(part: str) -> WorkerGroup | None:
    found = _GROUP.fullmatch(part)
    if found is None or found["role"] not in ROLES:
        return None
    num_workers, num_pods, num_spare = int(found["workers"] or 1), int(found["pods"] or 1), int(found["spare"] or 0)
    if min(num_workers, num_pods) > 1:
        return None
    return WorkerGroup(found["role"], found["name"], num_workers, num_pods, num_spare)
