"""What it takes to read a prompt's beginning from another worker's prefix cache; never says whether that pays."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.ids import WorkerRef
from tandem.core.step_cost import StepCost
from tandem.routing.links import Links
from tandem.routing.steps import rest_s
from tandem.routing.view import WorkerView, token_bytes
from tandem.routing.want import Want

LOAN_S = 3e-3
"""To ask for blocks and to hear which there are, to start a read and to check what came: four messages between two
processes and a turn of each one's transfer thread, which looks every half millisecond."""
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


def loan(lender: WorkerView, taker: WorkerView, want: Want, links: Links, steps: StepCost) -> Loan:
    """`steps` of the lender, which lends from device memory and between two steps."""
    num_tokens = want.held(lender).num_device_tokens
    num_read = num_tokens - want.held(taker).num_tokens
    wire_s = num_read * token_bytes(lender) / links.bandwidth(lender, taker)
    read_s = LOAN_S + rest_s(lender, steps) + wire_s
    return Loan(lender.ref, num_tokens // lender.block_size, num_tokens, num_read, read_s)


def may_lend(lender: WorkerView, taker: WorkerView, want: Want) -> bool:
    """It has blocks, of the same kind, that the other lacks."""
    return (
        lender.ref != taker.ref
        and lender.fingerprint == taker.fingerprint
        and (lender.block_size, lender.block_bytes) == (taker.block_size, taker.block_bytes)
        and want.held(lender).num_device_tokens > want.held(taker).num_tokens
    )
