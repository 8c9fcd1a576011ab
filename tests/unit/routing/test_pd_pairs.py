"""Test which pairs are tested, used and refused, from a few workers to many."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.config import Pool
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.link import LinkReport
from tandem.core.topology import Topology
from tandem.core.worker_load import WorkerLoad
from tandem.routing.link_policy import NUM_PEERS
from tandem.routing.pd_pairs import PairRegistry
from tandem.routing.worker_view import Pair, WorkerView


def view(name: str, pool: Pool, *, zone: str = "", fingerprint: str = "f", draining: bool = False) -> WorkerView:
    ref = WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1")
    return WorkerView(ref, pool, "m", fingerprint, WorkerLoad(draining=draining), topology=Topology("", "", zone))


def fleet(num_producers: int, num_consumers: int, zones: int = 1) -> list[WorkerView]:
    producers = [view(f"p{n}", "prefill", zone=f"z{n % zones}") for n in range(num_producers)]
    return producers + [view(f"d{n}", "decode", zone=f"z{n % zones}") for n in range(num_consumers)]


def due(pairs: PairRegistry, views: list[WorkerView], now: float = 0.0) -> list[Pair]:
    return [pair for pair, _ in pairs.due(views, now)]


def link(pairs: PairRegistry, views: list[WorkerView]) -> list[Pair]:
    """Test all pairs that are due, with success, and return them."""
    found = due(pairs, views)
    for pair in found:
        pairs.ended(pair, moved=True, retry_at=5.0)
    return found


def refusal(producer: WorkerView, problem: str = "tcp") -> LinkReport:
    return LinkReport(source=producer.ref, link_type="tcp", evidence="", problem=problem, refused=bool(problem))


def check(pairs: PairRegistry) -> None:
    assert pairs.failed.keys().isdisjoint(pairs.linked)
    assert pairs.refused.keys() <= pairs.failed.keys()


def test_all_pairs_of_few_workers_are_tested_once() -> None:
    pairs, views = PairRegistry("prefer"), fleet(2, NUM_PEERS)
    found = due(pairs, views)
    assert len(found) == len(set(found)) == 2 * NUM_PEERS
    assert due(pairs, views) == [], "they are being tested"
    for pair in found:
        pairs.ended(pair, moved=True, retry_at=5.0)
    assert pairs.linked == set(found) and due(pairs, views) == []


@pytest.mark.parametrize("zones", [1, 2])
def test_each_of_many_workers_tests_a_few_pairs_and_all_are_used(zones: int) -> None:
    pairs, views = PairRegistry("prefer"), fleet(40, 40, zones)
    found = due(pairs, views)
    # Each worker has its own few in each zone; where two have chosen each other that is one test.
    assert 40 * NUM_PEERS * zones <= len(found) <= 2 * 40 * NUM_PEERS * zones
    for number, pair in enumerate(found):
        if number == len(found) - 1:
            assert len(pairs.linked) < 1600
        pairs.ended(pair, moved=True, retry_at=5.0)
        check(pairs)
    assert len(pairs.linked) == 1600 and due(pairs, views, 100.0) == []


def test_an_untested_pair_waits_for_both_of_its_ends() -> None:
    pairs, views = PairRegistry("prefer"), fleet(20, 20)
    found = due(pairs, views)
    silent = views[0].ref
    for pair in found:
        if silent not in pair:
            pairs.ended(pair, moved=True, retry_at=5.0)
    assert not [pair for pair in pairs.linked if silent in pair]
    first = next(pair for pair in found if pair[0] == silent)
    pairs.ended(first, moved=True, retry_at=5.0)
    untested = {(silent, consumer.ref) for consumer in views[20:]} - set(found)
    assert {pair for pair in pairs.linked if silent in pair} == untested | {first}


def test_a_test_that_fails_is_repeated_and_others_are_tested_in_its_place() -> None:
    pairs, views = PairRegistry("prefer"), fleet(20, 20)
    found = due(pairs, views)
    mine = [pair for pair in found if pair[0] == views[0].ref]
    for pair in mine:
        pairs.ended(pair, moved=False, retry_at=5.0)
    more = due(pairs, views, 1.0)
    assert more and not set(more) & set(mine)
    assert set(due(pairs, views, 5.0)) >= set(mine)


def test_impossible_pairs_are_not_tested() -> None:
    views = [view("p", "prefill"), view("q", "prefill", fingerprint="g"), view("m", "mixed"), view("n", "mixed")]
    views.append(view("d", "decode", draining=True))
    names = {(producer.id, consumer.id) for producer, consumer in due(PairRegistry("prefer"), views)}
    assert names == {("p", "m"), ("p", "n")}
    names = {(producer.id, consumer.id) for producer, consumer in due(PairRegistry("strict"), views)}
    assert names == {("p", "m"), ("p", "n"), ("m", "n"), ("n", "m")}
    assert due(PairRegistry("off"), views) == []


def test_a_pair_that_is_refused_is_used_again_only_after_a_better_report() -> None:
    pairs, views = PairRegistry("prefer"), fleet(1, 2)
    producer, consumer, other = views
    link(pairs, views)
    pair = (producer.ref, consumer.ref)
    assert pairs.on_link_report(consumer.ref, refusal(producer))
    assert not pairs.on_link_report(consumer.ref, refusal(producer))
    check(pairs)
    assert pairs.linked == {(producer.ref, other.ref)} and pairs.refused == {pair: "tcp"}
    assert pairs.failed[pair] == math.inf and due(pairs, views, 1e9) == []
    pairs.ended(pair, moved=True, retry_at=5.0)
    assert pair not in pairs.linked, "a moved block does not lift the refusal"
    assert pairs.problem() == "the link from p0 to d0 is not used: tcp"
    assert pairs.links() == {("tcp", False): 1}
    assert pairs.on_link_report(consumer.ref, refusal(producer, ""))
    assert due(pairs, views) == [pair] and pairs.problem() is None and pairs.links() == {("tcp", True): 1}


def test_a_report_before_the_test_ends_counts() -> None:
    pairs, views = PairRegistry("prefer"), fleet(1, 1)
    ((pair, model),) = pairs.due(views, 0.0)
    assert model == "m"
    pairs.on_link_report(views[1].ref, refusal(views[0]))
    pairs.ended(pair, moved=True, retry_at=5.0)
    check(pairs)
    assert not pairs.linked


def test_suspected_pairs_are_tested_at_once() -> None:
    pairs, views = PairRegistry("prefer"), fleet(20, 20)
    found = link(pairs, views)
    untested = next(iter(set(pairs.linked) - set(found)))
    assert pairs.suspect(frozenset(untested), 7.0) == [untested] and untested not in pairs.linked
    check(pairs)
    assert due(pairs, views, 7.0) == [untested]
    pairs.ended(untested, moved=True, retry_at=12.0)
    assert untested in pairs.linked


def test_a_suspected_pair_that_was_refused_meanwhile_is_tested_after_a_better_report() -> None:
    pairs, views = PairRegistry("prefer"), fleet(1, 1)
    (pair,) = link(pairs, views)
    pairs.suspect(frozenset(pair), 7.0)
    pairs.on_link_report(views[1].ref, refusal(views[0]))
    assert due(pairs, views, 7.0) == []
    pairs.on_link_report(views[1].ref, refusal(views[0], ""))
    check(pairs)
    assert due(pairs, views, 7.0) == [pair] and not pairs.linked
    pairs.ended(pair, moved=True, retry_at=12.0)
    assert pairs.linked == {pair}


def test_nothing_is_kept_of_a_gone_worker() -> None:
    pairs, views = PairRegistry("prefer"), fleet(2, 2)
    first, *others = due(pairs, views)
    pairs.ended(first, moved=False, retry_at=5.0)
    for pair in others:
        pairs.ended(pair, moved=True, retry_at=5.0)
    pairs.on_link_report(views[2].ref, refusal(views[0]))
    pairs.drop(views[0].ref)
    left = (*pairs.linked, *pairs.failed, *pairs.refused, *pairs.links())
    assert not [pair for pair in left if views[0].ref in pair] and pairs.linked


def test_a_worker_that_joins_costs_as_much_as_there_are_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of pairs grows with the square of the number of workers."""
    pairs, views = PairRegistry("prefer"), fleet(40, 40)
    views = [view for both in zip(views[:40], views[40:], strict=True) for view in both]
    looks, num_tests, fits = 0, 0, pairs._fits

    def counted(producer: WorkerView, consumer: WorkerView) -> bool:
        nonlocal looks
        looks += 1
        return fits(producer, consumer)

    monkeypatch.setattr(pairs, "_fits", counted)
    for number in range(1, len(views) + 1):
        looks = 0
        num_tests += len(link(pairs, views[:number]))
        assert looks <= 5 * number
    assert num_tests <= NUM_PEERS * len(views) and len(pairs.linked) == 40 * 40


