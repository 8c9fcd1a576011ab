"""Test clients that send or read badly against a whole gateway with a scripted worker: each is refused or cut off,
leaves nothing behind, and the next client is served.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import uvloop

from tandem.admission.tenant import OPEN
from tandem.core.config import Bytes
from tandem.core.events import Finished, FinishReason, JobEvent, SampledToken, Token
from tandem.core.ids import JobKey
from tandem.core.request import Job
from tandem.gateway.app import GatewayApp
from tandem.gateway.context.interfaces import AllowAll
from tandem.gateway.http import openai_routes
from tandem.gateway.http.host_header import AllowedHosts
from tandem.gateway.http.monitoring_routes import PROBES
from tandem.gateway.http.protocol_limits import HttpLimits, LimitedHttpProtocol
from tandem.gateway.http.server import HttpServer
from tests.unit.gateway.conftest import serve_alone
from tests.unit.gateway.rig import Rig, StartRig
from tests.unit.gateway.scripted_worker import PATIENCE_S, ScriptedWorker, until

pytestmark = pytest.mark.slow

LIMITS = HttpLimits(linger_s=0.3, max_connections=32, probes=PROBES, probe_room=2)
HASTY = replace(LIMITS, request_timeout_s=0.3, stalled_client_s=0.3)
"""Timeout for clients that are expected to run into it. The other limits are long, because the machine may be slow."""
FORGETFUL = replace(LIMITS, keep_alive_s=1.0)
"""Idle timeout that closes keep-alive connections without a new request; a request under way has unlimited time."""
MAX_BODY = 20_000
HELD, LONG = 400, 10_000
"""Number of tokens."""

GET = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\n"
ASTRAY = b"POST /nothing HTTP/1.1\r\nhost: h\r\n"
"""A request that is answered before its body has arrived."""


def post(*, tokens: int = 3, headers: bytes = b"", **fields: Any) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": tokens, **fields}).encode()
    return HEAD + headers + b"content-length: %d\r\n\r\n" % len(body) + body


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + end


class Client:
    """Own one connection; what was read is kept in `seen`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.seen = b""

    async def read(self, until_seen: bytes | None = None) -> bytes:
        """Read to the end, or until `until_seen` was read."""
        async with asyncio.timeout(PATIENCE_S):
            while until_seen is None or until_seen not in self.seen:
                try:
                    more = await self.reader.read(1 << 16)
                except ConnectionError:
                    more = b""
                if not more:
                    assert until_seen is None, f"the connection ended: {self.seen[-500:]!r}"
                    break
                self.seen += more
        return self.seen

    def leave(self) -> None:
        self.writer.transport.abort()


class GuardedGateway:
    """Own a gateway in front of one scripted worker that answers each job at once, except jobs of `HELD` tokens."""

    def __init__(self, rig: Rig, worker: ScriptedWorker, limits: HttpLimits) -> None:
        self.rig, self.worker = rig, worker
        self.app = app = GatewayApp(rig.dispatch, AllowAll(), rig.config)
        self.server = HttpServer(app, "127.0.0.1", 0, graceful_s=1.0, limits=limits, on_refusal=app.count_refusal)
        self.clients: list[Client] = []

    async def connect(self, request: bytes = b"", *, receive_buffer: int = 0) -> Client:
        link = socket.socket()
        if receive_buffer:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        link.setblocking(False)
        await asyncio.get_running_loop().sock_connect(link, ("127.0.0.1", self.server.port))
        client = Client(*await asyncio.open_connection(sock=link, limit=1024 if receive_buffer else 1 << 16))
        self.clients.append(client)
        client.writer.write(request)
        return client

    async def send_request(self, request: bytes) -> tuple[int, bytes]:
        """Return status and body of the only answer, after which the connection must end."""
        client = await self.connect(request)
        answer = await client.read()
        client.leave()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]) if head else 0, body

    async def serves(self) -> None:
        status, body = await self.send_request(post(headers=b"connection: close\r\n"))
        assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 3

    async def close(self) -> None:
        """Let all clients leave, and check that the next one is served and that nothing is left."""
        for client in self.clients:
            client.leave()
        await until(lambda: not self.connections())
        await self.serves()
        await until(lambda: not self.rig.left_over() and not self.tasks() and not self.connections())
        await self.server.stop()

    def connections(self) -> set[object]:
        return self.server._server.server_state.connections

    def tasks(self) -> set[Any]:
        return self.server._server.server_state.tasks


def token(key: JobKey, index: int) -> Token:
    """Return a token that decodes to a letter."""
    return Token(key, index, SampledToken(60))


