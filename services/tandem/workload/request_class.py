"""Define a class of requests as a value: lengths, prefix, conversations, tenant and lane."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from tandem.core.lane import Lane
from tandem.workload import lengths
from tandem.workload.arrivals import Arrivals
from tandem.workload.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Prefix:
    """Shared beginning of prompts: one of `num_documents` documents, each of `num_tokens`.

    The k-th most popular document is chosen with probability proportional to k^-`zipf`; 0: all equally. One document is
    a system prompt. Raises ValueError for other values.
    """

    num_tokens: Lengths
    num_documents: int = 1
    zipf: float = 1.0

    def __post_init__(self) -> None:
        lengths.require(self.num_tokens)
        if not 1 <= self.num_documents <= 1_000_000:
            raise ValueError(f"documents must be in [1, 1000000], got {self.num_documents}")
        if not 0 <= self.zipf <= 10:
            raise ValueError(f"zipf must be in [0, 10], got {self.zipf}")

    def document_at(self, at: float) -> int:
        """Return the popularity rank, from 0, of the document at the position `at` in [0, 1)."""
        weights = _cumulative_weights(self.num_documents, self.zipf)
        return min(bisect_right(weights, at * weights[-1]), self.num_documents - 1)


@lru_cache(maxsize=16)
def _cumulative_weights(num_documents: int, zipf: float) -> tuple[float, ...]:
    return tuple(accumulate((rank + 1) ** -zipf for rank in range(num_documents)))


@dataclass(frozen=True, slots=True)
class RequestClass:
    """A class of requests. `share`: fraction of all requests that arrive by themselves. `prompt` counts a request's own
    tokens, after `prefix`. `priority`: lower runs first in its `lane`.

    With `turns` above 1 each request begins a conversation: each further turn is due an exponential time of mean
    `think_s` seconds after the end of the one before it, repeats its prompt and output and adds `prompt` tokens.
    `arrivals`: the class's own arrival process, independent of the other classes. Raises ValueError for impossible
    values.
    """

    name: str
    share: float
    prompt: Lengths
    output: Lengths
    tenant: str = ""
    lane: Lane = Lane.INTERACTIVE
    priority: int = 0
    prefix: Prefix | None = None
    turns: Lengths = (1, 1)
    think_s: float = 0.0
    arrivals: Arrivals | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a group must have a name")
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], got {self.share}")
        if not 0 <= self.think_s < float("inf"):
            raise ValueError(f"think_s must not be negative, got {self.think_s}")
        for each in (self.prompt, self.output, self.turns):
            lengths.require(each)
