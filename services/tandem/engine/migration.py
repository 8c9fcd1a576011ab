"""Migrate the running sequences of a draining worker to other workers.

A sequence is offered under a hand-off key of its own and keeps sampling. Once a consumer follows the hand-off, the
sequence keeps its seat and its blocks, and the blocks are announced as they become complete. When the consumer has
nearly all of them, it requests the remainder: the next token is the sequence's last one here, and is handed over with
everything that the consumer does not know. If the consumer is lost, the offer is void, and the sequence goes on and is
offered anew.
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
    """Own the offers of running sequences to other workers; nothing is offered before `begin`.

    Counted since the start: `num_migrated` sequences that other workers took over, and `num_requeued` jobs that had
    nothing to migrate or blocked others.
    """

    def __init__(self, migrations: MigrationTracker, producer: KVProducer) -> None:
        self.has_begun = False
        self.num_migrated = 0
        self.num_requeued = 0
        self._migrations = migrations
        self._producer = producer
        self._offers: dict[JobKey, HandoffKey] = {}
        self._jobs: dict[HandoffKey, JobKey] = {}
        # Number of output tokens that the consumer knows, for offers whose consumer has requested the remainder.
        self._num_known: dict[HandoffKey, int] = {}
        self._num_offers = 0

    def begin(self) -> None:
        """Start offering all running sequences."""
        self.has_begun = True

    @property
    def is_due(self) -> bool:
        """Return whether a sequence is to be offered or a job to be requeued."""
        if not self.has_begun:
            return False
        return bool(self._migrations.not_worth_moving()) or any(
            k not in self._offers for k in self._migrations.movable()
        )

    def not_worth_migrating(self) -> list[JobKey]:
        """Return the choices to requeue because they have no KV here that is worth migrating."""
        return self._migrations.not_worth_moving() if self.has_begun else []

    def blocking_jobs(self) -> list[JobKey]:
        """Return the choices to requeue when no step can be planned.

        A sequence that is being read is not preempted. If such sequences hold all blocks, none of them can sample the
        last token with which it leaves; without one of them the others can.
        """
        key = self._migrations.blocking_migration() if self.has_begun and not self._producer.is_awaiting else None
        return [] if key is None else [key]

    def has(self, key: HandoffKey) -> bool:
        """Return whether `key` is the offer of a sequence that runs here."""
        return key in self._jobs

    def offer(self) -> list[Effect]:
        """Offer the running sequences that are not offered yet."""
        effects: list[Effect] = []
        for job in self._migrations.movable() if self.has_begun else ():
            if job not in self._offers:
                self._num_offers += 1
                key = HandoffKey(HandoffId(f"{job.request}/{job.choice}/{self._num_offers}"), job.attempt)
                self._offers[job] = key
                self._jobs[key] = job
                effects.append(SendEvent(MigrationOffered(job, key)))
        return effects

    def follow(self, key: HandoffKey, now: float) -> None:
        """Open the lease of an offer that a consumer has started to follow; ignore other keys."""
        job = self._jobs.get(key)
        if job is not None and not self._producer.has(key):
            self._producer.open_migration_lease(key, job, self._migrations.start(job), now)

    def request_remainder(self, key: HandoffKey, num_known: int) -> None:
        """Let the sequence stop after its next token, because its consumer has nearly all KV and `num_known` output
        tokens."""
        job = self._jobs.get(key)
        if job is not None and self._producer.has(key) and key not in self._num_known:
            self._num_known[key] = num_known
            self._migrations.finalize(job)

    def computed(self, part: SequenceUpdate) -> list[Effect]:
        """Announce what a step completed of an offered sequence that goes on, or the remainder after its last token."""
        key = self._offers.get(part.key)
        if key is None or not self._producer.has(key):
            return []
        progress = self._migrations.progress(part.key, self._producer.num_announced(key), part.digests)
        known = self._num_known.get(key, 0)
        last = self._migrations.last_tokens(part.key, known) if progress.has_stopped else ()
        return self._producer.announce_migration(key, progress, last)

    def released(self, key: HandoffKey, now: float, *, is_taken: bool) -> JobKey | None:
        """Release an offer; return the choice if it has migrated to the consumer, else let the sequence go on here."""
        job = self._jobs.get(key)
        if job is None:
            return None
        has_migrated = is_taken and self._producer.has(key) and self._migrations.has_stopped(job)
        self._producer.release(key, now)
        if not has_migrated:
            self.expired(key)
            return None
        self.num_migrated += 1
        self._forget(key)
        return job

    def revoked(self, key: HandoffKey, now: float) -> bool:
        """Withdraw an offer that its gateway does not need any more; return False if `key` is not an offer.

        The offer stays open if a consumer follows it: the consumer releases it, and its blocks must not be written
        before.
        """
        if not self.has(key):
            return False
        if not self._producer.has(key):
            self.released(key, now, is_taken=False)
        return True

    def expired(self, key: HandoffKey) -> bool:
        """Let the sequence of an offer whose lease has ended go on here; return False if `key` is not an offer."""
        job = self._jobs.get(key)
        if job is None:
            return False
        self._migrations.cancel(job)
        self._forget(key)
        return True

    def ended(self, job: JobKey, kind: ErrorKind, reason: str, now: float) -> list[Effect]:
        """Withdraw the offer of a choice that has ended. A choice that is CANCELLED after it was handed over has
        migrated: its gateway may know that before this worker does."""
        key = self._offers.get(job)
        if key is None:
            return []
        self.num_migrated += kind is ErrorKind.CANCELLED and self._migrations.has_stopped(job)
        self._forget(key)
        return self._producer.withdraw(key, kind, reason, now)

    def check(self) -> None:
        """Raise AssertionError naming the first inconsistency."""
        assert self._offers == {job: key for key, job in self._jobs.items()}, "offers and jobs differ"
        assert self._num_known.keys() <= self._jobs.keys(), (
            "a consumer requested the remainder of a sequence that is not offered"
        )

    def __repr__(self) -> str:
        return f"<drain {len(self._offers)} offered, {len(self._num_known)} ending, {self.num_migrated} migrated>"

    def _forget(self, key: HandoffKey) -> None:
        del self._offers[self._jobs.pop(key)]
        self._num_known.pop(key, None)
