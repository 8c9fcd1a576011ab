"""Define what a router must know of one request, as a frozen value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.config import Disaggregation
from tandem.core.ids import BlockHash, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request import Request
from tandem.routing.prefix_index import PrefixHit
from tandem.routing.worker_view import Pair, WorkerView

EXPECTED_OUTPUT = 256
"""Upper limit of the output tokens that a placement plans for: many clients set `max_tokens` far above what they
receive."""


class CachedTokens(NamedTuple):
    """Numbers of prompt tokens whose KV a worker has cached.

    `num_tokens`: in device or host memory; `num_device_tokens`: how many of them are in device memory.
    """

    num_tokens: int
    num_device_tokens: int


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """Describe what the router knows of one request: a prompt of `num_prompt` tokens, probably followed by `num_output`
    output tokens.

    - `hits`: the cached prefix of each worker; None when it was not looked up, and then `num_tokens` is the number of
      prompt tokens to compute on any worker.
    - `blocked_links`: (producer, consumer) pairs of workers between which prefix fetches keep failing.
    - `key` identifies the request, and `session` the client's session ("": none); both decide among placements of
      nearly equal cost. `turn`: number of placements that the gateway made before, for the policy "round_robin".
    - `mode`: whether the request is split over a prefill and a decode worker, as in `gateway.disaggregation`.
    - `hashes`: the hashes of the prompt's full blocks, by which `hits` is looked up; empty: not looked up.
    - `avoided`: workers that failed the request, which are used only where there are no others.
    - `is_undivided`: the request's KV was lost in a hand-off more than once, so one worker runs prefill and decode
      where `mode` allows it.
    - `yields_to`: more urgent lanes in which requests wait for capacity; workers that serve any of them count as full.
    """

    model: str
    num_tokens: int = 1
    lane: Lane = Lane.INTERACTIVE
    num_prompt: int = 0
    num_output: int = EXPECTED_OUTPUT
    hits: Mapping[WorkerRef, PrefixHit] | None = None
    blocked_links: Set[Pair] = frozenset()
    key: str = ""
    session: str = ""
    turn: int = 0
    mode: Disaggregation = "prefer"
    hashes: Sequence[BlockHash] = ()
    avoided: frozenset[WorkerRef] = frozenset()
    is_undivided: bool = False
    yields_to: frozenset[Lane] = frozenset()

    @classmethod
    def of(
        cls, request: Request, mode: Disaggregation, hashes: Sequence[BlockHash] = (), session: str = ""
    ) -> RoutingRequest:
        """Return the routing request of a request that arrives now; the arguments are the attributes of the same names.

        When the request asks for log probabilities of its prompt, every prompt token is computed, so no cached prefix
        is looked up.
        """
        is_scored = request.prompt_logprobs is not None
        return cls(
            request.model,
            lane=request.lane,
            num_prompt=len(request.prompt_tokens),
            num_output=min(request.sampling.max_tokens, EXPECTED_OUTPUT) * request.num_choices,
            hits={} if is_scored else None,
            key=request.id,
            session=session,
            mode=mode,
            hashes=() if is_scored else hashes,
        )

    @property
    def num_context(self) -> int:
        """Return the number of tokens of the whole prompt, whether their KV is cached or not."""
        return max(self.num_prompt, self.num_tokens)

    def held(self, worker: WorkerView) -> CachedTokens:
        """Return the number of prompt tokens that the worker has cached. Only whole blocks count, without the block of
        the last token, which is always computed."""
        hit = None if self.hits is None else self.hits.get(worker.ref)
        if hit is None or not worker.block_size:
            return CachedTokens(0, 0)
        max_blocks = (self.num_context - 1) // worker.block_size
        return CachedTokens(
            min(hit.num_blocks, max_blocks) * worker.block_size,
            min(hit.num_device_blocks, max_blocks) * worker.block_size,
        )

    def num_uncached(self, worker: WorkerView) -> int:
        """Return the number of prompt tokens that the worker would have to compute if it fetches no prefix from another
        worker."""
        return self.num_tokens if self.hits is None else self.num_context - self.held(worker).num_tokens

    def max_remote_tokens(self, block_size: int) -> int:
        """Return the greatest number of prompt tokens that any one worker has cached; 0 when none has any.
        `block_size`: tokens per block."""
        return block_size * max((hit.num_blocks for hit in (self.hits or {}).values()), default=0)

    def fits(self, worker: WorkerView, num_remote: int = 0) -> bool:
        """Return whether the worker will probably accept the prompt now if it fetches the first `num_remote` tokens
        from another worker's cache."""
        num_tokens = self.num_uncached(worker)
        if num_remote:
            num_tokens = max(1, min(num_tokens, self.num_context - num_remote))
        return self.is_accepted(worker, num_tokens)

    def is_accepted(self, worker: WorkerView, num_tokens: int) -> bool:
        """Return whether the worker will probably accept the prompt now if it has to compute `num_tokens` tokens of it.
        False while a request of a more urgent lane waits for the worker."""
        return self.is_served_next(worker) and worker.takes(num_tokens, self.lane)

    def is_served_next(self, worker: WorkerView) -> bool:
        """Return whether the worker is free for this request's lane: no request of a more urgent lane waits for the
        worker."""
        return worker.lanes.isdisjoint(self.yields_to)
