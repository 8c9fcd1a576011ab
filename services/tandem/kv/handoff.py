"""Define the values of a KV hand-off from a producer to a consumer, and the state tables of both sides.

The two tables alone decide every transition. An event for which a state has no entry is a defect of Tandem and raises
`HandoffError` without changing anything; messages that a peer may send late or twice are filtered before they become
events.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from tandem.core.events import SampledToken
from tandem.core.ids import BlockHash, BlockId, HandoffKey


@dataclass(frozen=True, slots=True)
class BlockDigest:
    """Hold the checksum of one block.

    `block`: the block's id in the producer's pool. `heads`: one unsigned 64-bit integer for each KV head; empty when
    digests are off. `tandem_kernels.contract` defines the digest function.
    """

    block: BlockId
    heads: tuple[int, ...]


MAX_REMOTE_PREFIX_BLOCKS = 16_384
"""Largest number of prefix blocks in one request: 256 KiB of hashes."""


@dataclass(frozen=True, slots=True)
class RemotePrefixRequest:
    """Request of a consumer to read a cached prefix from a producer.

    `hashes`: hashes of the prefix's blocks, from the first block of the prompt on. `first_index`: number of leading
    blocks that the consumer has already and does not read.

    Serving a prefix by hash leaks nothing between tenants: hashes are rooted in the tenant's salt, so whoever knows the
    hashes of blocks knows their content, and only workers can open the stream on which requests arrive.
    """

    first_index: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Announcement:
    """Message of a producer that the consumer of the hand-off `key` may read more blocks from now on.

    - `first_index`, `blocks`: the blocks at positions `[first_index, first_index + len(blocks))` of the sequence, with
      their digests.
    - `num_computed`: tokens from the beginning of the sequence whose KV is complete.
    - `num_cached`: tokens of the prompt that were in the producer's prefix cache and were not computed.
    - `first_tokens`: the sampled tokens from which the consumer continues; empty before the last announcement. A
      prefill hands over one token for each choice of its job. For a migrating sequence these are the output tokens that
      the consumer does not know, at least the newest one. For a job with one choice, the last of these tokens directly
      follows the first `num_computed` tokens of the sequence.
    - `is_migrating`: the sequence migrates; if it runs, the producer keeps sampling until the consumer requests the
      rest.
    - `is_last`: marks a last announcement that has no `first_tokens`. After a remote prefix fetch, the producer has
      offered `num_computed` tokens in all, including those that the consumer had before. For a preempted sequence, the
      producer may have KV of fewer tokens than the consumer knows; the consumer computes the rest.
    """

    key: HandoffKey
    first_index: int
    blocks: tuple[BlockDigest, ...]
    num_computed: int
    first_tokens: tuple[SampledToken, ...] = ()
    num_cached: int = 0
    is_migrating: bool = False
    is_last: bool = False


class LeaseState(Enum):
    """States of a lease, the producer's side of a hand-off.

    RELEASED (the consumer has given the blocks up) and EXPIRED (the time of the lease has ended) are final.
    """

    RESERVED = auto()
    """The prefill is accepted and has no blocks yet."""
    OFFERED = auto()
    """The consumer may read the blocks."""
    WITHDRAWN = auto()
    """The producer has ended the lease. The consumer may not know that yet and still read, so the blocks are not
    free."""
    RELEASED = auto()
    EXPIRED = auto()


class LeaseEvent(Enum):
    STARTED = auto()
    WITHDRAW = auto()
    """The producer ends the lease while the consumer may be reading."""
    RELEASE = auto()
    EXPIRE = auto()


LEASE_TABLE: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.RESERVED, LeaseEvent.STARTED): LeaseState.OFFERED,
    (LeaseState.RESERVED, LeaseEvent.RELEASE): LeaseState.RELEASED,
    (LeaseState.RESERVED, LeaseEvent.EXPIRE): LeaseState.EXPIRED,
    (LeaseState.OFFERED, LeaseEvent.WITHDRAW): LeaseState.WITHDRAWN,
    (LeaseState.OFFERED, LeaseEvent.RELEASE): LeaseState.RELEASED,
    (LeaseState.OFFERED, LeaseEvent.EXPIRE): LeaseState.EXPIRED,
    (LeaseState.WITHDRAWN, LeaseEvent.RELEASE): LeaseState.RELEASED,
    (LeaseState.WITHDRAWN, LeaseEvent.EXPIRE): LeaseState.EXPIRED,
}


class PullState(Enum):
    """States of a pull, the consumer's read of the KV of one hand-off.

    READY and FREED are final. In FREED the consumer has given the pull up and no read writes to its local blocks any
    more.
    """

    WAITING = auto()
    """The consumer has no free blocks for the KV yet, or the producer has not announced any block."""
    READING = auto()
    READY = auto()
    """All KV is in local blocks and was checked within the lease."""
    DRAINING = auto()
    """The consumer has given the pull up while a read is still in flight: the local blocks of that read are not
    free."""
    FREED = auto()


class PullEvent(Enum):
    GRANTED = auto()
    ARRIVED = auto()
    ABANDON = auto()
    """The consumer gives the pull up while no read is in flight."""
    ABANDON_READING = auto()
    """The consumer gives the pull up while a read is in flight."""
    DRAINED = auto()


PULL_TABLE: dict[tuple[PullState, PullEvent], PullState] = {
    (PullState.WAITING, PullEvent.GRANTED): PullState.READING,
    (PullState.WAITING, PullEvent.ABANDON): PullState.FREED,
    (PullState.READING, PullEvent.ARRIVED): PullState.READY,
    (PullState.READING, PullEvent.ABANDON): PullState.FREED,
    (PullState.READING, PullEvent.ABANDON_READING): PullState.DRAINING,
    (PullState.DRAINING, PullEvent.DRAINED): PullState.FREED,
}


class HandoffError(Exception):
    """Raised when a lease or pull gets an event that its current state does not allow, which is a defect of Tandem."""


def next_lease(state: LeaseState, event: LeaseEvent) -> LeaseState:
    if (state, event) not in LEASE_TABLE:
        raise HandoffError(f"a lease that is {state.name} cannot take {event.name}")
    return LEASE_TABLE[state, event]


def next_pull(state: PullState, event: PullEvent) -> PullState:
    if (state, event) not in PULL_TABLE:
        raise HandoffError(f"a pull that is {state.name} cannot take {event.name}")
    return PULL_TABLE[state, event]