def events(job: Job) -> Sequence[JobEvent]:
    """Return all events of a job; a job of `HELD` tokens gets only the first, and one of `LONG` tokens has no end."""
    count = job.request.sampling.max_tokens
    if count == HELD:
        return [token(job.key, 0)]
    if count == LONG:
        return [token(job.key, index) for index in range(LONG - 1)]
    return [*(token(job.key, index) for index in range(count)), Finished(job.key, FinishReason.LENGTH, count, 0)]


OpenGateway = Callable[[HttpLimits], Awaitable[GuardedGateway]]


@pytest.fixture
async def open_gateway(start_rig: StartRig) -> AsyncIterator[OpenGateway]:
    """Return a function that opens a gateway; check at the end that it serves the next client and has nothing left."""
    opened: list[GuardedGateway] = []

    async def open_one(limits: HttpLimits) -> GuardedGateway:
        rig = await start_rig(max_body=Bytes(MAX_BODY), disaggregation="off")
        worker = await rig.add("m", "mixed")
        worker.max_model_len = 20_000
        await until(lambda: rig.dispatch.ready() is None)
        worker.after_submit = events
        opened.append(GuardedGateway(rig, worker, limits))
        await opened[-1].server.start()
        return opened[-1]

    yield open_one
    for gateway in opened:
        await gateway.close()


@pytest.fixture
async def gateway(open_gateway: OpenGateway) -> GuardedGateway:
    return await open_gateway(LIMITS)


@pytest.fixture
async def hasty(open_gateway: OpenGateway) -> GuardedGateway:
    return await open_gateway(HASTY)


async def drip(client: Client, data: bytes) -> None:
    """Send a byte at a time until the peer stops reading."""
    with suppress(ConnectionError):
        for byte in data:
            client.writer.write(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0.02)


async def answer_to_drip(client: Client, data: bytes) -> bytes:
    """Read to the end of the connection while the client sends a byte at a time."""
    dripping = asyncio.create_task(drip(client, data))
    answer = await client.read()
    dripping.cancel()
    return answer


