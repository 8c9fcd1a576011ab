"""Which attempts run, which are refused, and for how long that is remembered."""

from __future__ import annotations

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import JobKey, RequestId
from tandem.core.request import Generate, Request, SamplingParams
from tandem.engine.job_table import JobTable


def job(attempt: int, choice: int = 0) -> Generate:
    request = Request(id=RequestId("r"), model="m", prompt_tokens=(1,), sampling=SamplingParams(max_tokens=1))
    return Generate(request=request, attempt=attempt, choice=choice)


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


def test_a_cancel_that_comes_first_refuses_the_attempt_and_older_ones() -> None:
    table = JobTable()
    table.forbid(job(2).key, 0.0)
    table.forbid(job(1).key, 1.0)
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
    table.forbid(JobKey(RequestId("other"), 1), 0.0)
    table.forget(now)
    assert table.is_known(job(1).key) is remembers
    assert is_refused(table, job(1).key) is remembers
    assert is_refused(table, JobKey(RequestId("other"), 1)) is remembers
