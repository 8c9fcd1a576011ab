"""What the engine wants done, as frozen values for its driver; never a callback."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind
from tandem.core.events import JobEvent
from tandem.core.ids import HandoffKey, WorkerRef
from tandem.engine.job_times import JobTimes
from tandem.kv.handoff import Announcement, Borrow
from tandem.kv.pull_outcome import StartRead, Teardown


@dataclass(frozen=True, slots=True)
class Emit:
    """Tell the job's gateway."""

    event: JobEvent


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the taker that follows this hand-off."""

    taker: WorkerRef
    message: Announcement


@dataclass(frozen=True, slots=True)
class EndHandoff:
    """Tell the taker that a hand-off it follows is no more."""

    taker: WorkerRef
    key: HandoffKey
    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class Follow:
    """Follow a hand-off at its source, connecting to it first where there is no connection. `borrow`: ask for it, as
    often as it must be followed anew."""

    source: WorkerRef
    key: HandoffKey
    borrow: Borrow | None = None


@dataclass(frozen=True, slots=True)
class Unfollow:
    """Tell the source that its lease is not needed any more; `is_taken`: because all that it offered is here."""

    source: WorkerRef
    key: HandoffKey
    is_taken: bool = False


@dataclass(frozen=True, slots=True)
class Take:
    """Ask the source of a sequence that moves for the rest of it. `num_output_tokens` of its output are known here."""

    source: WorkerRef
    key: HandoffKey
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Ask the source for more time; its answer comes back as `Engine.renewed`."""

    source: WorkerRef
    keys: tuple[HandoffKey, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """A job is over here with its last choice: once for each that was accepted."""

    times: JobTimes


Effect = Emit | Announce | EndHandoff | Follow | Unfollow | Take | Renew | Ended | StartRead | Teardown
