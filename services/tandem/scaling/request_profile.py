"""Average the requests of a time window, and compute how much work one request makes for a worker."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.scaling.cluster_state import Demand, WorkerCapacity
from tandem.scaling.queueing import ServiceDemand


@dataclass(frozen=True, slots=True)
class RequestProfile:
    """Averages per request over a time window.

    `num_fresh`: prompt tokens that were computed. `num_cached`: prompt tokens found in a cache. `num_pairs`: (token
    computed, token it attends to) pairs of the prompt. `num_output`: output tokens.
    """

    num_fresh: float
    num_cached: float
    num_pairs: float
    num_output: float

    @classmethod
    def of(cls, total: Demand) -> RequestProfile:
        """Return the averages per request of `total`, the demand of a window.

        Cached tokens are averaged over served requests, and computed tokens are the rest of the prompt, because cache
        hits are counted later than arrivals.
        """
        num_requests = max(1, total.num_requests)
        num_served = num_requests if total.num_served is None else max(1, total.num_served)
        num_prompt = total.num_input_tokens / num_requests
        num_cached = min(num_prompt, total.num_cached_tokens / num_served)
        num_fresh = num_prompt - num_cached
        num_pairs = total.num_prefill_pairs / num_served
        return cls(num_fresh, num_cached, num_pairs, total.num_output_tokens / num_served)

    @property
    def cached_share(self) -> float:
        """Return the fraction of prompt tokens found in a cache; 0 without tokens."""
        num_prompt = self.num_fresh + self.num_cached
        return self.num_cached / num_prompt if num_prompt else 0.0

    @property
    def context(self) -> float:
        """Return the mean number of tokens that a decode step attends to."""
        return self.num_fresh + self.num_cached + self.num_output / 2

    @property
    def length_scv(self) -> float:
        """Return the squared coefficient of variation of the number of computed tokens per prompt; 0 without tokens.

        It follows from the pairs: n computed tokens after s cached ones have nearly n s + n^2 / 2 pairs.
        """
        squares = 2 * (self.num_pairs - self.num_fresh * self.num_cached)
        return max(0.0, squares / self.num_fresh**2 - 1) if self.num_fresh else 0.0


def prompt_work(worker: WorkerCapacity, profile: RequestProfile, rate: float, arrival_scv: float) -> ServiceDemand:
    """Return the demand that prompts with the averages in `profile`, arriving at `rate` per second, make on workers
    like `worker`.

    `arrival_scv`: squared coefficient of variation of the times between arrivals. The coefficient of the service times
    is derived from that of the prompt lengths; it is larger where the cost grows with the square of the length.
    """
    cost = worker.cost
    num_steps = max(1.0, profile.num_fresh / worker.max_num_batched_tokens)
    linear = cost.base_s * num_steps + cost.prefill_token_s * profile.num_fresh
    square = cost.prefill_pair_s * profile.num_pairs
    exponent = 1 + square / (linear + square) if linear + square > 0 else 1.0
    return ServiceDemand(rate, linear + square, (1 + profile.length_scv) ** (exponent * exponent) - 1, arrival_scv)
