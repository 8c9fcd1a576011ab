"""Chooses who takes over what another worker has begun: never sends anything and keeps no state."""

from __future__ import annotations

from collections.abc import Set
from contextlib import closing

from tandem.core.ids import WorkerRef
from tandem.routing.candidates import Candidates


def pick_migration_target(
    among: Candidates, model: str, source: WorkerRef, excluded: Set[WorkerRef]
) -> WorkerRef | None:
    """The least loaded worker that decodes and is not known to be out of reach of `source`, which may take no new work
    itself; None when there is none. Whether it has room it says itself."""
    with closing(among.decode_workers(model)) as consumers:
        for consumer in consumers:
            pair = (source, consumer.ref)
            if consumer.ref != source and consumer.ref not in excluded and pair not in among.unlinked:
                return consumer.ref
    return None
