"""Test that a client that disconnects in any state leaves nothing behind on the workers and in the gateway."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.e2e.gateway.http import LONG_ANSWER, LONG_PROMPT, Post, completion
from tests.e2e.gateway.pair import NUM_SEQS, Pair
from tests.e2e.gateway.processes import until

NUM_TRIES = 8
GLIMPSE_S = 5.0


def leave_when(calm: Pair, seen: Callable[[], bool], salt: int, max_tokens: int = 8, **body: object) -> None:
    """Disconnect in a state that lasts a moment: on a busy machine the check may find it too late, and then another
    prompt is sent.
    """
    for salt_of_try in range(salt, salt + NUM_TRIES):
        with Post(calm.gateway.url, completion(LONG_PROMPT, salt_of_try, max_tokens, **body)):
            until_s = time.monotonic() + GLIMPSE_S
            while time.monotonic() < until_s:
                if seen():
                    return
        calm.wait_idle()
    pytest.fail(f"never seen in {NUM_TRIES} requests")


@pytest.fixture(autouse=True)
def _nothing_left(calm: Pair) -> Iterator[None]:
    """Check that nothing is held before and after the test, and that the next request is served."""
    calm.wait_idle()
    yield
    calm.wait_idle()
    answer = calm.complete(20, 1)
    assert answer.status == 200 and answer.path == "remote"


def test_half_prefilled(calm: Pair) -> None:
    with Post(calm.whole.url, completion(LONG_PROMPT, 10, 8)):
        until(lambda: calm.decode.books().num_table_blocks > 0, "a prefill under way")
    assert calm.prefill.is_idle(), "this gateway does not split"


@pytest.mark.parametrize("stream", [False, True])
def test_half_transferred(calm: Pair, *, stream: bool) -> None:
    def half_transferred() -> bool:
        return calm.is_pulling() and calm.prefill.books().num_sequences == 1

    leave_when(calm, half_transferred, 200 + 10 * stream, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_decoding(calm: Pair, *, stream: bool) -> None:
    with Post(calm.gateway.url, completion(40, 30 + stream, LONG_ANSWER, stream=stream)) as post:
        if stream:
            post.wait_events(20)
        until(lambda: calm.decode.books().num_table_blocks > 4, "decoding")


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(calm: Pair, *, stream: bool) -> None:
    """The client disconnects while the prompt is computed, while its KV is transferred, and while all choices are
    decoded.
    """
    several = {"n": 3, "temperature": 1, "stream": stream}
    leave_when(calm, lambda: calm.prefill.books().num_leased_blocks > 0, 220 + 10 * stream, **several)
    calm.wait_idle()
    leave_when(calm, calm.is_pulling, 240 + 10 * stream, **several)
    calm.wait_idle()
    with Post(calm.gateway.url, completion(40, 74 + stream, LONG_ANSWER, **several)):
        until(lambda: calm.decode.books().num_sequences == 3, "three choices")


def test_stream_that_is_not_read(calm: Pair) -> None:
    with Post(calm.gateway.url, completion(40, 40, LONG_ANSWER, stream=True), receive_buffer=4096):
        until(lambda: calm.decode.books().num_table_blocks > 100, "a long answer that nobody reads")


def test_stream_that_is_not_read_until_the_worker_has_ended(calm: Pair) -> None:
    with Post(calm.gateway.url, completion(40, 41, 1500, stream=True), receive_buffer=4096):
        until(lambda: calm.decode.books().num_table_blocks > 20, "a long answer that nobody reads")
        calm.wait_idle()


def test_queued(calm: Pair) -> None:
    with ExitStack() as stack:
        for salt in range(NUM_SEQS):
            running = stack.enter_context(Post(calm.gateway.url, completion(8, 50 + salt, LONG_ANSWER, stream=True)))
            running.wait_events(3)
        assert calm.decode.books().num_sequences == NUM_SEQS
        with (
            Post(calm.gateway.url, completion(8, 60, 8)),
            Post(calm.gateway.url, completion(8, 61, 8, stream=True)),
            Post(calm.gateway.url, completion(8, 62, 8, model="nobody")) as later,
        ):
            assert later.finish().status == 404, "a later request was answered, so those before it have come in"
        assert calm.decode.books().num_sequences == NUM_SEQS, "those in line never came in"
