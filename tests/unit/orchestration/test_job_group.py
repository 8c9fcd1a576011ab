"""Test the jobs of one job group: which are open and which waits for a reply."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tandem.orchestration.job_group import JobGroup, JobGroupPhase


def job(*choices: int) -> Any:
    return SimpleNamespace(choices=set(choices))


def test_the_end_of_one_job_leaves_the_other_submitted() -> None:
    job_group, submitted, other = JobGroup({0}), job(0), job(0)
    job_group.works += [submitted, other]
    job_group.unanswered = submitted
    job_group.leave(other, 0)
    assert job_group.works == [submitted] and job_group.unanswered is submitted
    job_group.leave(submitted, 0)
    assert job_group.works == [] and job_group.unanswered is None


def test_a_choice_is_worked_on_while_a_job_has_it_or_it_is_queued() -> None:
    job_group = JobGroup({0, 1})
    job_group.phase = JobGroupPhase.QUEUED
    assert job_group.is_worked_on(0)
    job_group.phase = JobGroupPhase.RUNNING
    assert not job_group.is_worked_on(0)
    job_group.works.append(job(1))
    assert job_group.is_worked_on(1) and not job_group.is_worked_on(0)
