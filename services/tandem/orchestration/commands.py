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
    """Return the request to its old position in the queue, so that its waiting choices are placed on workers again.

    `excluded`: workers that rejected or failed the request since its last placement. `has_failed`: the failure counts
    as a failed attempt, so workers other than `excluded` are preferred from now on. `is_undivided`: the request's KV
    was lost in a hand-off more than once, so one worker runs prefill and decode where `gateway.disaggregation` allows
    it.
    """

    excluded: frozenset[WorkerRef]
    has_failed: bool = False
    is_undivided: bool = False


@dataclass(frozen=True, slots=True)
class FindConsumer:
    """Find a worker that takes over offered KV, without the request queue. The worker `source` offers the KV of
    `choice` and of the other choices in the same job group.

    `excluded`: workers that rejected this KV a moment ago, and count as full for a short time. `unfit`: workers that
    failed to take over this KV and are not tried again.
    """

    choice: int
    source: WorkerRef
    excluded: frozenset[WorkerRef] = frozenset()
    unfit: frozenset[WorkerRef] = frozenset()


@dataclass(frozen=True, slots=True)
class ReportWorkerFailure:
    """Report that a job failed and that any of `workers` may be the cause. The circuit breaker counts the failure
    against each of them, and the links between them are tested again."""

    workers: frozenset[WorkerRef]


@dataclass(frozen=True, slots=True)
class SubmitJob:
    worker: WorkerRef
    job: Job


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Tell `worker` to cancel choices of a job. `keys`: the key of each choice to cancel, with the attempt of the
    job."""

    worker: WorkerRef
    keys: tuple[JobKey, ...]


@dataclass(frozen=True, slots=True)
class OfferMigration:
    """Tell `worker` to offer the KV of choices, which it decodes or has preempted, so that another worker can take them
    over. `keys`: the key of each of these choices. Choices that run continue meanwhile."""

    worker: WorkerRef
    keys: tuple[JobKey, ...]


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    worker: WorkerRef
    key: HandoffKey


@dataclass(frozen=True, slots=True)
class EndRequest:
    """End the request with the id `request` for its client; there is exactly one such command for each request.

    `outcome`: the error with which the request ends, or the `Finished` event of its last choice. When an exception in
    the gateway's own code ended the request, that exception is the `__cause__` of the error.
    """

    request: RequestId
    outcome: Finished | TandemError


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """Report that a worker has computed the prompt of `request`. `num_cached`: number of prompt tokens whose KV was
    taken from a prefix cache and not computed."""

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
    - MOVED: the target decodes the sequence now. RESUMED: the same, for a sequence that had been preempted.
    - WITHDRAWN: the sequence stays on its worker, because this worker did not offer it or the target did not take it
      over.
    - ENDED: the request or choice has ended meanwhile, or its worker was lost.
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
"""Commands that are sent to a worker without waiting for an answer. Such a message may be lost: jobs of which the
gateway knows nothing end with the next Watch stream, leases expire, a move is given up, and a new offer or a drain
replaces an offer that no worker follows."""
Delivery = Token | PromptLogprobs | Finished
"""What the client of a request gets: tokens, log probabilities of its prompt, and the end of a choice while others go
on. Each names its request by its key."""
StateCommand = Requeue | FindConsumer | ReportWorkerFailure | SubmitJob | WorkerOrder | Delivery | EndRequest
"""Commands that the state machine of one request returns. The director resolves `Requeue` and `FindConsumer` itself."""
Command = ReportWorkerFailure | SubmitJob | WorkerOrder | Delivery | EndRequest | PromptComputed | KVMoved | ReportMove
"""Commands that a director returns for its driver to carry out."""