def code(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


# ---- slow senders


async def test_a_silent_client_is_disconnected(hasty: GuardedGateway) -> None:
    assert await (await hasty.connect()).read() == b""


@pytest.mark.parametrize("request_", [HEAD + b"x: " + b"y" * 1000, post()[:-1] + b" " * 1000])
async def test_a_byte_at_a_time_is_refused(hasty: GuardedGateway, request_: bytes) -> None:
    head = request_.find(b"\r\n\r\n")
    start = request_[: head + 5] if head > 0 else b""
    if head > 0:
        start = start.replace(b"content-length: ", b"content-length: 9")
    answer = await answer_to_drip(await hasty.connect(start), request_[len(start) :])
    assert answer.startswith(b"HTTP/1.1 408 ") and code(answer.partition(b"\r\n\r\n")[2]) == "request_timeout"
    assert hasty.worker.jobs == []


async def test_a_body_that_drips_on_after_its_answer_is_cut_off(hasty: GuardedGateway) -> None:
    client = await hasty.connect(HEAD.replace(b"completions", b"nothing") + b"content-length: 100000\r\n\r\n")
    answer = await answer_to_drip(client, b" " * 1000)
    assert answer.startswith(b"HTTP/1.1 404 ") and answer.count(b"HTTP/1.1") == 1


async def test_a_request_pipelined_behind_a_long_answer_does_not_time_out(open_gateway: OpenGateway) -> None:
    """The gateway delays the second request, not its client: half of a second request does not end the first one."""
    gateway = await open_gateway(replace(LIMITS, request_timeout_s=0.4))
    client = await gateway.connect(post(tokens=HELD, stream=True) + GET[:10])
    await client.read(b"data: ")
    for index in range(1, 4):
        await asyncio.sleep(0.25)
        gateway.worker.publish(token(gateway.worker.jobs[0].key, index))
    gateway.worker.publish(Finished(gateway.worker.jobs[0].key, FinishReason.LENGTH, 4, 0))
    client.writer.write(GET[10:])
    assert b"200 OK" in (await client.read(b'"ok"')).partition(b"[DONE]")[2]


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_slower_than_its_least_rate_is_refused(open_gateway: OpenGateway, is_chunked: bool) -> None:
    gateway = await open_gateway(replace(LIMITS, min_body_bytes_per_s=1e6, body_grace_s=0.3))
    begun = chunked(b"{", end=b"") if is_chunked else HEAD + b"content-length: 10000\r\n\r\n"
    dripping = b"1\r\n \r\n" * 1000 if is_chunked else b" " * 5000
    answer = await answer_to_drip(await gateway.connect(begun), dripping)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"gateway.min_body_bytes_per_s" in answer
    assert gateway.worker.jobs == []


async def test_a_slow_body_of_the_least_rate_is_accepted(open_gateway: OpenGateway) -> None:
    gateway = await open_gateway(replace(LIMITS, min_body_bytes_per_s=2.0, body_grace_s=0.1))
    head, _, body = post(headers=b"connection: close\r\n").partition(b"\r\n\r\n")
    client = await gateway.connect(head + b"\r\n\r\n")
    await drip(client, body)
    assert b"HTTP/1.1 200 OK" in await client.read()


async def test_a_body_behind_a_long_answer_is_not_too_slow(open_gateway: OpenGateway) -> None:
    """The gateway reads no further before the first answer; the head of the second request came with the first."""
    gateway = await open_gateway(replace(LIMITS, min_body_bytes_per_s=1e6, body_grace_s=0.3))
    second = post(tokens=4, headers=b"connection: close\r\n")
    client = await gateway.connect(post(tokens=HELD, stream=True) + second[:-5])
    await client.read(b"data: ")
    await asyncio.sleep(1.0)
    gateway.worker.publish(Finished(gateway.worker.jobs[0].key, FinishReason.LENGTH, 1, 0))
    client.writer.write(second[-5:])
    assert b'"completion_tokens":4' in await client.read()


def test_a_body_that_waited_while_the_process_stood_still_is_not_too_slow() -> None:
    """uvloop runs timers before it reads what has arrived meanwhile."""

    async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body"})

    async def scenario() -> bytes:
        server = await serve_alone(application, replace(LIMITS, min_body_bytes_per_s=1e6, body_grace_s=0.3))
        with socket.create_connection(("127.0.0.1", server.port)) as link:
            link.sendall(HEAD + b"content-length: 5\r\n\r\nhe")
            await asyncio.sleep(0.1)
            link.sendall(b"llo")
            time.sleep(1.5)  # noqa: ASYNC251 - the process stands still
            answer = await asyncio.to_thread(link.recv, 1 << 16)
        await server.stop()
        return answer

    assert uvloop.run(scenario()).startswith(b"HTTP/1.1 200 ")


# ---- the header Host

WRONG_HOSTS = [
    b"",
    b"host: a\r\nhost: b\r\n",
    b"host: h\r\nHost: h\r\n",
    b"host: a b\r\n",
    b"host: a,b\t\r\nhost:\r\n",
    b"host: h:8x\r\n",
    b"host: http://h/\r\n",
    b"host: user@h\r\n",
    b"host: [::1\r\n",
    b"host: h\xff\r\n",
]


async def test_a_missing_repeated_or_invalid_host_is_refused(gateway: GuardedGateway) -> None:
    for headers in WRONG_HOSTS:
        status, body = await gateway.send_request(b"GET /health HTTP/1.1\r\n" + headers + b"\r\n")
        assert (headers, status, code(body)) == (headers, 400, "invalid_request")


async def test_http_1_0_needs_no_host(gateway: GuardedGateway) -> None:
    assert (await gateway.send_request(b"GET /v1/models HTTP/1.0\r\n\r\n"))[0] == 200
    assert (await gateway.send_request(b"GET /v1/models HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n"))[0] == 400


async def test_a_loopback_gateway_answers_for_loopback_names_only(open_gateway: OpenGateway) -> None:
    """This is what keeps a web page that has rebound its name to 127.0.0.1 from reading the answers."""
    gateway = await open_gateway(replace(LIMITS, allowed_hosts=AllowedHosts.of("127.0.0.1", ["h"])))

    async def status(path: bytes, host: bytes) -> int:
        request = b"GET %b HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n\r\n" % (path, host)
        found, body = await gateway.send_request(request)
        assert found != 421 or (code(body) == "misdirected_request" and b"gateway.allowed_hosts" in body)
        return found

    for host in (b"127.0.0.1:%d" % gateway.server.port, b"localhost:9", b"LOCALHOST", b"[::1]:8000", b"h", b""):
        assert (host, await status(b"/v1/models", host)) == (host, 200)
    for host in (b"attacker.example", b"attacker.example:8000", b"127.0.0.1.attacker.example", b"10.0.0.1"):
        assert (host, await status(b"/v1/models", host)) == (host, 421)
        assert (host, await status(b"/health", host)) == (host, 200), "load balancers probe with any Host"
    assert await status(b"http://attacker.example/v1/models", b"localhost") == 421
    assert await status(b"http://localhost:8000/v1/models", b"attacker.example") == 200


# ---- keep-alive connections without a new request

FOUND, NOT_FOUND = b"HTTP/1.1 200 ", b"HTTP/1.1 404 "
IDLE: dict[str, list[tuple[bytes, bytes]]] = {
    "it was answered": [(GET, FOUND)],
    "a stray line": [(GET, FOUND), (b"\r\n", b"")],
    "half a stray line": [(GET, FOUND), (b"\r", b"")],
    "a late body": [(ASTRAY + b"content-length: 5\r\n\r\n", NOT_FOUND), (b"hello", b"")],
    "a late body, in pieces": [(ASTRAY + b"content-length: 5\r\n\r\nh", NOT_FOUND), (b"ell", b""), (b"o", b"")],
    "a late body, in chunks": [
        (ASTRAY + b"transfer-encoding: chunked\r\n\r\n", NOT_FOUND), (b"2\r\nhe", b""), (b"\r\n0\r\n\r\n", b""),
    ],
    "a late body and a stray line": [(ASTRAY + b"content-length: 5\r\n\r\n", NOT_FOUND), (b"hello\r\n", b"")],
    "a late body and another request": [(ASTRAY + b"content-length: 5\r\n\r\n", NOT_FOUND), (b"hello" + GET, FOUND)],
    "an upgrade": [
        (ASTRAY + b"content-length: 5\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", NOT_FOUND), (b"hello", b""),
    ],
    "several at once": [(GET + ASTRAY + b"content-length: 5\r\n\r\n", NOT_FOUND), (b"hello", b"")],
}  # fmt: skip
"""The pieces that are sent, and for each the part of the answer that is awaited before the next piece."""


async def converse(client: Client, pieces: list[tuple[bytes, bytes]]) -> None:
    for sent, awaited in pieces:
        client.writer.write(sent)
        await client.read(awaited)
        await asyncio.sleep(0.1)  # where nothing is awaited, give the piece time to arrive alone


async def test_an_idle_keep_alive_connection_is_closed(open_gateway: OpenGateway) -> None:
    """The kind of the last request and its answer does not matter; none of these needs a key."""
    gateway = await open_gateway(FORGETFUL)

    async def is_let_go(pieces: list[tuple[bytes, bytes]]) -> bool:
        client = await gateway.connect()
        await converse(client, pieces)
        try:
            await client.read()
        except TimeoutError:
            return False
        return True

    found = await asyncio.gather(*map(is_let_go, IDLE.values()))
    assert [name for name, ended in zip(IDLE, found, strict=True) if not ended] == []


async def test_stray_lines_do_not_postpone_the_idle_timeout(open_gateway: OpenGateway) -> None:
    gateway = await open_gateway(FORGETFUL)
    client = await gateway.connect(GET)
    await client.read(b'"ok"')
    await answer_to_drip(client, b"\r\n" * 2000)


@pytest.mark.parametrize("name", ["a body after its answer", "a head behind an answer"])
async def test_a_client_that_still_sends_is_not_idle(open_gateway: OpenGateway, name: str) -> None:
    gateway = await open_gateway(FORGETFUL)
    client = await gateway.connect()
    is_body = name == "a body after its answer"
    first = ASTRAY + b"content-length: 5\r\n\r\n" if is_body else post(tokens=4) + GET[:10]
    await converse(client, [(first, NOT_FOUND if is_body else b'"completion_tokens":4')])
    await asyncio.sleep(1.6 * FORGETFUL.keep_alive_s)
    await converse(client, [(b"hello" + GET if is_body else GET[10:], b'"ok"')])


# ---- large heads


HEAD_BOMBS = {
    "many": HEAD + b"".join(b"x-%d: y\r\n" % n for n in range(101)) + b"\r\n",
    "one": HEAD + b"x: " + b"y" * 40_000 + b"\r\n\r\n",
    "one endless": HEAD + b"x: " + b"y" * 900_000,
    "a name": HEAD + b"x" * 900_000,
    "a path": b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n",
    "an endless path": b"GET /" + b"a" * 900_000,
    "a trailer": chunked(b"{", end=b"0\r\nx: " + b"y" * 900_000),
    "trailers": chunked(b"{", end=b"0\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(200))),
    "an extension": HEAD + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 900_000,
}


async def test_head_bombs(gateway: GuardedGateway) -> None:
    for name, bomb in HEAD_BOMBS.items():
        status, body = await gateway.send_request(bomb)
        assert (name, status, code(body)) == (name, 431, "headers_too_large")


async def test_a_head_as_large_as_allowed(gateway: GuardedGateway) -> None:
    status, _ = await gateway.send_request(post(headers=b"connection: close\r\nx: " + b"y" * 32_000 + b"\r\n"))
    assert status == 200


# ---- bodies


LARGE = {
    "announced": HEAD + b"content-length: 20001\r\nconnection: close\r\n\r\n",
    "announced and sent": HEAD + b"content-length: 99999999999\r\nconnection: close\r\n\r\n" + b" " * 100_000,
    "chunked": chunked(*([b" " * 1000] * 21)).replace(b"host: h", b"host: h\r\nconnection: close"),
}
WRONG_JSON = {
    "arrays": b"[" * 15_000,
    "objects": b'{"a":' * 3_000,
    "prompt": b'{"model":"tiny","prompt":' + b"[" * 9_000 + b"]" * 9_000 + b"}",
    "surrogates": b'{"model":"tiny","prompt":"' + b"\\ud800" * 100 + b'"}',
    "no UTF-8": b"\xff" * 1000,
    "a number": b"1" * 15_000,
    "nothing": b"",
}


async def test_bodies_over_the_limit(gateway: GuardedGateway) -> None:
    for name, request in LARGE.items():
        status, body = await gateway.send_request(request)
        assert (name, status, code(body)) == (name, 413, "body_too_large")


async def test_json_that_goes_deep_or_wrong(gateway: GuardedGateway) -> None:
    for name, text in WRONG_JSON.items():
        head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(text)
        status, body = await gateway.send_request(head + text)
        assert (name, status, code(body)) == (name, 400, "invalid_request")


# ---- what is no HTTP, or another one


NOT_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nhost: h\r\n\r\n",
    b"CONNECT example.org:443 HTTP/1.1\r\nhost: h\r\n\r\n",
    HEAD + b"content-length: -1\r\n\r\n",
    HEAD + b"content-length: 1e3\r\n\r\n",
    HEAD + b"content-length: 99999999999999999999999\r\n\r\n",
    HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    HEAD + b"x: \x00\r\n\r\n",
    HEAD + b"no colon\r\n\r\n",
    b"\r\n" * 2000 + b"\x01",
]


async def test_bytes_that_are_not_http_are_refused(gateway: GuardedGateway) -> None:
    for request in NOT_HTTP:
        status, body = await gateway.send_request(request)
        assert (request, status, code(body)) == (request, 400, "invalid_request")


async def test_noise_harms_nobody(gateway: GuardedGateway) -> None:
    """Noise that looks like a request is answered; nothing causes an internal error."""
    noise = random.Random(0)
    good = post()
    for _ in range(60):
        request = bytearray(good)
        for _ in range(noise.randint(1, 6)):
            request[noise.randrange(len(request))] = noise.randrange(256)
        client = await gateway.connect(bytes(request))
        client.writer.write_eof()
        answer = await client.read()
        assert not answer.startswith(b"HTTP/1.1 5"), (request, answer)


async def test_requests_cut_at_every_byte(gateway: GuardedGateway) -> None:
    whole = post(stream=True)
    for stop in range(len(whole)):
        for resets in (True, False):
            client = await gateway.connect(whole[:stop])
            await client.writer.drain()
            if resets:
                client.leave()
            else:
                client.writer.write_eof()
                assert not (await client.read()).startswith(b"HTTP/1.1 5")
                client.leave()
    assert gateway.worker.jobs == []


OLDER = [
    (version, headers) for version in (b"HTTP/1.0", b"HTTP/0.9") for headers in (b"", b"connection: keep-alive\r\n")
]
"""HTTP versions with the headers of a request."""


async def test_http_1_0_is_answered_and_ended(gateway: GuardedGateway) -> None:
    for version, headers in OLDER:
        status, body = await gateway.send_request(post(headers=headers).replace(b"HTTP/1.1", version))
        num_tokens = json.loads(body)["usage"]["completion_tokens"]
        assert (version, headers, status, num_tokens) == (version, headers, 200, 3)


async def test_a_stream_over_http_1_0_has_no_chunks_and_ends_with_its_connection(gateway: GuardedGateway) -> None:
    """A client that does not know chunks would take their lengths for text."""
    for version, headers in OLDER:
        client = await gateway.connect(post(headers=headers, stream=True).replace(b"HTTP/1.1", version))
        head, _, body = (await client.read()).partition(b"\r\n\r\n")
        assert b"\r\nconnection: close" in head, (version, headers)
        assert b"transfer-encoding" not in head and b"content-length" not in head, (version, headers)
        events = body.split(b"\n\n")
        assert all(event.startswith(b"data: ") for event in events[:-1]), (version, headers)
        assert events[-2:] == [b"data: [DONE]", b""], (version, headers)


async def test_http_1_0_behind_another_request(gateway: GuardedGateway) -> None:
    client = await gateway.connect(post(stream=True) + post(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0") + GET)
    answer = await client.read()
    assert answer.count(b"HTTP/1.1 200 OK") == 2 and answer.count(b"transfer-encoding: chunked") == 1
    assert answer.endswith(b"\n\ndata: [DONE]\n\n")


async def test_an_upgrade_is_not_taken_and_the_request_is_answered(gateway: GuardedGateway) -> None:
    """Java's client offers h2c with its first request. The connection stays usable."""
    for protocol in (b"websocket\r\nsec-websocket-key: eA==\r\nsec-websocket-version: 13", b"h2c"):
        request = post(tokens=2, headers=b"connection: Upgrade\r\nupgrade: " + protocol + b"\r\n")
        for cut in (len(request), len(request) - 30, len(request) - 60):
            client = await gateway.connect(request[:cut])
            await client.writer.drain()
            client.writer.write(request[cut:])
            await client.read(b'"completion_tokens":2')
            client.writer.write(post(tokens=4))
            await client.read(b'"completion_tokens":4')
            client.leave()


async def test_a_response_to_head_needs_no_body(gateway: GuardedGateway) -> None:
    client = await gateway.connect(GET.replace(b"GET", b"HEAD", 1))
    head = await client.read(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK") and head.endswith(b"\r\n\r\n")
    client.seen = b""
    client.writer.write(LAST)
    assert (await client.read()).startswith(b"HTTP/1.1 200 OK")


async def test_expect_continue_is_answered_before_the_body(gateway: GuardedGateway) -> None:
    head, _, body = post(headers=b"expect: 100-continue\r\nconnection: close\r\n").partition(b"\r\n\r\n")
    client = await gateway.connect(head + b"\r\n\r\n")
    await client.read(b"100 Continue\r\n\r\n")
    client.writer.write(body)
    assert b"HTTP/1.1 200 OK" in await client.read()


async def test_a_client_is_not_late_with_a_body_that_the_gateway_has_not_requested(
    open_gateway: OpenGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large body waits for its tenant's turn."""
    monkeypatch.setattr(openai_routes, "LARGE_BODY_BYTES", 10)
    gateway = await open_gateway(replace(HASTY, body_grace_s=0.1))
    head, _, body = post(headers=b"expect: 100-continue\r\nconnection: close\r\n").partition(b"\r\n\r\n")
    turn = await gateway.app.answers.begin_large(OPEN, 4 << 20)
    client = await gateway.connect(head + b"\r\n\r\n")
    await asyncio.sleep(0.5)
    turn.end()
    await client.read(b"100 Continue\r\n\r\n")
    client.writer.write(body)
    assert b"HTTP/1.1 200 OK" in await client.read()


async def test_a_body_that_is_shorter_than_announced(hasty: GuardedGateway) -> None:
    status, body = await hasty.send_request(HEAD + b"content-length: 500\r\n\r\n" + b"{}")
    assert status == 408 and code(body) == "request_timeout"


async def test_a_body_that_is_longer_than_announced(gateway: GuardedGateway) -> None:
    """The rest is parsed as another request, which is malformed."""
    answer = await (await gateway.connect(HEAD + b"content-length: 2\r\n\r\n" + b"{}rubbish\r\n\r\n")).read()
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 400 ") == 2


# ---- many at once


async def test_pipelined_requests_are_answered_in_order(gateway: GuardedGateway) -> None:
    client = await gateway.connect(post(tokens=2) + GET + post(tokens=4) + LAST)
    answer = await client.read()
    assert answer.count(b"HTTP/1.1 200 OK") == 4
    places = [answer.index(sign) for sign in (b'"completion_tokens":2', b'"ok"', b'"completion_tokens":4')]
    assert places == sorted(places)


@pytest.mark.parametrize("num_requests", [20, 3000])
async def test_any_number_of_pipelined_requests_is_answered(gateway: GuardedGateway, num_requests: int) -> None:
    """3,000 requests are more bytes than are kept, so that the gateway stops reading meanwhile."""
    client = await gateway.connect(GET * num_requests + LAST)
    assert (await client.read()).count(b"HTTP/1.1 200 OK") == num_requests + 1


async def test_an_endless_series_of_pipelined_requests_keeps_little(gateway: GuardedGateway) -> None:
    """The client sends as fast as the gateway reads, far more than is answered meanwhile."""
    client = await gateway.connect()
    longest = 0

    async def send() -> None:
        while True:
            client.writer.write(GET * 5000)
            await client.writer.drain()

    sender = asyncio.create_task(send())
    answers = b"HTTP/1.1 200 OK"
    async with asyncio.timeout(PATIENCE_S):
        num_answers = 0
        while num_answers < 5000:
            more = await client.reader.read(1 << 16)
            assert more
            num_answers += more.count(answers)
            for connection in gateway.connections():
                longest = max(longest, len(connection._unparsed))  # type: ignore[attr-defined]
    sender.cancel()
    assert longest < 1 << 20, longest


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_of_empty_lines_is_parsed_in_few_parts(
    gateway: GuardedGateway, monkeypatch: pytest.MonkeyPatch, is_chunked: bool
) -> None:
    num_parts = 0
    parse = LimitedHttpProtocol._parse_part

    def counted(self: LimitedHttpProtocol, data: bytes) -> None:
        nonlocal num_parts
        num_parts += 1
        parse(self, data)

    monkeypatch.setattr(LimitedHttpProtocol, "_parse_part", counted)
    body = b'{"model": "tiny", "prompt": [5], "max_tokens": 1' + b"\r\n" * (MAX_BODY // 4) + b"}"
    request = chunked(body) if is_chunked else HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    client = await gateway.connect(request + LAST)
    assert (await client.read()).count(b"HTTP/1.1 200 OK") == 2
    assert num_parts < 200


@pytest.mark.parametrize("num_bytes", [1, 5, 64, 1 << 20])
async def test_pipelined_requests_in_pieces_of_any_size(gateway: GuardedGateway, num_bytes: int) -> None:
    """Empty lines occur in bodies and after trailers too, and a piece may end within one."""
    body = b'{"model": "tiny",\r\n\r\n "prompt": [5, 6, 7], "max_tokens": 3}\r\n\r\n'
    requests = {
        HEAD + b"content-length: %d\r\n\r\n" % len(body) + body: b"200",
        chunked(body[:20], body[20:]): b"200",
        GET: b"200",
        ASTRAY + b"content-length: 9\r\n\r\na\r\n\r\nGET ": b"404",
        chunked(body, end=b"0\r\nx: y\r\n\r\n"): b"200",
        b"\r\n\r\n" + LAST: b"200",
    }
    client = await gateway.connect()
    sent = b"".join(requests)
    for start in range(0, len(sent), num_bytes):
        client.writer.write(sent[start : start + num_bytes])
        await asyncio.sleep(0)
    assert re.findall(rb"HTTP/1.1 (\d+) ", await client.read()) == list(requests.values())


async def test_requests_behind_a_stream_wait_unparsed_and_in_bounded_memory(gateway: GuardedGateway) -> None:
    client = await gateway.connect(post(tokens=HELD, stream=True))
    await client.read(b"data: ")
    client.writer.write(GET * 30_000)
    (connection,) = gateway.connections()
    await until(lambda: connection.flow.read_paused)  # type: ignore[attr-defined]
    await asyncio.sleep(0.1)
    assert len(connection._unparsed) < len(GET * 20_000)  # type: ignore[attr-defined]
    assert len(connection._cycles) == 1  # type: ignore[attr-defined]
    key = gateway.worker.jobs[0].key
    gateway.worker.publish(token(key, 1), Finished(key, FinishReason.LENGTH, 2, 0))
    await client.read(b"[DONE]\n\n\r\n0\r\n\r\nHTTP/1.1 200 OK")


BEHIND = {
    "no HTTP": (b"rubbish\r\n\r\n", 400),
    "a large head": (GET[:-2] + b"x: " + b"y" * 40_000 + b"\r\n\r\n", 431),
    "a wrong chunk": (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
}


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize("first", [GET, post()], ids=["GET", "POST"])
async def test_a_refusal_follows_the_answers_to_earlier_requests(
    gateway: GuardedGateway, first: bytes, name: str
) -> None:
    refused, status = BEHIND[name]
    answer = await (await gateway.connect(first + refused)).read()
    assert answer.startswith(FOUND) and answer.count(b"HTTP/1.1 ") == 2, answer
    assert b"HTTP/1.1 %d " % status in answer
    assert answer.count(b"\r\nx-content-type-options: nosniff\r\n") == 2


async def test_a_flood_of_connections_is_refused_and_passes(gateway: GuardedGateway) -> None:
    """The fixture checks that it passes: its clients leave, and then the next one is served."""
    for _ in range(LIMITS.max_connections):
        await (await gateway.connect(GET)).read(b'"ok"')
    status, body = await gateway.send_request(post())
    assert status == 503 and code(body) == "overloaded" and gateway.worker.jobs == []
    client = await gateway.connect(GET.replace(b"health", b"metrics"))
    assert b"\r\nretry-after: 1\r\nx-tandem-reject-reason: connections\r\n" in await client.read()
    for client in gateway.clients:
        client.leave()
    await until(lambda: not gateway.connections())
    _, exported = await gateway.send_request(LAST.replace(b"health", b"metrics"))
    assert b'tandem_admissions_total{decision="refused",lane="",reason="connections",tenant=""} 2' in exported
    assert b'tandem_http_responses_total{status="503"} 2' in exported


async def test_probes_are_answered_among_too_many_connections(gateway: GuardedGateway) -> None:
    for _ in range(LIMITS.max_connections):
        await (await gateway.connect(GET)).read(b'"ok"')
    probe = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    for path in (b"/health", b"/live", b"/ready"):
        assert (await gateway.send_request(probe.replace(b"/health", path)))[0] == 200
    silent = [await gateway.connect() for _ in range(LIMITS.probe_room)]
    status, body = await gateway.send_request(probe)
    assert status == 503 and code(body) == "overloaded", "there is not room for all who might want to probe"
    for client in silent:
        assert await client.read() == b"", "who comes to probe does so at once"
    probing = await gateway.connect(GET)
    await probing.read(b'"ok"')
    probing.writer.write(post())
    assert b"x-tandem-reject-reason: connections" in await probing.read(), "a probe opens the door for nothing else"


async def test_a_client_that_disconnects_with_a_pipelined_request_is_cancelled(gateway: GuardedGateway) -> None:
    client = await gateway.connect(post(tokens=HELD, stream=True) + GET)
    await client.read(b"data: ")
    client.leave()
    key = gateway.worker.jobs[0].key
    for index in range(
        1, HELD
    ):  # no bytes of this client are read while an answer is due, so only the next write notices
        if "cancel" in gateway.worker.verbs(key.request):
            return
        gateway.worker.publish(token(key, index))
        await asyncio.sleep(0.01)
    raise AssertionError("it ran on")


@pytest.mark.parametrize("num_idle", [200, pytest.param(1000, marks=pytest.mark.nightly)])
async def test_many_idle_streams_that_leave_at_once(open_gateway: OpenGateway, num_idle: int) -> None:
    gateway = await open_gateway(HttpLimits())
    clients = [await gateway.connect(post(tokens=HELD, stream=True)) for _ in range(num_idle)]
    for client in clients:
        await client.read(b"data: ")
    await gateway.serves()
    for client in clients:
        client.leave()
    await until(lambda: not gateway.rig.left_over())
    held = {job.request.id for job in gateway.worker.jobs if job.request.sampling.max_tokens == HELD}
    await until(lambda: len(held & {key.request for verb, key in gateway.worker.seen if verb == "cancel"}) == num_idle)


# ---- slow readers


async def test_a_reader_that_stalls_is_cut_off_and_cancelled(hasty: GuardedGateway) -> None:
    """The data that waits for the reader is bounded: by the request's tokens here, by high-water marks below."""
    client = await hasty.connect(post(tokens=LONG, stream=True), receive_buffer=4096)
    await until(lambda: "cancel" in hasty.worker.verbs(hasty.worker.jobs[0].request.id) if hasty.worker.jobs else False)
    client.leave()


async def test_a_reader_that_takes_its_time_gets_all(gateway: GuardedGateway) -> None:
    client = await gateway.connect(post(tokens=5_000, stream=True), receive_buffer=4096)
    seen = b""
    async with asyncio.timeout(PATIENCE_S):
        while not seen.endswith(b"0\r\n\r\n"):
            more = await client.reader.read(1 << 14)
            assert more, seen[-200:]
            seen += more
            await asyncio.sleep(0.001)
    assert b"[DONE]" in seen


async def test_an_application_waits_for_its_reader() -> None:
    """The data that a client has not read yet is bounded, however much the application sends; when the client reads
    again, the application continues and the stall timer is reset.
    """
    peak, timers = 0, []

    async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
        nonlocal peak
        (connection,) = server._server.server_state.connections
        connection.pause_writing()
        timers.append(connection._reader_timer)
        connection.resume_writing()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        for _ in range(CHUNKS):
            await send({"type": "http.response.body", "body": bytes(CHUNK), "more_body": True})
            peak = max(peak, connection.transport.get_write_buffer_size())
        await send({"type": "http.response.body"})

    CHUNKS, CHUNK = 200, 1 << 16
    server = await serve_alone(application, LIMITS)
    client = Client(*await asyncio.open_connection("127.0.0.1", server.port, limit=1024))
    client.writer.write(GET)
    assert len(await client.read()) > CHUNKS * CHUNK
    client.leave()
    await server.stop()
    assert 0 < peak < 20 * CHUNK
    assert timers[0].cancelled()
