"""Test what is reported of the tokens of experts, and in which windows of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.worker.telemetry.gauges import WINDOW_S, ExpertLoad, imbalance_of
from tests.unit.transfer.scripted import ManualClock


class Counts:
    """The counts of a model with two layers of four experts; `error` is raised instead."""

    def __init__(self) -> None:
        self.tokens = {1: [0] * 4, 2: [0] * 4}
        self.num_reads = 0
        self.error: Exception | None = None

    def add(self, layer: int, *tokens: int) -> None:
        self.tokens[layer] = [before + more for before, more in zip(self.tokens[layer], tokens, strict=True)]

    def __call__(self) -> Mapping[int, Sequence[int]]:
        if self.error is not None:
            raise self.error
        self.num_reads += 1
        return dict(self.tokens)


def test_the_busiest_expert_is_divided_by_the_mean() -> None:
    first = {1: [3, 3, 3, 3], 2: [0, 0, 0, 0], 4: [9, 9, 9, 9]}
    last = {1: [4, 4, 4, 4], 2: [0, 6, 2, 0], 4: [9, 9, 10, 9], 7: [5, 5, 5, 5]}
    assert imbalance_of(first, last) == {1: 1.0, 2: 3.0, 4: 4.0}, "layer 7 has no first count"
    assert imbalance_of(first, first) == {} and imbalance_of({}, {}) == {}


def test_a_window_begins_with_the_first_read_and_takes_its_time() -> None:
    clock, counts = ManualClock(), Counts()
    load = ExpertLoad(counts, clock)
    counts.add(1, 90, 0, 0, 0)  # steps at the worker's start
    assert load.imbalance() == {}
    counts.add(1, 5, 5, 5, 5)
    counts.add(2, 1, 3, 0, 0)
    clock.time += WINDOW_S - 0.1
    assert load.imbalance() == {}
    clock.time += 0.1
    assert load.imbalance() == {1: 1.0, 2: 3.0}
    counts.add(1, 0, 0, 0, 8)
    clock.time += WINDOW_S - 0.1
    assert load.imbalance() == {1: 1.0, 2: 3.0}, "the last complete window counts"
    assert counts.num_reads == 2
    clock.time += 1.0
    assert load.imbalance() == {1: 4.0}, "layer 2 has computed nothing"
    clock.time += 10 * WINDOW_S
    assert load.imbalance() == {}


def test_a_device_that_has_failed_has_no_counts() -> None:
    clock, counts = ManualClock(), Counts()
    load = ExpertLoad(counts, clock)
    assert load.tokens() == counts.tokens and load.imbalance() == {}
    counts.add(1, 1, 0, 0, 0)
    counts.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    clock.time += WINDOW_S
    assert load.tokens() == {} and load.imbalance() == {}
