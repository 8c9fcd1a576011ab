"""Test `tandem chat` against a scripted server: answers, errors at every stage, interrupts by the user."""

from __future__ import annotations

import contextlib
import json
import signal
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import main
from tandem.wire.tls import TlsFiles
from tests.certificates import Authority
from tests.unit.http_server import QuietHandler, serving

Answer = Callable[[QuietHandler], None]
Chat = Callable[..., int]


class Script:
    """Scripted answers, in order; `requests` holds the bodies of the received requests. `listing`: body of the list of
    models, if it is not to be that of `models`."""

    server: ThreadingHTTPServer

    def __init__(self) -> None:
        self.models = [{"id": "small"}]
        self.listing = b""
        self.key: str | None = None
        self.answers: list[Answer] = []
        self.requests: list[dict[str, Any]] = []
        self.url = ""


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            if script.key is not None and self.headers["authorization"] != f"Bearer {script.key}":
                self.answer(401, b"{}")
            else:
                self.answer(200, script.listing or json.dumps({"data": script.models}).encode())

        def do_POST(self) -> None:
            script.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            script.answers.pop(0)(self)

    with serving(Handler) as server:
        script.server, script.url = server, f"http://127.0.0.1:{server.server_port}"
        yield script


def send(status: int, body: bytes) -> Answer:
    return lambda handler: handler.answer(status, body)


def stream(*events: object, then: Answer = lambda _: None) -> Answer:
    """Send server-sent events, which the end of the connection ends."""

    def answer(handler: QuietHandler) -> None:
        handler.send_response(200)
        handler.send_header("x-tandem-path", "remote")
        handler.end_headers()
        for event in events:
            text = event if isinstance(event, str) else json.dumps(event)
            handler.wfile.write(f"data: {text}\n\n".encode())
        handler.wfile.flush()
        then(handler)

    return answer


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


