"""Which worker group of a RayCluster has the pods of which role, read from a setting; never looks at a cluster."""

from __future__ import annotations

from typing import NamedTuple

ROLES = ("prefill", "decode")


class WorkerGroup(NamedTuple):
    """`num_workers`: of one pod."""

    role: str
    name: str
    num_workers: int = 1


def read_groups(text: str) -> tuple[WorkerGroup, ...] | None:
    """Of `prefill=GROUP,decode=GROUP:2`; None where that is not what it says. No role and no group comes twice."""
    groups = [_read(part.strip()) for part in text.split(",")]
    found = tuple(group for group in groups if group is not None)
    is_whole = len(found) == len(groups)
    is_clear = len({group.role for group in found}) == len({group.name for group in found}) == len(found)
    return found if is_whole and is_clear else None


def _read(part: str) -> WorkerGroup | None:
    role, _, rest = part.partition("=")
    name, colon, number = rest.partition(":")
    is_number = not colon or (number.isascii() and number.isdigit() and 1 <= int(number) <= 64)
    if role not in ROLES or not name or not is_number:
        return None
    return WorkerGroup(role, name, int(number or 1))
