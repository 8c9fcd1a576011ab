"""What it takes to read a prompt's beginning from another worker's prefix cache; never says whether that pays."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.core.ids import WorkerRef
from tandem.routing.links import Links
from tandem.routing.pace import Pace
from tandem.routing.view import WorkerView, token_bytes
from tandem.routing.want import Want

MESSAGES_S = 1.5e-3
"""To ask for blocks and to hear which there are, and again to start a read and to check what came: two messages between
two processes and a turn of each one's transfer thread, which looks every half millisecond."""
NUM_LENDERS = 2
"""Workers from which one that computes may read, that are compared: those that hold most. Others hold less and are
seldom so much nearer."""


@dataclass(frozen=True, slots=True)
class Loan:
    """The first `num_blocks` blocks of a prompt, which come to `num_tokens` tokens, as `lender` holds them. The taker
    lacks the last `num_read` of these tokens, and has them after `read_s` seconds if it asks now."""

    lender: WorkerRef
    num_blocks: int
    num_tokens: int
    num_read: int
    read_s: float


def loan(giver: Pace, reader: Pace, want: Want, links: Links) -> Loan:
    """Of what the giver has in device memory. Workers hear of each other between their steps only: the giver of the
    question; and the reader, which asks when its step ends, of the answer and of what came, each at the end of another
    one while it has others to compute."""
    lender, taker = giver.worker, reader.worker
    num_tokens = want.held(lender).num_device_tokens
    num_read = num_tokens - want.held(taker).num_tokens
    ask_s = MESSAGES_S + giver.rest_s
    wire_s = MESSAGES_S + num_read * token_bytes(lender) / links.bandwidth(lender, taker)
    next_s = reader.next_s
    heard_s = min(_whole(ask_s, next_s) + _whole(wire_s, next_s), ask_s + wire_s + reader.left_s)
    return Loan(lender.ref, num_tokens // lender.block_size, num_tokens, num_read, reader.rest_s + heard_s)


def may_lend(lender: WorkerView, taker: WorkerView) -> bool:
    """Their blocks are of the same kind."""
    return (
        lender.ref != taker.ref
        and lender.fingerprint == taker.fingerprint
        and (lender.block_size, lender.block_bytes) == (taker.block_size, taker.block_bytes)
    )


def _whole(seconds: float, step_s: float) -> float:
    """Until the end of the step in which so many seconds have gone."""
    return math.ceil(seconds / step_s) * step_s if step_s > 0 else seconds
