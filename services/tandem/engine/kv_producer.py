"""The producer's side of hand-offs: leases joined with the blocks they hold and the consumers to tell; never ends a
job."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from tandem.core.errors import ErrorKind
from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, HandoffKey, JobKey, WorkerRef
from tandem.core.request import PrefillJob
from tandem.engine.effects import Effect, SendAnnouncement, SendHandoffEnded
from tandem.kv.block_pool import BlockPool, Holder
from tandem.kv.handoff import LeaseState, RemotePrefixRequest
from tandem.kv.kv_producer import EndedLease, LeaseTable
from tandem.sched.state.schedule_result import SequenceUpdate
from tandem.sched.transfer.migration import MigrationProgress
from tandem.sched.transfer.prefix_serving import PrefixServer


class KVProducer:
    """Methods that end a lease return whose job computed for it and what to tell; ending that job is the engine's."""

    def __init__(self, pool: BlockPool, prefix_server: PrefixServer, lease_s: float) -> None:
        self._pool = pool
        self._prefix_server = prefix_server
        self._leases = LeaseTable(lease_s)

    def has(self, key: HandoffKey) -> bool:
        """Its lease is open."""
        return self._leases.find(key) is not None

    def num_announced(self, key: HandoffKey) -> int:
        """Leading blocks that its consumer may read."""
        lease = self._leases.find(key)
        return 0 if lease is None else lease.num_announced

    def open_migration_lease(self, key: HandoffKey, job: JobKey, standing: MigrationProgress, now: float) -> None:
        """Open the lease of a running sequence."""
        self._leases.open(key, job, now, is_migrating=True)
        self._leases.start(key, ())
        self.announce_migration(key, standing, ())

    def announce_migration(
        self, key: HandoffKey, standing: MigrationProgress, last: tuple[SampledToken, ...]
    ) -> list[Effect]:
        """Announce what a running sequence has completed; `last` are its last tokens, once it has stopped."""
        lease = self._leases.find(key)
        assert lease is not None, f"{key} is not lent"
        blocks = tuple(digest.block for digest in standing.fresh)
        self._pool.retain(blocks, Holder.LEASE)
        self._leases.grow(key, blocks)
        message = self._leases.announce(
            key, len(lease.blocks), standing.fresh, standing.num_computed, last, standing.num_cached
        )
        return [SendAnnouncement(lease.consumer, message)] if message is not None and lease.consumer is not None else []

    def announce_served(self, now: float) -> list[Effect]:
        """Tell consumers which blocks of their prefix fetches they may read: those that were digested."""
        effects: list[Effect] = []
        for key, digests in self._prefix_server.take_done():
            lease = self._leases.find(key)
            if lease is None:
                continue
            if not digests:
                effects += self.withdraw(key, ErrorKind.KV_LOST, "its blocks could not be digested", now)
                continue
            num_tokens = (lease.num_announced + len(digests)) * self._pool.block_size
            message = self._leases.announce_served(key, digests, num_tokens)
            effects += [SendAnnouncement(lease.consumer, message)] if lease.consumer is not None else []
        return effects

    def open_lease(self, job: PrefillJob, now: float) -> tuple[JobKey | None, list[Effect]]:
        """Open the lease of an accepted job; the job of an older attempt that this one ends comes back. Raises
        TandemError when the hand-off is fenced."""
        older = self._leases.open(job.offer, job.key, now)
        if older is None:
            return None, []
        return older.job, self._give_back(older, ErrorKind.CANCELLED, "fenced")

    def start(self, job: PrefillJob, blocks: tuple[BlockId, ...]) -> None:
        """The job got its blocks, held for the lease already."""
        self._leases.start(job.offer, blocks)

    def offer(self, job: PrefillJob, progress: SequenceUpdate, now: float) -> list[Effect]:
        """Announce what a chunk completed; end the hand-off when there is nothing left to hand over."""
        key = job.offer
        lease = self._leases.find(key)
        assert lease is not None, f"{job.key} runs without a lease"
        if progress.error is not None:
            return self.withdraw(key, progress.error_kind, progress.error, now)
        if progress.finish is not None:
            return self.withdraw(key, ErrorKind.CANCELLED, "nothing is left to hand over", now)
        num_complete = len(lease.blocks) if progress.handed_over else progress.num_computed // self._pool.block_size
        message = self._leases.announce(
            key, num_complete, progress.digests, progress.num_computed, progress.first_tokens, progress.num_cached
        )
        return [SendAnnouncement(lease.consumer, message)] if message is not None and lease.consumer is not None else []

    def follow(
        self, key: HandoffKey, consumer: WorkerRef, now: float, prefix_request: RemotePrefixRequest | None = None
    ) -> list[Effect]:
        """A consumer wants a hand-off's announcements, from the first on, or those of what it borrows."""
        effects = [] if prefix_request is None else self._lend_prefix(key, prefix_request, now)
        messages = self._leases.follow(key, consumer, now) if self._leases.offers(key, prefix_request) else None
        if messages is None:
            return [*effects, self._over(key, consumer)]
        return [*effects, *(SendAnnouncement(consumer, message) for message in messages)]

    def renew(self, keys: Iterable[HandoffKey], consumer: WorkerRef, now: float) -> list[Effect]:
        """A consumer needs more time; `now` is the moment of the answer."""
        return [self._over(key, consumer) for key in keys if not self._leases.renew(key, now)]

    def release(self, key: HandoffKey, now: float) -> JobKey | None:
        """A consumer needs the KV no more, and need not be told; returns whose job computes for it."""
        ended = self._leases.release(key, now)
        if ended is None:
            return None
        self._drop(ended)
        return ended.job

    def revoke(self, key: HandoffKey, now: float) -> tuple[JobKey | None, list[Effect]]:
        """A gateway needs the KV no more; returns whose job computes for it."""
        lease = self._leases.find(key)
        effects = self.withdraw(key, ErrorKind.KV_LOST, "its gateway needs it no more", now)
        return None if lease is None else lease.job, effects

    def withdraw(self, key: HandoffKey, kind: ErrorKind, reason: str, now: float) -> list[Effect]:
        """End a hand-off from this side. What its consumer may be reading is held until it lets go."""
        ended = self._leases.withdraw(key, now, kind)
        return [] if ended is None else self._give_back(ended, kind, reason)

    def lapse(self, now: float) -> tuple[list[EndedLease], list[Effect]]:
        """End all leases that nobody renewed in time."""
        lapsed = self._leases.expire(now)
        effects = [x for ended in lapsed for x in self._give_back(ended, ErrorKind.KV_LOST, "the lease ran out")]
        return lapsed, effects

    def next_expiry(self) -> float:
        """When `lapse` will have something to do, if nothing comes before; infinity without a lease."""
        return self._leases.next_expiry()

    @property
    def is_awaiting(self) -> bool:
        """Blocks come back when a consumer lets go: of what was withdrawn, of a prefill, or of cached blocks."""
        return any(lease.state is LeaseState.WITHDRAWN or not lease.is_migrating for lease in self._leases)

    def blocks(self) -> Iterator[BlockId]:
        """Every block once per lease that holds it."""
        return self._leases.blocks()

    def check(self, jobs: Container[JobKey]) -> None:
        """`jobs`: those that are live, by all their names. Raises AssertionError naming what is off."""
        for lease in self._leases:
            assert len(lease.blocks) or lease.job in jobs, f"{lease!r} has neither blocks nor a job"

    def __len__(self) -> int:
        return len(self._leases)

    def _lend_prefix(self, key: HandoffKey, prefix_request: RemotePrefixRequest, now: float) -> list[Effect]:
        """Open the lease of cached blocks, unless it is open, or over, or there is nothing to lend: then whoever
        follows hears so."""
        if not self._leases.can_serve_prefix(key):
            return []
        older = self._leases.open(key, None, now, prefix_fetch=prefix_request)
        effects = [] if older is None else self._give_back(older, ErrorKind.CANCELLED, "fenced")
        blocks = self._prefix_server.lend(key, prefix_request)
        if blocks:
            self._leases.start(key, blocks, prefix_request.first_index)
        else:
            self._leases.release(key, now)
        return effects

    def _give_back(self, ended: EndedLease, kind: ErrorKind, reason: str) -> list[Effect]:
        self._drop(ended)
        return [SendHandoffEnded(ended.consumer, ended.key, kind, reason)] if ended.consumer is not None else []

    def _drop(self, ended: EndedLease) -> None:
        self._pool.drop(ended.blocks, Holder.LEASE)
        self._prefix_server.drop(ended.key)

    def _over(self, key: HandoffKey, consumer: WorkerRef) -> SendHandoffEnded:
        kind = self._leases.end_reason(key) or ErrorKind.KV_LOST
        return SendHandoffEnded(consumer, key, kind, "the hand-off has ended")
