"""Test that an interactive request does not wait for batch answers that fill a worker, and that these lose no token."""

from __future__ import annotations

import pytest

from tests.e2e.gateway.http import Post, completion, send
from tests.e2e.gateway.processes import Cluster, until

_BATCH = {"x-tandem-lane": "batch"}
_EXPLAIN = {"x-tandem-explain": "1"}
_LONG, _SHORT = 2000, 4


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("pools", "path"), [(("prefill", "decode"), "remote"), pytest.param(("mixed",), "local", marks=pytest.mark.nightly)]
)
def test_batch_answers_yield_a_seat_and_lose_no_token(running: Cluster, pools: tuple[str, ...], path: str) -> None:
    # The last worker decodes, two sequences at a time.
    *_, decoder = workers = [running.worker(pool, pool, "--max-num-seqs", "2") for pool in pools]
    gateway = running.gateway("gateway")
    running.wait_serving()
    bodies = [completion(40, salt, _LONG, stream=True) for salt in (1, 2)]

    until(lambda: _short(gateway.url, 9)[1] == path, f"a request on the path {path}")
    with Post(gateway.url, bodies[0], headers=_BATCH) as first, Post(gateway.url, bodies[1], headers=_BATCH) as second:
        first.wait_events(3)
        second.wait_events(3)
        answers = [send(gateway.url, completion(30, salt, _SHORT), headers=_EXPLAIN) for salt in (3, 4)]
        books = decoder.books()
        ended = [post.finish() for post in (first, second)]
    assert books.num_sequences == 2, "both batch answers, which filled the worker, were unfinished when others ended"
    assert [(answer.status, answer.path) for answer in answers] == [(200, path)] * 2
    assert [answer.text() for answer in ended] == [send(gateway.url, body).text() for body in bodies]
    facts = [answer.about() for answer in ended]
    assert sum(fact.get("preemptions", 0) for fact in facts) >= 1, facts
    assert all(fact["paused_ms"] > 0 for fact in facts if "preemptions" in fact)
    assert [(answer.text(), path) for answer in answers] == [_short(gateway.url, salt) for salt in (3, 4)]
    yielded = [each for answer in answers for each in answer.about()["yielded"]]
    assert {each["lane"] for each in yielded} == {"batch"}
    assert sum(each["sequences"] for each in yielded) == sum(fact.get("preemptions", 0) for fact in facts)
    assert all(40 < each["tokens"] < each["sequences"] * (40 + _LONG) and each["blocks"] for each in yielded), yielded

    with Post(gateway.url, bodies[0]) as first, Post(gateway.url, bodies[1]) as second:
        first.wait_events(3)
        second.wait_events(3)
        with Post(gateway.url, completion(30, 5, _SHORT, stream=True), headers=_EXPLAIN) as third:
            for post in (first, second):
                post.finish()
            fact = third.finish().about()
    (waits,) = fact["waits"]
    assert {wait["cause"] for wait in waits} & {"seat", "no_room"}, "two that are as urgent had both seats"
    assert all(wait["ms"] > 0 for wait in waits) and fact["yielded"] == []
    for worker in workers:
        until(worker.is_idle, f"an idle {worker.name}")
    running.stop()
    assert running.complaints() == []


def _short(url: str, salt: int) -> tuple[str, str]:
    """Return the text and the path of a short interactive answer."""
    answer = send(url, completion(30, salt, _SHORT))
    return answer.text(), answer.path


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_a_paused_answer_can_be_cancelled_and_survives_its_worker(running: Cluster) -> None:
    prefill, decoder = (running.worker(pool, pool, "--max-num-seqs", "1") for pool in ("prefill", "decode"))
    gateway = running.gateway("gateway")
    running.wait_serving()
    until(lambda: _short(gateway.url, 9)[1] == "remote", "a request on two workers")
    bodies = [completion(40, salt, 1200, stream=True) for salt in (1, 2)]
    expected = [send(gateway.url, body | {"cache_salt": "undisturbed"}).text() for body in bodies]

    with Post(gateway.url, bodies[0], headers=_BATCH) as paused:
        paused.wait_events(3)
        urgent = Post(gateway.url, bodies[1])
        urgent.wait_events(3)
        assert decoder.books().num_sequences == 2, "one has the only seat, so the other is paused"
    with urgent:
        until(lambda: decoder.books().num_sequences <= 1, "the end of the cancelled one")
        assert urgent.finish().text() == expected[1]
    until(decoder.is_idle, "an idle decode worker")
    assert running.complaints() == []

    with Post(gateway.url, bodies[0], headers=_BATCH) as paused:
        paused.wait_events(3)
        with Post(gateway.url, bodies[1]) as urgent:
            urgent.wait_events(3)
            assert decoder.books().num_sequences == 2
            decoder.kill()
            answers = [post.finish() for post in (paused, urgent)]
    assert [(answer.error(), answer.text()) for answer in answers] == [(None, text) for text in expected]
    assert [answer.about()["attempts"] for answer in answers] == [2, 2]
    until(prefill.is_idle, "an idle prefill worker")
