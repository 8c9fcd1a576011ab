"""Test workers that are killed or stopped in any state, and a Redis that is lost: every request continues unchanged
where other workers are left, and the cluster recovers.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway.http import LONG_ANSWER, LONG_PROMPT, Answer, Post, begin_streams, completion, send
from tests.e2e.gateway.pair import NUM_SEQS, SETTINGS, Pair, start_pair
from tests.e2e.gateway.processes import Redis, cluster, redis_server, until

pytestmark = pytest.mark.timeout(240)

ANSWER = 600


@pytest.fixture(scope="module")
def redis() -> Iterator[Redis]:
    with redis_server() as redis:
        yield redis


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, redis: Redis, model: Path) -> Iterator[Pair]:
    with cluster(tmp_path_factory.mktemp("faults"), redis.url, model, *SETTINGS) as running:
        yield start_pair(running)


@pytest.fixture
def pair(running: Pair) -> Iterator[Pair]:
    """Check that the cluster is whole and idle before the test; afterwards restart every worker that the test ended."""
    running.wait_serving()
    running.wait_idle()
    yield running
    for name in ("prefill", "decode"):
        worker = getattr(running, name)
        if worker.exit_code is None:
            worker.signal(signal.SIGCONT)
        else:
            setattr(running, name, running.cluster.again(worker))
            getattr(running, name).wait_ready()
    running.wait_serving()
    running.wait_idle()
    assert running.cluster.log_lines("Traceback", "ERROR") == []


def expect(pair: Pair, *bodies: dict[str, Any]) -> list[str]:
    """Return the undisturbed answers to all bodies; none of their blocks is found again."""
    with ExitStack() as stack:
        salted = [body | {"cache_salt": "undisturbed"} for body in bodies]
        posts = [stack.enter_context(Post(pair.gateway.url, body)) for body in salted]
        return [post.finish().text() for post in posts]


def goes_on(answer: Answer, expected: str) -> None:
    """Check that each answer was migrated or retried once and equals the undisturbed one."""
    assert answer.error() is None, answer.error()
    assert answer.text() == expected
    assert answer.about()["attempts"] == 2, answer.about()


def prefilling(pair: Pair) -> bool:
    books = pair.prefill.books()
    return books.num_sequences > 0 and books.num_free_blocks < books.num_blocks


STATES: dict[str, Callable[[Pair], bool]] = {"prefilling": prefilling, "transferring": Pair.is_pulling}


@pytest.mark.parametrize("state", ["transferring", pytest.param("prefilling", marks=pytest.mark.nightly)])
def test_the_prefill_worker_is_killed(pair: Pair, state: str) -> None:
    body = completion(LONG_PROMPT, 800, 8, stream=state == "transferring")
    (expected,) = expect(pair, body)
    with Post(pair.gateway.url, body | {"cache_salt": state}) as post:
        until(lambda: STATES[state](pair), state)
        pair.prefill.kill()
        goes_on(post.finish(), expected)
    until(pair.decode.is_idle, "an idle decode worker")


@pytest.mark.nightly
def test_a_prefill_worker_killed_while_the_other_decodes_is_not_missed(pair: Pair) -> None:
    body = completion(40, 810, ANSWER)
    expected = send(pair.gateway.url, body).text()
    with Post(pair.gateway.url, body | {"stream": True}) as post:
        post.wait_events(10)
        pair.prefill.kill()
        answer = post.finish()
    assert answer.error() is None and answer.text() == expected
    fallback = pair.complete(20, 811)
    assert fallback.status == 200 and fallback.path == "fallback;reason=no_prefill_worker"


@pytest.mark.nightly
def test_the_decode_worker_is_killed_while_it_pulls(pair: Pair) -> None:
    body = completion(LONG_PROMPT, 820, 8)
    (expected,) = expect(pair, body)
    with Post(pair.gateway.url, body) as post:
        until(lambda: pair.is_pulling(), "a pull")
        pair.decode.kill()
        goes_on(post.finish(), expected)
    until(pair.prefill.is_idle, "an idle prefill worker")


def test_the_decode_worker_is_killed_while_it_decodes_and_others_wait_in_line(pair: Pair) -> None:
    """The remaining worker serves them all."""
    bodies = [completion(8, 830 + salt, ANSWER, stream=True) for salt in range(NUM_SEQS)]
    expected = expect(pair, *bodies)
    with ExitStack() as stack:
        posts = begin_streams(stack, pair.gateway.url, bodies, 5)
        waiting = stack.enter_context(Post(pair.gateway.url, completion(8, 840, 8)))
        pair.decode.kill()
        for post, text in zip(posts, expected, strict=True):
            goes_on(post.finish(), text)
        answer = waiting.finish()
    assert answer.status == 200 and answer.path == "fallback;reason=no_decode_worker"
    until(pair.prefill.is_idle, "an idle prefill worker")


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_that_is_suspended_and_resumed_late_harms_no_request(pair: Pair, role: str) -> None:
    sleeper = pair.prefill if role == "prefill" else pair.decode
    body = completion(LONG_PROMPT, 850, 40)
    (expected,) = expect(pair, body)
    with Post(pair.gateway.url, body | {"cache_salt": role}) as post:
        until(lambda: pair.is_pulling() and prefilling(pair), "a hand-off under way")
        sleeper.signal(signal.SIGSTOP)
        goes_on(post.finish(), expected)
    sleeper.signal(signal.SIGCONT)
    pair.wait_idle()
    pair.wait_serving()
    assert sleeper.exit_code is None


def test_redis_is_lost_and_recovers(pair: Pair, redis: Redis) -> None:
    def complaints() -> list[str]:
        return [line for line in pair.gateway.log.splitlines() if "Redis fails" in line]

    before = len(complaints())
    redis.stop()
    until(lambda: len(complaints()) > before, "a word about it")
    assert pair.complete(20, 860).path == "remote"
    pair.prefill.kill()
    pair.prefill = pair.cluster.again(pair.prefill)
    pair.prefill.wait_ready()
    assert pair.complete(20, 861).path.startswith("fallback"), "the new life cannot be found yet"
    redis.start()
    pair.wait_serving()
    assert len(complaints()) == before + 1, "said once"


@pytest.mark.nightly
def test_a_worker_drains_on_a_stop_signal(pair: Pair) -> None:
    with Post(pair.gateway.url, completion(40, 870, 400, stream=True)) as post:
        post.wait_events(5)
        pair.decode.signal(signal.SIGTERM)
        until(lambda: pair.complete(8, 871).path.startswith("fallback"), "a gateway that goes elsewhere")
        answer = post.finish()
    assert answer.error() is None and answer.events()[-1] is None
    assert pair.decode.wait() == 0


@pytest.mark.nightly
def test_a_gateway_that_ends_cuts_a_stream_that_stands_still(pair: Pair) -> None:
    gateway = pair.cluster.gateway("patient", "--worker-timeout-s", "60", "--gateway-drain-s", "1")
    gateway.wait_serving()
    with Post(gateway.url, completion(40, 880, LONG_ANSWER, stream=True)) as post:
        post.wait_events(5)
        pair.decode.signal(signal.SIGSTOP)
        gateway.signal(signal.SIGTERM)
        error = post.finish().error()
    assert error is not None and error["code"] == "draining"
    assert gateway.wait() == 0
