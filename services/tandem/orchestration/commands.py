"""Define the commands that the state machine of a request returns, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tandem.core.errors import TandemError
from tandem.core.events import Finished, PromptLogprobs, Token
from tandem.core.ids import HandoffKey, JobKey, RequestId, WorkerRef
from tandem.core.request import Job, Request
from tandem.routing.rebalance import Relocation


@dataclass(frozen=True, slots=True)
class Requeue:
    """Place the waiting choices of the request again, from the request's old position in the queue.

    `excluded`: workers that rejected it since its last placement. `has_failed`: those workers had accepted it and then
    failed, so other workers are preferred. `is_undivided`: its KV was lost in a hand-off more than once, so one worker
    runs prefill and decode where the policy allows.
    """

    excluded: frozenset[WorkerRef]
    has_failed: bool = False
    is_undivided: bool = False


@dataclass(frozen=True, slots=True)
class FindConsumer:
    """Find a worker that takes over the KV which the worker `source` offers of `choice` and the other choices of its
    job group.

    `excluded`: workers that rejected it a moment ago; `unfit`: workers that must not be tried. The search bypasses the
    request queue.
    """

    choice: int
    source: WorkerRef
    excluded: frozenset[WorkerRef] = frozenset()
    unfit: frozenset[WorkerRef] = frozenset()


@dataclass(frozen=True, slots=True)
class ReportWorkerFailure:
    """Report to the circuit breaker that a job failed and that one or each of these workers may be the cause."""

    workers: frozenset[WorkerRef]


@dataclass(frozen=True, slots=True)
class SubmitJob:
    worker: WorkerRef
    job: Job


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Cancel these choices of a job at a worker; each key names one choice."""

    worker: WorkerRef
    keys: tuple[JobKey, ...]


@dataclass(frozen=True, slots=True)
class OfferMigration:
    """Have a worker offer these choices, which it decodes or has preempted, to other workers; running ones go on
    meanwhile."""

    worker: WorkerRef
    keys: tuple[JobKey, ...]


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    worker: WorkerRef
    key: HandoffKey


@dataclass(frozen=True, slots=True)
class EndRequest:
    """End the request; there is exactly one such command for each request.

    `outcome`: the error, or the `Finished` of its last choice. `usage`: the tokens that count against the tenant's
    quota, None where no worker began the request. When this program itself failed, the outcome's `__cause__` is that
    exception.
    """

    request: RequestId
    outcome: Finished | TandemError


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """Report that a worker has computed the prompt of a request; `num_cached` of its tokens came from a prefix
    cache."""

    request: Request
    num_cached: int


@dataclass(frozen=True, slots=True)
class KVMoved:
    """Report that `num_bytes` of KV were copied from `source` to `consumer`.

    `is_prefix`: the copy was a remote prefix fetch; otherwise it was a hand-off.
    """

    source: WorkerRef
    consumer: WorkerRef
    num_bytes: int
    is_prefix: bool


class MoveOutcome(Enum):
    """Name the outcome of a plan to move a running or preempted sequence to another decode worker.

    - ADVISED: nothing is done, because `gateway.rebalance` is `explain`.
    - MOVED: the other worker decodes it now. RESUMED: so it does, and the sequence was preempted before.
    - WITHDRAWN: it stays where it is, because its worker did not offer it or the other one did not take it over.
    - ENDED: its request or choice has ended meanwhile, or its worker was lost.
    """

    ADVISED = "advised"
    MOVED = "moved"
    RESUMED = "resumed"
    WITHDRAWN = "withdrawn"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ReportMove:
    move: Relocation
    outcome: MoveOutcome


WorkerOrder = CancelJob | OfferMigration | ReleaseLease
"""What a worker is told without waiting for an answer. Such a message may be lost: jobs of which the gateway knows
nothing end with the next Watch stream, leases expire, a move is given up, and a new offer or a drain replaces an offer
that no worker follows."""
Delivery = Token | PromptLogprobs | Finished
"""What the client of a request gets: tokens, log probabilities of its prompt, and the end of a choice while others go
on. Each names its request by its key."""
StateCommand = Requeue | FindConsumer | ReportWorkerFailure | SubmitJob | WorkerOrder | Delivery | EndRequest
"""What the state of one request wants done. The director resolves `Requeue` and `FindConsumer` itself."""
Command = ReportWorkerFailure | SubmitJob | WorkerOrder | Delivery | EndRequest | PromptComputed | KVMoved | ReportMove
"""What a director wants done by its driver."""
