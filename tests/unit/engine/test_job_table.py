"""Test which attempts are live or rejected, and for how long that is remembered."""

from __future__ import annotations

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import JobKey, RequestId
from tandem.core.request import GenerateJob, Request, SamplingParams
from tandem.engine.job_table import JobTable


def job(attempt: int, choice: int = 0, num_choices: int = 1) -> GenerateJob:
    request = Request(id=RequestId("r"), model="m", prompt_tokens=(1,), sampling=SamplingParams(max_tokens=1))
    return GenerateJob(request=request, attempt=attempt, choice=choice, num_choices=num_choices)


def is_refused(table: JobTable, key: JobKey) -> bool:
    try:
        table.fenced_by(key)
    except TandemError as error:
        return error.kind is ErrorKind.CANCELLED
    return False


def live(attempt: int) -> JobTable:
    table = JobTable(memory_s=120.0)
    table.add(job(attempt))
    return table


def test_a_live_attempt_fences_older_ones_and_yields_to_newer_ones() -> None:
    table = live(2)
    assert is_refused(table, job(1).key)
    assert table.fenced_by(job(3).key) == job(2).key
    assert table.fenced_by(job(1, choice=1).key) is None


def test_an_ended_attempt_fences_older_ones_too() -> None:
    table = live(2)
    table.end(job(2).key, 0.0)
    assert table.is_known(job(2).key) and len(table) == 0
    assert is_refused(table, job(1).key) and not table.is_known(job(1).key)
    assert table.fenced_by(job(3).key) is None


def test_an_early_cancel_rejects_the_attempt_and_older_ones() -> None:
    table = JobTable()
    table.tombstone(job(2).key, 0.0)
    table.tombstone(job(1).key, 1.0)
    assert is_refused(table, job(2).key) and is_refused(table, job(1).key)
    assert not is_refused(table, job(3).key) and not table.is_known(job(2).key)


def test_attempt_zero_is_an_attempt() -> None:
    assert JobTable().fenced_by(job(0).key) is None


def test_find_is_exact() -> None:
    table = live(2)
    assert table.find(job(2).key) == job(2)
    assert table.find(job(1).key) is None and table.find(job(2, choice=1).key) is None
    assert list(table) == [job(2)]


@pytest.mark.parametrize(("now", "remembers"), [(119.0, True), (120.0, False)])
def test_memory_ends(now: float, remembers: bool) -> None:
    table = live(1)
    table.end(job(1).key, 0.0)
    table.tombstone(JobKey(RequestId("other"), 1), 0.0)
    table.forget(now)
    assert table.is_known(job(1).key) is remembers
    assert is_refused(table, job(1).key) is remembers
    assert is_refused(table, JobKey(RequestId("other"), 1)) is remembers


def test_each_choice_of_a_job_ends_by_itself_and_the_job_with_the_last() -> None:
    table, of_three = JobTable(), job(1, num_choices=3)
    table.add(of_three)
    assert len(table) == 3 and list(table) == [of_three] and table.keys() == list(of_three.keys)
    table.end(of_three.keys[0], 0.0)
    assert table.find(of_three.keys[0]) is None and table.find(of_three.keys[2]) is of_three
    assert table.find_job(of_three.key) is of_three and table.live_keys(of_three.key) == list(of_three.keys[1:])
    assert table.examine(of_three) is None, "it is known by the choices that have ended too"
    for key in of_three.keys[1:]:
        table.end(key, 0.0)
    assert table.find_job(of_three.key) is None and not len(table) and not list(table)


def test_a_newer_attempt_ends_each_choice_of_the_older_one() -> None:
    table = JobTable()
    table.add(job(1, num_choices=3))
    older, forbidden = table.examine(job(2, choice=1, num_choices=2)) or ([], [])
    assert older == list(job(1, num_choices=3).keys[1:]) and not forbidden


def test_choices_cancelled_before_their_job_are_reported_unless_all_were() -> None:
    table, of_two = JobTable(), job(2, num_choices=2)
    table.add(job(1, choice=1))
    table.tombstone(of_two.keys[1], 0.0)
    assert table.examine(of_two) == ([job(1, choice=1).key], [of_two.keys[1]]), "what it fences ends all the same"
    table.tombstone(of_two.keys[0], 0.0)
    with pytest.raises(TandemError, match="cancelled"):
        table.examine(of_two)


def test_a_newer_attempt_at_any_choice_refuses_the_job() -> None:
    table, of_two = JobTable(), job(2, num_choices=2)
    table.add(job(3, choice=1))
    table.tombstone(of_two.keys[1], 0.0)
    with pytest.raises(TandemError, match="fenced"):
        table.examine(of_two)
