"""Define the effects that the engine returns for its driver to carry out, as frozen values.

The driver sends events to gateways and messages to other workers, and passes reads from other workers to the transfer
thread. "This worker" is the worker of the engine that returns the effect.
"""

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
    """Tell the driver to send `message`, which names blocks that may be read from now on, to the worker `consumer`,
    which follows the hand-off."""

    consumer: WorkerRef
    message: Announcement


@dataclass(frozen=True, slots=True)
class SendHandoffEnded:
    """Tell the driver to notify the worker `consumer` that the hand-off `key`, which it follows, has ended.

    `kind` and `message`: the reason. CANCELLED: nothing is left to hand over.
    """

    consumer: WorkerRef
    key: HandoffKey
    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class FollowHandoff:
    """Tell the driver to request from the worker `source` that it sends the announcements of the hand-off `key`, and to
    connect to `source` first if needed.

    `prefix_request`: the cached blocks to fetch, for a remote prefix fetch; None for a `ResumeJob`. The driver sends
    the request again whenever the stream to the source was interrupted.
    """

    source: WorkerRef
    key: HandoffKey
    prefix_request: RemotePrefixRequest | None = None


@dataclass(frozen=True, slots=True)
class ReleaseHandoff:
    """Tell the driver to notify the worker `source` that this worker, the consumer of the hand-off `key`, does not need
    its lease any more.

    `is_taken`: True if all KV of a `ResumeJob` has arrived; False if the pull was given up, and for every remote prefix
    fetch.
    """

    source: WorkerRef
    key: HandoffKey
    is_taken: bool = False


@dataclass(frozen=True, slots=True)
class SendRemainderRequest:
    """Tell the driver to request from the worker `source` that it stops the migrating sequence of the hand-off `key`
    and hands over the rest, because this worker has nearly all of its KV.

    `num_output_tokens`: output tokens of the sequence that this worker knows. If the sequence runs, the source samples
    one more token and then sends the output tokens after these. If it is preempted, the source hands over its cached
    blocks.
    """

    source: WorkerRef
    key: HandoffKey
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class RenewLeases:
    """Tell the driver to request from the worker `source` that it extends the leases of the hand-offs `keys`. The
    driver passes the source's answer to `Engine.renewed`."""

    source: WorkerRef
    keys: tuple[HandoffKey, ...]


@dataclass(frozen=True, slots=True)
class StartRead:
    """Tell the transfer thread to copy blocks from the memory of the worker `source` into local blocks, to check their
    digests, and to report the end of this read once.

    - `read`: number of the read, unique among open reads, which `Engine.read_done` or `read_failed` gets back.
    - `positions`: index of each block in its sequence, which the digest covers. `offered`: id of each block in the pool
      of the source, with one digest per KV head of the model. `local`: the block of this worker into which each is
      copied.
    - `is_checked`: False: digests are not compared.

    Raises ValueError when `positions`, `offered` and `local`, which have one entry per block, differ in length.
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
    """Tell the transfer thread to disconnect from the worker `source` and end all reads from it. The transfer thread
    answers with `PeerLost` unless there is no connection. `reason`: text for logs and errors."""

    source: WorkerRef
    reason: str


@dataclass(frozen=True, slots=True)
class ReadFiles:
    """Tell the driver to read blocks from files into host memory, in order, up to the first block that cannot be read
    or fails its check. The driver reports blocks that were read, and the end, by `Engine.files_read`.

    `read`: number that `Engine.files_read` gets back. `hashes`, `slots`: the hash and the host slot of each block to
    read. `before`: the hashes of the blocks before these in their prefix, whose files are marked as used too.
    """

    read: int
    hashes: tuple[BlockHash, ...]
    slots: tuple[HostSlot, ...]
    before: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteFiles:
    """Tell the driver to write blocks of host memory to files. The driver reports the end of each write, successful or
    not, by `Engine.file_written`.

    `writes`: pairs (host slot, block hash), one for each block.
    """

    writes: tuple[FileWrite, ...]


@dataclass(frozen=True, slots=True)
class PullEnded:
    """Report to the engine that the pull of `job` is over. `KVConsumer` returns it, and the driver never gets it.

    - `times`: sizes and times of the pull.
    - `kind`, `message`: why the pull was given up. `kind` is None when all KV arrived, and for every remote prefix
      fetch: the blocks that such a fetch has read are in the prefix cache, however it ended.
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
    """Report to the driver the times of a job whose last choice has ended, for metrics and traces. Returned once for
    each accepted job."""

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
