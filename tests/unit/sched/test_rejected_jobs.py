"""Test jobs that are rejected for lack of room, and their order when they are submitted again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.request import Job
from tandem.kv.block_pool import BlockPool
from tandem.sched.phases.job_admission import PATIENCE_S, RejectedJobs
from tandem.sched.scheduler import Scheduler
from tandem.sched.state.limits import Capacity, SchedulerLimits
from tests.unit.sched.lane_jobs import with_choices
from tests.unit.sched.test_scheduler import resume

NUM_SEATS = 6


def job(name: str, num_choices: int = 1, attempt: int = 1, num_prompt: int = 4) -> Job:
    return replace(with_choices(resume(name, num_prompt, 8), num_choices), attempt=attempt)


def worker(num_blocks: int = 100) -> Scheduler:
    limits = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=NUM_SEATS, max_model_len=1000)
    return Scheduler(BlockPool(num_blocks, 4), limits, "f")


def takes(scheduler: Scheduler, job: Job, now: float) -> bool:
    try:
        scheduler.add(job, now)
    except TandemError as error:
        assert error.kind is ErrorKind.OVERLOADED
        return False
    return True


def full_worker() -> tuple[Scheduler, list[Job]]:
    """Return a worker, and the jobs that have taken all of its seats."""
    scheduler, running = worker(), [job(f"s{i}") for i in range(NUM_SEATS)]
    assert all(takes(scheduler, one, 0.0) for one in running)
    return scheduler, running


def test_a_job_of_several_sequences_is_not_overtaken_for_ever_by_single_ones() -> None:
    """One sequence slot becomes free at a time, and another gateway always has a job for it."""
    scheduler, running = full_worker()
    now = 0.0
    assert not takes(scheduler, job("large", 3), now)
    for number in range(3):
        now += 0.1
        assert scheduler.cancel(running[number].key)
        assert not takes(scheduler, job(f"late {number}"), now)
        if takes(scheduler, job("large", 3, attempt=2 + number), now):
            break
    assert number == 2, "its third seat"
    assert not takes(scheduler, job("later"), now), "all seats are taken"


def test_room_is_kept_only_for_a_job_that_is_resubmitted() -> None:
    scheduler, running = full_worker()
    assert not takes(scheduler, job("large", 3), 0.0)
    scheduler.cancel(running[0].key)
    assert not takes(scheduler, job("late"), 0.9 * PATIENCE_S)
    assert takes(scheduler, job("late"), PATIENCE_S)


def test_room_is_kept_neither_from_equals_nor_once_it_is_taken() -> None:
    scheduler, running = full_worker()
    assert not takes(scheduler, job("first"), 0.0)
    scheduler.cancel(running[0].key)
    assert takes(scheduler, job("second"), 0.0), "who wants as much finds room as soon as the first does"
    assert not takes(scheduler, job("large", 2), 0.0)
    for one in running[1:3]:
        scheduler.cancel(one.key)
    assert takes(scheduler, job("large", 2, attempt=2), 0.1)
    scheduler.cancel(running[3].key)
    assert takes(scheduler, job("third"), 0.1)


def test_blocks_are_kept_as_seats_are() -> None:
    scheduler = worker(num_blocks=40)
    first, second = job("a", num_prompt=60), job("b", num_prompt=60)
    assert takes(scheduler, first, 0.0) and takes(scheduler, second, 0.0)
    assert not takes(scheduler, job("large", num_prompt=100), 0.0)
    scheduler.cancel(first.key)
    assert not takes(scheduler, job("small", num_prompt=20), 0.1)
    assert not takes(scheduler, job("large", num_prompt=100, attempt=2), 0.1)
    scheduler.cancel(second.key)
    assert takes(scheduler, job("large", num_prompt=100, attempt=3), 0.2)
    assert takes(scheduler, job("small", num_prompt=20, attempt=2), 0.2)


@pytest.mark.parametrize(("num_seats", "kept"), [(1, 5), (2, 3), (3, 0)])
def test_what_is_kept_from_a_job_is_the_room_of_larger_ones_before_it(num_seats: int, kept: int) -> None:
    away = RejectedJobs()
    away.put(job("x", 2), Capacity(0, 2), 0.0)
    away.put(job("y", 3), Capacity(0, 3), 0.0)
    assert away.ahead(job("new", num_seats), Capacity(1, num_seats), 0.1).num_seats == kept
    assert away.ahead(job("x", 2), Capacity(1, 1), 0.1).num_seats == 0, "it was first"
