"""Choose the target of a migration; keeps no state."""

from __future__ import annotations

from collections.abc import Set
from contextlib import closing

from tandem.core.ids import WorkerRef
from tandem.routing.candidates import Candidates


def pick_migration_target(
    candidates: Candidates, model: str, source: WorkerRef, excluded: Set[WorkerRef]
) -> WorkerRef | None:
    """Return the least loaded decode worker whose link from `source` is not known to have failed; None when there is
    none.

    `source` itself may take no new work. Whether the target has capacity is left to its own admission.
    """
    with closing(candidates.decode_workers(model)) as consumers:
        for consumer in consumers:
            pair = (source, consumer.ref)
            if consumer.ref != source and consumer.ref not in excluded and pair not in candidates.unlinked:
                return consumer.ref
    return None
