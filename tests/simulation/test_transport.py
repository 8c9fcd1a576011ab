"""Test how reads share links in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.sim.cluster.fabric import Fabric
from tandem.sim.kernel.event_queue import Actor, SimEventQueue

A, B, C, D = (WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1") for name in "abcd")
PARTY = Actor(0)


def linked(agenda: SimEventQueue, latency_s: float = 0.0) -> Fabric:
    """Return a network on which workers have 100 bytes per second, D 25."""
    fabric = Fabric(agenda, latency_s)
    for worker, bandwidth in ((A, 100.0), (B, 100.0), (C, 100.0), (D, 25.0)):
        fabric.add(worker, bandwidth, PARTY)
    return fabric


def ends(*reads: tuple[float, WorkerRef, WorkerRef, int], latency_s: float = 0.0) -> Sequence[float]:
    """When each of (start, source, consumer, bytes) ends."""
    agenda = SimEventQueue()
    fabric = linked(agenda, latency_s)
    ended = [0.0] * len(reads)

    def start(index: int) -> None:
        _, source, consumer, num_bytes = reads[index]
        fabric.read(source, consumer, num_bytes, lambda: ended.__setitem__(index, agenda.now))

    for index, read in enumerate(reads):
        agenda.at(read[0], "start", lambda i=index: start(i), by=PARTY)  # type: ignore[misc]
    agenda.run()
    assert fabric.num_reads == 0 and fabric.num_bytes == sum(read[3] for read in reads)
    return ended


def test_one_read_takes_latency_and_bytes_over_bandwidth() -> None:
    assert ends((1.0, A, B, 200), latency_s=0.5) == pytest.approx([3.5])
    assert ends((0.0, A, B, 0), latency_s=0.5) == pytest.approx([0.5])


def test_the_slower_end_sets_the_pace() -> None:
    assert ends((0.0, A, D, 100)) == ends((0.0, D, A, 100)) == pytest.approx([4.0])


def test_reads_from_one_source_or_into_one_consumer_share_it() -> None:
    assert ends((0.0, A, B, 100), (0.0, A, C, 100)) == pytest.approx([2.0, 2.0])
    assert ends((0.0, A, C, 100), (0.0, B, C, 100)) == pytest.approx([2.0, 2.0])


def test_directions_of_a_link_and_other_links_are_independent() -> None:
    assert ends((0.0, A, B, 100), (0.0, B, A, 100)) == pytest.approx([1.0, 1.0])
    assert ends((0.0, A, B, 100), (0.0, C, D, 100)) == pytest.approx([1.0, 4.0])


def test_a_later_read_slows_the_first_until_it_ends() -> None:
    # 50 bytes alone until 0.5, then half each: the second's 25 end at 1.0, the first has 25 left for the whole link.
    assert ends((0.0, A, B, 100), (0.5, A, C, 25)) == pytest.approx([1.25, 1.0])


def test_many_reads_use_a_link_fully() -> None:
    assert max(ends(*((0.1 * i, A, (B, C)[i % 2], 100) for i in range(10)))) == pytest.approx(10.0)


def test_what_is_cut_never_ends_and_leaves_the_link_to_others() -> None:
    agenda = SimEventQueue()
    fabric = linked(agenda, 0.5)
    ended: list[float] = []
    fabric.read(A, B, 100, lambda: pytest.fail("it was cut"))
    fabric.read(A, C, 100, lambda: ended.append(agenda.now))
    agenda.at(
        1.0, "late", lambda: fabric.read(A, B, 100, lambda: pytest.fail("it was cut before its first byte")), by=PARTY
    )
    agenda.at(1.25, "cut", lambda: fabric.cut(A, B), by=PARTY)
    agenda.run()
    # 37.5 bytes by 1.25 s at half of the link, the rest at all of it.
    assert ended == pytest.approx([1.875])
    assert fabric.num_reads == 0 and fabric.num_bytes == 100


def test_a_link_without_bandwidth_is_refused() -> None:
    with pytest.raises(ValueError, match="a link of 0"):
        Fabric(SimEventQueue(), 0.0).add(A, 0, PARTY)


def test_a_stopped_read_goes_on_where_it_stood() -> None:
    agenda, ended = SimEventQueue(), list[float]()
    fabric = linked(agenda)
    fabric.read(A, B, 100, lambda: ended.append(agenda.now))
    agenda.at(0.25, "stop", lambda: fabric.stop(A, B), by=PARTY)
    agenda.at(3.0, "go on", lambda: fabric.resume(A, B), by=PARTY)
    agenda.at(3.25, "slow", lambda: fabric.set_bandwidth(A, 10.0), by=PARTY)
    agenda.run()
    assert ended == pytest.approx([8.25]), "a quarter each before and after the stop, half of it slowly"


def test_reads_from_a_worker_that_is_gone_are_lost_and_its_own_are_forgotten() -> None:
    agenda, lost = SimEventQueue(), list[float]()
    fabric = linked(agenda)
    fabric.read(A, B, 100, lambda: pytest.fail("its source is gone"), lambda: lost.append(agenda.now))
    fabric.read(
        C, A, 100, lambda: pytest.fail("its consumer is gone"), lambda: pytest.fail("nobody is left to be told")
    )
    agenda.at(0.5, "lose", lambda: fabric.lose(A), by=PARTY)
    agenda.run()
    assert lost == [0.5] and fabric.num_reads == 0
