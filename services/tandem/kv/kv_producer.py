"""Decide, on the producer's side of every hand-off, which blocks are leased to whom and until when.

A lease guarantees that its blocks keep their content, and a consumer reads until it learns that the lease is over. A
lease that the producer itself ends is therefore held until the consumer releases it, or until the granted time is over.

The owner of the table must drop the blocks that `release`, `withdraw`, `expire` and a fencing `open` return. Times are
seconds of the caller's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, HandoffId, HandoffKey, JobKey, WorkerRef
from tandem.kv.expiring_dict import ExpiringDict
from tandem.kv.handoff import Announcement, BlockDigest, LeaseEvent, LeaseState, RemotePrefixRequest, next_lease


class Lease:
    """One open hand-off on its producer's side.

    The first `num_announced` of `blocks` may be read. `is_migrating`: the sequence goes on, so blocks are added.
    `prefix_fetch`: the request, for a lease of cached blocks that no job computes. `expires_at`: seconds of the
    caller's clock.
    """

    __slots__ = (
        "announcements",
        "blocks",
        "consumer",
        "expires_at",
        "is_migrating",
        "job",
        "key",
        "num_announced",
        "prefix_fetch",
        "state",
    )

    def __init__(
        self,
        key: HandoffKey,
        job: JobKey | None,
        expires_at: float,
        is_migrating: bool,
        prefix_fetch: RemotePrefixRequest | None,
    ) -> None:
        self.key = key
        self.job = job
        self.is_migrating = is_migrating
        self.prefix_fetch = prefix_fetch
        self.state = LeaseState.RESERVED
        self.expires_at = expires_at
        self.blocks: tuple[BlockId, ...] = ()
        self.num_announced = 0
        self.announcements: list[Announcement] = []
        self.consumer: WorkerRef | None = None

    @property
    def may_be_read(self) -> bool:
        """Return whether blocks were announced to a consumer."""
        return self.consumer is not None and any(message.blocks for message in self.announcements)

    def __repr__(self) -> str:
        return f"<lease {self.key} {self.state.name} {self.num_announced}/{len(self.blocks)} blocks to {self.consumer}>"


@dataclass(frozen=True, slots=True)
class EndedLease:
    """Outcome of a lease that has ended.

    `job`: the job that computed for the lease, if any. `blocks`: blocks that the lease no longer holds. `consumer`: the
    worker that must be notified, if any.
    """

    key: HandoffKey
    job: JobKey | None
    blocks: tuple[BlockId, ...]
    consumer: WorkerRef | None


@dataclass(frozen=True, slots=True)
class _ClosedHandoff:
    """Hand-off of which no attempt up to `attempt` can be opened or followed; `kind` is how the last attempt ended."""

    attempt: int
    kind: ErrorKind


class LeaseTable:
    """Own the leases of one producer: one open lease per hand-off id, and the withdrawn leases that may still be read.

    Ended hand-offs are remembered for `memory_s` seconds, so that a late consumer is notified.
    """

    def __init__(self, lease_s: float, *, memory_s: float = 60.0) -> None:
        self.lease_s = lease_s
        self._leases: dict[HandoffId, Lease] = {}
        self._withdrawn: dict[HandoffKey, Lease] = {}
        self._closed: ExpiringDict[HandoffId, _ClosedHandoff] = ExpiringDict(memory_s)
        self._awaited: ExpiringDict[HandoffKey, WorkerRef] = ExpiringDict(memory_s)

    def open(
        self,
        key: HandoffKey,
        job: JobKey | None,
        now: float,
        *,
        is_migrating: bool = False,
        prefix_fetch: RemotePrefixRequest | None = None,
    ) -> EndedLease | None:
        """Reserve a lease for a hand-off; return the older attempt that the new one ends. Raises TandemError for a
        fenced attempt."""
        self.forget(now)
        old = self._leases.get(key.handoff)
        if old is not None and old.key.attempt >= key.attempt:
            raise TandemError(ErrorKind.CANCELLED, f"hand-off {key} is fenced by {old.key}")
        if self.end_reason(key) is not None:
            raise TandemError(ErrorKind.CANCELLED, f"hand-off {key} has ended")
        ended = self.withdraw(old.key, now, ErrorKind.CANCELLED) if old is not None else None
        lease = self._leases[key.handoff] = Lease(key, job, now + self.lease_s, is_migrating, prefix_fetch)
        lease.consumer = self._awaited.pop(key)
        return ended

    def start(self, key: HandoffKey, blocks: tuple[BlockId, ...], num_skipped: int = 0) -> None:
        """Record the blocks of a prefill, which are held for the lease from now on.

        The first `num_skipped` blocks are not announced, because the consumer has them; they are held only as parents
        of the blocks after them.
        """
        lease = self._leases[key.handoff]
        lease.state = next_lease(lease.state, LeaseEvent.STARTED)
        lease.blocks = blocks
        lease.num_announced = num_skipped

    def grow(self, key: HandoffKey, blocks: tuple[BlockId, ...]) -> None:
        """Add blocks of a migrating sequence to its lease."""
        lease = self._leases[key.handoff]
        assert lease.is_migrating and lease.state is LeaseState.OFFERED, f"{lease!r} does not grow"
        lease.blocks += blocks

    def announce(
        self,
        key: HandoffKey,
        num_complete: int,
        digests: Sequence[BlockDigest],
        num_computed: int,
        first_tokens: tuple[SampledToken, ...],
        num_cached: int = 0,
    ) -> Announcement | None:
        """Announce that blocks `[num_announced, num_complete)` may be read; return None when there is nothing new to
        announce.

        A migrating sequence is announced before it has a readable block, so that its consumer makes room. `digests` are
        those of exactly these blocks in order, or empty.
        """
        lease = self._leases[key.handoff]
        first = lease.num_announced
        if num_complete == first and not first_tokens and (lease.announcements or not lease.is_migrating):
            return None
        blocks = tuple(digests) or tuple(BlockDigest(b, ()) for b in lease.blocks[first:num_complete])
        assert tuple(d.block for d in blocks) == lease.blocks[first:num_complete], f"{lease!r}: digests of other blocks"
        lease.num_announced = num_complete
        announcement = Announcement(key, first, blocks, num_computed, first_tokens, num_cached, lease.is_migrating)
        lease.announcements.append(announcement)
        return announcement

    def offers(self, key: HandoffKey, prefix_fetch: RemotePrefixRequest | None) -> bool:
        """Return whether `key` is free or was opened for exactly this `prefix_fetch` request.

        A consumer must not read the blocks of another request, because it would publish them under the wrong hashes.
        """
        lease = self.find(key)
        return lease is None or lease.prefix_fetch == prefix_fetch

    def can_serve_prefix(self, key: HandoffKey) -> bool:
        """Return whether `key` is unused, and the older attempt that it would end, if any, is a remote prefix fetch as
        well."""
        old = self._leases.get(key.handoff)
        is_newer = old is None or (old.key.attempt < key.attempt and old.job is None)
        return is_newer and self.end_reason(key) is None

    def announce_served(self, key: HandoffKey, digests: tuple[BlockDigest, ...], num_tokens: int) -> Announcement:
        """Announce the next blocks of a remote prefix fetch; with them `num_tokens` tokens of the prefix may be
        read."""
        lease = self._leases[key.handoff]
        first, stop = lease.num_announced, lease.num_announced + len(digests)
        assert tuple(d.block for d in digests) == lease.blocks[first:stop], f"{lease!r}: digests of other blocks"
        lease.num_announced = stop
        announcement = Announcement(key, first, digests, num_tokens, is_last=stop == len(lease.blocks))
        lease.announcements.append(announcement)
        return announcement

    def follow(self, key: HandoffKey, consumer: WorkerRef, now: float) -> list[Announcement] | None:
        """Send a hand-off's announcements to `consumer` from now on; return the announcements so far, None if it has
        ended.

        For an unknown hand-off the consumer is remembered until the hand-off is opened.
        """
        lease = self.find(key)
        if lease is None:
            if self.end_reason(key) is not None:
                return None
            self._awaited.put(key, consumer, now)
            return []
        lease.consumer = consumer
        lease.expires_at = now + self.lease_s
        return list(lease.announcements)

    def renew(self, key: HandoffKey, now: float) -> bool:
        """Extend a lease from `now`, when the producer answers; return False if the hand-off is neither open nor
        awaited."""
        lease = self.find(key)
        if lease is None:
            return key in self._awaited and self.end_reason(key) is None
        lease.expires_at = now + self.lease_s
        return True

    def release(self, key: HandoffKey, now: float, kind: ErrorKind = ErrorKind.KV_LOST) -> EndedLease | None:
        """End a lease that its consumer has released; return None when no blocks are held for it. Later followers and
        requests for the hand-off get `kind`."""
        lease = self.find(key) or self._withdrawn.get(key)
        self._awaited.pop(key)
        if lease is None:
            self._remember(key, kind, now)
            return None
        return self._end(lease, LeaseEvent.RELEASE, kind, now)

    def withdraw(self, key: HandoffKey, now: float, kind: ErrorKind = ErrorKind.KV_LOST) -> EndedLease | None:
        """End a lease from the producer's side; return None when it is not open.

        Blocks that the consumer may be reading are returned later by `release` or `expire`; such a lease is not
        renewed. Later followers and requests for the hand-off get `kind`.
        """
        if key in self._withdrawn:
            return None
        lease = self.find(key)
        if lease is None or not lease.may_be_read:
            return self.release(key, now, kind)
        return self._end(lease, LeaseEvent.WITHDRAW, kind, now)

    def expire(self, now: float) -> list[EndedLease]:
        """End all leases whose time is over, and drop records that are older than `memory_s`."""
        self.forget(now)
        expired = [lease for lease in self if lease.expires_at <= now]
        return [self._end(lease, LeaseEvent.EXPIRE, ErrorKind.KV_LOST, now) for lease in expired]

    def next_expiry(self) -> float:
        """Return when the first lease expires if nobody renews it; infinity without leases."""
        return min((lease.expires_at for lease in self), default=math.inf)

    def forget(self, now: float) -> None:
        """Drop records of ended and awaited hand-offs that are older than `memory_s`."""
        self._closed.forget(now)
        self._awaited.forget(now)

    def end_reason(self, key: HandoffKey) -> ErrorKind | None:
        """Return how a hand-off ended; None while it is open or may still be opened."""
        lease, closed = self._leases.get(key.handoff), self._closed.get(key.handoff)
        if lease is not None and lease.key.attempt >= key.attempt:
            return None if lease.key == key else ErrorKind.CANCELLED
        return closed.kind if closed is not None and closed.attempt >= key.attempt else None

    def find(self, key: HandoffKey) -> Lease | None:
        lease = self._leases.get(key.handoff)
        return lease if lease is not None and lease.key == key else None

    def blocks(self) -> Iterator[BlockId]:
        """Iterate over every block once per lease that holds it, for the pool's `check`."""
        return (b for lease in self for b in lease.blocks)

    def __len__(self) -> int:
        return len(self._leases) + len(self._withdrawn)

    def __iter__(self) -> Iterator[Lease]:
        """Iterate over the open leases and the withdrawn leases that consumers have not released."""
        return chain(self._leases.values(), self._withdrawn.values())

    def _end(self, lease: Lease, event: LeaseEvent, kind: ErrorKind, now: float) -> EndedLease:
        """Move a lease to its end state and return the blocks it no longer holds.

        The end of a withdrawn lease reports only its blocks, because job and consumer were reported at the withdrawal.
        """
        before = lease.state
        lease.state = next_lease(before, event)
        if before is LeaseState.WITHDRAWN:
            del self._withdrawn[lease.key]
            return EndedLease(lease.key, None, lease.blocks, None)
        del self._leases[lease.key.handoff]
        self._remember(lease.key, kind, now)
        if lease.state is LeaseState.WITHDRAWN:
            self._withdrawn[lease.key] = lease
            return EndedLease(lease.key, lease.job, (), lease.consumer)
        return EndedLease(lease.key, lease.job, lease.blocks, lease.consumer)

    def _remember(self, key: HandoffKey, kind: ErrorKind, now: float) -> None:
        closed = self._closed.get(key.handoff)
        if closed is None or closed.attempt < key.attempt:
            self._closed.put(key.handoff, _ClosedHandoff(key.attempt, kind), now)
