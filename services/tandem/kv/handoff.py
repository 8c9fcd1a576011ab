"""The hand-off of KV from a producer to a consumer: its values and both state tables; never touches a block.

All that decides a transition is in the two tables. An event that a state has no entry for is an error of ours and
changes nothing; what a peer may send late or twice is filtered before it becomes an event.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from tandem.core.events import SampledToken
from tandem.core.ids import BlockHash, BlockId, HandoffKey


@dataclass(frozen=True, slots=True)
class BlockDigest:
    """64 bits for each KV head of a block's bytes, as unsigned integers; empty when digests are off.

    See `tandem_kernels.contract` for their meaning.
    """

    block: BlockId
    heads: tuple[int, ...]


MAX_REMOTE_PREFIX_BLOCKS = 16_384
"""Blocks of a prefix that one may be asked for: 256 KiB of names."""


@dataclass(frozen=True, slots=True)
class RemotePrefixRequest:
    """A consumer wants to read a prefix from a producer's cache. `hashes` name its blocks from the first on; those
    before `first_index` the consumer has.

    Whoever knows the names of blocks knows what is in them: they are rooted in the tenant's salt. So that a producer
    has them tells nothing to somebody of another tenant, nor to a stranger, who cannot open a stream."""

    first_index: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Announcement:
    """Blocks of the producer that may be read from now on: positions `[first_index, first_index + len(blocks))` of the
    table. `num_cached` tokens of the prompt were in the producer's prefix cache.

    The last one of a hand-off has `first_tokens`, with which the consumer goes on. Of a prefill they are one for each
    choice of its job. `is_moving`: the producer draws on until the consumer asks for the rest; then they are the one
    choice's tokens that the consumer lacks. Where there is one choice, the last of them follows the `num_computed`
    tokens.

    Of a prefix that is lent the last one is `is_last`: `num_computed` tokens, those that the consumer had included, is
    all that there is."""

    key: HandoffKey
    first_index: int
    blocks: tuple[BlockDigest, ...]
    num_computed: int
    first_tokens: tuple[SampledToken, ...] = ()
    num_cached: int = 0
    is_moving: bool = False
    is_last: bool = False


class LeaseState(Enum):
    """The producer's side."""

    PROMISED = auto()
    """The prefill is accepted and has no blocks yet."""
    OFFERED = auto()
    WITHDRAWN = auto()
    """Ended by the producer, whose consumer may not know it yet and read on: its blocks are not free."""
    RELEASED = auto()
    EXPIRED = auto()


class LeaseEvent(Enum):
    STARTED = auto()
    WITHDRAW = auto()
    """Ended by the producer while its consumer may be reading."""
    RELEASE = auto()
    LAPSE = auto()


LEASE_TABLE: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.PROMISED, LeaseEvent.STARTED): LeaseState.OFFERED,
    (LeaseState.PROMISED, LeaseEvent.RELEASE): LeaseState.RELEASED,
    (LeaseState.PROMISED, LeaseEvent.LAPSE): LeaseState.EXPIRED,
    (LeaseState.OFFERED, LeaseEvent.WITHDRAW): LeaseState.WITHDRAWN,
    (LeaseState.OFFERED, LeaseEvent.RELEASE): LeaseState.RELEASED,
    (LeaseState.OFFERED, LeaseEvent.LAPSE): LeaseState.EXPIRED,
    (LeaseState.WITHDRAWN, LeaseEvent.RELEASE): LeaseState.RELEASED,
    (LeaseState.WITHDRAWN, LeaseEvent.LAPSE): LeaseState.EXPIRED,
}


class PullState(Enum):
    """The consumer's side."""

    WAITING = auto()
    """No room yet, or nothing announced."""
    READING = auto()
    READY = auto()
    """All KV is here and checked, within the lease."""
    DRAINING = auto()
    """Given up, but a read is still under way: its blocks are not free."""
    FREED = auto()


class PullEvent(Enum):
    GRANTED = auto()
    ARRIVED = auto()
    ABANDON = auto()
    """Given up while no read is under way."""
    ABANDON_READING = auto()
    """Given up while a read is under way."""
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
    """An event that the state has no entry for: a defect of ours."""


def next_lease(state: LeaseState, event: LeaseEvent) -> LeaseState:
    if (state, event) not in LEASE_TABLE:
        raise HandoffError(f"a lease that is {state.name} cannot take {event.name}")
    return LEASE_TABLE[state, event]


def next_pull(state: PullState, event: PullEvent) -> PullState:
    if (state, event) not in PULL_TABLE:
        raise HandoffError(f"a pull that is {state.name} cannot take {event.name}")
    return PULL_TABLE[state, event]
