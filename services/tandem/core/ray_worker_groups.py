"""Parse the setting that maps worker groups of a RayCluster to roles."""

from __future__ import annotations

import re
from typing import NamedTuple

ROLES = ("prefill", "decode")


class WorkerGroup(NamedTuple):
    """A worker group of a RayCluster, and the role (`prefill` or `decode`) of its workers.

    `num_workers`: number of workers in each pod. `num_spare`: number of idle pods that are kept ready to replace
    workers.
    """

    role: str
    name: str
    num_workers: int = 1
    num_spare: int = 0


def read_groups(text: str) -> tuple[WorkerGroup, ...] | None:
    """Parse the setting `planner.groups`, such as `prefill=GROUP,decode=GROUP:2+1` (two workers in a pod, one spare
    pod).

    Returns None for a malformed text or one that repeats a role or a group.
    """
    groups = [_read(part.strip()) for part in text.split(",")]
    found = tuple(group for group in groups if group is not None)
    is_whole = len(found) == len(groups)
    is_clear = len({group.role for group in found}) == len({group.name for group in found}) == len(found)
    return found if is_whole and is_clear else None


_GROUP = re.compile(r"(?P<role>\w+)=(?P<name>[a-z0-9.-]+)(:(?P<workers>[1-9]\d?))?(\+(?P<spare>\d{1,3}))?", re.ASCII)


def _read(part: str) -> WorkerGroup | None:
    found = _GROUP.fullmatch(part)
    if found is None or found["role"] not in ROLES:
        return None
    return WorkerGroup(found["role"], found["name"], int(found["workers"] or 1), int(found["spare"] or 0))
