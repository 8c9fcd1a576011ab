"""The stages that a request's time goes to, and what a worker tells of its own; never adds them up."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Stage(Enum):
    """Nine; at any moment a request is in one of them, so their times add up to its own.

    RECEIVE: its body is read, its tenant known, its prompt tokenized, its quota taken. QUEUE: it waits in the gateway's
    line. ROUTE: its workers are asked and accept. PREFILL_QUEUE: it waits for its first step where its prompt is
    computed; PREFILL: from there to its first token. TRANSFER: what of the KV's way comes after that, and so is not
    hidden behind the prefill; DECODE_QUEUE: the KV is there and no step has taken it. DECODE: until the last token.
    DELIVER: tokens on their way to the client, where nothing else is waited for.

    A request that lives through a failure is in some of them more than once.
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
    """What a job waited for before it drew its first token, in seconds by its worker's clock. A job that takes KV over
    has no prefill of its own: `decode_s` is that of its first step."""

    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_queue_s: float = 0.0
    decode_s: float = 0.0
