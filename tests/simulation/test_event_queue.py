"""Test the order of the event queue, its digest and the seeded samples."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import pytest

from tandem.sim.kernel.event_queue import Actor, EventDigest, SimEventQueue, combined
from tandem.workload import seeded_random


def parties(number: int) -> list[Actor]:
    return [Actor(rank) for rank in range(number)]


def test_events_run_by_time_and_then_in_scheduling_order() -> None:
    agenda, seen = SimEventQueue(), []
    (one,) = parties(1)

    def note(what: str) -> Callable[[], None]:
        return lambda: seen.append((agenda.now, what))

    def schedule_more() -> None:
        seen.append((agenda.now, "b"))
        agenda.after(0.0, "d", note("d"), by=one)

    agenda.at(2.0, "e", note("e"), by=one)
    agenda.at(1.0, "a", note("a"), by=one)
    agenda.at(1.0, "b", schedule_more, by=one)
    agenda.at(1.0, "c", note("c"), by=one)
    agenda.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (1.0, "c"), (1.0, "d"), (2.0, "e")]
    assert agenda.num_run == 5 and agenda.num_pending == 0


@pytest.mark.parametrize("time", [0.5, float("nan")])
def test_the_past_and_no_time_at_all_are_refused(time: float) -> None:
    agenda, (one,) = SimEventQueue(), parties(1)
    agenda.at(1.0, "x", lambda: None, by=one)
    agenda.run()
    with pytest.raises(ValueError, match="already"):
        agenda.at(time, "y", lambda: None, by=one)


def test_run_stops_at_its_limit_and_resumes_from_there() -> None:
    agenda, seen = SimEventQueue(), []
    (one,) = parties(1)
    for time in (1.0, 2.0, 3.0):
        agenda.at(time, "x", lambda t=time: seen.append(t), by=one)  # type: ignore[misc]
    agenda.run(until=2.0)
    assert seen == [1.0, 2.0] and agenda.now == 2.0
    agenda.run()
    assert seen == [1.0, 2.0, 3.0]


def test_at_one_time_ends_run_first_and_then_actors_by_rank() -> None:
    agenda, seen = SimEventQueue(), []
    low, high = parties(2)

    def note(what: str) -> Callable[[], None]:
        return lambda: seen.append(what)

    agenda.at(1.0, "", note("high"), by=high, to=low)
    agenda.at(1.0, "", note("low"), by=low, to=high)
    agenda.at(1.0, "", note("end"), by=high, is_end=True)
    agenda.run()
    assert seen == ["end", "low", "high"]


def test_what_has_passed_is_known_within_one_time() -> None:
    agenda, seen = SimEventQueue(), []
    low, mid, high = parties(3)

    def look() -> None:
        seen.append([agenda.has_passed(time, by) for time in (0.5, 1.0, 1.5) for by in (low, high)])

    agenda.at(1.0, "", look, by=mid)
    agenda.run()
    assert seen == [[True, True, True, False, False, False]]


def test_a_cancelled_event_neither_happens_nor_shows() -> None:
    def digest(is_scheduled: bool) -> str:
        agenda, (one,) = SimEventQueue(), parties(1)
        agenda.at(1.0, "x", lambda: None, by=one)
        if is_scheduled:
            agenda.cancel(agenda.at(1.5, "never", lambda: pytest.fail("it was cancelled"), by=one))
        agenda.at(2.0, "y", lambda: None, by=one)
        agenda.run()
        return combined([one.log])

    assert digest(is_scheduled=True) == digest(is_scheduled=False)


def test_a_digest_covers_times_labels_and_each_party_s_order() -> None:
    def digest(*events: tuple[float, str, int]) -> str:
        agenda, two = SimEventQueue(), parties(2)
        for time, label, to in events:
            agenda.at(time, label, lambda: None, by=two[0], to=two[to])
        agenda.run()
        return combined(party.log for party in two)

    usual = digest((1.0, "x", 0), (1.0, "y", 0), (1.0, "z", 1))
    assert digest((1.0, "z", 1), (1.0, "x", 0), (1.0, "y", 0)) == usual, "what is at different parties has no order"
    others = {
        digest((1.0, "y", 0), (1.0, "x", 0), (1.0, "z", 1)),
        digest((1.0, "x", 0), (1.0 + 2**-52, "y", 0), (1.0, "z", 1)),
        digest((1.0, "x", 0), (1.0, "y", 1), (1.0, "z", 1)),
        digest((1.0, "x", 0), (1.0, "y", 0)),
    }
    assert len(others) == 4 and usual not in others


def test_steps_may_be_written_down_later_but_not_in_another_order() -> None:
    def digest(*acts: str) -> bytes:
        log = EventDigest()
        for act in acts:
            if act == "step":
                log.step(1.0, 1, 2, 3)
            elif act == "next":
                log.step(1.5, 2, 2, 3)
            else:
                log.note(1.2, act)
        return log.digest()

    assert digest("step", "came", "next") == digest("came", "step", "next")
    assert digest("next", "came", "step") != digest("step", "came", "next") != digest("step", "next")


def test_samples_are_functions_of_their_names() -> None:
    assert seeded_random.uniform(1, "a", 2) == seeded_random.uniform(1, "a", 2)
    assert (
        len({seeded_random.uniform(1, "a", 2), seeded_random.uniform(2, "a", 2), seeded_random.uniform(1, "b", 2)}) == 3
    )
    assert seeded_random.tokens(5, 1, "a") == seeded_random.tokens(9, 1, "a")[:5] != seeded_random.tokens(5, 2, "a")


def test_samples_have_the_distribution_that_they_claim() -> None:
    samples = [seeded_random.integer(3, 6, "seed", i) for i in range(4000)]
    assert {samples.count(n) > 900 for n in (3, 4, 5, 6)} == {True} and set(samples) == {3, 4, 5, 6}
    waits = [seeded_random.exponential(2.0, "seed", i) for i in range(4000)]
    assert min(waits) >= 0 and 1.9 < fmean(waits) < 2.1
    assert 0.47 < sum(wait > 2.0 * 0.6931 for wait in waits) / 4000 < 0.53, "half lie above the median"


def test_who_stands_still_does_all_of_it_later_in_order_and_who_is_gone_nothing() -> None:
    agenda, seen = SimEventQueue(), list[tuple[float, str]]()
    world, still, gone = parties(3)

    def note(what: str) -> Callable[[], None]:
        return lambda: seen.append((agenda.now, what))

    agenda.at(1.0, "", lambda: agenda.halt(still), by=world)
    agenda.at(1.0, "", gone.vanish, by=world)
    agenda.at(2.0, "first", note("first"), by=still)
    cancelled = agenda.at(2.5, "never", note("never"), by=still)
    agenda.at(2.7, "", lambda: agenda.cancel(cancelled), by=world)
    agenda.at(3.0, "second", note("second"), by=world, to=still)
    agenda.at(3.0, "gone", note("gone"), by=world, to=gone)
    agenda.at(4.0, "", lambda: agenda.go_on(still), by=world)
    agenda.at(4.0, "", lambda: agenda.go_on(gone), by=world)
    agenda.at(5.0, "third", note("third"), by=still)
    agenda.run()
    assert seen == [(4.0, "first"), (4.0, "second"), (5.0, "third")]
    assert gone.is_gone and not still.is_gone
