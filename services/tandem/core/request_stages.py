"""Define the stages of a request's time, and the part that a worker reports."""

from __future__ import annotations

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


class JobStages(NamedTuple):
    """Division of a job's time before its first sampled token into stages, in seconds of its worker's clock.

    The fields are the stages of `Stage`. A job that reads its KV from another worker has no prefill: `decode_s` is the
    time of its first step.
    """

    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_queue_s: float = 0.0
    decode_s: float = 0.0
