"""Predict how long a worker's steps take and how many of them a new prompt waits for, from the worker's last report.

A new prompt joins at the end of the step in progress, and its first token comes at the end of the last step that
computes a part of it. Other prompts fill this step up, so on a busy worker a short prompt takes as long as whole steps
do. The order of prompts within steps is that of `sched.budget.prefill_sharing`.
"""

from __future__ import annotations

from tandem.core.lane import Lane
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.routing.worker_view import WorkerView

NOMINAL = StepCost(5e-3, 1e-4, 1e-4, 1e-8, 0.0)
"""Step costs of every worker while one of the compared workers has not reported its own: then costs compare token
counts and are not seconds."""


class WorkerSpeed:
    """Predict how long one worker's steps take, and how long a new prompt waits there.

    `has_step_costs`: True if all compared workers have reported how long their steps take; otherwise `NOMINAL` is used.
    `cost`: the step costs in use. `base_s`: seconds of a step without prompt tokens. `token_s`: seconds that a queued
    prompt token adds to a step. `rest_s`: expected seconds until the current step ends. `num_left`: queued prompt
    tokens that the current step does not compute.
    """

    __slots__ = ("base_s", "cost", "num_left", "rest_s", "token_s", "worker")

    def __init__(self, worker: WorkerView, *, has_step_costs: bool) -> None:
        self.worker = worker
        self.cost = cost = worker.step_cost if has_step_costs and worker.step_cost is not None else NOMINAL
        load = worker.load
        queued = worker.queued_tokens
        num_decoding = worker.num_decoding
        context = worker.num_held_tokens if num_decoding else 0
        self.base_s = cost.predict(StepFeatures(num_decode_seqs=num_decoding, decode_context=context))
        longest = max((*load.lane_longest, *worker.unreported), default=0)
        self.token_s = cost.prefill_token_s + cost.prefill_pair_s * longest / 2
        num_in_step = min(queued, worker.num_step_tokens)
        self.num_left = queued - num_in_step
        # The expected rest of the step in progress is half of it.
        self.rest_s = (self.base_s + num_in_step * self.token_s) / 2 if num_in_step or num_decoding else 0.0

    @property
    def next_s(self) -> float:
        """Return the seconds of the step after the current one; 0 when that step will have nothing to compute."""
        if not self.num_left:
            return self.base_s if self.worker.num_decoding else 0.0
        return self.base_s + min(self.num_left, self.worker.num_step_tokens) * self.token_s

    @property
    def left_s(self) -> float:
        """Return the seconds of all steps after the current one that the worker needs for the queued prompts.

        Where no prompt is left after the current step, these are the seconds of one more step, which only decodes.
        """
        if not self.num_left:
            return self.next_s
        return self.num_steps(self.num_left) * self.base_s + self.num_left * self.token_s

    def num_steps(self, num_tokens: int) -> int:
        """Return the number of steps in which the worker computes `num_tokens` prompt tokens, if it computes nothing
        else."""
        return -(-num_tokens // self.worker.num_step_tokens)

    def wait_s(self, num_tokens: int, lane: Lane) -> float:
        """Return how many seconds later than on an idle worker the first token of a new prompt would be.

        The prompt, in `lane` and with `num_tokens` to compute, waits for the rest of the current step and for the
        computation of other prompts until the end of its own last step.
        """
        if not self.num_left:
            return self.rest_s
        full = self.worker.num_step_tokens
        queued = self.worker.queued_tokens
        ahead = max(0, self.worker.num_ahead(num_tokens, lane) - (queued - self.num_left))
        num_steps = self.num_steps(min(self.num_left, ahead) + num_tokens)
        beside = min(num_steps * full - num_tokens, self.num_left)
        return self.rest_s + beside * self.token_s + (num_steps - self.num_steps(num_tokens)) * self.base_s
