"""Subtract mixed workers from the needed workers, and choose role changes."""

from __future__ import annotations

from tandem.scaling.decision import ReplicaTarget, RoleChange


def needed_beside_mixed(needed: ReplicaTarget, num_mixed: int) -> ReplicaTarget:
    """Return the workers needed in addition to mixed workers. A mixed worker does both kinds of work, so it replaces
    one worker in total, divided in proportion to the needs of the roles."""
    total = needed.prefill + needed.decode
    num_replaced = min(num_mixed, total)
    prefill = round(num_replaced * needed.prefill / total) if total else 0
    return ReplicaTarget(needed.prefill - prefill, needed.decode - (num_replaced - prefill))


def role_changes(current: ReplicaTarget, desired: ReplicaTarget, spare: ReplicaTarget) -> tuple[RoleChange, ...]:
    """Return the role changes from a role with `spare` serving workers to a role that has fewer than desired."""
    from_prefill = min(spare.prefill, desired.decode - current.decode)
    from_decode = min(spare.decode, desired.prefill - current.prefill)
    if from_prefill > 0:
        return (RoleChange("prefill", "decode", from_prefill),)
    if from_decode > 0:
        return (RoleChange("decode", "prefill", from_decode),)
    return ()
