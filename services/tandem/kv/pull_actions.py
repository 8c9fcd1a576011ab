"""Define the actions that `PullTable` returns for its owner to carry out, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind
from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, HandoffKey, JobKey, WorkerRef
from tandem.kv.handoff import BlockDigest


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read the `offered` remote blocks, which lie at positions `[first_index, ...)` of the prompt, into the `local`
    blocks."""

    read: int
    source: WorkerRef
    first_index: int
    offered: tuple[BlockDigest, ...]
    local: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class PullStats:
    """Statistics of one pull.

    `num_hit_blocks` were prefix hits and `num_blocks` were read; `num_exposed_blocks` of these had not been read when
    the last announcement arrived. Seconds: `total_s` and `exposed_s` run from the first and from the last announcement
    to the last checked block; `busy_s` is the time with at least one read in flight.
    """

    num_hit_blocks: int
    num_blocks: int
    num_exposed_blocks: int
    total_s: float
    exposed_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class RequestRemainder:
    """Request the remainder from the source of a migrating sequence, because nearly all of its KV is local.

    The source then samples its last token and hands over the rest.
    """

    key: HandoffKey
    job: JobKey
    source: WorkerRef


@dataclass(frozen=True, slots=True)
class KVComplete:
    """All KV of a job, that of `num_computed` tokens, is local and was checked within the lease.

    `first_tokens`, `num_cached`: see `Announcement`.
    """

    key: HandoffKey
    job: JobKey
    source: WorkerRef
    first_tokens: tuple[SampledToken, ...]
    num_computed: int
    num_cached: int
    stats: PullStats


@dataclass(frozen=True, slots=True)
class PullFailed:
    """A pull was given up. `stats` count the blocks that had been read."""

    key: HandoffKey
    job: JobKey
    source: WorkerRef
    kind: ErrorKind
    message: str
    stats: PullStats


@dataclass(frozen=True, slots=True)
class PrefixFetchDone:
    """A remote prefix fetch has ended: all blocks that its source has were read, or the fetch was given up.

    `num_ready` leading blocks are local and were checked within the lease, the earlier prefix hits included.
    """

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
    """Tear down the connection to a producer as a whole, because a read does not end."""

    source: WorkerRef


PullOutcome = StartRead | RequestRemainder | KVComplete | PullFailed | PrefixFetchDone | ReadEnded | TearDownProducer