@pytest.fixture
def chat(script: Script, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Return a function that runs the command with these lines as its input, and with flags."""

    def run(lines: Sequence[str], *flags: str) -> int:
        typed = iter(lines)

        def read(_prompt: str) -> str:
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", read)
        return main(["chat", "--url", script.url, *flags])

    return run


def test_a_conversation_grows_and_starts_over(script: Script, chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    script.answers = [stream(delta("Good "), delta("day"), "[DONE]") for _ in range(3)]
    assert chat(["Hello", "", "And?", "/new", "Again", "/quit", "never sent"]) == 0
    contents = [[message["content"] for message in request["messages"]] for request in script.requests]
    assert contents == [["Hello"], ["Hello", "Good day", "And?"], ["Again"]]
    assert all(request["model"] == "small" and request["stream"] for request in script.requests)
    out = capsys.readouterr().out
    assert out.count("Good day") == 3 and "[path: remote]" in out


def test_the_temperature_is_the_model_s_own_unless_it_is_given(script: Script, chat: Chat) -> None:
    script.answers = [stream(delta("Yes"), "[DONE]") for _ in range(2)]
    assert chat(["One?"]) == 0
    assert chat(["Two?"], "--temperature", "0") == 0
    assert ["temperature" in request for request in script.requests] == [False, True]
    assert script.requests[1]["temperature"] == 0


@pytest.mark.parametrize("value", ["nan", "-0.1", "2.1", "warm"])
def test_a_temperature_out_of_range_is_refused(value: str, chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        chat([], "--temperature", value)
    assert "argument --temperature" in capsys.readouterr().err


def test_the_key_is_read_from_the_environment(
    script: Script, chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script.key = "tdm_one"
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    assert chat([]) == 1
    assert "set TANDEM_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("TANDEM_API_KEY", "tdm_one")
    assert chat(["/quit"]) == 0


@pytest.mark.parametrize(
    ("answer", "error_text"),
    [
        (send(503, b'{"error": {"message": "no worker yet"}}'), "[failed: no worker yet]"),
        (send(502, b"<html>bad gateway</html>"), "[failed: <html>bad gateway</html>]"),
        (stream({"error": {"message": "worker lost"}}), "[failed: worker lost]"),
    ],
)
def test_a_failed_answer_removes_its_question(
    answer: Answer, error_text: str, script: Script, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    script.answers = [answer, stream(delta("fine"), "[DONE]")]
    assert chat(["one", "two"]) == 0
    assert [message["content"] for message in script.requests[1]["messages"]] == ["two"]
    out, error = capsys.readouterr()
    assert error_text in error and "fine" in out


def test_an_error_in_mid_stream_keeps_the_partial_answer(
    script: Script, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    script.answers = [stream(delta("Once upon"), {"error": {"message": "worker lost"}}), stream(delta("on"), "[DONE]")]
    assert chat(["tell", "go on"]) == 0
    assert [message["content"] for message in script.requests[1]["messages"]] == ["tell", "Once upon", "go on"]
    out, error = capsys.readouterr()
    assert "Once upon" in out and "[failed: worker lost]" in error


@pytest.mark.parametrize("event", ["{", "[" * 100_000, "[]", "5", '{"choices": [5]}', '{"choices": [{"text": "a"}]}'])
def test_an_event_that_is_none_of_a_chat_ends_the_answer(
    script: Script, chat: Chat, capsys: pytest.CaptureFixture[str], event: str
) -> None:
    script.answers = [stream(delta("Once upon"), event), stream(delta("on"), "[DONE]")]
    assert chat(["tell", "go on"]) == 0
    assert [message["content"] for message in script.requests[1]["messages"]] == ["tell", "Once upon", "go on"]
    assert "[failed: not an event of a chat" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_conversation(
    script: Script, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    # A shell's background jobs are started with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt_and_hold(handler: QuietHandler) -> None:
        """Send SIGINT until the client hangs up: a signal just before a thread begins to wait takes effect only after
        the wait, so one may not be enough."""
        handler.connection.settimeout(5.0)
        while True:
            signal.pthread_kill(main_thread, signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                handler.connection.recv(1)
                return

    script.answers = [stream(delta("endless"), then=interrupt_and_hold), stream(delta("fine"), "[DONE]")]
    try:
        assert chat(["one", "two"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    out = capsys.readouterr().out
    assert "[stopped]" in out and "fine" in out and len(script.requests) == 2


def test_a_missing_gateway_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 1
    assert "tandem chat: no gateway answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_a_gateway_on_an_ipv6_address_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--host", "::1", "--port", "1"]) == 1
    assert "tandem chat: no gateway answers at http://[::1]:1" in capsys.readouterr().err


def test_a_url_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://[::1"]) == 2
    assert "tandem chat: --url http://[::1 is not a URL" in capsys.readouterr().err


def test_another_server_is_reported(script: Script, chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    script.listing = b"<html>It works!</html>"
    assert chat(["one"]) == 1
    assert f"{script.url}/v1/models returns no list of models" in capsys.readouterr().err


def test_a_gateway_with_tls_is_checked_by_its_ca_and_shown_a_certificate(
    script: Script, tmp_path: Path, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path / "ours")
    server, own = authority.issue_for_gateway("server", requires_client=True), authority.issue_for_gateway("client")
    context = TlsFiles.of_gateway(server).context()
    context.verify_mode = ssl.CERT_REQUIRED
    script.server.socket = context.wrap_socket(script.server.socket, server_side=True)
    script.url = script.url.replace("http://", "https://")
    trust = ("--ca-file", str(authority.ca))
    assert chat([], *trust, "--cert-file", own.tls_cert_file, "--key-file", own.tls_key_file) == 0
    assert chat([]) == 1
    assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err
    assert chat([], *trust) == 1, "it has no certificate"
    assert chat([], "--ca-file", "/nowhere") == 2
    assert "cannot use --ca-file" in capsys.readouterr().err


def test_a_gateway_without_a_model_is_reported(script: Script, chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    script.models = []
    assert chat(["one"]) == 1
    assert "serves no model yet" in capsys.readouterr().err
