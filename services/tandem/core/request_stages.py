"""Define the stages of a request's time, what it waits for in them, and the part that a worker reports."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class Stage(Enum):
    """The nine stages of a request. At any moment a request is in exactly one, so their times add up to its total.

    - RECEIVE: its body is read, its tenant identified, its prompt tokenized, its quota reserved.
    - QUEUE: it waits in the gateway's request queue.
    - ROUTE: its jobs are submitted to workers and accepted.
    - PREFILL_QUEUE: it waits for the first step of the worker that computes its prompt.
    - PREFILL: from that first step to the first token.
    - TRANSFER: from the first token until the decode worker has all KV; what is read before that costs no time.
    - DECODE_QUEUE: the KV is complete and no step has computed it yet.
    - DECODE: until the last token.
    - DELIVER: tokens are on their way to the client, and nothing else is waited for.

    A request that survives a failure passes through some stages more than once.
    """

    RECEIVE = "receive"
    QUEUE = "queue"
    ROUTE = "route"
    PREFILL_QUEUE = "prefill_queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE_QUEUE = "decode_queue"
    DECODE = "decode"
    DELIVER = "deliver"


class WaitCause(Enum):
    """Name what a request waits for, in the stages in which it waits.

    In QUEUE:

    - TURN: requests before it in the gateway's queue, by lane, fair share of the tenants, and priority.
    - NO_ROOM: it is the next, and no worker of its model has room, or a busy one is worth the wait.
    - URGENT_LANES: requests of more urgent lanes wait for all workers that serve its lane.
    - NO_WORKER: no live worker could serve it.

    In PREFILL_QUEUE:

    - REMOTE_PREFIX: the beginning of its prompt is read from another worker or from files.
    - PROMPTS_AHEAD: other prompts are computed before it.
    - BATCH_SHARE: batch sequences have taken all that they may (`batch_max_share`).
    - LEASES: leases of KV blocks must end before another prompt may lease or fill so many.

    In PREFILL_QUEUE, and in TRANSFER before the KV can be read:

    - SEAT: `max_num_seqs` sequences run already.
    - BLOCKS: too few KV blocks are free.

    PULL: its KV is read (TRANSFER). STEP: a step of the worker that began before it could join (PREFILL_QUEUE,
    DECODE_QUEUE).
    """

    TURN = "turn"
    NO_ROOM = "no_room"
    URGENT_LANES = "urgent_lanes"
    NO_WORKER = "no_worker"
    REMOTE_PREFIX = "remote_prefix"
    PROMPTS_AHEAD = "prompts_ahead"
    BATCH_SHARE = "batch_share"
    LEASES = "leases"
    SEAT = "seat"
    BLOCKS = "blocks"
    PULL = "pull"
    STEP = "step"


class Wait(NamedTuple):
    """Seconds that a request waited for one cause in one stage.

    `num_tokens_ahead`: for PROMPTS_AHEAD, the prompt tokens to compute before it when it arrived at the worker.
    """

    stage: Stage
    cause: WaitCause
    seconds: float
    num_tokens_ahead: int = 0

    def plus(self, other: Wait) -> Wait:
        """Return the wait for the same cause whose seconds are those of both, with the more tokens ahead."""
        num_tokens = max(self.num_tokens_ahead, other.num_tokens_ahead)
        return self._replace(seconds=self.seconds + other.seconds, num_tokens_ahead=num_tokens)


def merged_waits(waits: Iterable[Wait]) -> tuple[Wait, ...]:
    """Return one wait for each stage and cause, in the order of their first occurrence."""
    found: dict[tuple[Stage, WaitCause], Wait] = {}
    for wait in waits:
        known = found.get(wait[:2])
        found[wait[:2]] = wait if known is None else known.plus(wait)
    return tuple(found.values())


class JobStages(NamedTuple):
    """Division of a job's time before its first sampled token into stages, in seconds of its worker's clock.

    The fields are the stages of `Stage`. A job that reads its KV from another worker has no prefill: `decode_s` is the
    time of its first step. `waits`: what it waited for, as far as its worker knows more than the stages tell; in order.
    """

    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_queue_s: float = 0.0
    decode_s: float = 0.0
    waits: tuple[Wait, ...] = ()

    @classmethod
    def of(cls, seconds: Iterable[float], waits: tuple[Wait, ...] = ()) -> JobStages:
        """Return the division with the seconds of the five stages, in order."""
        prefill_queue_s, prefill_s, transfer_s, decode_queue_s, decode_s = seconds
        return cls(prefill_queue_s, prefill_s, transfer_s, decode_queue_s, decode_s, waits)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Return the seconds of the five stages, in order."""
        return self[:5]
