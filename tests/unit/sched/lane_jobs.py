"""Make jobs in lanes."""

from __future__ import annotations

from dataclasses import replace

from tandem.core.lane import Lane
from tandem.core.request import Job
from tests.unit.sched.test_scheduler import generate


def in_lane(lane: Lane, job: Job) -> Job:
    return replace(job, request=replace(job.request, lane=lane))


def batch(name: str, max_tokens: int = 20, num_prompt: int = 4) -> Job:
    return in_lane(Lane.BATCH, generate(name, num_prompt, max_tokens))


def urgent(name: str, max_tokens: int = 3) -> Job:
    return in_lane(Lane.INTERACTIVE, generate(name, 4, max_tokens))


def with_choices(job: Job, num_choices: int) -> Job:
    return replace(job, request=replace(job.request, num_choices=num_choices), num_choices=num_choices)
