"""What one request of a window was like on average, and the work that makes for a worker; never counts workers."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.scaling.cluster_state import Demand, WorkerCapacity
from tandem.scaling.queueing import ServiceDemand


@dataclass(frozen=True, slots=True)
class RequestProfile:
    """Of one request: tokens of its prompt that are computed and that are cached, pairs as of `StepFeatures`, and
    tokens of its answer."""

    num_fresh: float
    num_cached: float
    num_pairs: float
    num_output: float

    @classmethod
    def of(cls, total: Demand) -> RequestProfile:
        """What caches have is read as a share of prompts, because it is known later than what came. Where nobody counts
        pairs, lengths are taken to vary as exponential times do."""
        number = max(1, total.num_requests)
        served = number if total.num_served is None else max(1, total.num_served)
        whole = total.num_input_tokens / number
        cached = min(whole, total.num_cached_tokens / served)
        fresh = whole - cached
        pairs = fresh * cached + fresh * fresh if total.num_prefill_pairs is None else total.num_prefill_pairs / served
        return cls(fresh, cached, pairs, total.num_output_tokens / served)

    @property
    def cached_share(self) -> float:
        whole = self.num_fresh + self.num_cached
        return self.num_cached / whole if whole else 0.0

    @property
    def context(self) -> float:
        """Tokens that a step of its answer attends to."""
        return self.num_fresh + self.num_cached + self.num_output / 2

    @property
    def length_scv(self) -> float:
        """Squared coefficient of variation of the fresh tokens, which the pairs tell: those of n behind s tokens are
        n s + n^2 / 2, nearly."""
        squares = 2 * (self.num_pairs - self.num_fresh * self.num_cached)
        return max(0.0, squares / self.num_fresh**2 - 1) if self.num_fresh else 0.0


def prompt_work(worker: WorkerCapacity, means: RequestProfile, rate: float, arrival_scv: float) -> ServiceDemand:
    """Of prompts that come at `rate`. What grows with the square of a length varies more than the length does."""
    cost = worker.cost
    num_steps = max(1.0, means.num_fresh / worker.max_num_batched_tokens)
    linear = cost.base_s * num_steps + cost.prefill_token_s * means.num_fresh
    square = cost.prefill_pair_s * means.num_pairs
    power = 1 + square / (linear + square) if linear + square > 0 else 1.0
    return ServiceDemand(rate, linear + square, (1 + means.length_scv) ** (power * power) - 1, arrival_scv)
