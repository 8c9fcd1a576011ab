"""Predict the cost of a placement in seconds, part by part.

A second until the first token counts as one. A second of decoding, or of a delay of other sequences that decode, counts
as `DECODE_WEIGHT`, because it is spread over many tokens, which the client reads meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.core.ids import WorkerRef
from tandem.core.step_cost import StepFeatures
from tandem.routing.candidates import PrefillCandidate
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.routing_request import CachedTokens, RoutingRequest
from tandem.routing.worker_speed import WorkerSpeed
from tandem.routing.worker_view import WorkerView, token_bytes

DECODE_WEIGHT = 0.2
COMPUTE_WEIGHT = 1.0
"""Weight of the seconds in which the prompt is computed, as a delay of the prompts after it, on whichever worker it is
placed. Without it a request leaves its cached prefix for a slightly shorter queue, and all queues grow."""
OVERLAPPED_WEIGHT = 0.1
"""Weight of the seconds of transfers while the prompt is still being computed: they do not delay this request, but use
shared bandwidth."""
NO_ROOM_S = 10.0
"""Cost of a decode worker that has too few free blocks for the prompt and its output, so that the request would wait
there for others to end."""
MESSAGES_S = 1.5e-3
"""Seconds of a message exchange between two workers: two messages, and a turn of each transfer thread, which polls
every half millisecond. A fetch has two exchanges, one to request blocks, and one to start a read and check the
result."""
HOST_BANDWIDTH = 10e9
"""Bytes per second at which blocks are loaded from host memory."""


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


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Cost of computing the prompt on `worker`, in seconds.

    `num_uncached`: prompt tokens to compute. `is_accepted`: the worker probably accepts the prompt now. `wait_s`: delay
    by the worker's current step and its other prompts. `compute_s`: time of the computation. `stall_s`: delay of the
    sequences that decode on the worker, weighted by `DECODE_WEIGHT`.

    `prefix_fetch`: the prefix to read from another worker's cache before the other tokens are computed; None: no fetch.
    `read_s`: seconds by which this read delays the prompt beyond `wait_s`, at least `OVERLAPPED_WEIGHT` of the read's
    time.
    """

    worker: WorkerView
    num_uncached: int
    is_accepted: bool
    wait_s: float
    compute_s: float
    stall_s: float
    read_s: float = 0.0
    prefix_fetch: RemotePrefixPlan | None = None

    @property
    def first_s(self) -> float:
        """Return the seconds until the whole prompt is computed."""
        return self.wait_s + self.read_s + self.compute_s

    @property
    def num_lacking(self) -> int:
        """Return the prompt tokens whose KV the worker does not hold: those that it computes and those that it
        fetches."""
        return self.num_uncached + (0 if self.prefix_fetch is None else self.prefix_fetch.num_read)

    @property
    def total_s(self) -> float:
        return self.first_s + COMPUTE_WEIGHT * self.compute_s + self.stall_s


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Cost of decoding on `worker`, which does not have the KV of `num_lacking` prompt tokens.

    `decode_s`: seconds in which all output tokens are decoded, plus the seconds by which they delay the worker's other
    sequences; the sum is weighted by `DECODE_WEIGHT`. `prompts_s`: seconds of computing the prompts that are queued on
    the worker, also weighted by `DECODE_WEIGHT`. `room_s`: `NO_ROOM_S` when the worker has too few free blocks for
    prompt and output, else 0.
    """

    worker: WorkerView
    num_lacking: int
    decode_s: float
    prompts_s: float
    room_s: float


@dataclass(frozen=True, slots=True)
class PairCost:
    """Cost of one placement: of the prefill on one worker and of the decode on the same or another worker.

    `transfer_s`: cost of moving the KV between the two, in seconds; 0 when they are the same worker.
    """

    prefill: PrefillCost
    decode: DecodeCost
    transfer_s: float

    @property
    def is_local(self) -> bool:
        return self.prefill.worker.ref == self.decode.worker.ref

    @property
    def first_s(self) -> float:
        """Return the predicted seconds until the first token, plus the seconds by which the KV transfer delays the
        second token."""
        return self.prefill.first_s + self.transfer_s

    @property
    def total_s(self) -> float:
        prompts_s = 0.0 if self.is_local else self.decode.prompts_s
        return self.prefill.total_s + self.transfer_s + self.decode.decode_s + self.decode.room_s + prompts_s


def price(candidates: Sequence[PrefillCandidate], request: RoutingRequest, links: LinkBandwidth) -> list[PairCost]:
    """Return the cost of every prefill candidate together with each of its decode workers.

    Costs are in seconds if every compared worker has reported how long its steps take; otherwise all workers get the
    same nominal speed, so that in effect token counts are compared. `links`: the measured bandwidths between workers,
    for transfers.
    """
    compared = [view for candidate in candidates for view in (candidate.worker, *candidate.decode_workers)]
    has_step_costs = all(view.step_cost is not None for view in compared)
    sources = (view for candidate in candidates for view in candidate.prefix_sources)
    views = {view.ref: view for view in (*compared, *sources)}
    speeds = {ref: WorkerSpeed(view, has_step_costs=has_step_costs) for ref, view in views.items()}
    consumers = {view.ref for candidate in candidates for view in candidate.decode_workers}
    decodes = {ref: decode_cost(speeds[ref], request) for ref in consumers}
    priced: list[PairCost] = []
    for candidate in candidates:
        prefill = _cheapest_prefill(candidate, request, links, speeds)
        for consumer in candidate.decode_workers:
            decode = decodes[consumer.ref]
            is_local = consumer.ref == candidate.worker.ref
            priced.append(PairCost(prefill, decode, 0.0 if is_local else transfer_s(prefill, decode, links)))
    return priced


def _cheapest_prefill(
    candidate: PrefillCandidate, request: RoutingRequest, links: LinkBandwidth, speeds: Mapping[WorkerRef, WorkerSpeed]
) -> PrefillCost:
    """Return the least cost of getting the prompt's KV, either by computing all of it or by fetching its beginning from
    one of the prefix sources.

    Variants that the worker would reject are compared only where it would reject all of them.
    """
    speed = speeds[candidate.worker.ref]
    variants = [prefill_cost(speed, request)]
    for source in candidate.prefix_sources:
        variants.append(prefill_cost(speed, request, plan_remote_prefix(speeds[source.ref], speed, request, links)))
    accepted = [variant for variant in variants if variant.is_accepted]
    return min(accepted or variants, key=lambda variant: variant.total_s)


def prefill_cost(
    speed: WorkerSpeed, request: RoutingRequest, prefix_fetch: RemotePrefixPlan | None = None
) -> PrefillCost:
    worker = speed.worker
    cost = speed.cost
    num_uncached = (
        request.num_uncached(worker) if prefix_fetch is None else request.num_context - prefix_fetch.num_tokens
    )
    chunk_s = cost.chunk_s(request.num_context - num_uncached, num_uncached)
    host_s = onload_s(worker, request.held(worker))
    wait_s = speed.wait_s(num_uncached, request.lane)
    fetch_s = 0.0 if prefix_fetch is None else prefix_fetch.read_s
    return PrefillCost(
        worker,
        num_uncached,
        is_accepted=request.is_accepted(worker, num_uncached),
        wait_s=wait_s,
        compute_s=host_s + speed.num_steps(num_uncached) * speed.base_s + chunk_s,
        stall_s=DECODE_WEIGHT * worker.num_decoding * chunk_s,
        read_s=max(OVERLAPPED_WEIGHT * fetch_s, fetch_s - wait_s),
        prefix_fetch=prefix_fetch,
    )


def decode_cost(speed: WorkerSpeed, request: RoutingRequest) -> DecodeCost:
    worker = speed.worker
    cost = speed.cost
    num_others = worker.num_to_decode
    num_context = request.num_context
    step = StepFeatures(num_decode_seqs=num_others + 1, decode_context=worker.num_held_tokens + num_context)
    itl_s = cost.predict(step)
    slower_s = num_others * (cost.decode_seq_s + cost.decode_context_s * num_context)
    num_lacking = num_context - request.held(worker).num_tokens
    return DecodeCost(
        worker,
        num_lacking,
        decode_s=DECODE_WEIGHT * request.num_output * (itl_s + slower_s),
        prompts_s=DECODE_WEIGHT * cost.prefill_token_s * worker.queued_tokens,
        room_s=0.0 if worker.has_room(num_lacking + request.num_output) else NO_ROOM_S,
    )


def transfer_s(producer: PrefillCost, consumer: DecodeCost, links: LinkBandwidth) -> float:
    """Return the cost, in seconds, of transferring from the producer to the consumer the KV that the consumer does not
    have. `links`: the measured bandwidths between workers.

    Blocks of one chunk are read while the next chunk is computed. So the transfer delays the request by the read of the
    last chunk, or by more where the link is slower than the computation. The rest of the transfer is hidden by the
    computation and weighted by `OVERLAPPED_WEIGHT`.
    """
    per_token_s = token_bytes(producer.worker) / links.bandwidth(producer.worker, consumer.worker)
    num_tokens = consumer.num_lacking
    all_s = num_tokens * per_token_s
    last_s = min(num_tokens, producer.num_uncached, producer.worker.num_step_tokens) * per_token_s
    exposed_s = max(last_s, all_s - producer.compute_s)
    return exposed_s + OVERLAPPED_WEIGHT * (all_s - exposed_s)


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


def _round_up(seconds: float, step_s: float) -> float:
    """Return `seconds` rounded up to the end of a step."""
    return math.ceil(seconds / step_s) * step_s if step_s > 0 else seconds
