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
    """Documents with which the prompts of a class begin: each client's prompts begin with one of them.

    `num_tokens`: length of each document. `num_documents`: how many there are; a single one acts as a system prompt.
    `zipf`: the k-th most popular document is chosen with probability proportional to k^-`zipf`; 0: all equally. Raises
    ValueError for other values."""

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
        """Return the number of a document: its rank by popularity, from 0.

        `at` is in [0, 1); a uniformly random `at` chooses documents with their probabilities."""
        weights = _cumulative_weights(self.num_documents, self.zipf)
        return min(bisect_right(weights, at * weights[-1]), self.num_documents - 1)


@lru_cache(maxsize=16)
def _cumulative_weights(num_documents: int, zipf: float) -> tuple[float, ...]:
    return tuple(accumulate((rank + 1) ** -zipf for rank in range(num_documents)))


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Class of requests with equal distributions of lengths, tenant and lane.

    - `name`: name of the class in reports. `share`: fraction of all requests, not counting later turns of
      conversations.
    - `prompt`: number of a request's own tokens, which follow its `prefix`. `output`: number of tokens to generate.
      `priority`: requests with a lower number run first in their `lane`.
    - `prefix`: documents with which prompts begin; None: prompts have only their own tokens.
    - `turns`: number of requests of a conversation. Each later request repeats the prompt and the output of the one
      before, and then has its own tokens. It is due after a pause from the end of the one before; pauses are
      exponentially distributed with a mean of `think_s` seconds.
    - `arrivals`: the class's own arrival process, independent of the other classes; None: the mix's process.

    Raises ValueError for impossible values."""

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
