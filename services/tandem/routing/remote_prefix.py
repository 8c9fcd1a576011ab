"""What it takes to read a prompt's beginning from another worker's prefix cache; never says whether that pays."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.core.ids import WorkerRef
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_speed import WorkerSpeed
from tandem.routing.worker_view import WorkerView, token_bytes

MESSAGES_S = 1.5e-3
"""To ask for blocks and to hear which there are, and again to start a read and to check what came: two messages between
two processes and a turn of each one's transfer thread, which looks every half millisecond."""
NUM_LENDERS = 2
"""Workers from which one that computes may read, that are compared: those that hold most. Others hold less and are
seldom so much nearer."""


@dataclass(frozen=True, slots=True)
class RemotePrefixPlan:
    """The first `num_blocks` blocks of a prompt, which come to `num_tokens` tokens, as `producer` holds them. The
    consumer lacks the last `num_read` of these tokens, and has them after `read_s` seconds if it asks now."""

    producer: WorkerRef
    num_blocks: int
    num_tokens: int
    num_read: int
    read_s: float


def plan_remote_prefix(
    source: WorkerSpeed, reader: WorkerSpeed, want: RoutingRequest, links: LinkBandwidth
) -> RemotePrefixPlan:
    """Plan a read of what the source has in device memory. Workers hear of each other between their steps only: the
    source of the question; and the reader, which asks when its step ends, of the answer and of what came, each at the
    end of another one while it has others to compute."""
    producer, consumer = source.worker, reader.worker
    num_tokens = want.held(producer).num_device_tokens
    num_read = num_tokens - want.held(consumer).num_tokens
    ask_s = MESSAGES_S + source.rest_s
    wire_s = MESSAGES_S + num_read * token_bytes(producer) / links.bandwidth(producer, consumer)
    next_s = reader.next_s
    heard_s = min(_whole(ask_s, next_s) + _whole(wire_s, next_s), ask_s + wire_s + reader.left_s)
    return RemotePrefixPlan(
        producer.ref, num_tokens // producer.block_size, num_tokens, num_read, reader.rest_s + heard_s
    )


def can_serve_prefix(producer: WorkerView, consumer: WorkerView) -> bool:
    """Their blocks are of the same kind."""
    return (
        producer.ref != consumer.ref
        and producer.fingerprint == consumer.fingerprint
        and (producer.block_size, producer.block_bytes) == (consumer.block_size, consumer.block_bytes)
    )


def _whole(seconds: float, step_s: float) -> float:
    """Until the end of the step in which so many seconds have gone."""
    return math.ceil(seconds / step_s) * step_s if step_s > 0 else seconds
