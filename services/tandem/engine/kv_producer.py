"""Lease KV blocks to the consumers of hand-offs: which blocks are leased to which worker, and until when.

A lease guarantees that its blocks keep their content. A consumer reads until it learns that the lease is over; when the
producer itself ends a lease, it therefore keeps the blocks unchanged until the consumer releases them, or until the
granted time is over.

Times are seconds of the caller's clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import SampledToken
from tandem.core.ids import BlockHash, BlockId, HandoffId, HandoffKey, JobKey, WorkerRef
from tandem.core.request import PrefillJob
from tandem.engine.effects import Effect, SendAnnouncement, SendHandoffEnded
from tandem.kv.block_pool import BlockPool, BlockTable, Holder
from tandem.kv.expiring_dict import ExpiringDict
from tandem.kv.handoff import Announcement, BlockDigest, LeaseEvent, LeaseState, RemotePrefixRequest, next_lease
from tandem.sched.phases.plan_builder import MAX_DIGESTS
from tandem.sched.state.limits import NO_DEMAND, BlockDemand, may_offer
from tandem.sched.state.schedule_result import SequenceUpdate
from tandem.sched.state.step_plan import PrefixBlock, StepPlan


@dataclass(slots=True, eq=False)
class _Onload:
    """Blocks of a served prefix that are copied from host memory: `table` holds them until the step that makes the
    copies is committed, and longer while their lease is open.

    `plan`: number of that step's plan; None before it was planned. `is_filled`: the step is committed. `is_over`: the
    lease has ended.
    """

    table: BlockTable
    plan: int | None = None
    is_filled: bool = False
    is_over: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Lease:
    """Hold one hand-off on its producer's side: a time-limited guarantee that its blocks keep their content for a
    consumer.

    - `key`: the hand-off and its attempt. `job`: the job that computes the blocks; None for a remote prefix fetch.
    - `blocks`: the leased blocks in the order of the tokens; a consumer may read the first `num_announced`.
    - `is_migrating`: the sequence of `job` migrates; while it runs, the blocks that it completes are added to `blocks`.
    - `prefix_request`: the request of a remote prefix fetch, which leases blocks that are in the prefix cache.
    - `onload`: blocks of the prefix that are copied from host memory first; None if there are none.
    - `consumer`: the worker that follows the hand-off; None before one does.
    - `announcements`: all announcements made so far; a new follower gets them from the first on.
    - `expires_at`: end of the lease unless it is renewed, in seconds of the caller's clock.
    """

    key: HandoffKey
    job: JobKey | None
    expires_at: float
    is_migrating: bool
    prefix_request: RemotePrefixRequest | None
    consumer: WorkerRef | None
    state: LeaseState = LeaseState.RESERVED
    blocks: tuple[BlockId, ...] = ()
    num_announced: int = 0
    onload: _Onload | None = None
    announcements: list[Announcement] = field(default_factory=list)

    @property
    def may_be_read(self) -> bool:
        """Return whether a consumer follows the hand-off and blocks were announced, so that it may be reading them."""
        return self.consumer is not None and any(message.blocks for message in self.announcements)

    def __repr__(self) -> str:
        return f"<lease {self.key} {self.state.name} {self.num_announced}/{len(self.blocks)} blocks to {self.consumer}>"


@dataclass(frozen=True, slots=True)
class _ClosedHandoff:
    """Record of a hand-off that has ended: its attempts up to number `attempt` cannot be opened or followed any more.
    `kind`: how the last of these attempts ended."""

    attempt: int
    kind: ErrorKind


class KVProducer:
    """Lease KV blocks of one worker to consumers, announce them as they are computed, and end the leases.

    There is one open lease per hand-off id; a newer attempt ends the older one. A lease lasts for `lease_s` seconds
    after it was opened, followed or last renewed. If the producer ends a lease that may still be read, the lease is
    withdrawn: its blocks are held until the consumer releases it or it expires. A method that ends a lease returns the
    job that still computes for this lease if the engine must end the job. Ended hand-offs are remembered for `memory_s`
    seconds, so that a late consumer is notified.

    The blocks of remote prefix fetches ("served prefixes") and of `hand_over_cached` are always digested, even where
    `digest_handoffs` is off, because the plan that digests a block also waits for its copy from host memory. Blocks
    that are only in host memory are first copied back into free blocks, as for a prefix hit of this worker's own jobs;
    they count towards the limit on leased blocks like all others.
    """

    def __init__(self, pool: BlockPool, lease_s: float, *, memory_s: float = 60.0) -> None:
        self._pool = pool
        self._lease_s = lease_s
        self._leases: dict[HandoffId, Lease] = {}
        self._withdrawn: dict[HandoffKey, Lease] = {}
        self._closed: ExpiringDict[HandoffId, _ClosedHandoff] = ExpiringDict(memory_s)
        self._awaited: ExpiringDict[HandoffKey, WorkerRef] = ExpiringDict(memory_s)
        self._undigested: dict[HandoffKey, deque[PrefixBlock]] = {}
        # The hand-offs, and their numbers of blocks, that an open plan digests, by plan number.
        self._digesting: dict[int, list[tuple[HandoffKey, int]]] = {}
        self._onloads: list[_Onload] = []

    # ---- prefills and migrations

    def open(
        self,
        key: HandoffKey,
        job: JobKey | None,
        now: float,
        *,
        is_migrating: bool = False,
        prefix_request: RemotePrefixRequest | None = None,
    ) -> tuple[JobKey | None, list[Effect]]:
        """Open the lease of a hand-off, which has no blocks yet. Return the job of the older attempt that this ends,
        None if there is none, and the effects.

        `job`: the job that computes the blocks; None for a remote prefix fetch. `is_migrating`: whether the lease is
        for a sequence that migrates. `prefix_request`: the request of a remote prefix fetch, else None. Raises
        TandemError (CANCELLED) when a newer attempt exists or this one has ended.
        """
        self._forget(now)
        old = self._leases.get(key.handoff)
        if old is not None and old.key.attempt >= key.attempt:
            raise TandemError(ErrorKind.CANCELLED, f"hand-off {key} is fenced by {old.key}")
        if self.end_reason(key) is not None:
            raise TandemError(ErrorKind.CANCELLED, f"hand-off {key} has ended")
        effects = [] if old is None else self.withdraw(old.key, ErrorKind.CANCELLED, "fenced", now)
        self._leases[key.handoff] = Lease(
            key, job, now + self._lease_s, is_migrating, prefix_request, consumer=self._awaited.pop(key)
        )
        return None if old is None else old.job, effects

    def start(self, key: HandoffKey, blocks: tuple[BlockId, ...], num_skipped: int = 0) -> None:
        """Record that the open lease of `key` now has `blocks`, which the caller has already marked as leased in the
        pool.

        The first `num_skipped` blocks are not announced, because the consumer has them; they are held only as parents
        of the blocks after them.
        """
        lease = self._leases[key.handoff]
        lease.state = next_lease(lease.state, LeaseEvent.STARTED)
        lease.blocks = blocks
        lease.num_announced = num_skipped

    def on_chunk(self, job: PrefillJob, progress: SequenceUpdate, now: float) -> list[Effect]:
        """Announce the blocks that a step of the prefill `job` completed. `progress`: what the step changed for the
        sequence.

        A prefill that failed, or whose request ended with its first token, leaves nothing to hand over: its lease is
        withdrawn, and the consumer is notified.
        """
        lease = self.find(job.offer)
        assert lease is not None, f"{job.key} runs without a lease"
        if progress.error is not None:
            return self.withdraw(job.offer, progress.error_kind, progress.error, now)
        if progress.finish is not None:
            return self.withdraw(job.offer, ErrorKind.CANCELLED, "nothing is left to hand over", now)
        num_complete = len(lease.blocks) if progress.handed_over else progress.num_computed // self._pool.block_size
        return self._announce(
            lease, num_complete, progress.digests, progress.num_computed, progress.first_tokens, progress.num_cached
        )

    def on_migration_progress(
        self,
        key: HandoffKey,
        fresh: Sequence[BlockDigest],
        num_computed: int,
        num_cached: int,
        last: tuple[SampledToken, ...],
    ) -> list[Effect]:
        """Lease and announce the blocks of a migrating sequence that became complete.

        - `fresh`: these blocks with their digests, in order.
        - `num_computed`: tokens of the sequence with complete KV. `num_cached`: prompt tokens that were prefix-cache
          hits.
        - `last`: once the sequence has stopped on this worker, the output tokens that the consumer lacks; empty before.
        """
        lease = self._leases[key.handoff]
        assert lease.is_migrating and lease.state is LeaseState.OFFERED, f"{lease!r} does not grow"
        blocks = tuple(digest.block for digest in fresh)
        self._pool.retain(blocks, Holder.LEASE)
        lease.blocks += blocks
        return self._announce(lease, len(lease.blocks), fresh, num_computed, last, num_cached)

    def hand_over_cached(self, key: HandoffKey, hashes: Sequence[BlockHash], demand: BlockDemand) -> list[Effect]:
        """Lease blocks of a preempted sequence to the consumer of the hand-off `key`: the leading blocks that are
        cached on this worker. The consumer computes the tokens behind these blocks. The caller must keep the sequence
        from starting meanwhile.

        `hashes`: the hashes of the sequence's full blocks. `demand`: free blocks that must remain for other sequences;
        it limits how many blocks are leased. The blocks are announced once plans have digested them, like those of
        served prefixes; the last announcement has no tokens.
        """
        lease = self._leases[key.handoff]
        blocks = self._lease_cached(lease, hashes[: self._num_within_room(hashes, demand)])
        if not blocks:
            return self._announce(lease, 0, (), 0, is_last=True)
        lease.blocks = blocks
        self._digest_later(key, blocks, 0)
        return []

    # ---- served prefixes

    def blocks_to_digest(self) -> tuple[PrefixBlock, ...]:
        """Return the blocks of served prefixes that the next plan is to digest, oldest request first, at most
        MAX_DIGESTS."""
        return tuple(islice(chain.from_iterable(self._undigested.values()), MAX_DIGESTS)) if self._undigested else ()

    def on_planned(self, plan: StepPlan) -> None:
        """Record that a plan digests the blocks `plan.digests`, which are the first ones of `blocks_to_digest`, and
        makes all copies from host memory that were queued for served prefixes."""
        for onload in self._onloads:
            onload.plan = plan.number if onload.plan is None else onload.plan
        num_left = len(plan.digests)
        for key, blocks in list(self._undigested.items()):
            count = min(len(blocks), num_left)
            if count == 0:
                return
            num_left -= count
            for _ in range(count):
                blocks.popleft()
            self._digesting.setdefault(plan.number, []).append((key, count))
            if not blocks:
                del self._undigested[key]

    def on_digests(self, number: int, digests: Sequence[BlockDigest], now: float) -> list[Effect]:
        """Announce the blocks of served prefixes whose digests the finished plan `number` computed.

        `digests` has one entry for each block that the plan was to digest, or is empty where the plan failed; then the
        leases of these blocks are withdrawn. Leases that have ended meanwhile are skipped. Must be called for each plan
        that is over, even without digests, because the copies from host memory that the plan made are complete then.
        """
        for onload in [onload for onload in self._onloads if onload.plan == number]:
            onload.is_filled = True
            self._let_go(onload)
        effects: list[Effect] = []
        first = 0
        for key, count in self._digesting.pop(number, ()):
            fresh = digests[first : first + count]
            first += count
            lease = self.find(key)
            if lease is None:
                continue
            if not fresh:
                effects += self.withdraw(key, ErrorKind.KV_LOST, "its blocks could not be digested", now)
                continue
            num_complete = lease.num_announced + len(fresh)
            is_last = num_complete == len(lease.blocks)
            effects += self._announce(lease, num_complete, fresh, num_complete * self._pool.block_size, is_last=is_last)
        return effects

    # ---- messages of consumers and gateways

    def on_follow(
        self,
        key: HandoffKey,
        consumer: WorkerRef,
        now: float,
        prefix_request: RemotePrefixRequest | None = None,
        demand: BlockDemand = NO_DEMAND,
    ) -> list[Effect]:
        """Let the worker `consumer` follow a hand-off: send it all announcements made so far immediately, and later
        ones as they are made.

        With a `prefix_request` the cached blocks that it names are leased first, as many as leave room for `demand`. If
        the hand-off is not open yet, its consumer is remembered. If it has ended, the consumer is notified. A consumer
        whose `prefix_request` differs from that of the lease is also notified that the hand-off has ended, because it
        would publish the blocks under wrong hashes.
        """
        effects = [] if prefix_request is None else self._serve_prefix(key, prefix_request, demand, now)
        lease = self.find(key)
        if lease is None and self.end_reason(key) is None:
            self._awaited.put(key, consumer, now)
            return effects
        if lease is None or lease.prefix_request != prefix_request:
            return [*effects, self._has_ended(key, consumer)]
        lease.consumer = consumer
        lease.expires_at = now + self._lease_s
        return [*effects, *(SendAnnouncement(consumer, message) for message in lease.announcements)]

    def on_renew(self, keys: Iterable[HandoffKey], consumer: WorkerRef, now: float) -> list[Effect]:
        """Extend the open leases of the hand-offs `keys` to `now` plus the lease time, because `consumer` has requested
        it; `now` is the time at which the producer answers.

        The effects notify the consumer of each hand-off that has ended or is unknown. A hand-off that is followed but
        not open yet is neither extended nor reported. A lease has no consumer if it opened only after the `on_follow`
        of its consumer was forgotten. Then `consumer` follows it from now on, because producer and consumer would
        otherwise wait for each other for ever.
        """
        effects: list[Effect] = []
        for key in keys:
            lease = self.find(key)
            if lease is not None:
                lease.expires_at = now + self._lease_s
                if lease.consumer is None:
                    lease.consumer = consumer
                    effects += [SendAnnouncement(consumer, message) for message in lease.announcements]
            elif key not in self._awaited or self.end_reason(key) is not None:
                effects.append(self._has_ended(key, consumer))
        return effects

    def on_release(self, key: HandoffKey, now: float, kind: ErrorKind = ErrorKind.KV_LOST) -> JobKey | None:
        """End a lease that its consumer has released, and free its blocks. Return the job that still computes for it,
        None if there is none.

        A hand-off that was never opened cannot be opened later. `kind`: the kind of error that is reported to consumers
        that follow the hand-off later.
        """
        lease = self.find(key) or self._withdrawn.get(key)
        self._awaited.pop(key)
        if lease is None:
            self._remember(key, kind, now)
            return None
        job = None if lease.state is LeaseState.WITHDRAWN else lease.job
        self._end(lease, LeaseEvent.RELEASE, kind, now)
        return job

    def on_revoke(self, key: HandoffKey, now: float) -> tuple[JobKey | None, list[Effect]]:
        """Withdraw a lease that the gateway does not need any more.

        Returns the job that computes for the lease, if any, and the effects.
        """
        lease = self.find(key)
        effects = self.withdraw(key, ErrorKind.KV_LOST, "its gateway does not need it any more", now)
        return None if lease is None else lease.job, effects

    def withdraw(self, key: HandoffKey, kind: ErrorKind, reason: str, now: float) -> list[Effect]:
        """End a lease from the producer's side and notify its consumer, if it has one.

        Blocks that the consumer may be reading are held until it releases them or the lease expires, without renewal;
        all others are freed. `kind` and `reason` go to the consumer; later followers get `kind`. If the lease was never
        opened, it cannot be opened later; if it has ended, nothing happens.
        """
        lease = self.find(key)
        if lease is None:
            if key not in self._withdrawn:
                self.on_release(key, now, kind)
            return []
        self._end(lease, LeaseEvent.WITHDRAW if lease.may_be_read else LeaseEvent.RELEASE, kind, now)
        return _notification(lease, kind, reason)

    # ---- time and books

    def on_tick(self, now: float) -> tuple[list[Lease], list[Effect]]:
        """End all expired leases and free their blocks.

        Returns the expired leases that had not been withdrawn, and the notifications of their consumers. Also forgets
        hand-offs that ended more than `memory_s` seconds ago.
        """
        self._forget(now)
        expired = [lease for lease in self if lease.expires_at <= now]
        ended = [lease for lease in expired if lease.state is not LeaseState.WITHDRAWN]
        for lease in expired:
            self._end(lease, LeaseEvent.EXPIRE, ErrorKind.KV_LOST, now)
        return ended, [x for lease in ended for x in _notification(lease, ErrorKind.KV_LOST, "the lease ran out")]

    def next_expiry(self) -> float:
        """Return the time at which the first lease expires unless it is renewed; infinity without leases."""
        return min((lease.expires_at for lease in self), default=math.inf)

    @property
    def is_awaiting(self) -> bool:
        """Return whether a consumer will free blocks by releasing a lease.

        Leases of migrating sequences do not count, nor do those of prefills that have no blocks yet.
        """
        return any(
            lease.state is LeaseState.WITHDRAWN or (lease.state is LeaseState.OFFERED and not lease.is_migrating)
            for lease in self
        )

    def find(self, key: HandoffKey) -> Lease | None:
        """Return the open lease of `key`; None for a withdrawn or ended lease, or for another attempt."""
        lease = self._leases.get(key.handoff)
        return lease if lease is not None and lease.key == key else None

    def follower(self, key: HandoffKey) -> WorkerRef | None:
        """Return the worker that was the last to follow a hand-off, even if its lease is withdrawn or not open yet;
        None where there is none."""
        lease = self.find(key) or self._withdrawn.get(key)
        return self._awaited.get(key) if lease is None else lease.consumer

    def end_reason(self, key: HandoffKey) -> ErrorKind | None:
        """Return the kind of error with which a hand-off ended; None while it is open or may still be opened.

        CANCELLED: a newer attempt is open.
        """
        lease, closed = self._leases.get(key.handoff), self._closed.get(key.handoff)
        if lease is not None and lease.key.attempt >= key.attempt:
            return None if lease.key == key else ErrorKind.CANCELLED
        return closed.kind if closed is not None and closed.attempt >= key.attempt else None

    def blocks(self) -> Iterator[BlockId]:
        """Iterate over the leased blocks, each once per lease that holds it, for `BlockPool.check`."""
        return (b for lease in self for b in lease.blocks)

    def tables(self) -> Iterator[BlockTable]:
        """Iterate over the tables of served prefixes that were in host memory, for `BlockPool.check`."""
        return (onload.table for onload in self._onloads)

    def check(self, jobs: Container[JobKey]) -> None:
        """Raise AssertionError naming the first inconsistency of the leases. `jobs`: the keys of all live jobs and
        choices."""
        for lease in self:
            is_open = self.find(lease.key) is lease
            assert is_open == (lease.state in (LeaseState.RESERVED, LeaseState.OFFERED)), f"{lease!r}: leases"
            assert is_open or lease.may_be_read, f"{lease!r} is held for nobody"
            assert len(lease.blocks) or lease.job in jobs, f"{lease!r} has neither blocks nor a job"
        for key in self._undigested:
            assert self.find(key) is not None, f"blocks of {key} are to be digested without a lease"

    def __len__(self) -> int:
        return len(self._leases) + len(self._withdrawn)

    def __iter__(self) -> Iterator[Lease]:
        """Iterate over the open leases and the withdrawn leases that consumers have not released."""
        return chain(self._leases.values(), self._withdrawn.values())

    # ---- internals

    def _serve_prefix(
        self, key: HandoffKey, prefix_request: RemotePrefixRequest, demand: BlockDemand, now: float
    ) -> list[Effect]:
        """Open a lease on the leading requested blocks that are cached here. It includes blocks that the consumer has
        already, because later blocks depend on them.

        Without such blocks, or for a key that was used, no lease is open afterwards. An older attempt ends only if it
        is a served prefix too.
        """
        old = self._leases.get(key.handoff)
        is_newer = old is None or (old.key.attempt < key.attempt and old.job is None)
        if not is_newer or self.end_reason(key) is not None:
            return []
        _, effects = self.open(key, None, now, prefix_request=prefix_request)
        first = prefix_request.first_index
        hashes = prefix_request.hashes[: self._num_within_room(prefix_request.hashes, demand)]
        if len(hashes) > first:
            blocks = self._lease_cached(self._leases[key.handoff], hashes)
            self.start(key, blocks, first)
            self._digest_later(key, blocks, first)
        else:
            self.on_release(key, now)
        return effects

    def _digest_later(self, key: HandoffKey, blocks: Sequence[BlockId], first: int) -> None:
        """Let plans digest the blocks of a lease from index `first` on, after which they are announced."""
        self._undigested[key] = deque((block, index) for index, block in enumerate(blocks[first:], first))

    def _lease_cached(self, lease: Lease, hashes: Sequence[BlockHash]) -> tuple[BlockId, ...]:
        """Add a lease to the cached blocks of `hashes`, and return them. Those that only host memory holds get free
        blocks, and copies into these are queued."""
        blocks = self._pool.cached(hashes)
        if len(blocks) == len(hashes):
            self._pool.retain_for_lease(blocks)
            return blocks
        lease.onload = _Onload(BlockTable())
        self._onloads.append(lease.onload)
        self._pool.share(lease.onload.table, hashes)
        blocks = lease.onload.table.ids()
        self._pool.retain(blocks, Holder.LEASE)
        return blocks

    def _let_go(self, onload: _Onload) -> None:
        """Release the table of copied blocks once neither a step nor the lease needs it."""
        if onload.is_filled and onload.is_over:
            self._pool.release(onload.table)
            self._onloads.remove(onload)

    def _num_within_room(self, hashes: Sequence[BlockHash], demand: BlockDemand) -> int:
        """Count the leading cached blocks that can be leased without taking room from reserved pulls or running
        sequences.

        Left free is what the largest reserved pull needs, as for every lease (`may_offer`), and the block that each
        running sequence may need next. Serving cannot deadlock: the consumer had room before it sent the request, and
        the lease expires.
        """
        num_hits, blocks = self._pool.count_hits(hashes), self._pool.cached(hashes)
        num_spare = self._pool.num_free - demand.num_running
        num_leased = num_taken = 0
        for i in range(num_hits):
            holders = self._pool.holders(blocks[i]) if i < len(blocks) else (0, 0, 0, 0)
            num_leased += not holders[1]
            num_taken += not any(holders)
            fits = may_offer(num_leased, self._pool.num_leased, self._pool.num_blocks, demand.largest_reservation)
            if not fits or (num_taken and num_taken > num_spare):
                return i
        return num_hits

    def _announce(
        self,
        lease: Lease,
        num_complete: int,
        digests: Sequence[BlockDigest],
        num_computed: int,
        first_tokens: tuple[SampledToken, ...] = (),
        num_cached: int = 0,
        *,
        is_last: bool = False,
    ) -> list[Effect]:
        """Announce that blocks `[num_announced, num_complete)` may be read, unless there is nothing new to announce.

        A migrating sequence is announced before it has a readable block, so that its consumer makes room. `digests` are
        those of exactly these blocks in order, or empty.
        """
        first = lease.num_announced
        is_news = num_complete > first or first_tokens or is_last
        if not is_news and (lease.announcements or not lease.is_migrating):
            return []
        fresh = lease.blocks[first:num_complete]
        blocks = tuple(digests) or tuple(BlockDigest(block, ()) for block in fresh)
        assert tuple(digest.block for digest in blocks) == fresh, f"{lease!r}: digests of other blocks"
        lease.num_announced = num_complete
        message = Announcement(
            lease.key, first, blocks, num_computed, first_tokens, num_cached, lease.is_migrating, is_last
        )
        lease.announcements.append(message)
        return [SendAnnouncement(lease.consumer, message)] if lease.consumer is not None else []

    def _end(self, lease: Lease, event: LeaseEvent, kind: ErrorKind, now: float) -> None:
        """Move a lease to its next state, and drop its blocks unless its consumer may still read them."""
        state = next_lease(lease.state, event)
        if lease.state is LeaseState.WITHDRAWN:
            del self._withdrawn[lease.key]
        else:
            del self._leases[lease.key.handoff]
            self._remember(lease.key, kind, now)
        lease.state = state
        if state is LeaseState.WITHDRAWN:
            self._withdrawn[lease.key] = lease
        else:
            self._pool.drop(lease.blocks, Holder.LEASE)
            if lease.onload is not None:
                lease.onload.is_over = True
                self._let_go(lease.onload)
        self._undigested.pop(lease.key, None)

    def _has_ended(self, key: HandoffKey, consumer: WorkerRef) -> SendHandoffEnded:
        kind = self.end_reason(key) or ErrorKind.KV_LOST
        return SendHandoffEnded(consumer, key, kind, "the hand-off has ended")

    def _remember(self, key: HandoffKey, kind: ErrorKind, now: float) -> None:
        closed = self._closed.get(key.handoff)
        if closed is None or closed.attempt < key.attempt:
            self._closed.put(key.handoff, _ClosedHandoff(key.attempt, kind), now)

    def _forget(self, now: float) -> None:
        self._closed.forget(now)
        self._awaited.forget(now)


def _notification(lease: Lease, kind: ErrorKind, reason: str) -> list[Effect]:
    """Return the message to the consumer of a lease that has ended, if there is a consumer."""
    return [SendHandoffEnded(lease.consumer, lease.key, kind, reason)] if lease.consumer is not None else []
