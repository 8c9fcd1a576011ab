"""The running sequences of a worker that drains, on their way to others; never ends a job and never moves a byte.

A sequence is offered under a key of its own and draws on. Once a consumer follows, the sequence holds its seat and its
blocks, which are announced as they become complete. When the consumer has nearly all, it asks for the rest: the next
draw is the sequence's last here, and is handed over with all that the consumer does not know. An offer whose consumer
is lost is void, its sequence goes on, and is offered anew.
"""

from __future__ import annotations

from tandem.core.errors import ErrorKind
from tandem.core.events import MigrationOffered
from tandem.core.ids import HandoffId, HandoffKey, JobKey
from tandem.engine.effects import Effect, SendEvent
from tandem.engine.kv_producer import KVProducer
from tandem.sched.state.schedule_result import SequenceUpdate
from tandem.sched.transfer.migration import MigrationTracker


class DrainMigration:
    """`num_moved` sequences were taken by others, and `num_given_back` had nothing to take or were in the others' way,
    since the start. Nothing is offered before `begin`."""

    def __init__(self, migrations: MigrationTracker, producer: KVProducer) -> None:
        self.has_begun = False
        self.num_moved = 0
        self.num_given_back = 0
        self._migrations = migrations
        self._producer = producer
        self._offers: dict[JobKey, HandoffKey] = {}
        self._jobs: dict[HandoffKey, JobKey] = {}
        # Output tokens that the consumers know that have asked for the rest.
        self._num_known: dict[HandoffKey, int] = {}
        self._num_offers = 0

    def begin(self) -> None:
        """From now on whatever runs wants to go on elsewhere."""
        self.has_begun = True

    @property
    def is_due(self) -> bool:
        """Something is to be offered or given up."""
        if not self.has_begun:
            return False
        return bool(self._migrations.not_worth_moving()) or any(
            k not in self._offers for k in self._migrations.movable()
        )

    def fruitless(self) -> list[JobKey]:
        """What is to be given back: nothing of it is here that would be worth moving."""
        return self._migrations.not_worth_moving() if self.has_begun else []

    def in_the_way(self) -> list[JobKey]:
        """What is to be given back where nothing can be planned. Sequences that others read give way to nobody: where
        they hold all blocks none can draw the last token that it leaves with. Without one of them the others can."""
        key = self._migrations.blocking_migration() if self.has_begun and not self._producer.is_awaiting else None
        return [] if key is None else [key]

    def has(self, key: HandoffKey) -> bool:
        """It is the offer of a sequence that is here."""
        return key in self._jobs

    def offer(self) -> list[Effect]:
        """Offer what runs and is not offered."""
        effects: list[Effect] = []
        for job in self._migrations.movable() if self.has_begun else ():
            if job not in self._offers:
                self._num_offers += 1
                key = HandoffKey(HandoffId(f"{job.request}/{job.choice}/{self._num_offers}"), job.attempt)
                self._offers[job], self._jobs[key] = key, job
                effects.append(SendEvent(MigrationOffered(job, key)))
        return effects

    def follow(self, key: HandoffKey, now: float) -> None:
        """Somebody takes an offer up: the lease begins."""
        job = self._jobs.get(key)
        if job is not None and not self._producer.has(key):
            self._producer.open_migration_lease(key, job, self._migrations.start(job), now)

    def ask_rest(self, key: HandoffKey, num_known: int) -> None:
        """The consumer has nearly all KV, and knows so many output tokens."""
        job = self._jobs.get(key)
        if job is not None and self._producer.has(key) and key not in self._num_known:
            self._num_known[key] = num_known
            self._migrations.finalize(job)

    def computed(self, part: SequenceUpdate) -> list[Effect]:
        """A step is done with a sequence that goes on: announce what it completed, or with the last one the rest."""
        key = self._offers.get(part.key)
        if key is None or not self._producer.has(key):
            return []
        progress = self._migrations.progress(part.key, self._producer.num_announced(key), part.digests)
        known = self._num_known.get(key, 0)
        last = self._migrations.last_tokens(part.key, known) if progress.has_stopped else ()
        return self._producer.announce_migration(key, progress, last)

    def released(self, key: HandoffKey, now: float, *, is_taken: bool) -> JobKey | None:
        """Its consumer needs an offer no more; returns the choice that goes on there, if it does."""
        job = self._jobs.get(key)
        if job is None:
            return None
        has_moved = is_taken and self._producer.has(key) and self._migrations.has_stopped(job)
        self._producer.release(key, now)
        if not has_moved:
            self.lapsed(key)
            return None
        self.num_moved += 1
        self._forget(key)
        return job

    def recalled(self, key: HandoffKey, now: float) -> bool:
        """Its gateway needs an offer no more; a consumer that has it says for itself when it has let go, and until then
        no block of it may be written. False: it is no offer of a running sequence."""
        if not self.has(key):
            return False
        if not self._producer.has(key):
            self.released(key, now, is_taken=False)
        return True

    def lapsed(self, key: HandoffKey) -> bool:
        """The lease of an offer has ended, and its sequence goes on. False: it is no offer of a running sequence."""
        job = self._jobs.get(key)
        if job is None:
            return False
        self._migrations.cancel(job)
        self._forget(key)
        return True

    def ended(self, job: JobKey, kind: ErrorKind, reason: str, now: float) -> list[Effect]:
        """A choice is no more. CANCELLED: its own end is all that there is to say. What is cancelled after it was
        handed over has moved: its gateway may hear of that before we do."""
        key = self._offers.get(job)
        if key is None:
            return []
        self.num_moved += kind is ErrorKind.CANCELLED and self._migrations.has_stopped(job)
        self._forget(key)
        return self._producer.withdraw(key, kind, reason, now)

    def check(self) -> None:
        """Raises AssertionError naming what is off."""
        assert self._offers == {job: key for key, job in self._jobs.items()}, "offers and jobs differ"
        assert self._num_known.keys() <= self._jobs.keys(), "a consumer asks for what is not offered"

    def __repr__(self) -> str:
        return f"<evacuation {len(self._offers)} offered, {len(self._num_known)} leaving, {self.num_moved} moved>"

    def _forget(self, key: HandoffKey) -> None:
        del self._offers[self._jobs.pop(key)]
        self._num_known.pop(key, None)
