"""When a prompt's first token would come if it were admitted now, and whether that is too late; never admits one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.step_cost import StepCost

SLACK = 1.5
"""A lane's target is no promise to this one request, and a prediction may be off: only what misses it by half is sent
away. A client's own deadline has none, because its first token is only the beginning of what it waits for."""
LEAST_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class PrefillWorkerLoad:
    """A worker that prefills: `num_queued` tokens of prompts are before a newcomer there, a full step has
    `num_step_tokens`."""

    cost: StepCost
    num_step_tokens: int
    num_queued: int

    def seconds(self, num_tokens: int) -> float:
        """Of a prompt of so many tokens in full steps, alone."""
        return self.cost.base_s * num_tokens / self.num_step_tokens + self.cost.chunk_s(0, num_tokens)

    @property
    def rate(self) -> float:
        """Tokens per second in full steps of prompts' beginnings."""
        step_s = self.seconds(self.num_step_tokens)
        return self.num_step_tokens / step_s if step_s > 0 else math.inf


@dataclass(frozen=True, slots=True)
class TtftForecast:
    """Seconds: in the gateway's queue and the worker's, and of the prompt's own computation."""

    wait_s: float
    prefill_s: float

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.prefill_s


def forecast(prefillers: Sequence[PrefillWorkerLoad], num_ahead: int, num_tokens: int) -> TtftForecast | None:
    """Of a prompt with `num_tokens` to compute and `num_ahead` before it in the gateway's queue; None while no worker
    has told what its steps cost.

    What comes later and goes ahead of it, room for decoding, and how attention grows with length in prompts ahead are
    not in it, so it errs on the side of admitting.
    """
    if not prefillers:
        return None
    rate = sum(worker.rate for worker in prefillers)
    least_s = min(worker.num_queued / worker.rate for worker in prefillers)
    own_s = min(worker.seconds(num_tokens) for worker in prefillers)
    return TtftForecast(num_ahead / rate + least_s, own_s)


def ttft_error(expected: TtftForecast, target_s: float, deadline_s: float | None) -> TandemError | None:
    """SLO_MISS for what would come too late. `target_s` is its lane's, 0: none; `deadline_s` what the client's own
    deadline leaves, None: it has none."""
    if deadline_s is not None and expected.ttft_s > deadline_s:
        return _slo_miss_error("deadline", "the client's deadline", expected, deadline_s)
    if 0 < SLACK * target_s < expected.ttft_s:
        return _slo_miss_error("predicted_ttft", f"{SLACK:g} times its lane's target", expected, SLACK * target_s)
    return None


def queue_full(num_waiting: int, expected: TtftForecast | None) -> TandemError:
    """More wait than may."""
    retry_s = LEAST_RETRY_S if expected is None else max(LEAST_RETRY_S, expected.wait_s)
    text = f"{num_waiting} requests are waiting already"
    return TandemError(ErrorKind.OVERLOADED, text, retry_after_s=retry_s, reason="queue_full")


def _slo_miss_error(reason: str, limit: str, expected: TtftForecast, limit_s: float) -> TandemError:
    """By when it would make it, if nobody else came in the meantime."""
    return TandemError(
        ErrorKind.SLO_MISS,
        f"the first token is expected in {expected.ttft_s:.3g} s, {limit} is {limit_s:.3g} s",
        retry_after_s=max(LEAST_RETRY_S, min(expected.wait_s, expected.ttft_s - limit_s)),
        reason=reason,
    )
