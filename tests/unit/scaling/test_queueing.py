"""Test waiting times at several workers against known values and a simulated queue."""

from __future__ import annotations

import heapq
import math
from random import Random

import pytest

from tandem.scaling.queueing import ServiceDemand, erlang_c, late_share, least_workers


@pytest.mark.parametrize(
    ("num_workers", "load", "share"),
    [(1, 0.5, 0.5), (1, 0.9, 0.9), (2, 1.0, 1 / 3), (3, 2.0, 4 / 9), (5, 4.0, 0.5541), (2, 2.0, 1.0), (2, 7.0, 1.0)],
)
def test_erlang(num_workers: int, load: float, share: float) -> None:
    """The first by (rho), the others from tables."""
    assert erlang_c(num_workers, load) == pytest.approx(share, abs=1e-4)


def simulated_late_share(work: ServiceDemand, num_workers: int, limit_s: float, count: int = 100_000) -> float:
    """Simulate a first-come, first-served queue with Poisson arrivals and lognormal service times; jobs late by
    themselves are excluded."""
    rng, free = Random(5), [0.0] * num_workers
    spread = math.log1p(work.service_scv)
    at, late = 0.0, 0
    for _ in range(count):
        at += rng.expovariate(work.rate)
        time = rng.lognormvariate(math.log(work.mean_s) - spread / 2, math.sqrt(spread))
        begin = max(at, free[0])
        heapq.heapreplace(free, begin + time)
        late += begin + time - at > limit_s and time <= limit_s
    return late / count


@pytest.mark.parametrize("num_workers", [3, 4, 6])
@pytest.mark.parametrize("scv", [0.2, 1.0, 3.0])
def test_the_late_share_is_near_that_of_a_simulated_queue(num_workers: int, scv: float) -> None:
    """Accurate to a factor of about two, where one worker more or less changes it by four and more."""
    work = ServiceDemand(rate=2.5, mean_s=1.0, service_scv=scv)
    predicted, simulated = late_share(work, num_workers, 6.0), simulated_late_share(work, num_workers, 6.0)
    assert predicted == pytest.approx(simulated, rel=1.2, abs=0.004)


def test_times_have_the_requested_mean_and_variation() -> None:
    times = ServiceDemand(1.0, 2.0, 0.5).times()
    mean = sum(times) / len(times)
    assert mean == pytest.approx(2.0, rel=0.02)
    assert sum((time - mean) ** 2 for time in times) / len(times) / mean**2 == pytest.approx(0.5, rel=0.2)
    assert set(ServiceDemand(1.0, 2.0, 0.0).times()) == {2.0}


def test_the_fewest_workers_are_enough_and_one_fewer_is_not() -> None:
    work = ServiceDemand(rate=10.0, mean_s=0.5, service_scv=1.0, arrival_scv=3.0)
    number = least_workers(work, 2.0, 0.01, 0.0)
    assert late_share(work, number, 2.0) <= 0.01 < late_share(work, number - 1, 2.0)


def test_without_a_target_only_headroom_counts() -> None:
    assert least_workers(ServiceDemand(10.0, 0.5), None, 0.01, 0.0) == 5
    assert least_workers(ServiceDemand(10.0, 0.5), None, 0.01, 0.2) == 7
    assert least_workers(ServiceDemand(0.0, 0.5), 1.0, 0.01, 0.2) == 0


def test_jobs_late_by_themselves_need_no_workers() -> None:
    """Every job takes longer than the limit: more workers do not help."""
    assert least_workers(ServiceDemand(2.0, 10.0, 0.0), 1.0, 0.01, 0.15) == 24


def test_the_number_of_workers_is_monotonic() -> None:
    base = ServiceDemand(rate=6.0, mean_s=0.7, service_scv=1.0, arrival_scv=1.0)
    number = least_workers(base, 2.0, 0.01, 0.15)
    for worse in (
        ServiceDemand(9.0, 0.7),
        ServiceDemand(6.0, 1.0),
        ServiceDemand(6.0, 0.7, 4.0),
        ServiceDemand(6.0, 0.7, 1.0, 6.0),
    ):
        assert least_workers(worse, 2.0, 0.01, 0.15) > number, worse
    assert least_workers(base, 1.0, 0.01, 0.15) > number
    assert least_workers(base, 2.0, 0.0001, 0.15) > number
