"""Test that `Engine.next_deadline` is no later than the first tick with work."""

from __future__ import annotations

import math

from tandem.core.errors import ErrorKind
from tandem.core.events import Failed, KVReceived
from tandem.engine.effects import ReleaseHandoff, RenewLeases, StartRead
from tandem.engine.engine import Engine
from tests.unit.engine.test_engine import KEY, OTHER, engine, events, generate, offer, prefill, resume, step


def is_quiet_until(e: Engine, due: float) -> bool:
    before = repr(e)
    return all(e.tick(due * share) == [] for share in (0.25, 0.5, 0.999)) and repr(e) == before


def test_without_hand_offs_there_is_none() -> None:
    e = engine()
    assert e.next_deadline() == math.inf
    e.submit(generate(), 0.0)
    step(e)
    assert e.next_deadline() == math.inf


def test_a_lease_that_nobody_renews() -> None:
    e = engine()
    e.submit(prefill(), 0.0)
    assert e.next_deadline() == 10.0 and is_quiet_until(e, 10.0)
    (failed,) = events(e.tick(10.0))
    assert isinstance(failed, Failed) and failed.kind is ErrorKind.KV_LOST
    assert e.next_deadline() == math.inf


def test_a_renewal_and_then_the_next() -> None:
    e = engine()
    e.submit(resume(), 0.0)
    due = e.next_deadline()
    assert 3.3 < due < 3.4 and is_quiet_until(e, due)
    assert e.tick(due) == [RenewLeases(OTHER, (KEY,))]
    assert due < e.next_deadline() < 6.7 and e.tick(due + 0.1) == []


def test_a_pull_that_only_waits_for_its_lease_is_due_once_that_is_known() -> None:
    e = engine()
    e.submit(resume(), 0.0)
    e.announced(offer(0, 4, token=50), 1.0)
    plan, effects = e.begin(1.0)
    (read,) = [x for x in effects if isinstance(x, StartRead)]
    assert plan is None and e.read_done(read.read, 1.5) == []
    assert e.next_deadline() > 3.0 and e.tick(2.0) == []
    e.renewed((KEY,), 0.5, 10.0)
    assert e.next_deadline() < 2.0
    effects = e.tick(2.0)
    assert ReleaseHandoff(OTHER, KEY, is_taken=True) in effects and any(
        isinstance(x, KVReceived) for x in events(effects)
    )


def test_a_pull_that_nobody_answers() -> None:
    e = engine()
    e.submit(resume(), 0.0)
    for at in range(4, 30, 3):
        e.tick(float(at))
    assert e.next_deadline() == 30.0
    (failed,) = events(e.tick(30.0))
    assert isinstance(failed, Failed)
