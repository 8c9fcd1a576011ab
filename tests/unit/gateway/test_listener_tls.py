"""Test TLS at both front ends: certificates of either side, files that change while requests run, and clients that
speak another protocol than the port.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import uvloop
from tokenizers import Tokenizer

from tandem.core.config import GatewayConfig
from tandem.gateway.context.interfaces import ServedModel
from tandem.gateway.http.protocol_limits import HttpLimits
from tandem.gateway.text.text_model import TextModel
from tandem.wire.channels import CHANNEL_OPTIONS
from tandem.wire.gen import inference_pb2 as pb
from tandem.wire.gen.inference_pb2_grpc import InferenceStub
from tandem.wire.tls import TlsFiles
from tests.certificates import Authority
from tests.unit.gateway.conftest import Front, ScriptedDispatch, serve_alone

pytestmark = pytest.mark.slow

FILES = ("tls_cert_file", "tls_key_file", "tls_client_ca_file")
PATIENCE_S = 60.0
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
HELLO = pb.ChatRequest(model="tiny", messages=[pb.ChatMessage(role="user", content="Hello")])
Serve = Callable[[GatewayConfig], Any]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def serve(make_text: Callable[..., TextModel], tokenizer: Tokenizer) -> Serve:
    """Return a context manager that runs both front ends with the TLS files of a configuration."""

    @contextmanager
    def serve(files: GatewayConfig) -> Iterator[Front]:
        served = [ServedModel(name="tiny", max_model_len=512, text=make_text(), created=1)]
        options = {name: getattr(files, name) for name in FILES}
        with Front(ScriptedDispatch(served), tokenizer, **options) as front:
            yield front

    return serve


def trusting(ca: Path, own: GatewayConfig | None = None) -> ssl.SSLContext:
    """A client's context that checks the server's name and CA; `own`: the client's own certificate."""
    context = ssl.create_default_context(cafile=ca)
    if own is not None:
        context.load_cert_chain(own.tls_cert_file, own.tls_key_file)
    return context


def web(front: Front, context: ssl.SSLContext) -> httpx.Client:
    return httpx.Client(base_url=front.url, timeout=PATIENCE_S, trust_env=False, verify=context)


def answer_of(front: Front, context: ssl.SSLContext) -> httpx.Response:
    """The response to a chat request over a connection of its own."""
    with web(front, context) as client:
        return client.post("/v1/chat/completions", json=BODY)


@contextmanager
def calling(front: Front, ca: Path, own: GatewayConfig | None = None) -> Iterator[Any]:
    pair = (None, None) if own is None else (Path(own.tls_key_file).read_bytes(), Path(own.tls_cert_file).read_bytes())
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), *pair)
    with grpc.secure_channel(f"127.0.0.1:{front.grpc_port}", credentials, options=CHANNEL_OPTIONS) as channel:
        yield InferenceStub(channel)  # type: ignore[arg-type]


