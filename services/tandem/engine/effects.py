"""Define the effects that the engine returns for its driver to carry out, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind
from tandem.core.events import JobEvent
from tandem.core.ids import HandoffKey, WorkerRef
from tandem.engine.job_timings import JobTimes
from tandem.kv.handoff import Announcement, RemotePrefixRequest
from tandem.kv.pull_actions import StartRead, TearDownProducer


@dataclass(frozen=True, slots=True)
class SendEvent:
    """Send an event to the job's gateway."""

    event: JobEvent


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
    """Request the remainder of a migrating sequence from its source; the first `num_output_tokens` output tokens are
    known to the consumer."""

    source: WorkerRef
    key: HandoffKey
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class RenewLeases:
    """Renew leases at their source; the answer arrives as `Engine.renewed`."""

    source: WorkerRef
    keys: tuple[HandoffKey, ...]


@dataclass(frozen=True, slots=True)
class JobEnded:
    """Report a job whose last choice has ended; returned once for each accepted job."""

    times: JobTimes


Effect = (
    SendEvent
    | SendAnnouncement
    | SendHandoffEnded
    | FollowHandoff
    | ReleaseHandoff
    | SendRemainderRequest
    | RenewLeases
    | JobEnded
    | StartRead
    | TearDownProducer
)
