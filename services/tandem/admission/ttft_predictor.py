"""Predict the time to first token of a prompt that is admitted now, and build the error for a prompt that would be
late."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.step_cost import StepCost

SLACK = 1.5
"""Factor on a lane's target before a request is rejected: the target is no guarantee for a single request, and
predictions are inexact. A client's own deadline has no such factor, because the client waits for more than the first
token."""
LEAST_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class PrefillWorkerLoad:
    """Speed and load of one prefill worker.

    `cost`: the model that predicts its step times. `num_step_tokens`: prompt tokens of a full step. `num_queued`:
    prompt tokens that it would compute before a new prompt.
    """

    cost: StepCost
    num_step_tokens: int
    num_queued: int

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds that the worker needs for a prompt of `num_tokens` if it computes nothing else."""
        return self.cost.base_s * num_tokens / self.num_step_tokens + self.cost.chunk_s(0, num_tokens)

    @property
    def rate(self) -> float:
        """Return the prompt tokens per second that the worker computes if each step computes the first
        `num_step_tokens` tokens of a prompt."""
        step_s = self.seconds(self.num_step_tokens)
        return self.num_step_tokens / step_s if step_s > 0 else math.inf


@dataclass(frozen=True, slots=True)
class TtftForecast:
    """Predicted time to first token of a prompt, in two parts.

    `wait_s`: seconds in the queues of gateway and worker. `prefill_s`: seconds of the prompt's own computation.
    """

    wait_s: float
    prefill_s: float

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.prefill_s


def forecast(prefillers: Sequence[PrefillWorkerLoad], num_ahead: int, num_tokens: int) -> TtftForecast | None:
    """Predict the time to first token of a prompt with `num_tokens` to compute; None when `prefillers` is empty.

    `prefillers`: the workers that may compute it. `num_ahead`: prompt tokens before it in the gateway's queue. The
    prediction is rather too short than too long: it ignores requests that arrive later and overtake this one, the
    capacity that decoding takes, and the longer attention of waiting prompts that take several steps.
    """
    if not prefillers:
        return None
    rate = sum(worker.rate for worker in prefillers)
    least_s = min(worker.num_queued / worker.rate for worker in prefillers)
    own_s = min(worker.seconds(num_tokens) for worker in prefillers)
    return TtftForecast(num_ahead / rate + least_s, own_s)


def ttft_error(expected: TtftForecast, target_s: float, deadline_s: float | None) -> TandemError | None:
    """Return the SLO_MISS error for a prompt whose first token is expected too late; None when it is expected in time.

    `expected`: the forecast for the prompt. `target_s`: TTFT target of its lane in seconds, which may be exceeded by up
    to the factor SLACK; 0: no target. `deadline_s`: seconds left until the client's own deadline; None: no deadline.
    """
    if deadline_s is not None and expected.ttft_s > deadline_s:
        return _slo_miss_error("deadline", "the client's deadline", expected, deadline_s)
    if 0 < SLACK * target_s < expected.ttft_s:
        return _slo_miss_error("predicted_ttft", f"{SLACK:g} times its lane's target", expected, SLACK * target_s)
    return None


def queue_full(num_waiting: int, expected: TtftForecast | None) -> TandemError:
    """Return the OVERLOADED error for a request that is rejected because the gateway's queue is full.

    `num_waiting`: how many requests wait, for the error message; it is the limit `gateway.max_queued`. `expected`: the
    forecast for a new prompt, whose waiting time becomes the time after which the client may retry, at least
    LEAST_RETRY_S seconds; None where no forecast is possible, which gives LEAST_RETRY_S.
    """
    retry_s = LEAST_RETRY_S if expected is None else max(LEAST_RETRY_S, expected.wait_s)
    text = f"the queue is full: {num_waiting} requests wait (gateway.max_queued); retry later"
    return TandemError(ErrorKind.OVERLOADED, text, retry_after_s=retry_s, reason="queue_full")


def _slo_miss_error(reason: str, limit: str, expected: TtftForecast, limit_s: float) -> TandemError:
    """Return the error with the time after which a retry would meet the limit, if no other request arrived in the
    meantime."""
    return TandemError(
        ErrorKind.SLO_MISS,
        f"rejected, because the first token is expected in {expected.ttft_s:.3g} s and {limit} is {limit_s:.3g} s",
        retry_after_s=max(LEAST_RETRY_S, min(expected.wait_s, expected.ttft_s - limit_s)),
        reason=reason,
    )
