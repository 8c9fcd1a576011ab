"""Test which link reports a worker keeps, and when it measures again."""

from __future__ import annotations

import pytest

from tandem.core.ids import WorkerRef
from tandem.core.link import LinkReport
from tandem.worker.links import link_monitor
from tandem.worker.links.link_monitor import FRESH_S, GONE_S, MAX_RETRY_S, RETRY_S, LinkReports
from tests.unit.worker.conftest import ref


def report(source: WorkerRef, problem: str = "") -> LinkReport:
    return LinkReport(source=source, link_type="tcp", evidence="", num_bytes=1, seconds=1.0, problem=problem)


def test_each_source_has_its_newest_report_of_its_newest_life() -> None:
    book = LinkReports()
    assert book.put(report(ref("a")), 0.0) and book.put(report(ref("b")), 1.0)
    last_number = book.number
    assert not book.put(report(ref("a")), 2.0), "it says nothing new"
    assert [each.source.id for each in book.since(0)] == ["b", "a"]
    assert [each.source.id for each in book.since(last_number)] == ["a"] and book.since(book.number) == []
    assert book.put(report(ref("a", 2)), 3.0), "another life is another worker"
    assert not book.put(report(ref("a", 1)), 4.0) and book.find(ref("a", 1)) is None
    assert book.find(ref("a", 2)) == report(ref("a", 2))


def test_a_chosen_source_is_measured_once_and_again_when_suspected() -> None:
    book, source = LinkReports(), ref("a")
    assert book.due([source], 0.0) == [source]
    book.put(report(source), 0.0)
    assert book.due([source], 1e9) == []
    book.suspect(source, 1.0)
    assert book.due([source], FRESH_S - 0.1) == [] and book.due([], FRESH_S) == [source]
    book.suspect(ref("nobody"), 1.0)
    book.suspect(ref("a", 2), 1.0)


def test_a_link_with_a_problem_is_measured_again_with_back_off() -> None:
    book, source, now, waits = LinkReports(), ref("a"), 0.0, []
    for _ in range(9):
        book.put(report(source, "slow"), now)
        wait = next(wait for wait in (RETRY_S * 2**k for k in range(9)) if book.due([], now + min(wait, MAX_RETRY_S)))
        waits.append(min(wait, MAX_RETRY_S))
        now += waits[-1]
    assert waits[:3] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S] and waits[-1] == MAX_RETRY_S
    book.put(report(source), now)
    assert book.due([source], now + 1e9) == []
    book.put(report(source, "slow"), now)
    assert book.due([], now + RETRY_S) == [source], "patience begins anew"


def test_a_failed_measurement_is_retried_even_without_requirements() -> None:
    book, source = LinkReports(), ref("a")
    book.put(LinkReport(source=source, link_type="unknown", evidence="gone"), 0.0)
    assert book.due([source], RETRY_S - 0.1) == [] and book.due([], RETRY_S) == [source]


def test_a_report_is_fresh_for_a_while() -> None:
    book = LinkReports()
    book.put(report(ref("a")), 1.0)
    assert book.fresh(ref("a"), 1.0 + FRESH_S - 0.1) is not None
    assert book.fresh(ref("a"), 1.0 + FRESH_S) is None and book.fresh(ref("b"), 1.0) is None


@pytest.mark.slow
def test_the_number_of_sources_is_bounded() -> None:
    book = LinkReports()
    for number in range(link_monitor.MAX_SOURCES + 5):
        book.put(report(ref(f"w{number}")), 0.0)
    assert len(book.since(0)) == link_monitor.MAX_SOURCES and book.find(ref("w0")) is None


def test_a_source_unlisted_for_a_while_is_forgotten() -> None:
    book = LinkReports()
    for name in ("here", "gone"):
        book.put(report(ref(name), "slow"), 0.0)
    book.listed({ref("here"), ref("gone")}, 10.0)
    book.put(report(ref("gone"), "slow"), 11.0)
    book.listed({ref("here")}, 10.0 + GONE_S - 0.1)
    assert book.find(ref("gone")) is not None, "a registry may be filled anew"
    book.listed({ref("here")}, 10.0 + GONE_S)
    assert book.find(ref("gone")) is None and book.due([], 1e9) == [ref("here")]
    book.forget(ref("here", 2))
    assert book.find(ref("here")) is not None, "that was another life"
    book.forget(ref("here"))
    assert book.since(0) == []


def test_a_source_that_restarted_after_its_clock_was_set_back_is_measured_once() -> None:
    """Its incarnation is smaller; the registry lists one life of each worker."""
    book, former, later = LinkReports(), ref("a", 2), ref("a", 1)
    book.put(report(former), 0.0)
    book.listed({former}, 1.0)
    book.listed({later}, 11.0)
    assert book.due([later], 11.0) == [later]
    assert book.put(report(later), 11.0) and book.find(later) == report(later)
    assert book.due([later], 12.0) == [], "not at each beat"
