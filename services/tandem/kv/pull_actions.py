"""What follows for its holder from what a pull book hears, as frozen values; never decides it."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind
from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, HandoffKey, JobKey, WorkerRef
from tandem.kv.handoff import BlockDigest


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read the offered blocks, which stand at `[first_index, ...)` of the prompt, into `local`."""

    read: int
    source: WorkerRef
    first_index: int
    offered: tuple[BlockDigest, ...]
    local: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class PullStats:
    """`num_hit_blocks` were found here, `num_blocks` were read, `num_exposed_blocks` of which when the last
    announcement had come; seconds are from the first and the last announcement to the last checked block, and those in
    which at least one read was under way."""

    num_hit_blocks: int
    num_blocks: int
    num_exposed_blocks: int
    total_s: float
    exposed_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class RequestRemainder:
    """Nearly all KV of a sequence that moves is here: its source may draw its last token and hand over the rest."""

    key: HandoffKey
    job: JobKey
    source: WorkerRef


@dataclass(frozen=True, slots=True)
class KVComplete:
    """All KV of a job is here and checked within the lease: that of `num_computed` tokens. `first_tokens`,
    `num_cached`: as `Announcement`."""

    key: HandoffKey
    job: JobKey
    source: WorkerRef
    first_tokens: tuple[SampledToken, ...]
    num_computed: int
    num_cached: int
    stats: PullStats


@dataclass(frozen=True, slots=True)
class PullFailed:
    """A pull was given up. `stats` are of the blocks that had been read."""

    key: HandoffKey
    job: JobKey
    source: WorkerRef
    kind: ErrorKind
    message: str
    stats: PullStats


@dataclass(frozen=True, slots=True)
class PrefixFetchDone:
    """Nothing more will be read of a cached prefix: all that its source has is here, or it was given up. `num_ready`
    leading blocks are here and checked within the lease, those that were here before included."""

    key: HandoffKey
    job: JobKey
    source: WorkerRef
    num_ready: int
    stats: PullStats


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """Nothing writes into these blocks any more."""

    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class TearDownProducer:
    """A read does not end: give up the peer as a whole."""

    source: WorkerRef


PullOutcome = StartRead | RequestRemainder | KVComplete | PullFailed | PrefixFetchDone | ReadEnded | TearDownProducer