def test_a_pair_in_use_stays_in_use_when_another_one_fails() -> None:
    pairs, views = PairRegistry("prefer"), fleet(20, 20)
    found = link(pairs, views)
    before = set(pairs.linked)
    pairs.suspect(frozenset(found[0]), 7.0)
    assert due(pairs, views, 6.0) == [] and before - set(pairs.linked) == {found[0]}


def test_a_worker_with_another_role_has_other_pairs() -> None:
    pairs, views = PairRegistry("prefer"), fleet(2, 1)
    link(pairs, views)
    changed = [views[0], replace(views[1], pool="decode"), views[2]]
    assert due(pairs, changed) == [(views[0].ref, views[1].ref)]
    assert pairs.linked == {(views[0].ref, views[2].ref)}
    pairs.ended((views[0].ref, views[1].ref), moved=True, retry_at=5.0)
    assert len(pairs.linked) == 2


def test_a_better_report_on_a_worker_that_drains_chooses_nothing() -> None:
    pairs, views = PairRegistry("prefer"), fleet(1, 2)
    producer, consumer, other = views
    link(pairs, views)
    pairs.on_link_report(consumer.ref, refusal(producer))
    assert due(pairs, [producer, replace(consumer, load=WorkerLoad(draining=True)), other]) == []
    assert pairs.on_link_report(consumer.ref, refusal(producer, ""))
    late = view("d9", "decode")
    assert due(pairs, [producer, other, late]) == [(producer.ref, late.ref)]


