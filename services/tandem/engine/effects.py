"""Define the effects that the engine returns for its driver to carry out, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind
from tandem.core.events import JobEvent, SampledToken
from tandem.core.ids import BlockId, HandoffKey, WorkerRef
from tandem.core.request import Job
from tandem.engine.job_timeline import JobTimes, PullTimes
from tandem.kv.handoff import Announcement, BlockDigest, RemotePrefixRequest


@dataclass(frozen=True, slots=True)
class SendAnnouncement:
    """Send an announcement to the consumer that follows its hand-off."""

    consumer: WorkerRef
    message: Announcement


@dataclass(frozen=True, slots=True)
class SendHandoffEnded:
    """Notify a consumer that a hand-off it follows has ended."""

    consumer: WorkerRef
    key: HandoffKey
    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class FollowHandoff:
    """Follow a hand-off at its source, connecting to the source first if needed.

    `prefix_request`: the blocks to request, for a remote prefix fetch; sent again whenever the hand-off is followed
    anew.
    """

    source: WorkerRef
    key: HandoffKey
    prefix_request: RemotePrefixRequest | None = None


@dataclass(frozen=True, slots=True)
class ReleaseHandoff:
    """Notify the source that its lease is not needed any more. `is_taken`: because the consumer has all that was
    offered."""

    source: WorkerRef
    key: HandoffKey
    is_taken: bool = False


@dataclass(frozen=True, slots=True)
class SendRemainderRequest:
    """Request the remainder of a migrating sequence from its source, because nearly all of its KV is local; the first
    `num_output_tokens` output tokens are known to the consumer. The source then samples its last token and hands over
    the rest."""

    source: WorkerRef
    key: HandoffKey
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class RenewLeases:
    """Renew leases at their source; the answer arrives as `Engine.renewed`."""

    source: WorkerRef
    keys: tuple[HandoffKey, ...]


@dataclass(frozen=True, slots=True)
class StartRead:
    """Copy the `offered` blocks of `source` into the `local` blocks, compare their digests, and report once under
    `read`, which is unique among open reads.

    `positions` are those of the blocks in the prompt's block table, which the digests cover. An offered block has one
    number per KV head of the model. Without `is_checked` nothing is compared.
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
    """Disconnect a peer and end all reads from it; answered by PeerLost unless it is disconnected already."""

    source: WorkerRef
    reason: str


@dataclass(frozen=True, slots=True)
class PullEnded:
    """Report a pull that is over, and why it was given up; `kind` is None if all KV of `job` arrived.

    All KV, that of `num_computed` tokens, is then local and was checked within the lease; `first_tokens`, `num_cached`:
    see `Announcement`. The end of a remote prefix fetch has no `kind` either: the blocks that arrived are published.
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
    """Report a job whose last choice has ended; returned once for each accepted job."""

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
    | JobEnded
)
"""A `JobEvent` is to be sent to the job's gateway."""

ConsumerEffect = Effect | PullEnded
"""Effects of `KVConsumer`: the engine itself carries out `PullEnded`."""