def call(front: Front, ca: Path, own: GatewayConfig | None = None) -> str:
    """The status of a gRPC call over a connection of its own: OK, or its error's."""
    with calling(front, ca, own) as stub:
        try:
            stub.Chat(HELLO, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def install(fresh: GatewayConfig, files: GatewayConfig) -> None:
    for name in FILES[:2]:
        shutil.copyfile(getattr(fresh, name), getattr(files, name))


def content(line: str) -> str:
    """The text of an event of a stream."""
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_both_protocols_use_tls(serve: Serve, authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    with serve(authority.issue_for_gateway("front")) as front:
        front.instant("Paris")
        assert front.url.startswith("https://127.0.0.1:")
        response = answer_of(front, trusting(authority.ca))
        assert response.status_code == 200 and response.json()["choices"][0]["message"]["content"] == "Paris"
        assert call(front, authority.ca) == "OK"
        began = time.monotonic()
        idle = web(front, trusting(authority.ca))
        assert idle.get("/ready").json() == {"status": "ready"}
    assert time.monotonic() - began < PATIENCE_S / 2, "an idle client holds the stop back"
    idle.close()
    assert complaints(caplog) == []


def test_only_tls_1_2_and_later(authority: Authority) -> None:
    files = TlsFiles.of_gateway(authority.issue_for_gateway("front"))
    assert files.context().minimum_version is ssl.TLSVersion.TLSv1_2


def test_new_files_are_for_new_connections_and_streams_continue(
    serve: Serve, authority: Authority, tmp_path: Path
) -> None:
    files, next_one = authority.issue_for_gateway("front"), Authority(tmp_path / "next")
    with serve(files) as front:
        gate = asyncio.Event()
        front.stream("Par", gate, "is", front.finished())
        with web(front, trusting(authority.ca)) as client, calling(front, authority.ca) as stub:
            with client.stream("POST", "/v1/chat/completions", json=BODY | {"stream": True}) as response:
                lines = (line for line in response.iter_lines() if line.startswith("data: "))
                text = "".join(content(next(lines)) for _ in range(2))
                assert text, "the stream has begun"
                stub.ListModels(pb.ListModelsRequest(), timeout=PATIENCE_S)
                install(next_one.issue_for_gateway("fresh"), files)
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    answer_of(front, trusting(authority.ca))
                with web(front, trusting(next_one.ca)) as other:
                    assert other.get("/v1/models").status_code == 200
                front.let(gate)
                *rest, end = lines
                assert text + "".join(map(content, rest)) == "Paris" and end == "data: [DONE]"
            assert client.get("/v1/models").status_code == 200, "the connection is the old one"
            stub.ListModels(pb.ListModelsRequest(), timeout=PATIENCE_S)
        front.instant("Paris")
        assert call(front, next_one.ca) == "OK" and call(front, authority.ca) == "UNAVAILABLE"


def test_files_that_do_not_match_are_logged_once_and_the_old_ones_stay(
    serve: Serve, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files, fresh = authority.issue_for_gateway("front"), authority.issue_for_gateway("fresh")
    with serve(files) as front, web(front, trusting(authority.ca)) as client:
        front.instant("Paris")
        shutil.copyfile(fresh.tls_key_file, files.tls_key_file)
        for _ in range(3):
            assert answer_of(front, trusting(authority.ca)).status_code == 200
            assert call(front, authority.ca) == "OK"
        (line,) = complaints(caplog)
        assert line.startswith("the TLS files are unusable") and "gateway.tls_cert_file" in line
        assert "KEY_VALUES_MISMATCH" in line
        assert client.get("/ready").json() == {"status": "ready", "warning": line}
        shutil.copyfile(fresh.tls_cert_file, files.tls_cert_file)
        assert client.get("/ready").json() == {"status": "ready"}
        assert answer_of(front, trusting(authority.ca)).status_code == 200 and len(complaints(caplog)) == 1


def test_clients_need_a_certificate_for_all_but_probes(
    serve: Serve, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Authority(tmp_path / "theirs").issue_for_gateway("stranger")
    with serve(authority.issue_for_gateway("front", requires_client=True)) as front:
        front.instant("Paris")
        own = authority.issue_for_gateway("client")
        assert answer_of(front, trusting(authority.ca, own)).status_code == 200
        assert call(front, authority.ca, own) == "OK"
        with web(front, trusting(authority.ca)) as client:
            assert [client.get(f"/{probe}").status_code for probe in ("live", "ready", "health")] == [200] * 3
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
                refused = client.get(path)
                assert refused.status_code == 401 and "client certificate" in refused.json()["error"]["message"]
        assert answer_of(front, trusting(authority.ca)).status_code == 401
        assert call(front, authority.ca) == "UNAVAILABLE" and call(front, authority.ca, stranger) == "UNAVAILABLE"
        with pytest.raises(httpx.TransportError):
            answer_of(front, trusting(authority.ca, stranger))
    assert complaints(caplog) == []


def test_plain_clients_at_ports_with_tls_are_cut_off(
    serve: Serve, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(authority.issue_for_gateway("front")) as front:
        front.instant("Paris")
        with socket.create_connection(("127.0.0.1", front.port), PATIENCE_S) as plain:
            plain.sendall(b"GET /ready HTTP/1.1\r\nhost: h\r\n\r\n")
            assert b"HTTP" not in plain.recv(1 << 16)
        with grpc.insecure_channel(f"127.0.0.1:{front.grpc_port}", options=CHANNEL_OPTIONS) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                InferenceStub(channel).Chat(HELLO, timeout=PATIENCE_S)  # type: ignore[arg-type]
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        assert answer_of(front, trusting(authority.ca)).status_code == 200 and call(front, authority.ca) == "OK"
    assert complaints(caplog) == []


def test_tls_clients_at_plain_ports_get_an_error(
    front: Front, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    context = trusting(authority.ca)
    with socket.create_connection(("127.0.0.1", front.port), PATIENCE_S) as plain:
        hello = ssl.MemoryBIO()
        with pytest.raises(ssl.SSLWantReadError):
            context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
        plain.sendall(hello.read())
        seen = b"".join(iter(lambda: plain.recv(1 << 16), b""))
    assert seen.startswith(b"HTTP/1.1 400 ") and b"gateway.tls_cert_file" in seen
    assert call(front, authority.ca) == "UNAVAILABLE" and complaints(caplog) == []


def test_a_client_that_does_not_finish_its_handshake_is_cut_off(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    tls = TlsFiles.of_gateway(authority.issue_for_gateway("front"))

    async def run() -> None:
        server = await serve_alone(pytest.fail, HttpLimits(handshake_s=0.2), tls=tls)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(PATIENCE_S / 2):
            assert await reader.read() == b""
        writer.close()
        await server.stop()

    uvloop.run(run())
    assert complaints(caplog) == []


def test_a_client_that_does_not_read_is_cut_off(authority: Authority) -> None:
    """uvloop passes on that the client's side is full, as it does without TLS."""
    tls = TlsFiles.of_gateway(authority.issue_for_gateway("front"))
    ended = threading.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        disconnected = asyncio.ensure_future(receive())
        while not disconnected.done():
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            await asyncio.sleep(0)
        ended.set()

    async def run() -> None:
        server = await serve_alone(application, HttpLimits(stalled_client_s=0.3), tls=tls)
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting(authority.ca), limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            while not ended.is_set():
                await asyncio.sleep(0.01)
        writer.transport.abort()
        await server.stop()

    uvloop.run(run())


@pytest.mark.parametrize("num_bytes", [2 << 20, 540_000])
def test_a_stop_waits_until_a_complete_response_is_sent(authority: Authority, num_bytes: int) -> None:
    """The client reads nothing until an idle connection would have been aborted. Of the smaller response uvloop reports
    no unsent byte."""
    tls = TlsFiles.of_gateway(authority.issue_for_gateway("front"))

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(num_bytes)})

    def read_late(port: int, may_stop: threading.Event) -> int:
        with socket.socket() as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            plain.settimeout(PATIENCE_S)
            plain.connect(("127.0.0.1", port))
            with trusting(authority.ca).wrap_socket(plain, server_hostname="127.0.0.1") as secure:
                secure.sendall(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
                seen = len(secure.recv(1000))
                may_stop.set()
                time.sleep(1.0)
                while chunk := secure.recv(1 << 16):
                    seen += len(chunk)
        return seen

    async def run() -> None:
        server = await serve_alone(application, HttpLimits(), graceful_s=PATIENCE_S, tls=tls)
        may_stop = threading.Event()
        seen = asyncio.create_task(asyncio.to_thread(read_late, server.port, may_stop))
        await asyncio.to_thread(may_stop.wait, PATIENCE_S)
        await server.stop()
        assert await seen > num_bytes

    uvloop.run(run())
