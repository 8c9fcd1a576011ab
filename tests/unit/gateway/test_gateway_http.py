"""Test the app on a real server: refusals in OpenAI's error format, and what a leaving client sets free."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any

import httpx
import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import LaneYield, Pauses
from tandem.core.lane import Lane
from tandem.core.request_stages import Stage, Wait, WaitCause
from tandem.orchestration.phase_ledger import PhaseLedger
from tests.unit.gateway.conftest import Endless

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
URL = "/v1/chat/completions"
Front = Any  # the fixtures' class lives in conftest


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"] and response.headers["x-content-type-options"] == "nosniff"
    return dict(body["error"])


def tandem_facts(response: httpx.Response) -> dict[str, Any]:
    """Return the field `tandem` of a whole answer or of a stream's last chunk."""
    last = response.text.removesuffix("data: [DONE]\n\n").strip().rpartition("data: ")[2]
    facts: dict[str, Any] = json.loads(last)["tandem"]
    return facts


@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"messages": None}, 400, "invalid_request", "messages"),
        ({"messages": []}, 400, "invalid_request", "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, 400, "invalid_request", "messages[0].content"),
        ({"model": "nothing"}, 404, "model_not_found", "model"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, 400, "context_length_exceeded", "messages"),
        ({"messages": [{"role": "user", "content": "a " * 1500}]}, 400, "context_length_exceeded", "messages"),
        ({"max_tokens": 5000}, 400, "context_length_exceeded", "messages"),
        ({"n": 0}, 400, "invalid_request", "n"),
        ({"temperature": "hot"}, 400, "invalid_request", "temperature"),
        ({"tools": [{}]}, 400, "invalid_request", "tools[0].type"),
    ],
)
def test_bad_requests(
    front: Front, http: httpx.Client, change: dict[str, Any], status: int, code: str, param: str
) -> None:
    response = http.post(URL, json=CHAT | change)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error"
    assert front.dispatch.requests == []


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'"x"', b'{"model":"tiny\xc3"}'])
def test_invalid_json_bodies_are_refused(http: httpx.Client, body: bytes) -> None:
    response = http.post(URL, content=body)
    assert (response.status_code, error_of(response)["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/", 404, "not_found"),
        ("GET", "/v1/models/", 404, "not_found"),
        ("GET", "/v1/models/nothing", 404, "model_not_found"),
        ("GET", URL, 405, "method_not_allowed"),
        ("DELETE", "/v1/models/tiny", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_routes_that_do_not_exist(http: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    response = http.request(method, path)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert ("allow" in response.headers) == (status == 405)


def test_a_10_mb_body_is_refused_and_the_connection_lives_on(front: Front) -> None:
    with Raw(front.port) as raw:
        raw.send(post(b"x" * 10_000_000))
        status, headers, body = raw.response()
        assert status == 413
        assert json.loads(body)["error"]["code"] == "body_too_large"
        assert headers["x-request-id"] and headers["x-content-type-options"] == "nosniff"
        raw.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert raw.response()[0] == 200


def test_a_large_body_is_refused_before_it_is_sent(front: Front) -> None:
    with Raw(front.port) as raw:
        raw.send(post(b"", length=1 << 30))
        assert raw.response()[0] == 413


def test_a_body_of_unknown_length_is_refused_when_it_is_over_the_limit(front: Front) -> None:
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with Raw(front.port) as raw:
        raw.send(b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % URL.encode())
        raw.send(chunk * 17)
        assert raw.response()[0] == 413
        raw.send(b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert raw.response()[0] == 200


def test_a_client_that_disconnects_while_sending_leaves_no_request(front: Front, http: httpx.Client) -> None:
    with Raw(front.port) as raw:
        raw.send(post(b'{"model"', length=1000))
    assert http.get("/health").status_code == 200
    assert front.dispatch.requests == []


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_refusals_of_the_dispatch(front: Front, http: httpx.Client, kind: ErrorKind) -> None:
    def refuse(request: object) -> None:
        raise TandemError(kind, "no", param="p", retry_after_s=1.2)

    front.dispatch.script = refuse
    response = http.post(URL, json=CHAT)
    assert response.status_code == kind.http
    assert error_of(response) == {"message": "no", "type": kind.openai_type, "param": "p", "code": kind.value}
    assert response.headers["retry-after"] == "2"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_has_its_status(front: Front, http: httpx.Client, stream: bool) -> None:
    tokens = front.stream(TandemError(ErrorKind.WORKER_LOST, "the worker is gone"))
    response = http.post(URL, json=CHAT | {"stream": stream})
    assert (response.status_code, error_of(response)["code"]) == (502, "worker_lost")
    assert "retry-after" not in response.headers
    assert tokens.closed.wait(20) and tokens.num_closes == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", [RuntimeError("secret"), None])
def test_internal_errors_reveal_no_details(
    front: Front, http: httpx.Client, failure: Exception | None, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = front.stream(*([failure] if failure else []))  # Without a failure the stream simply has no end event.
    response = http.post(URL, json=CHAT | {"stream": stream}, headers={"x-request-id": "abc"})
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal"
    assert "secret" not in response.text
    assert tokens.closed.wait(20) and tokens.num_closes == 1
    if failure:
        assert "abc" in response.text
        assert "request abc failed" in caplog.text


@pytest.mark.parametrize(
    ("failure", "code"),
    [(TandemError(ErrorKind.KV_LOST, "lost"), "kv_lost"), (RuntimeError("secret"), "internal"), (None, "internal")],
)
def test_an_error_after_the_first_byte(front: Front, http: httpx.Client, failure: Exception | None, code: str) -> None:
    tokens = front.stream("The capital", *([failure] if failure else []))
    response = http.post(URL, json=CHAT | {"stream": True})
    assert response.status_code == 200
    events = response.text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == code
    assert "[DONE]" not in response.text
    assert "secret" not in response.text
    assert tokens.closed.wait(20) and tokens.num_closes == 1
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("path", [URL, "/nothing", "/health", "/v1/models"])
def test_request_ids_are_echoed(front: Front, http: httpx.Client, path: str) -> None:
    front.answer("x")
    for given, echoed in [("my-id_1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)]:
        response = http.post(path, json=CHAT, headers={"x-request-id": given})
        assert (response.headers["x-request-id"] == given) == echoed
        assert 1 <= len(response.headers["x-request-id"]) <= 128
    assert all("my-id_1" not in request.id for request in front.dispatch.requests)


def test_without_any_model_the_error_is_unavailable_and_not_not_found(front: Front, http: httpx.Client) -> None:
    front.dispatch.served, front.dispatch.missing = [], "no worker is registered"
    response = http.post(URL, json=CHAT)
    assert response.status_code == 503 and "no worker is registered" in error_of(response)["message"]
    assert response.headers["retry-after"] == "1"


def test_a_path_that_no_header_can_carry(front: Front, http: httpx.Client) -> None:
    front.answer("x", path="fallback;reason=a\r\nevil: ü")
    response = http.post(URL, json=CHAT)
    assert response.headers["x-tandem-path"] == "fallback;reason=a??evil: ??"
    assert "evil" not in response.headers


@pytest.mark.parametrize("is_streamed", [False, True])
def test_placement_reasons_are_sent_on_request(front: Front, http: httpx.Client, is_streamed: bool) -> None:
    def tandem_field(headers: dict[str, str]) -> dict[str, Any]:
        front.answer("x", path="local;reason=short_prompt")
        response = http.post(URL, json={**CHAT, "stream": is_streamed}, headers=headers)
        assert response.headers["x-tandem-path"] == "local;reason=short_prompt"
        return tandem_facts(response)

    assert tandem_field({"x-tandem-explain": "1"})["reasons"] == [{"prefill": "p1", "decode": "d1"}]
    assert tandem_field({}).keys() == tandem_field({"x-tandem-explain": "0"}).keys() == {"path", "attempts"}
    refused = http.post(URL, json=CHAT, headers={"x-tandem-explain": "yes"})
    assert refused.status_code == 400 and error_of(refused)["param"] == "x-tandem-explain"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_reports_preemptions(
    front: Front, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    monkeypatch.setattr(PhaseLedger, "pauses", Pauses(2, 1.2345678))
    front.answer("x")
    facts = tandem_facts(http.post(URL, json={**CHAT, "stream": is_streamed}))
    assert facts == {"path": "remote", "attempts": 1, "preemptions": 2, "paused_ms": 1234.568}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_explains_its_waits_on_request(
    front: Front, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    waits = (
        Wait(Stage.QUEUE, WaitCause.TURN, 0.0009),
        Wait(Stage.QUEUE, WaitCause.NO_ROOM, 0.25),
        Wait(Stage.PREFILL_QUEUE, WaitCause.PROMPTS_AHEAD, 1.2345678, 4096),
    )
    monkeypatch.setattr(PhaseLedger, "waits", waits)
    monkeypatch.setattr(PhaseLedger, "yields", (LaneYield(Lane.BATCH, 2, 812, 51),))
    front.answer("x")
    facts = tandem_facts(http.post(URL, json={**CHAT, "stream": is_streamed}, headers={"x-tandem-explain": "1"}))
    assert facts["waits"] == [
        [
            {"stage": "queue", "cause": "no_room", "ms": 250.0},
            {"stage": "prefill_queue", "cause": "prompts_ahead", "ms": 1234.568, "tokens_ahead": 4096},
        ]
    ]
    assert facts["yielded"] == [{"lane": "batch", "sequences": 2, "tokens": 812, "blocks": 51}]


def test_a_whole_answer_has_a_timing_header(front: Front, http: httpx.Client) -> None:
    front.answer("x")
    answer = http.post(URL, json=CHAT, headers={"x-tandem-timing": "1"})
    timing = answer.json()["tandem"]["timing"]
    header_timing = dict(re.findall(r"(\w+);dur=([0-9.e-]+)(?:, |$)", answer.headers["x-tandem-timing"]))
    assert {f"{name}_ms": float(ms) for name, ms in header_timing.items()} | {
        "first_token_ms": timing["first_token_ms"]
    } == timing
    assert {*header_timing} == {*(stage.value for stage in Stage), "total"}
    assert all(round(ms, 3) == ms for ms in timing.values())
    for refused in (
        http.post(URL, json=CHAT | {"model": "none"}, headers={"x-tandem-timing": "1"}),
        http.post(URL, json=CHAT, headers={"x-tandem-timing": "0"}),
    ):
        assert "x-tandem-timing" not in refused.headers and "timing" not in refused.text


@pytest.mark.parametrize(
    "given", ["00-zz-cd-01", "01", "x" * 5000, f"00-{'0' * 32}-{'cd' * 8}-01", f"00-{'ab' * 16}-{'cd' * 8}-01"]
)
def test_a_valid_trace_context_is_passed_on_without_tracing(front: Front, http: httpx.Client, given: str) -> None:
    front.answer("x")
    assert http.post(URL, json=CHAT, headers={"traceparent": given}).status_code == 200
    passed_on = front.dispatch.requests[-1].traceparent
    assert passed_on == (given if given.startswith("00-abab") else "")


def test_a_session_is_named_by_a_header_or_by_the_user(front: Front, http: httpx.Client) -> None:
    for headers, body, session in (
        ({"x-tandem-session": "s1"}, {"user": "alice"}, "s1"),
        ({}, {"user": "alice"}, "alice"),
        ({}, {}, ""),
    ):
        front.answer("x")
        assert http.post(URL, json={**CHAT, **body}, headers=headers).status_code == 200
        caller = front.dispatch.callers[-1]
        assert caller.session == session
        assert caller.tenant_session == (f"{caller.tenant.id} {session}" if session else "")


# What a leaving client sets free


def test_leaving_in_a_stream_closes_it_once(front: Front, http: httpx.Client) -> None:
    tokens = front.stream("The capital", asyncio.Event())
    with http.stream("POST", URL, json=CHAT | {"stream": True}) as response:
        assert "assistant" in next(response.iter_lines())
    assert tokens.closed.wait(20)
    assert http.get("/health").status_code == 200
    assert tokens.num_closes == 1


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_closes_it_once(front: Front, http: httpx.Client, stream: bool) -> None:
    tokens = front.stream(asyncio.Event())
    leave_once_open(front, stream=stream)
    assert tokens.closed.wait(20)
    assert http.get("/health").status_code == 200
    assert tokens.num_closes == 1


def test_leaving_while_the_request_is_queued(front: Front) -> None:
    front.dispatch.hold_open = True
    leave_once_open(front)
    assert front.dispatch.open_cancelled.wait(20)


def test_leaving_while_a_whole_answer_is_collected(front: Front) -> None:
    tokens = front.stream("The capital", asyncio.Event())
    leave_once_open(front)
    assert tokens.closed.wait(20) and tokens.num_closes == 1


def test_leaving_without_reading_closes_a_stream_that_is_blocked_on_its_client(front: Front) -> None:
    tokens = Endless()
    front.dispatch.script = lambda request: tokens
    # With the alternatives of each, few tokens fill the buffers between the two.
    much = CHAT | {"stream": True, "logprobs": True, "top_logprobs": 20}
    with Raw(front.port, receive_buffer=4096) as raw:
        raw.send(post(json.dumps(much).encode()))
        assert raw.socket.recv(1000)
        tokens.wait_until_blocked()
        assert not tokens.closed.is_set()
    assert tokens.closed.wait(20) and tokens.num_closes == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_request_at_once(front: Front, http: httpx.Client, stream: bool) -> None:
    # The stream would go on: only its close ends this test.
    tokens = front.stream("The capital of France", asyncio.Event())
    response = http.post(URL, json=CHAT | {"stream": stream, "stop": ["ital o", "never"]})
    text = response.text
    assert '"finish_reason":"stop"' in text
    assert "ital" not in text
    assert tokens.closed.wait(20) and tokens.num_closes == 1
    if not stream:
        body = response.json()
        assert body["choices"][0]["message"]["content"] == "The cap"
        assert "prompt_tokens_details" in body["usage"]


def test_tokens_are_sent_as_they_arrive(front: Front, http: httpx.Client) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    words = ["The", " capital", " of"]
    front.stream(words[0], gates[0], words[1], gates[1], words[2], front.finished())
    seen = ""
    with http.stream("POST", URL, json=CHAT | {"stream": True}) as response:
        lines = response.iter_lines()
        for word, gate in zip(words, [*gates, None], strict=True):
            while not seen.endswith(word):
                line = next(lines).removeprefix("data: ")
                if line:
                    seen += json.loads(line)["choices"][0]["delta"].get("content", "")
            if gate:
                front.let(gate)
        assert [line for line in lines if line][-1] == "data: [DONE]"


def leave_once_open(front: Front, *, stream: bool = False) -> None:
    """Send a request and hang up as soon as the dispatch opens it."""
    with Raw(front.port) as raw:
        raw.send(post(json.dumps(CHAT | {"stream": stream}).encode()))
        front.dispatch.opening.get(timeout=20)


def post(body: bytes, length: int | None = None) -> bytes:
    head = f"POST {URL} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body) if length is None else length}\r\n\r\n"
    return head.encode() + body


class Raw:
    """Own a raw connection of which the test sees every byte."""

    def __init__(self, port: int, receive_buffer: int = 0) -> None:
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(20)
        self.socket.connect(("127.0.0.1", port))
        self._reader = self.socket.makefile("rb")

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def response(self) -> tuple[int, dict[str, str], bytes]:
        status = int(self._reader.readline().split()[1])
        headers: dict[str, str] = {}
        while line := self._reader.readline().strip().decode():
            name, _, value = line.partition(": ")
            headers[name] = value
        return status, headers, self._reader.read(int(headers["content-length"]))
