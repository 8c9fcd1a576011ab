"""Of an answer that is over nothing is left that only the garbage collector finds: its looks hold up every stream."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import SampledToken, Token
from tandem.core.ids import JobKey, RequestId
from tandem.gateway.http.exchange import Exchange
from tandem.gateway.telemetry.request_recorder import RequestRecording
from tests.unit.gateway.conftest import Front, ScriptedStream

NUM = 8
KEY = JobKey(RequestId("r"), 1)
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}


@pytest.fixture(scope="module")
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


def num_alive() -> int:
    """Of the two that hold on to all else of an answer; those that are frozen are not among them."""
    return sum(type(each) in (Exchange, RequestRecording) for each in gc.get_objects())


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["well", "refused", "broken off"])
def test_an_answer_leaves_no_circle(front: Front, http: httpx.Client, how: str, *, stream: bool) -> None:
    front.instant()
    if how == "refused":
        front.dispatch.script = _refuse
    elif how == "broken off":
        front.dispatch.script = lambda _: ScriptedStream([Token(KEY, 0, SampledToken(40))])
    before = num_alive()
    for _ in range(NUM):
        told = http.post("/v1/chat/completions", json={**ASKED, "stream": stream})
        assert (told.status_code == 200) == (how == "well" or (stream and how == "broken off"))
    # The server keeps what its connection came with last, and what is told of an answer may wait for others.
    end = time.monotonic() + 20.0
    while num_alive() - before > 2:
        assert time.monotonic() < end, num_alive() - before
        time.sleep(0.05)


def _refuse(*_: Any) -> Any:
    raise TandemError(ErrorKind.OVERLOADED, "full")
