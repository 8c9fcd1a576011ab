"""What a router must know of one request, frozen; never the request itself."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.ids import WorkerRef
from tandem.core.lane import Lane
from tandem.routing.prefix_index import PrefixHit
from tandem.routing.worker_view import Pair, WorkerView

EXPECTED_OUTPUT = 256
"""Tokens at most that a placement reckons with: many clients leave `max_tokens` far above what they get."""


class CachedTokens(NamedTuple):
    """Of a prompt, in tokens."""

    num_tokens: int
    num_device_tokens: int


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A prompt of `num_prompt` tokens, probably followed by `num_output`. `hits`: what each worker holds of it; None:
    nobody looked, and probably `num_tokens` are to compute wherever it goes. `blocked_links`: (producer, consumer)
    between which prefix fetches fail.

    `key` names the request and `session` those that belong together, for choices among equals; `turn` counts what a
    gateway has placed.
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

    @property
    def num_context(self) -> int:
        """Tokens of the prompt."""
        return max(self.num_prompt, self.num_tokens)

    def held(self, worker: WorkerView) -> CachedTokens:
        """What it has of the prompt: at most all but one token, in whole blocks."""
        hit = None if self.hits is None else self.hits.get(worker.ref)
        if hit is None or not worker.block_size:
            return CachedTokens(0, 0)
        most = (self.num_context - 1) // worker.block_size
        return CachedTokens(
            min(hit.num_blocks, most) * worker.block_size, min(hit.num_device_blocks, most) * worker.block_size
        )

    def num_uncached(self, worker: WorkerView) -> int:
        """Tokens that it would have to compute."""
        return self.num_tokens if self.hits is None else self.num_context - self.held(worker).num_tokens

    def num_lendable(self, block_size: int) -> int:
        """Tokens that the worker which holds most of the prompt in device memory could lend."""
        return block_size * max((hit.num_device_blocks for hit in (self.hits or {}).values()), default=0)

    def fits(self, worker: WorkerView, num_lent: int = 0) -> bool:
        """Whether it will probably accept the prompt now, if others lend it the first `num_lent` tokens."""
        num_tokens = self.num_uncached(worker)
        if num_lent:
            num_tokens = max(1, min(num_tokens, self.num_context - num_lent))
        return worker.takes(num_tokens, self.lane)
