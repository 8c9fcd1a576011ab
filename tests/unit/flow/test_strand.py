"""The books of one strand: which jobs are under way and which of them is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tandem.flow.strand import Phase, Strand


def job(*choices: int) -> Any:
    return SimpleNamespace(choices=set(choices))


def test_the_end_of_one_job_leaves_the_other_asked_for() -> None:
    strand, asked, other = Strand([0]), job(0), job(0)
    strand.works += [asked, other]
    strand.asked = asked
    strand.leave(other, 0)
    assert strand.works == [asked] and strand.asked is asked
    strand.leave(asked, 0)
    assert strand.works == [] and strand.asked is None


def test_a_choice_is_worked_on_while_a_job_has_it_or_it_waits_for_one() -> None:
    strand = Strand([0, 1])
    strand.phase = Phase.QUEUED
    assert strand.is_worked_on(0)
    strand.phase = Phase.RUNNING
    assert not strand.is_worked_on(0)
    strand.works.append(job(1))
    assert strand.is_worked_on(1) and not strand.is_worked_on(0)
