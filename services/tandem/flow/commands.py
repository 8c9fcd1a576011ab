"""What a request's life wants done, as frozen values; never a callback."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import TandemError
from tandem.core.events import Finished, PromptScored, Token
from tandem.core.ids import HandoffKey, JobKey, WorkerRef
from tandem.core.request import Job


@dataclass(frozen=True, slots=True)
class Place:
    """Find workers for the request; `excluded` refused it since it was placed last."""

    excluded: frozenset[WorkerRef]


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
class Score:
    """Hand scores of its prompt to the client."""

    scores: PromptScored


@dataclass(frozen=True, slots=True)
class EndChoice:
    """The end of one choice, while others go on."""

    outcome: Finished


@dataclass(frozen=True, slots=True)
class End:
    """The one end of the request; a Finished is that of its last choice."""

    outcome: Finished | TandemError


Command = Place | Submit | CancelJob | ReleaseLease | Deliver | Score | EndChoice | End
