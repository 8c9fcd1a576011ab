"""Test streams that wait for their first token: comments keep them alive, and errors keep their proper form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tandem.core.errors import ErrorKind, TandemError

Front = Any  # the fixtures' class lives in conftest
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
}
BEAT = ": heartbeat"


@pytest.mark.parametrize("path", BODIES)
def test_a_waiting_stream_sends_heartbeats_until_its_first_token(front: Front, http: httpx.Client, path: str) -> None:
    gate = asyncio.Event()
    tokens = front.stream(gate, "Paris", 1, front.finished())
    with http.stream("POST", path, json=BODIES[path] | {"stream": True}) as response:
        assert response.status_code == 200
        assert "x-tandem-path" not in response.headers
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [BEAT, ""] * 2
        front.let(gate)
        rest = [line for line in lines if line and line != BEAT]
    assert rest[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in rest[:-1]]
    texts = [choice.get("delta", {}).get("content", choice.get("text")) for c in chunks for choice in c["choices"]]
    assert "".join(text or "" for text in texts) == "Paris"
    assert chunks[-1]["tandem"] == {"path": "remote", "attempts": 1}
    assert tokens.closed.wait(20) and tokens.num_closes == 1


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("kind", [ErrorKind.NO_WORKER, ErrorKind.DEADLINE, ErrorKind.SLO_MISS])
def test_an_error_after_a_heartbeat_is_an_event_and_nothing_follows(
    front: Front, http: httpx.Client, path: str, kind: ErrorKind
) -> None:
    gate = asyncio.Event()
    tokens = front.stream(gate, TandemError(kind, "no place"))
    with http.stream("POST", path, json=BODIES[path] | {"stream": True}) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert next(lines) == BEAT
        front.let(gate)
        rest = [line for line in lines if line and line != BEAT]
    (event,) = rest
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == kind.value
    assert tokens.closed.wait(20) and tokens.num_closes == 1


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_has_no_heartbeats(front: Front, http: httpx.Client, path: str) -> None:
    """The status of a whole answer is not known before its end."""
    gate = asyncio.Event()
    front.stream(gate, TandemError(ErrorKind.NO_WORKER, "no place"))
    front.let(gate)
    response = http.post(path, json=BODIES[path])
    assert response.status_code == 503 and response.headers["retry-after"] == "1"


def test_a_client_that_leaves_between_heartbeats_leaves_nothing(front: Front, http: httpx.Client) -> None:
    tokens = front.stream(asyncio.Event())
    with http.stream("POST", "/v1/completions", json=BODIES["/v1/completions"] | {"stream": True}) as response:
        assert next(response.iter_lines()) == BEAT
    assert tokens.closed.wait(20) and tokens.num_closes == 1


def test_several_prompts_have_heartbeats_until_the_first_token_of_any(front: Front, http: httpx.Client) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    streams = iter([front.stream(gate, "a", front.finished()) for gate in gates])
    front.dispatch.script = lambda request: next(streams)
    body = BODIES["/v1/completions"] | {"stream": True, "prompt": ["x", "y"]}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines) == BEAT
        for gate in gates:
            front.let(gate)
        assert [line for line in lines if line][-1] == "data: [DONE]"