EVENTS = ["join", "leave", "drain", "role", "test", "fail", "report", "suspect"]


def changed(one: WorkerView, kind: str) -> WorkerView:
    if kind == "drain":
        return replace(one, load=WorkerLoad(draining=True))
    return replace(one, pool="decode" if one.pool == "prefill" else "prefill")


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 7)), min_size=20, max_size=80))
def test_whatever_happens_the_books_agree(events: list[tuple[str, int]]) -> None:
    """A pair is linked or failed, never both, and what was looked up before is what is computed now."""
    pairs, now = PairRegistry("prefer"), 0.0
    known = [view(f"{'pd'[n % 2]}{n}", "prefill" if n % 2 == 0 else "decode") for n in range(8)]
    everyone = [one.ref for one in known]
    present: dict[int, WorkerView] = {}
    testing: list[Pair] = []
    for kind, n in events:
        now += 3.0
        if kind in ("test", "fail"):
            for pair in testing:
                pairs.ended(pair, moved=kind == "test", retry_at=now + 5.0)
            testing = []
        elif kind == "suspect":
            pairs.suspect(frozenset(one.ref for one in present.values()), now)
        elif n not in present:
            present[n] = known[n]
        elif kind == "leave":
            gone = present.pop(n).ref
            pairs.drop(gone)
            testing = [pair for pair in testing if gone not in pair]
        elif kind == "report" and (n + 1) % 8 in present:
            pairs.on_link_report(present[n].ref, refusal(present[(n + 1) % 8], "slow" if int(now) % 2 else ""))
        elif kind in ("drain", "role"):
            present[n] = changed(present[n], kind)
        testing += due(pairs, list(present.values()), now)
        linked = set(pairs.linked)
        assert linked == {(p, d) for p in everyone for d in everyone if (p, d) in pairs.linked}
        assert linked == {(p, d) for p in everyone for d in everyone if pairs.is_linked((p, d))}
        check(pairs)
