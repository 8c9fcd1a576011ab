"""What the engine wants done, as frozen values for its driver; never a callback."""

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
    """Tell the job's gateway."""

    event: JobEvent


@dataclass(frozen=True, slots=True)
class SendAnnouncement:
    """Tell the consumer that follows this hand-off."""

    consumer: WorkerRef
    message: Announcement


@dataclass(frozen=True, slots=True)
class SendHandoffEnded:
    """Tell the consumer that a hand-off it follows is no more."""

    consumer: WorkerRef
    key: HandoffKey
    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class FollowHandoff:
    """Follow a hand-off at its source, connecting to it first where there is no connection. `prefix_request`: ask for
    it, as often as it must be followed anew."""

    source: WorkerRef
    key: HandoffKey
    prefix_request: RemotePrefixRequest | None = None


@dataclass(frozen=True, slots=True)
class ReleaseHandoff:
    """Tell the source that its lease is not needed any more; `is_taken`: because all that it offered is here."""

    source: WorkerRef
    key: HandoffKey
    is_taken: bool = False


@dataclass(frozen=True, slots=True)
class SendRemainderRequest:
    """Ask the source of a sequence that moves for the rest of it. `num_output_tokens` of its output are known here."""

    source: WorkerRef
    key: HandoffKey
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class RenewLeases:
    """Ask the source for more time; its answer comes back as `Engine.renewed`."""

    source: WorkerRef
    keys: tuple[HandoffKey, ...]


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A job is over here with its last choice: once for each that was accepted."""

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
