"""Predict the time of fetching a prompt's prefix from another worker's cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.core.ids import WorkerRef
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.routing_request import CachedTokens, RoutingRequest
from tandem.routing.worker_speed import WorkerSpeed
from tandem.routing.worker_view import WorkerView, token_bytes

MESSAGES_S = 1.5e-3
"""Seconds of a message exchange between two workers: two messages, and a turn of each transfer thread, which polls
every half millisecond. A fetch has two exchanges, one to request blocks, and one to start a read and check the
result."""
HOST_BANDWIDTH = 10e9
"""Bytes per second at which blocks are loaded from host memory."""
NUM_SOURCES = 2
"""Most workers that are compared as the source of a prefix for one worker: those that hold most of it. Others hold
less, and are seldom so much nearer that this pays."""


@dataclass(frozen=True, slots=True)
class RemotePrefixPlan:
    """A fetch of the first `num_blocks` blocks of a prompt, which are `num_tokens` tokens, from the cache of the worker
    `producer`.

    `num_read`: how many of these tokens are read, because the consumer does not hold them. `read_s`: predicted seconds
    from now until they have been read.
    """

    producer: WorkerRef
    num_blocks: int
    num_tokens: int
    num_read: int
    read_s: float


def plan_remote_prefix(
    source: WorkerSpeed, reader: WorkerSpeed, request: RoutingRequest, links: LinkBandwidth
) -> RemotePrefixPlan:
    """Return the fetch by the worker `reader` of all prompt blocks that the worker `source` has cached, with its
    predicted time. Blocks that the source has in host memory only are copied to its device memory first. `links`: the
    measured bandwidths between workers.

    Workers handle messages only between their steps. So the source handles the request at the end of its current step.
    The reader handles the response, and then the arrival of the data, each at the end of a further step, as long as it
    has prompts to compute.
    """
    producer = source.worker
    consumer = reader.worker
    held = request.held(producer)
    num_tokens = held.num_tokens
    num_read = num_tokens - request.held(consumer).num_tokens
    request_s = MESSAGES_S + source.rest_s + onload_s(producer, held)
    wire_s = MESSAGES_S + num_read * token_bytes(producer) / links.bandwidth(producer, consumer)
    next_s = reader.next_s
    response_s = min(_round_up(request_s, next_s) + _round_up(wire_s, next_s), request_s + wire_s + reader.left_s)
    return RemotePrefixPlan(
        producer.ref, num_tokens // producer.block_size, num_tokens, num_read, reader.rest_s + response_s
    )


def onload_s(worker: WorkerView, held: CachedTokens) -> float:
    """Return the seconds in which a worker copies cached tokens from its host memory to its device memory. `held`: the
    cached tokens; those that are in device memory already are not copied."""
    return (held.num_tokens - held.num_device_tokens) * token_bytes(worker) / HOST_BANDWIDTH


def can_serve_prefix(producer: WorkerView, consumer: WorkerView) -> bool:
    """Return whether the worker `consumer` can use KV blocks of the worker `producer`. The two must be different
    workers, with equal fingerprint, block size and bytes per block."""
    return (
        producer.ref != consumer.ref
        and producer.fingerprint == consumer.fingerprint
        and (producer.block_size, producer.block_bytes) == (consumer.block_size, consumer.block_bytes)
    )


def _round_up(seconds: float, step_s: float) -> float:
    """Return `seconds` rounded up to the end of a step."""
    return math.ceil(seconds / step_s) * step_s if step_s > 0 else seconds
