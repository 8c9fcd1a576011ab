"""Read the workers' step logs of a load test: what each engine step computed.

A log is what `worker.step_log` makes a worker write, see `tandem.engine.step_log`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadtest.common.distribution import Distribution, distribution
from loadtest.common.stats import percentile
from tandem.core.quantile_sketch import QuantileSketch
from tandem.engine.step_log import decode_log
from tandem.sched.state.schedule_result import StepRecord

INTERVALS = 120
"""Maximum number of intervals in a chart."""


class TimedStep(msgspec.Struct, frozen=True):
    """One step of a worker; `ended_s` counts from the beginning of the load test."""

    ended_s: float
    step: StepRecord


class RecordedSteps(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    pool: str
    steps: tuple[TimedStep, ...]


class Counts(msgspec.Struct, frozen=True):
    """Distribution of the number of tokens per step."""

    p50: float
    p99: float
    max: float


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one worker's steps.

    Counts are of steps that computed any such tokens. `mixed_share`: the share of all steps with both prompts and
    decodes. `budget_use`: prompt tokens divided by what the budget had for them, of steps that computed prompts.
    `over_target`: the share of steps with a latency target that exceeded it; None without any.
    """

    worker: str
    pool: str
    num_steps: int
    num_failed: int
    num_preempted: int
    prefill: Counts | None
    decode: Counts | None
    mixed_share: float
    budget_use: float | None
    seconds: Distribution
    over_target: float | None


def read_steps(path: Path) -> RecordedSteps:
    """Read a step log, with times in seconds since the epoch. Raises TandemError that names the line, or OSError."""
    with path.open(encoding="utf-8") as lines:
        log = decode_log(lines, str(path))
    steps = tuple(TimedStep(step.at, step.record) for step in log.steps)
    return RecordedSteps(worker=log.head.worker, pool=log.head.pool, steps=steps)


def within(log: RecordedSteps, began: float, wall_s: float) -> RecordedSteps:
    """Return the steps that ended during a test, with times counted from its beginning.

    `began`: start of the test in seconds since the epoch. `wall_s`: its length in seconds.
    """
    moved = (TimedStep(step.ended_s - began, step.step) for step in log.steps)
    return RecordedSteps(worker=log.worker, pool=log.pool, steps=tuple(s for s in moved if 0 <= s.ended_s <= wall_s))


def summarise(log: RecordedSteps) -> StepSummary | None:
    """Summarise a step log; None if it has no step."""
    steps = [one.step for one in log.steps]
    seconds = distribution(QuantileSketch(step.measured_s for step in steps))
    if seconds is None:
        return None
    prompts = [step for step in steps if step.features.num_prefill_tokens]
    budget = sum(step.num_budget_tokens for step in prompts)
    timed = [step for step in steps if step.target_s > 0]
    return StepSummary(
        worker=log.worker,
        pool=log.pool,
        num_steps=len(steps),
        num_failed=sum(step.has_failed for step in steps),
        num_preempted=sum(step.num_preempted for step in steps),
        prefill=_counts([step.features.num_prefill_tokens for step in prompts]),
        decode=_counts([step.features.num_decode_seqs for step in steps if step.features.num_decode_seqs]),
        mixed_share=sum(step.features.num_decode_seqs > 0 for step in prompts) / len(steps),
        budget_use=sum(step.features.num_prefill_tokens for step in prompts) / budget if budget else None,
        seconds=seconds,
        over_target=sum(step.measured_s > step.target_s for step in timed) / len(timed) if timed else None,
    )


def _counts(values: Sequence[int]) -> Counts | None:
    return Counts(*(percentile(values, share) for share in (0.5, 0.99, 1.0))) if values else None


def per_interval(log: RecordedSteps) -> tuple[list[float], list[float], list[float]]:
    """Return the edges of equal intervals in seconds, and the mean prefill and decode tokens of a step in each
    interval.

    Intervals without steps have 0.
    """
    if not log.steps:
        return [0.0, 1.0], [0.0], [0.0]
    first, last = log.steps[0].ended_s, max(log.steps[-1].ended_s, log.steps[0].ended_s + 1e-3)
    number = min(INTERVALS, len(log.steps))
    width = (last - first) / number
    found: list[list[StepRecord]] = [[] for _ in range(number)]
    for one in log.steps:
        found[min(int((one.ended_s - first) / width), number - 1)].append(one.step)
    prefill = [_mean([step.features.num_prefill_tokens for step in steps]) for steps in found]
    decode = [_mean([step.features.num_decode_seqs for step in steps]) for steps in found]
    return [first + i * width for i in range(number + 1)], prefill, decode


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
