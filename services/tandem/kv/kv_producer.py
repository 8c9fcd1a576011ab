"""The producer's side of every hand-off: what is offered to whom and until when; never frees a block itself.

A lease is a promise that its blocks stay as they are, and a consumer reads on until it has heard that it is over. So
what the producer itself ends is held until the consumer lets go, or until the time is over that the consumer was
granted.

Whoever holds the book drops the blocks that `release`, `withdraw`, `expire` and a fencing `open` return. Times are
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
    """One open hand-off. `num_announced` leading blocks of `blocks` may be read. `is_moving`: of a sequence that goes
    on, so that blocks are added. `prefix_fetch`: what was asked for, where it is of cached blocks and computed for no
    job."""

    __slots__ = (
        "announcements",
        "blocks",
        "consumer",
        "is_moving",
        "job",
        "key",
        "num_announced",
        "prefix_fetch",
        "state",
        "until",
    )

    def __init__(
        self,
        key: HandoffKey,
        job: JobKey | None,
        until: float,
        is_moving: bool,
        prefix_fetch: RemotePrefixRequest | None,
    ) -> None:
        self.key = key
        self.job = job
        self.is_moving = is_moving
        self.prefix_fetch = prefix_fetch
        self.state = LeaseState.PROMISED
        self.until = until
        self.blocks: tuple[BlockId, ...] = ()
        self.num_announced = 0
        self.announcements: list[Announcement] = []
        self.consumer: WorkerRef | None = None

    @property
    def may_be_read(self) -> bool:
        """Its consumer was told of blocks."""
        return self.consumer is not None and any(message.blocks for message in self.announcements)

    def __repr__(self) -> str:
        return f"<lease {self.key} {self.state.name} {self.num_announced}/{len(self.blocks)} blocks to {self.consumer}>"


@dataclass(frozen=True, slots=True)
class EndedLease:
    """A lease that is no more: who computed for it, if anybody, blocks that are not held any more, and who must be
    told."""

    key: HandoffKey
    job: JobKey | None
    blocks: tuple[BlockId, ...]
    consumer: WorkerRef | None


@dataclass(frozen=True, slots=True)
class _ClosedHandoff:
    """No attempt up to `attempt` can be opened or followed; `kind` says how the last one ended."""

    attempt: int
    kind: ErrorKind


class LeaseTable:
    """One open lease per hand-off id, beside those that were withdrawn. Memory of ended ones is kept for `memory_s`, so
    that a late consumer is told."""

    def __init__(self, lease_s: float, *, memory_s: float = 60.0) -> None:
        self.lease_s = lease_s
        self._leases: dict[HandoffId, Lease] = {}
        self._withdrawn: dict[HandoffKey, Lease] = {}
        self._over: ExpiringDict[HandoffId, _ClosedHandoff] = ExpiringDict(memory_s)
        self._awaited: ExpiringDict[HandoffKey, WorkerRef] = ExpiringDict(memory_s)

    def open(
        self,
        key: HandoffKey,
        job: JobKey | None,
        now: float,
        *,
        is_moving: bool = False,
        prefix_fetch: RemotePrefixRequest | None = None,
    ) -> EndedLease | None:
        """Promise a hand-off; returns the older attempt that this one ends. Raises TandemError when it is fenced."""
        self.forget(now)
        old = self._leases.get(key.handoff)
        if old is not None and old.key.attempt >= key.attempt:
            raise TandemError(ErrorKind.CANCELLED, f"hand-off {key} is fenced by {old.key}")
        if self.why_over(key) is not None:
            raise TandemError(ErrorKind.CANCELLED, f"hand-off {key} has ended")
        ended = self.withdraw(old.key, now, ErrorKind.CANCELLED) if old is not None else None
        lease = self._leases[key.handoff] = Lease(key, job, now + self.lease_s, is_moving, prefix_fetch)
        lease.consumer = self._awaited.pop(key)
        return ended

    def start(self, key: HandoffKey, blocks: tuple[BlockId, ...], num_left_out: int = 0) -> None:
        """The prefill got its blocks; they are held for the lease from now on. The first `num_left_out` are held only
        because those after them stand on them: the consumer has them."""
        lease = self._leases[key.handoff]
        lease.state = next_lease(lease.state, LeaseEvent.STARTED)
        lease.blocks = blocks
        lease.num_announced = num_left_out

    def grow(self, key: HandoffKey, blocks: tuple[BlockId, ...]) -> None:
        """A sequence that moves has more blocks; they are held for the lease from now on."""
        lease = self._leases[key.handoff]
        assert lease.is_moving and lease.state is LeaseState.OFFERED, f"{lease!r} does not grow"
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
        """Blocks `[num_announced, num_complete)` may be read; None when there is nothing new to say. What moves is
        announced before it has a block to read, so that its consumer makes room.

        `digests` are those of exactly these blocks in order, or none at all.
        """
        lease = self._leases[key.handoff]
        first = lease.num_announced
        if num_complete == first and not first_tokens and (lease.announcements or not lease.is_moving):
            return None
        blocks = tuple(digests) or tuple(BlockDigest(b, ()) for b in lease.blocks[first:num_complete])
        assert tuple(d.block for d in blocks) == lease.blocks[first:num_complete], f"{lease!r}: digests of other blocks"
        lease.num_announced = num_complete
        announcement = Announcement(key, first, blocks, num_computed, first_tokens, num_cached, lease.is_moving)
        lease.announcements.append(announcement)
        return announcement

    def offers(self, key: HandoffKey, prefix_fetch: RemotePrefixRequest | None) -> bool:
        """Nothing else is offered under this key. Whoever reads what he did not ask for takes it for what he did."""
        lease = self.find(key)
        return lease is None or lease.prefix_fetch == prefix_fetch

    def can_serve_prefix(self, key: HandoffKey) -> bool:
        """Nobody has used this key, and the older attempt that it would end, if any, is a prefix fetch as well."""
        old = self._leases.get(key.handoff)
        is_newer = old is None or (old.key.attempt < key.attempt and old.job is None)
        return is_newer and self.why_over(key) is None

    def announce_served(self, key: HandoffKey, digests: tuple[BlockDigest, ...], num_tokens: int) -> Announcement:
        """The next blocks of a prefix fetch may be read: with them `num_tokens` from the first on."""
        lease = self._leases[key.handoff]
        first, stop = lease.num_announced, lease.num_announced + len(digests)
        assert tuple(d.block for d in digests) == lease.blocks[first:stop], f"{lease!r}: digests of other blocks"
        lease.num_announced = stop
        announcement = Announcement(key, first, digests, num_tokens, is_last=stop == len(lease.blocks))
        lease.announcements.append(announcement)
        return announcement

    def follow(self, key: HandoffKey, consumer: WorkerRef, now: float) -> list[Announcement] | None:
        """Send a hand-off's announcements to `consumer` from now on; returns those so far, None if it has ended.

        A hand-off that is not known yet is waited for.
        """
        lease = self.find(key)
        if lease is None:
            if self.why_over(key) is not None:
                return None
            self._awaited.put(key, consumer, now)
            return []
        lease.consumer = consumer
        lease.until = now + self.lease_s
        return list(lease.announcements)

    def renew(self, key: HandoffKey, now: float) -> bool:
        """Extend a lease from `now`, the moment of the answer. False when there is none (any more)."""
        lease = self.find(key)
        if lease is None:
            return key in self._awaited and self.why_over(key) is None
        lease.until = now + self.lease_s
        return True

    def release(self, key: HandoffKey, now: float, kind: ErrorKind = ErrorKind.KV_LOST) -> EndedLease | None:
        """End a lease that its consumer has let go of; None when nothing is held for it. Whoever follows it or asks for
        it later is told `kind`."""
        lease = self.find(key) or self._withdrawn.get(key)
        self._awaited.pop(key)
        if lease is None:
            self._remember(key, kind, now)
            return None
        return self._end(lease, LeaseEvent.RELEASE, kind, now)

    def withdraw(self, key: HandoffKey, now: float, kind: ErrorKind = ErrorKind.KV_LOST) -> EndedLease | None:
        """End a lease from this side; None when it is not open. Blocks that its consumer may be reading come back
        later, by `release` or `expire`; they are not renewed. Whoever follows it or asks for it later is told
        `kind`."""
        if key in self._withdrawn:
            return None
        lease = self.find(key)
        if lease is None or not lease.may_be_read:
            return self.release(key, now, kind)
        return self._end(lease, LeaseEvent.WITHDRAW, kind, now)

    def expire(self, now: float) -> list[EndedLease]:
        """End all leases whose time is over, and forget what was kept for late consumers."""
        self.forget(now)
        lapsed = [lease for lease in self if lease.until <= now]
        return [self._end(lease, LeaseEvent.LAPSE, ErrorKind.KV_LOST, now) for lease in lapsed]

    def next_lapse(self) -> float:
        """When the first lease will be over if nobody renews it; infinity without one."""
        return min((lease.until for lease in self), default=math.inf)

    def forget(self, now: float) -> None:
        """Drop what was kept for late consumers too long."""
        self._over.forget(now)
        self._awaited.forget(now)

    def why_over(self, key: HandoffKey) -> ErrorKind | None:
        """How a hand-off ended that is not open; None when it is, or may still come."""
        lease, over = self._leases.get(key.handoff), self._over.get(key.handoff)
        if lease is not None and lease.key.attempt >= key.attempt:
            return None if lease.key == key else ErrorKind.CANCELLED
        return over.kind if over is not None and over.attempt >= key.attempt else None

    def find(self, key: HandoffKey) -> Lease | None:
        lease = self._leases.get(key.handoff)
        return lease if lease is not None and lease.key == key else None

    def blocks(self) -> Iterator[BlockId]:
        """Every block once per lease that holds it; for the pool's check."""
        return (b for lease in self for b in lease.blocks)

    def __len__(self) -> int:
        return len(self._leases) + len(self._withdrawn)

    def __iter__(self) -> Iterator[Lease]:
        """Those that are open, and those whose consumers have not let go."""
        return chain(self._leases.values(), self._withdrawn.values())

    def _end(self, lease: Lease, event: LeaseEvent, kind: ErrorKind, now: float) -> EndedLease:
        """Of one that was withdrawn all has been said but that its blocks are free."""
        before, lease.state = lease.state, next_lease(lease.state, event)
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
        over = self._over.get(key.handoff)
        if over is None or over.attempt < key.attempt:
            self._over.put(key.handoff, _ClosedHandoff(key.attempt, kind), now)
