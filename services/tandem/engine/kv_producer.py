"""Join the producer's side of hand-offs with the blocks that leases hold and the consumers that must be notified."""

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
    """Own the leases of one worker. Methods that end a lease return the job that computed for it and the notifications;
    the engine ends the job."""

    def __init__(self, pool: BlockPool, prefix_server: PrefixServer, lease_s: float) -> None:
        self._pool = pool
        self._prefix_server = prefix_server
        self._leases = LeaseTable(lease_s)

    def has(self, key: HandoffKey) -> bool:
        """Return whether the lease of `key` is open."""
        return self._leases.find(key) is not None

    def num_announced(self, key: HandoffKey) -> int:
        """Count the leading blocks that the consumer may read."""
        lease = self._leases.find(key)
        return 0 if lease is None else lease.num_announced

    def open_migration_lease(self, key: HandoffKey, job: JobKey, progress: MigrationProgress, now: float) -> None:
        """Open the lease of a running sequence, and announce its blocks so far."""
        self._leases.open(key, job, now, is_migrating=True)
        self._leases.start(key, ())
        self.announce_migration(key, progress, ())

    def announce_migration(
        self, key: HandoffKey, progress: MigrationProgress, last: tuple[SampledToken, ...]
    ) -> list[Effect]:
        """Announce the completed blocks of a migrating sequence. `last`: its last tokens, once it has stopped here,
        else empty."""
        lease = self._leases.find(key)
        assert lease is not None, f"{key} has no open lease"
        blocks = tuple(digest.block for digest in progress.fresh)
        self._pool.retain(blocks, Holder.LEASE)
        self._leases.grow(key, blocks)
        message = self._leases.announce(
            key, len(lease.blocks), progress.fresh, progress.num_computed, last, progress.num_cached
        )
        return [SendAnnouncement(lease.consumer, message)] if message is not None and lease.consumer is not None else []

    def announce_served(self, now: float) -> list[Effect]:
        """Announce the blocks of remote prefix fetches whose digests have been computed."""
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
        """Open the lease of an accepted job; return the job of the older attempt that this one ends, if any.

        Raises TandemError when the hand-off is fenced.
        """
        older = self._leases.open(job.offer, job.key, now)
        if older is None:
            return None, []
        return older.job, self._close(older, ErrorKind.CANCELLED, "fenced")

    def start(self, job: PrefillJob, blocks: tuple[BlockId, ...]) -> None:
        """Record the blocks of a job, which the scheduler holds for the lease already."""
        self._leases.start(job.offer, blocks)

    def offer(self, job: PrefillJob, progress: SequenceUpdate, now: float) -> list[Effect]:
        """Announce the blocks that a chunk completed; end the hand-off when nothing is left to hand over."""
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
        """Send a hand-off's announcements to `consumer` from now on. `prefix_request`: open a lease of these cached
        blocks first."""
        effects = [] if prefix_request is None else self._open_prefix_lease(key, prefix_request, now)
        messages = self._leases.follow(key, consumer, now) if self._leases.offers(key, prefix_request) else None
        if messages is None:
            return [*effects, self._handoff_ended(key, consumer)]
        return [*effects, *(SendAnnouncement(consumer, message) for message in messages)]

    def renew(self, keys: Iterable[HandoffKey], consumer: WorkerRef, now: float) -> list[Effect]:
        """Extend leases from `now`, when the producer answers; notify the consumer of leases that have ended."""
        return [self._handoff_ended(key, consumer) for key in keys if not self._leases.renew(key, now)]

    def release(self, key: HandoffKey, now: float) -> JobKey | None:
        """End a lease that its consumer has released; return the job that computes for it, if any."""
        ended = self._leases.release(key, now)
        if ended is None:
            return None
        self._drop(ended)
        return ended.job

    def revoke(self, key: HandoffKey, now: float) -> tuple[JobKey | None, list[Effect]]:
        """End a lease that the gateway does not need any more; return the job that computes for it, if any."""
        lease = self._leases.find(key)
        effects = self.withdraw(key, ErrorKind.KV_LOST, "its gateway does not need it any more", now)
        return None if lease is None else lease.job, effects

    def withdraw(self, key: HandoffKey, kind: ErrorKind, reason: str, now: float) -> list[Effect]:
        """End a lease from the producer's side. Blocks that its consumer may be reading are held until the consumer
        releases them."""
        ended = self._leases.withdraw(key, now, kind)
        return [] if ended is None else self._close(ended, kind, reason)

    def expire(self, now: float) -> tuple[list[EndedLease], list[Effect]]:
        """End all leases that were not renewed in time."""
        expired = self._leases.expire(now)
        effects = [x for ended in expired for x in self._close(ended, ErrorKind.KV_LOST, "the lease ran out")]
        return expired, effects

    def next_expiry(self) -> float:
        """Return when `expire` will have something to do unless a lease is renewed; infinity without leases."""
        return self._leases.next_expiry()

    @property
    def is_awaiting(self) -> bool:
        """Return whether blocks will be freed when a consumer releases them: those of a withdrawn lease, of a prefill
        or of a remote prefix fetch."""
        return any(lease.state is LeaseState.WITHDRAWN or not lease.is_migrating for lease in self._leases)

    def blocks(self) -> Iterator[BlockId]:
        """Iterate over every block once per lease that holds it."""
        return self._leases.blocks()

    def check(self, jobs: Container[JobKey]) -> None:
        """Raise AssertionError for a lease with neither blocks nor a live job. `jobs`: job and choice keys of all live
        jobs."""
        for lease in self._leases:
            assert len(lease.blocks) or lease.job in jobs, f"{lease!r} has neither blocks nor a job"

    def __len__(self) -> int:
        return len(self._leases)

    def _open_prefix_lease(self, key: HandoffKey, prefix_request: RemotePrefixRequest, now: float) -> list[Effect]:
        """Open the lease of cached blocks. Without cached blocks, or for a key that was used, no lease is opened, and
        the following `follow` reports the end of the hand-off."""
        if not self._leases.can_serve_prefix(key):
            return []
        older = self._leases.open(key, None, now, prefix_fetch=prefix_request)
        effects = [] if older is None else self._close(older, ErrorKind.CANCELLED, "fenced")
        blocks = self._prefix_server.serve(key, prefix_request)
        if blocks:
            self._leases.start(key, blocks, prefix_request.first_index)
        else:
            self._leases.release(key, now)
        return effects

    def _close(self, ended: EndedLease, kind: ErrorKind, reason: str) -> list[Effect]:
        """Drop the blocks of an ended lease, and notify its consumer."""
        self._drop(ended)
        return [SendHandoffEnded(ended.consumer, ended.key, kind, reason)] if ended.consumer is not None else []

    def _drop(self, ended: EndedLease) -> None:
        self._pool.drop(ended.blocks, Holder.LEASE)
        self._prefix_server.drop(ended.key)

    def _handoff_ended(self, key: HandoffKey, consumer: WorkerRef) -> SendHandoffEnded:
        kind = self._leases.end_reason(key) or ErrorKind.KV_LOST
        return SendHandoffEnded(consumer, key, kind, "the hand-off has ended")
