"""Define the effects that the engine returns for its driver to carry out, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind
from tandem.core.events import JobEvent, SampledToken
from tandem.core.ids import BlockHash, BlockId, HandoffKey, HostSlot, WorkerRef
from tandem.core.request import Job
from tandem.engine.job_timeline import JobTimes, PullTimes
from tandem.kv.handoff import Announcement, BlockDigest, RemotePrefixRequest
from tandem.kv.host_offload import FileWrite


@dataclass(frozen=True, slots=True)
class SendAnnouncement:
    """Send `message`, which names blocks that may be read from now on, to the consumer of its hand-off."""

    consumer: WorkerRef
    message: Announcement


@dataclass(frozen=True, slots=True)
class SendHandoffEnded:
    """Notify a consumer that a hand-off it follows has ended; `kind` and `message` give the reason."""

    consumer: WorkerRef
    key: HandoffKey
    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class FollowHandoff:
    """Request from `source` that it sends the announcements of a hand-off; connect to it first if needed.

    `prefix_request`: the cached blocks to fetch, for a remote prefix fetch; None for a `ResumeJob`. It is sent again
    whenever the stream to the source was interrupted.
    """

    source: WorkerRef
    key: HandoffKey
    prefix_request: RemotePrefixRequest | None = None


@dataclass(frozen=True, slots=True)
class ReleaseHandoff:
    """Notify `source` that this worker, the consumer, does not need the lease any more.

    `is_taken`: because it has all that was offered; otherwise because the pull was given up.
    """

    source: WorkerRef
    key: HandoffKey
    is_taken: bool = False


@dataclass(frozen=True, slots=True)
class SendRemainderRequest:
    """Request from `source` that it stops a migrating sequence and hands over the rest, because nearly all KV is here.

    The source samples one more token and then sends the output tokens after the first `num_output_tokens`, which this
    worker knows.
    """

    source: WorkerRef
    key: HandoffKey
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class RenewLeases:
    """Request from `source` that it extends the leases of these hand-offs; its answer is passed to `Engine.renewed`."""

    source: WorkerRef
    keys: tuple[HandoffKey, ...]


@dataclass(frozen=True, slots=True)
class StartRead:
    """Copy blocks from the memory of `source` into local blocks and check their digests; the end is reported once.

    `read` is the number of the read, unique among open reads, which `Engine.read_done` or `read_failed` gets back.
    `offered`, `local` and `positions` have one entry per block: the source's block with one digest per KV head of the
    model, the local block, and the block's index in the sequence, which the digest covers. Without `is_checked` digests
    are not compared. Raises ValueError when the three differ in length.
    """

    read: int
    source: WorkerRef
    positions: tuple[int, ...]
    offered: tuple[BlockDigest, ...]
    local: tuple[BlockId, ...]
    is_checked: bool = True

    def __post_init__(self) -> None:
        if not len(self.positions) == len(self.offered) == len(self.local):
            raise ValueError(f"{len(self.offered)} blocks with {len(self.positions)} positions into {len(self.local)}")


@dataclass(frozen=True, slots=True)
class TearDownPeer:
    """Disconnect from `source` and end all reads from it; answered by `PeerLost` unless there is no connection."""

    source: WorkerRef
    reason: str


@dataclass(frozen=True, slots=True)
class ReadFiles:
    """Read blocks from files into host memory, in order, up to the first that cannot be read or fails its check;
    progress and end are reported by `Engine.files_read`.

    `read`: number of the order. `hashes`, `slots`: one entry per block. `before`: the hashes of the blocks before them
    in their prefix, whose files are in use as well.
    """

    read: int
    hashes: tuple[BlockHash, ...]
    slots: tuple[HostSlot, ...]
    before: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteFiles:
    """Write blocks of host memory to files; each is reported by `Engine.file_written`, whether or not it was."""

    writes: tuple[FileWrite, ...]


@dataclass(frozen=True, slots=True)
class PullEnded:
    """Report to the engine that a pull is over; the driver never gets this effect.

    - `kind`, `message`: why the pull was given up; `kind` is None when all KV arrived, and always for a remote prefix
      fetch, of which the blocks that arrived are in the prefix cache.
    - `num_computed`: tokens whose KV is local now and was checked within the lease.
    - `first_tokens`, `num_cached`: the tokens from which the job continues, and the prompt tokens that were
      prefix-cache hits at the source.
    """

    job: Job
    times: PullTimes
    kind: ErrorKind | None = None
    message: str = ""
    first_tokens: tuple[SampledToken, ...] = ()
    num_computed: int = 0
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class JobEnded:
    """Report the times of a job whose last choice has ended; returned once for each accepted job."""

    times: JobTimes


Effect = (
    JobEvent
    | SendAnnouncement
    | SendHandoffEnded
    | FollowHandoff
    | ReleaseHandoff
    | SendRemainderRequest
    | RenewLeases
    | StartRead
    | TearDownPeer
    | ReadFiles
    | WriteFiles
    | JobEnded
)
"""A `JobEvent` is to be sent to the job's gateway."""

ConsumerEffect = Effect | PullEnded
"""Effects of `KVConsumer`: the engine itself carries out `PullEnded`."""
