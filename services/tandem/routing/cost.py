"""What a placement costs in predicted seconds, part by part; never chooses one.

A second until the first token counts as one. Seconds of decoding, its own and those by which it holds up others, are
paid token by token while the client reads, and count `DECODE_WEIGHT`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.step_cost import StepFeatures
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.remote_prefix import RemotePrefixPlan
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_speed import WorkerSpeed
from tandem.routing.worker_view import WorkerView, token_bytes

DECODE_WEIGHT = 0.2
COMPUTE_WEIGHT = 1.0
"""Of the prompt's computation once more: those that come next wait for it, wherever it is placed. Without this a
request leaves its prefix for a queue that is a little shorter, and all queues grow."""
OVERLAPPED_WEIGHT = 0.1
"""Of reads while the prompt is still being computed: nobody waits for them, but they share the links with others."""
NO_ROOM_S = 10.0
"""For a decode worker without blocks for the prompt and its answer, which would wait for others to end."""
HOST_BANDWIDTH = 10e9
"""Bytes per second at which blocks come back from host memory."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Where the prompt is computed: seconds in its queue, of the computation, and weighted of those that decode there
    beside it. With a `prefix_fetch` the rest is computed once that is read: `read_s` is what its queue does not hide of
    it."""

    worker: WorkerView
    num_uncached: int
    wait_s: float
    compute_s: float
    stall_s: float
    read_s: float = 0.0
    prefix_fetch: RemotePrefixPlan | None = None

    @property
    def first_s(self) -> float:
        """Until all of it is computed."""
        return self.wait_s + self.read_s + self.compute_s

    @property
    def num_lacking(self) -> int:
        """Tokens that it computes or reads."""
        return self.num_uncached + (0 if self.prefix_fetch is None else self.prefix_fetch.num_read)

    @property
    def total_s(self) -> float:
        return self.first_s + COMPUTE_WEIGHT * self.compute_s + self.stall_s


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Where the answer is drawn, by a worker that lacks `num_lacking` tokens of the prompt: seconds between tokens,
    weighted seconds of all of them and of what they slow others by; `prompts_s`, weighted: of prompts there that it
    would wait behind; `room_s` where there is no room."""

    worker: WorkerView
    num_lacking: int
    itl_s: float
    decode_s: float
    prompts_s: float
    room_s: float


@dataclass(frozen=True, slots=True)
class PairCost:
    """Of one placement. `transfer_s` is 0 in one place."""

    prefill: PrefillCost
    decode: DecodeCost
    transfer_s: float

    @property
    def is_local(self) -> bool:
        return self.prefill.worker.ref == self.decode.worker.ref

    @property
    def first_s(self) -> float:
        """Until the first token, and what holds up the second."""
        return self.prefill.first_s + self.transfer_s

    @property
    def total_s(self) -> float:
        prompts_s = 0.0 if self.is_local else self.decode.prompts_s
        return self.prefill.total_s + self.transfer_s + self.decode.decode_s + self.decode.room_s + prompts_s


def prefill_cost(pace: WorkerSpeed, want: RoutingRequest, prefix_fetch: RemotePrefixPlan | None = None) -> PrefillCost:
    worker, cost = pace.worker, pace.cost
    num_uncached = want.num_uncached(worker) if prefix_fetch is None else want.num_context - prefix_fetch.num_tokens
    chunk_s = cost.chunk_s(want.num_context - num_uncached, num_uncached)
    held = want.held(worker)
    host_s = (held.num_tokens - held.num_device_tokens) * token_bytes(worker) / HOST_BANDWIDTH
    wait_s = pace.wait_s(num_uncached, want.lane)
    return PrefillCost(
        worker,
        num_uncached,
        wait_s=wait_s,
        compute_s=host_s + pace.num_steps(num_uncached) * pace.base_s + chunk_s,
        stall_s=DECODE_WEIGHT * worker.num_decoding * chunk_s,
        read_s=0.0
        if prefix_fetch is None
        else max(OVERLAPPED_WEIGHT * prefix_fetch.read_s, prefix_fetch.read_s - wait_s),
        prefix_fetch=prefix_fetch,
    )


def decode_cost(pace: WorkerSpeed, want: RoutingRequest) -> DecodeCost:
    worker, cost = pace.worker, pace.cost
    num_others, num_context = worker.num_to_decode, want.num_context
    step = StepFeatures(num_decode_seqs=num_others + 1, decode_context=worker.num_held_tokens + num_context)
    itl_s = cost.predict(step)
    slower_s = num_others * (cost.decode_seq_s + cost.decode_context_s * num_context)
    return DecodeCost(
        worker,
        num_context - want.held(worker).num_tokens,
        itl_s,
        decode_s=DECODE_WEIGHT * want.num_output * (itl_s + slower_s),
        prompts_s=DECODE_WEIGHT * cost.prefill_token_s * worker.queued_tokens,
        room_s=0.0 if _has_room(worker, want) else NO_ROOM_S,
    )


def transfer_s(producer: PrefillCost, consumer: DecodeCost, links: LinkBandwidth) -> float:
    """Of the blocks that the consumer lacks. They are read chunk by chunk while the next one is computed: exposed is
    the last chunk, or what the link cannot carry while the prompt is computed."""
    per_token_s = token_bytes(producer.worker) / links.bandwidth(producer.worker, consumer.worker)
    num_tokens = consumer.num_lacking
    all_s = num_tokens * per_token_s
    last_s = min(num_tokens, producer.num_uncached, producer.worker.num_step_tokens) * per_token_s
    exposed_s = max(last_s, all_s - producer.compute_s)
    return exposed_s + OVERLAPPED_WEIGHT * (all_s - exposed_s)


def _has_room(worker: WorkerView, want: RoutingRequest) -> bool:
    load = worker.load
    if not worker.block_size or not load.num_blocks:
        return True
    num_tokens = want.num_context + want.num_output - want.held(worker).num_tokens
    num_blocks = -(-num_tokens // worker.block_size)
    return num_blocks * (1 + worker.num_inflight) <= load.num_free_blocks - load.num_reserved_blocks
