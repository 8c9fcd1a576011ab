"""What a request's life wants done, as frozen values; never a callback."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import TandemError
from tandem.core.events import Finished, PromptLogprobs, Token
from tandem.core.ids import HandoffKey, JobKey, WorkerRef
from tandem.core.request import Job


@dataclass(frozen=True, slots=True)
class Requeue:
    """Find workers for the request; `excluded` refused it since it was placed last. `has_failed`: they had taken it,
    so it goes to others if there are any. `is_undivided`: its KV did not reach whoever was to have it, time and again,
    so one worker does all of it where that is allowed."""

    excluded: frozenset[WorkerRef]
    has_failed: bool = False
    is_undivided: bool = False


@dataclass(frozen=True, slots=True)
class FindConsumer:
    """Find a worker that goes on with what `source` offers of `choice` and of those that go with it; `excluded`
    refused a moment ago, `unfit` are not to be asked. It waits in no line."""

    choice: int
    source: WorkerRef
    excluded: frozenset[WorkerRef] = frozenset()
    unfit: frozenset[WorkerRef] = frozenset()


@dataclass(frozen=True, slots=True)
class ReportWorkerFailure:
    """A job failed for which one of these workers, or each, may be the cause."""

    workers: frozenset[WorkerRef]


@dataclass(frozen=True, slots=True)
class Submit:
    worker: WorkerRef
    job: Job


@dataclass(frozen=True, slots=True)
class CancelJob:
    """End these choices of a job."""

    worker: WorkerRef
    keys: tuple[JobKey, ...]


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    worker: WorkerRef
    key: HandoffKey


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand a token to the client."""

    token: Token


@dataclass(frozen=True, slots=True)
class DeliverPromptLogprobs:
    """Hand scores of its prompt to the client."""

    scores: PromptLogprobs


@dataclass(frozen=True, slots=True)
class EndChoice:
    """The end of one choice, while others go on."""

    outcome: Finished


@dataclass(frozen=True, slots=True)
class EndRequest:
    """The one end of the request; a Finished is that of its last choice."""

    outcome: Finished | TandemError


Command = (
    Requeue
    | FindConsumer
    | ReportWorkerFailure
    | Submit
    | CancelJob
    | ReleaseLease
    | Deliver
    | DeliverPromptLogprobs
    | EndChoice
    | EndRequest
)
