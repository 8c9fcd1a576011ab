"""Define the commands of a request's state machine, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import TandemError
from tandem.core.events import Finished, PromptLogprobs, Token
from tandem.core.ids import HandoffKey, JobKey, WorkerRef
from tandem.core.request import Job


@dataclass(frozen=True, slots=True)
class Requeue:
    """Find workers for the request; the `excluded` workers refused or lost it since it was placed last.

    `has_failed`: they had accepted it, so other workers are preferred. `is_undivided`: its KV transfer failed
    repeatedly, so one worker should do all of it where that is allowed.
    """

    excluded: frozenset[WorkerRef]
    has_failed: bool = False
    is_undivided: bool = False


@dataclass(frozen=True, slots=True)
class FindConsumer:
    """Find a worker that continues, without queueing, from what `source` offers of `choice` and of the other choices of
    its job group.

    `excluded` workers refused a moment ago, `unfit` workers are not to be tried.
    """

    choice: int
    source: WorkerRef
    excluded: frozenset[WorkerRef] = frozenset()
    unfit: frozenset[WorkerRef] = frozenset()


@dataclass(frozen=True, slots=True)
class ReportWorkerFailure:
    """Report a failed job to the circuit breakers of these workers, each of which may be the cause."""

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
    """Send a token to the client."""

    token: Token


@dataclass(frozen=True, slots=True)
class DeliverPromptLogprobs:
    """Send prompt log probabilities to the client."""

    scores: PromptLogprobs


@dataclass(frozen=True, slots=True)
class EndChoice:
    """End one choice while others go on."""

    outcome: Finished


@dataclass(frozen=True, slots=True)
class EndRequest:
    """End the request, exactly once; a Finished is that of its last choice."""

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
