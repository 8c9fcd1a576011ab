"""Predict the cost of a placement in seconds, part by part.

A second until the first token counts as one. A second of decoding, or of a delay of other sequences that decode, counts
as `DECODE_WEIGHT`, because it is spread over many tokens, which the client reads meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.step_cost import StepFeatures
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.remote_prefix import RemotePrefixPlan, onload_s
from tandem.routing.routing_request import RoutingRequest
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
    return PrefillCost(
        worker,
        num_uncached,
        is_accepted=request.is_accepted(worker, num_uncached),
        wait_s=wait_s,
        compute_s=host_s + speed.num_steps(num_uncached) * speed.base_s + chunk_s,
        stall_s=DECODE_WEIGHT * worker.num_decoding * chunk_s,
        read_s=0.0
        if prefix_fetch is None
        else max(OVERLAPPED_WEIGHT * prefix_fetch.read_s, prefix_fetch.read_s - wait_s),
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
    return DecodeCost(
        worker,
        num_context - request.held(worker).num_tokens,
        decode_s=DECODE_WEIGHT * request.num_output * (itl_s + slower_s),
        prompts_s=DECODE_WEIGHT * cost.prefill_token_s * worker.queued_tokens,
        room_s=0.0 if _has_room(worker, request) else NO_ROOM_S,
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


def _has_room(worker: WorkerView, request: RoutingRequest) -> bool:
    load = worker.load
    if not worker.block_size or not load.num_blocks:
        return True
    num_tokens = request.num_context + request.num_output - request.held(worker).num_tokens
    num_blocks = -(-num_tokens // worker.block_size)
    return num_blocks * (1 + worker.num_inflight) <= load.num_free_blocks - load.num_reserved_blocks
