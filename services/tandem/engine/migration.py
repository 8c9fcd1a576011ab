"""Migrate sequences to other workers: the running ones of a draining worker, and those whose gateway asks for it.

A sequence is offered under a hand-off key of its own and keeps sampling. Once a consumer follows the hand-off, the
sequence keeps its seat and its blocks, and the blocks are announced as they become complete. When the consumer has
nearly all of them, it requests the remainder: the next token is the sequence's last one here, and is handed over with
everything that the consumer does not know. If the consumer is lost, the offer is void, and the sequence goes on; a
draining worker offers it anew.

A preempted sequence is offered too, and starts again meanwhile if it can. Once its consumer has room and requests the
remainder, the sequence does not start here any more, and those of its blocks that are cached are handed over; the
consumer computes the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, takewhile

from tandem.core.errors import ErrorKind
from tandem.core.events import MigrationOffered
from tandem.core.ids import HandoffId, HandoffKey, JobKey
from tandem.core.request import PrefillJob
from tandem.engine.effects import Effect
from tandem.engine.kv_producer import KVProducer
from tandem.kv.handoff import BlockDigest
from tandem.sched.state.limits import BlockDemand
from tandem.sched.state.schedule_result import SequenceUpdate
from tandem.sched.state.scheduler_state import SchedulerState
from tandem.sched.state.sequence import MigrationState, Status
from tandem.sched.state.sequence import Sequence as Seq


class Migrations:
    """Offer running and preempted sequences to other workers, and keep each offer until it is taken or void.

    `offer_all` offers all running sequences between `begin_drain` and `end_drain`, `offer` a single sequence. The class
    also owns `Sequence.migration_state`; besides it only the plan that freezes a sequence writes that field.
    `num_migrated`: sequences that other workers took over since the start of the drain. `num_requeued`: choices that
    failed as DRAINING since then, because they had nothing to migrate or blocked others.
    """

    def __init__(self, state: SchedulerState, producer: KVProducer) -> None:
        self.is_draining = False
        self.num_migrated = 0
        self.num_requeued = 0
        self._state = state
        self._producer = producer
        self._offers: dict[JobKey, HandoffKey] = {}
        self._jobs: dict[HandoffKey, JobKey] = {}
        # Number of output tokens that the consumer knows, for offers whose consumer has requested the remainder.
        self._num_known: dict[HandoffKey, int] = {}
        self._num_offers = 0

    @property
    def is_due(self) -> bool:
        """Return whether `offer_all` or `not_worth_migrating` would return anything now."""
        return bool(self.not_worth_migrating()) or next(self._not_offered(), None) is not None

    def not_worth_migrating(self) -> list[JobKey]:
        """Return the choices that a draining worker should requeue on other workers instead of migrating them, because
        they have no KV of their own here. Empty while `is_draining` is False.

        The KV of such a choice is still being pulled, or the choice waits to be computed. A waiting choice that is
        being handed over to a consumer is left out.
        """
        if not self.is_draining:
            return []
        waiting = (seq for seq in self._state.waiting if seq.migration_state is not MigrationState.FROZEN)
        return [key for seq in chain(waiting, self._state.pulling.values()) for key in seq.keys]

    def blocking_jobs(self) -> list[JobKey]:
        """Return the choice to requeue when migrating sequences hold all blocks and no step can be planned, as a list
        of one; the list is empty if blocks will become free without requeueing.

        A sequence that a consumer reads is not preempted. If such sequences hold all blocks, none of them can sample
        the last token after which it is handed over. Once the youngest of them is requeued, the others can. Blocks will
        become free without that if a sequence has stopped here, or if a consumer is still to release a lease.
        """
        if self._producer.is_awaiting:
            return []
        read = [seq for seq in self._state.running if seq.migration_state is not MigrationState.NONE]
        has_stopped = any(seq.migration_state is MigrationState.FROZEN for seq in chain(read, self._state.waiting))
        return [] if has_stopped else [seq.key for seq in read[-1:]]

    def has(self, key: HandoffKey) -> bool:
        """Return whether `key` is the hand-off under which a sequence of this worker is offered."""
        return key in self._jobs

    def offer_all(self) -> list[Effect]:
        """Offer the running sequences of a draining worker that are not offered yet; return one `MigrationOffered` for
        each. Empty while `is_draining` is False."""
        return [self._offer(job, is_requested=False) for job in self._not_offered()]

    def offer(self, job: JobKey, now: float) -> list[Effect]:
        """Offer one running or preempted sequence because its gateway asks for it, and return its `MigrationOffered`.

        `job`: the key of the sequence's choice. If the sequence was offered before and no consumer follows that offer,
        that offer becomes void. The result is empty for a choice that has not begun here, and for one that a consumer
        follows already. It is also empty for a prefill, which is handed over anyway, and on a draining worker, which
        offers all running sequences anyway.
        """
        if self.is_draining:
            return []
        self._void(job, now)
        seq = self._state.by_key.get(job)
        if seq is None or not (seq.status is Status.RUNNING or _is_preempted(seq)) or not self._may_offer(seq):
            return []
        return [self._offer(job, is_requested=True)]

    def begin_drain(self, now: float) -> None:
        """Start the drain: from now on `offer_all` offers all running sequences. Earlier offers that no consumer
        follows become void, so their sequences are offered again."""
        if not self.is_draining:
            self.num_migrated = self.num_requeued = 0
        self.is_draining = True
        for job in list(self._offers):
            self._void(job, now)

    def end_drain(self) -> None:
        """End the drain: running sequences stay here, except those that are offered already."""
        self.is_draining = False

    def follow(self, key: HandoffKey, now: float) -> None:
        """Open the lease of an offer that a consumer has started to follow, and announce the blocks that are complete.

        From now on completed blocks are digested, and the sequence is not preempted. Ignores a key that is not an
        offer.
        """
        job = self._jobs.get(key)
        if job is None or self._producer.find(key) is not None:
            return
        seq = self._state.by_key[job]
        assert seq.migration_state is MigrationState.NONE, f"{seq!r} is {seq.migration_state}"
        seq.migration_state = MigrationState.STREAMING
        seq.num_digested = 0
        self._producer.open(key, job, now, is_migrating=True)
        self._producer.start(key, ())
        self._announce(key, seq, ())

    def request_remainder(self, key: HandoffKey, num_known: int, demand: BlockDemand, now: float) -> list[Effect]:
        """Stop the sequence of an offer because its consumer has nearly all of its KV, and hand over the rest; return
        the effects.

        `num_known`: output tokens that the consumer knows. A running sequence stops after its next token. A preempted
        sequence does not start again: as many of its cached blocks are handed over as leave room for `demand`. If the
        consumer of a preempted sequence knows fewer output tokens than were sampled here, the offer is withdrawn
        instead, because the consumer would sample the others anew. Does nothing for a key that is not an offer, for an
        offer that no consumer follows, and on a second call.
        """
        job = self._jobs.get(key)
        if job is None or self._producer.find(key) is None or key in self._num_known:
            return []
        seq = self._state.by_key[job]
        if seq.status is Status.WAITING and seq.num_output != num_known:
            effects = self._producer.withdraw(key, ErrorKind.OVERLOADED, "its consumer lacks output tokens", now)
            self.expired(key)
            return effects
        self._num_known[key] = num_known
        if seq.status is not Status.WAITING:
            if seq.migration_state is MigrationState.STREAMING:
                seq.migration_state = MigrationState.FINALIZING
            return []
        seq.migration_state = MigrationState.FROZEN
        seq.may_start = False
        return self._producer.hand_over_cached(key, seq.reusable(self._state.pool.block_size), demand)

    def computed(self, part: SequenceUpdate) -> list[Effect]:
        """Announce the blocks of an offered sequence that a step completed; empty where no consumer follows the offer.

        `part`: what the step changed for the choice. Once the sequence has stopped, all remaining blocks and its last
        tokens are announced.
        """
        key = self._offers.get(part.key)
        if key is None or self._producer.find(key) is None:
            return []
        return self._announce(key, self._state.by_key[part.key], part.digests)

    def released(self, key: HandoffKey, now: float, *, is_taken: bool) -> JobKey | None:
        """End the lease of an offer; return the choice if it has migrated, so that the caller ends it here, else None.

        A choice has migrated if its consumer has taken everything (`is_taken`) and its sequence has stopped here;
        otherwise the sequence goes on here. Returns None also for a key that is not an offer.
        """
        job = self._jobs.get(key)
        if job is None:
            return None
        has_migrated = is_taken and self._producer.find(key) is not None and self._has_stopped(job)
        self._producer.on_release(key, now)
        if not has_migrated:
            self.expired(key)
            return None
        self.num_migrated += self.is_draining
        self._forget(key)
        return job

    def revoked(self, key: HandoffKey, now: float) -> bool:
        """Withdraw an offer that its gateway does not need any more; return False if `key` is not an offer.

        An offer that a consumer follows stays open, because its blocks must not be overwritten before the consumer
        releases it.
        """
        if not self.has(key):
            return False
        if self._producer.find(key) is None:
            self.released(key, now, is_taken=False)
        return True

    def expired(self, key: HandoffKey) -> bool:
        """Forget an offer whose lease has ended, and let its sequence go on here: it may start, be preempted and be
        offered again. Returns False, and changes nothing, if `key` is not an offer."""
        job = self._jobs.get(key)
        if job is None:
            return False
        seq = self._state.by_key[job]
        seq.migration_state = MigrationState.NONE
        seq.may_start = True
        self._forget(key)
        return True

    def end_withdrawn(self) -> None:
        """Forget the offers of preempted sequences whose leases were withdrawn because their blocks could not be
        digested, and let these sequences start again here."""
        for key in [key for key in self._num_known if self._producer.find(key) is None]:
            self.expired(key)

    def ended(self, job: JobKey, kind: ErrorKind, reason: str, now: float) -> list[Effect]:
        """Withdraw the offer of a choice that has ended, and return the notification of its consumer; empty where there
        is no offer.

        `kind`, `reason`: why the choice ended; both are sent to the consumer. A choice that ends as CANCELLED after its
        sequence has stopped here counts as migrated: its gateway has heard of the migration before this worker.
        """
        key = self._offers.get(job)
        if key is None:
            return []
        self.num_migrated += self.is_draining and kind is ErrorKind.CANCELLED and self._has_stopped(job)
        self._forget(key)
        return self._producer.withdraw(key, kind, reason, now)

    def check(self) -> None:
        """Raise AssertionError naming the first inconsistency between offers, jobs and requested remainders."""
        assert self._offers == {job: key for key, job in self._jobs.items()}, "offers and jobs differ"
        assert self._num_known.keys() <= self._jobs.keys(), (
            "a consumer requested the remainder of a sequence that is not offered"
        )
        for seq in self._state.waiting:
            is_frozen = seq.migration_state is MigrationState.FROZEN
            key = self._offers.get(seq.key) if is_frozen else None
            assert not is_frozen or (not seq.may_start and key is not None and self._producer.find(key) is not None), (
                f"{seq!r} is handed over to nobody"
            )

    def __repr__(self) -> str:
        return f"<migrations {len(self._offers)} offered, {len(self._num_known)} ending, {self.num_migrated} migrated>"

    def _not_offered(self) -> Iterator[JobKey]:
        """Yield the running sequences, one key per choice, that are to be offered. A prefill is handed over anyway."""
        for seq in self._state.running if self.is_draining else ():
            if self._may_offer(seq):
                yield seq.key

    def _may_offer(self, seq: Seq) -> bool:
        is_decode = seq.job.request.sampling.max_tokens > 0 and not seq.is_unforked
        return is_decode and not isinstance(seq.job, PrefillJob) and seq.key not in self._offers

    def _void(self, job: JobKey, now: float) -> None:
        """End the offer of a choice unless a consumer follows it."""
        key = self._offers.get(job)
        if key is not None and self._producer.find(key) is None:
            self.released(key, now, is_taken=False)

    def _offer(self, job: JobKey, *, is_requested: bool) -> MigrationOffered:
        self._num_offers += 1
        key = HandoffKey(HandoffId(f"{job.request}/{job.choice}/{self._num_offers}"), job.attempt)
        self._offers[job] = key
        self._jobs[key] = job
        return MigrationOffered(job, key, is_requested)

    def _has_stopped(self, job: JobKey) -> bool:
        """Return whether the sequence is here, samples no more tokens, and no open plan names it."""
        seq = self._state.by_key.get(job)
        return seq is not None and seq.migration_state is MigrationState.FROZEN and seq.num_open_plans == 0

    def _announce(self, key: HandoffKey, seq: Seq, digests: Sequence[BlockDigest]) -> list[Effect]:
        """Announce the blocks that became final: complete blocks, or all blocks and the last tokens once the sequence
        has stopped. `digests` are those of the finished step, and may contain blocks that were digested for a consumer
        that has disconnected."""
        lease = self._producer.find(key)
        assert lease is not None, f"{key} has no open lease"
        has_stopped = self._has_stopped(seq.key)
        size = self._state.pool.block_size
        num_whole = -(-seq.num_computed // size) if has_stopped else seq.num_computed // size
        blocks = seq.table.ids(num_whole)[lease.num_announced :]
        if self._state.limits.digest_handoffs:
            known = {digest.block: digest for digest in digests}
            fresh = [known[block] for block in takewhile(known.__contains__, blocks)]
        else:
            fresh = [BlockDigest(block, ()) for block in blocks]
        num_known = min(self._num_known.get(key, 0), seq.num_output - 1)
        last = seq.output_from(num_known) if has_stopped else ()
        return self._producer.on_migration_progress(key, fresh, seq.num_computed, seq.num_cached, last)

    def _forget(self, key: HandoffKey) -> None:
        del self._offers[self._jobs.pop(key)]
        self._num_known.pop(key, None)


def _is_preempted(seq: Seq) -> bool:
    """Return whether a sequence waits here after it has sampled tokens."""
    return seq.status is Status.WAITING and seq.was_started and seq.num_output > 0
