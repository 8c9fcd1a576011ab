"""How long a worker's steps are and how many a prompt that comes now must await, by what was last heard of it; never
says where it goes.

A prompt joins at the end of the step that is under way, and has its first token at the end of its last own step,
which others fill up: on a busy worker a short prompt takes as long as whole steps do. Within steps its turn is by
`sched.share`.
"""

from __future__ import annotations

import math

from tandem.core.lane import Lane
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.routing.view import WorkerView

NOMINAL = StepCost(5e-3, 1e-4, 1e-4, 1e-8, 0.0)
"""Of every worker while one of them has not told its own: then costs compare counts of tokens, and mean no seconds."""


def steps_of(worker: WorkerView, is_told: bool) -> StepCost:
    """`is_told`: all workers that are compared have told what their steps cost."""
    return worker.step_cost if is_told and worker.step_cost is not None else NOMINAL


def base_s(worker: WorkerView, steps: StepCost) -> float:
    """Of a step there without a prompt's tokens."""
    num_decoding = worker.num_decoding
    context = worker.num_held_tokens if num_decoding else 0
    return steps.predict(StepFeatures(num_decode_seqs=num_decoding, decode_context=context))


def rest_s(worker: WorkerView, steps: StepCost) -> float:
    """Until the step that is under way ends: half of it by expectation. Reports are of ends of steps, so what a worker
    has queued is what it computes now."""
    num_tokens = min(worker.queued_tokens, worker.num_step_tokens)
    if not num_tokens and not worker.num_decoding:
        return 0.0
    return (base_s(worker, steps) + num_tokens * queued_token_s(worker, steps)) / 2


def following_s(worker: WorkerView, steps: StepCost) -> tuple[float, float]:
    """The length of the step after that, and of all that compute what is queued; 0 where there is none. Where it
    decodes there is always one more."""
    full, token_s, each_s = worker.num_step_tokens, queued_token_s(worker, steps), base_s(worker, steps)
    left = max(0, worker.queued_tokens - full)
    if not left:
        return (each_s, each_s) if worker.num_decoding else (0.0, 0.0)
    return each_s + min(left, full) * token_s, math.ceil(left / full) * each_s + left * token_s


def wait_s(worker: WorkerView, num_tokens: int, lane: Lane, steps: StepCost) -> float:
    """What a prompt of so many tokens to compute has its first token later than on a worker that has nothing else to
    compute: the rest of the step under way, and what is computed of others until the end of its last step."""
    full, queued = worker.num_step_tokens, worker.queued_tokens
    under_way = min(queued, full)
    left = queued - under_way
    ahead = min(left, max(0, worker.num_ahead(num_tokens, lane) - under_way))
    num_steps = math.ceil((ahead + num_tokens) / full)
    beside = min(num_steps * full - num_tokens, left)
    more_s = (num_steps - math.ceil(num_tokens / full)) * base_s(worker, steps)
    return rest_s(worker, steps) + beside * queued_token_s(worker, steps) + more_s


def queued_token_s(worker: WorkerView, steps: StepCost) -> float:
    """Of one of the tokens that are queued there: they attend to half of the longest prompt on average."""
    longest = max(*worker.load.lane_longest, *worker.unreported, 0, 0)
    return steps.prefill_token_s + steps.prefill_pair_s * longest / 2
