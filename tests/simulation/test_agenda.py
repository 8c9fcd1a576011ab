"""The agenda's order, its digest and the draws by name; never more than these two files."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import pytest

from tandem.sim.agenda import Agenda
from tandem.workload import chance


def test_events_run_by_time_and_then_in_the_order_in_which_they_were_asked_for() -> None:
    agenda, seen = Agenda(), []

    def note(what: str) -> Callable[[], None]:
        return lambda: seen.append((agenda.now, what))

    def ask_more() -> None:
        seen.append((agenda.now, "b"))
        agenda.after(0.0, "d", note("d"))

    agenda.at(2.0, "e", note("e"))
    agenda.at(1.0, "a", note("a"))
    agenda.at(1.0, "b", ask_more)
    agenda.at(1.0, "c", note("c"))
    agenda.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (1.0, "c"), (1.0, "d"), (2.0, "e")]
    assert agenda.num_run == 5 and agenda.num_asked == 0


@pytest.mark.parametrize("time", [0.5, float("nan")])
def test_the_past_and_no_time_at_all_are_refused(time: float) -> None:
    agenda = Agenda()
    agenda.at(1.0, "x", lambda: None)
    agenda.run()
    with pytest.raises(ValueError, match="already"):
        agenda.at(time, "y", lambda: None)


def test_run_stops_where_it_is_told_and_goes_on_from_there() -> None:
    agenda, seen = Agenda(), []
    for time in (1.0, 2.0, 3.0):
        agenda.at(time, "x", lambda t=time: seen.append(t))  # type: ignore[misc]
    agenda.run(until=2.0)
    assert seen == [1.0, 2.0] and agenda.now == 2.0
    agenda.run()
    assert seen == [1.0, 2.0, 3.0]


def test_a_cancelled_event_neither_happens_nor_shows() -> None:
    def digest(is_asked: bool) -> str:
        agenda = Agenda()
        agenda.at(1.0, "x", lambda: None)
        if is_asked:
            agenda.cancel(agenda.at(1.5, "never", lambda: pytest.fail("it was cancelled")))
        agenda.at(2.0, "y", lambda: None)
        agenda.run()
        return agenda.digest

    assert digest(is_asked=True) == digest(is_asked=False)


def test_the_digest_covers_times_labels_and_order() -> None:
    def digest(*events: tuple[float, str]) -> str:
        agenda = Agenda()
        for time, label in events:
            agenda.at(time, label, lambda: None)
        agenda.run()
        return agenda.digest

    usual = digest((1.0, "x"), (1.0, "y"))
    assert digest((1.0, "x"), (1.0, "y")) == usual
    others = {digest((1.0, "y"), (1.0, "x")), digest((1.0, "x"), (1.0 + 2**-52, "y")), digest((1.0, "x"))}
    assert len(others) == 3 and usual not in others


def test_draws_are_functions_of_their_names() -> None:
    assert chance.uniform(1, "a", 2) == chance.uniform(1, "a", 2)
    assert len({chance.uniform(1, "a", 2), chance.uniform(2, "a", 2), chance.uniform(1, "b", 2)}) == 3
    assert chance.tokens(5, 1, "a") == chance.tokens(9, 1, "a")[:5] != chance.tokens(5, 2, "a")


def test_draws_have_the_distribution_that_they_claim() -> None:
    drawn = [chance.integer(3, 6, "seed", i) for i in range(4000)]
    assert {drawn.count(n) > 900 for n in (3, 4, 5, 6)} == {True} and set(drawn) == {3, 4, 5, 6}
    waits = [chance.exponential(2.0, "seed", i) for i in range(4000)]
    assert min(waits) >= 0 and 1.9 < fmean(waits) < 2.1
    assert 0.47 < sum(wait > 2.0 * 0.6931 for wait in waits) / 4000 < 0.53, "half lie above the median"
