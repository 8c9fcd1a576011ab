"""Test that a finished answer leaves no reference cycle: the garbage collector's pauses hold up every stream."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import SampledToken, Token
from tandem.core.ids import JobKey, RequestId
from tandem.gateway.http.exchange import Exchange
from tandem.gateway.serving.completions import LARGE_BODY_BYTES
from tandem.gateway.telemetry.request_recorder import RequestRecording
from tests.unit.gateway.conftest import Front, ScriptedStream

NUM = 8
KEY = JobKey(RequestId("r"), 1)
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}


@pytest.fixture(scope="module")
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


def num_alive() -> int:
    """Count the live objects of the two classes that hold on to all other objects of an answer, except frozen ones."""
    return sum(type(each) in (Exchange, RequestRecording) for each in gc.get_objects())


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ending", ["well", "large", "refused", "broken off", "too long", "not JSON"])
def test_an_answer_leaves_no_reference_cycle(front: Front, http: httpx.Client, ending: str, *, stream: bool) -> None:
    front.instant()
    if ending == "refused":
        front.dispatch.script = _refuse
    elif ending == "broken off":
        front.dispatch.script = lambda _: ScriptedStream([Token(KEY, 0, SampledToken(40))])
    body = json.dumps({**BODY, "stream": stream}).encode()
    if ending == "large":
        body = body[:-1] + b" " * LARGE_BODY_BYTES + b"}"
    elif ending == "too long":
        body = json.dumps({**BODY, "messages": [{"role": "user", "content": "7" * LARGE_BODY_BYTES}]}).encode()
    elif ending == "not JSON":
        body = b"{"
    before = num_alive()
    for _ in range(NUM):
        response = http.post("/v1/chat/completions", content=body)
        assert (response.status_code == 200) == (ending in ("well", "large") or (stream and ending == "broken off"))
    # The server keeps the last message of its connection, and deferred telemetry of an answer may still be queued.
    end = time.monotonic() + 20.0
    while num_alive() - before > 2:
        assert time.monotonic() < end, num_alive() - before
        time.sleep(0.05)


def _refuse(*_: Any) -> Any:
    raise TandemError(ErrorKind.OVERLOADED, "full")
