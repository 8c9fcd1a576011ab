"""Define the stages of a request's time, the causes of waiting within them, and the stages that a worker reports."""

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
    - PREFILL: from the beginning of this first step to the first token.
    - TRANSFER: from the first token until the decode worker has all KV; KV that is read before the first token adds no
      time.
    - DECODE_QUEUE: the decode worker has all KV and has not begun a step with the request yet.
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

    - TURN: requests that are before it in the gateway's queue, by lane, fair share of the tenants, and priority.
    - NO_ROOM: it is the first of its model and lane, and either no worker has room, or waiting for a busy worker is
      predicted to cost less than using a free one.
    - URGENT_LANES: requests of more urgent lanes wait for all workers that serve its lane.
    - NO_WORKER: no live worker could serve it.

    In PREFILL_QUEUE:

    - REMOTE_PREFIX: the beginning of its prompt is read from another worker or from files.
    - PROMPTS_AHEAD: other prompts are computed before it.
    - BATCH_SHARE: batch sequences have taken all that they may (`batch_max_share`).
    - LEASES: other workers still lease so many KV blocks that its prompt, or one before it, cannot get or lease its
      blocks.

    In PREFILL_QUEUE, and in TRANSFER before the KV can be read:

    - SEAT: `max_num_seqs` sequences run already.
    - BLOCKS: too few KV blocks are free.

    In the stages in parentheses:

    - PULL: its KV is read from another worker (TRANSFER).
    - STEP: a step of the worker runs that began before the request could join it (PREFILL_QUEUE, DECODE_QUEUE).
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

    `num_tokens_ahead`: if `cause` is PROMPTS_AHEAD, the number of prompt tokens that were to be computed before the
    request when it arrived at the worker; else 0.
    """

    stage: Stage
    cause: WaitCause
    seconds: float
    num_tokens_ahead: int = 0

    def plus(self, other: Wait) -> Wait:
        """Return the sum of this wait and another for the same cause and stage, with the larger `num_tokens_ahead` of
        both."""
        num_tokens = max(self.num_tokens_ahead, other.num_tokens_ahead)
        return self._replace(seconds=self.seconds + other.seconds, num_tokens_ahead=num_tokens)


def merged_waits(waits: Iterable[Wait]) -> tuple[Wait, ...]:
    """Add up the waits of each stage and cause. Returns one wait for each pair of stage and cause, in the order in
    which the pairs first occur."""
    found: dict[tuple[Stage, WaitCause], Wait] = {}
    for wait in waits:
        known = found.get(wait[:2])
        found[wait[:2]] = wait if known is None else known.plus(wait)
    return tuple(found.values())


class JobStages(NamedTuple):
    """Division of a job's time before its first sampled token into stages, in seconds of its worker's clock.

    Each of the first five fields is the time in the stage of the same name in `Stage`. A job that reads its KV from
    another worker has no prefill; its `decode_s` is the time of its first step. `waits`: what the job waited for within
    these stages, in order, as far as its worker knows.
    """

    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_queue_s: float = 0.0
    decode_s: float = 0.0
    waits: tuple[Wait, ...] = ()

    @classmethod
    def of(cls, seconds: Iterable[float], waits: tuple[Wait, ...] = ()) -> JobStages:
        """Return the division with these seconds of the five stages, in the order of the fields."""
        prefill_queue_s, prefill_s, transfer_s, decode_queue_s, decode_s = seconds
        return cls(prefill_queue_s, prefill_s, transfer_s, decode_queue_s, decode_s, waits)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Return the seconds of the five stages, in the order of the fields."""
        return self[:5]
