"""How long a worker's steps are and how many a prompt that comes now must await, by what was last heard of it; never
says where it goes.

A prompt joins at the end of the step that is under way, and has its first token at the end of its last own step,
which others fill up: on a busy worker a short prompt takes as long as whole steps do. Within steps its turn is by
`sched.share`.
"""

from __future__ import annotations

from tandem.core.lane import Lane
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.routing.worker_view import WorkerView

NOMINAL = StepCost(5e-3, 1e-4, 1e-4, 1e-8, 0.0)
"""Of every worker while one of them has not told its own: then costs compare counts of tokens, and mean no seconds."""


class WorkerSpeed:
    """One worker's. `cost` of its steps; `is_told`: all workers that are compared have told theirs. `base_s`: seconds
    of a step without a prompt's tokens; `token_s`: of one of the tokens that are queued, which attend to half of the
    longest prompt on average. Reports are of ends of steps: what is queued is what the step under way computes, and
    `num_left` tokens after that."""

    __slots__ = ("base_s", "cost", "num_left", "rest_s", "token_s", "worker")

    def __init__(self, worker: WorkerView, *, is_told: bool) -> None:
        self.worker = worker
        self.cost = cost = worker.step_cost if is_told and worker.step_cost is not None else NOMINAL
        load, queued, num_decoding = worker.load, worker.queued_tokens, worker.num_decoding
        context = worker.num_held_tokens if num_decoding else 0
        self.base_s = cost.predict(StepFeatures(num_decode_seqs=num_decoding, decode_context=context))
        longest = max((*load.lane_longest, *worker.unreported), default=0)
        self.token_s = cost.prefill_token_s + cost.prefill_pair_s * longest / 2
        under_way = min(queued, worker.num_step_tokens)
        self.num_left = queued - under_way
        # Until the step under way ends: half of it by expectation.
        self.rest_s = (self.base_s + under_way * self.token_s) / 2 if under_way or num_decoding else 0.0

    @property
    def next_s(self) -> float:
        """The length of the step after the one under way; 0: there is none. Where it decodes there is always one."""
        if not self.num_left:
            return self.base_s if self.worker.num_decoding else 0.0
        return self.base_s + min(self.num_left, self.worker.num_step_tokens) * self.token_s

    @property
    def left_s(self) -> float:
        """All steps after the one under way that are known of."""
        if not self.num_left:
            return self.next_s
        return self.num_steps(self.num_left) * self.base_s + self.num_left * self.token_s

    def num_steps(self, num_tokens: int) -> int:
        """Full ones that compute so many tokens."""
        return -(-num_tokens // self.worker.num_step_tokens)

    def wait_s(self, num_tokens: int, lane: Lane) -> float:
        """What a prompt of so many tokens to compute has its first token later than on a worker that has nothing else
        to compute: the rest of the step under way, and what is computed of others until the end of its last step."""
        if not self.num_left:
            return self.rest_s
        full, queued = self.worker.num_step_tokens, self.worker.queued_tokens
        ahead = max(0, self.worker.num_ahead(num_tokens, lane) - (queued - self.num_left))
        num_steps = self.num_steps(min(self.num_left, ahead) + num_tokens)
        beside = min(num_steps * full - num_tokens, self.num_left)
        return self.rest_s + beside * self.token_s + (num_steps - self.num_steps(num_tokens)) * self.base_s
