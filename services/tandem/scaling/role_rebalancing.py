"""What of the needed workers the mixed ones stand for, and who changes its role; numbers in, numbers out."""

from __future__ import annotations

from tandem.scaling.decision import ReplicaTarget, RoleChange


def needed_beside_mixed(needed: ReplicaTarget, num_mixed: int) -> ReplicaTarget:
    """What is needed beside mixed workers, which do both kinds of work, so that each spares one worker in all: of each
    role in proportion."""
    whole = needed.prefill + needed.decode
    spared = min(num_mixed, whole)
    prefill = round(spared * needed.prefill / whole) if whole else 0
    return ReplicaTarget(needed.prefill - prefill, needed.decode - (spared - prefill))


def role_changes(current: ReplicaTarget, wanted: ReplicaTarget, spare: ReplicaTarget) -> tuple[RoleChange, ...]:
    """One role has workers to `spare` of those that serve, and the other wants more than it has."""
    from_prefill = min(spare.prefill, wanted.decode - current.decode)
    from_decode = min(spare.decode, wanted.prefill - current.prefill)
    if from_prefill > 0:
        return (RoleChange("prefill", "decode", from_prefill),)
    if from_decode > 0:
        return (RoleChange("decode", "prefill", from_decode),)
    return ()
