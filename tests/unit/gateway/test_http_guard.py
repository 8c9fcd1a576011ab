"""Clients that send or read badly, against the whole gateway but its workers: each gets what it deserves, nothing of it
is left, and the next one is served."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from tandem.core.config import Bytes
from tandem.core.events import Finished, FinishReason, JobEvent, SampledToken, Token
from tandem.core.ids import JobKey
from tandem.core.request import Job
from tandem.gateway.app import create_app
from tandem.gateway.context.interfaces import AllowAll
from tandem.gateway.http.health import PROBES
from tandem.gateway.http.protocol_limits import HttpLimits
from tandem.gateway.http.server import HttpServer
from tests.unit.gateway.rig import Rig
from tests.unit.gateway.scripted_worker import PATIENCE_S, ScriptedWorker, until

pytestmark = pytest.mark.slow

LIMITS = HttpLimits(linger_s=0.3, max_connections=32, max_pipelined=4, probes=PROBES, probe_room=2)
HASTY = replace(LIMITS, request_timeout_s=0.3, stalled_client_s=0.3)
"""For those whose time is over. Nobody else is hurried, because the machine may be slow."""
FORGETFUL = replace(LIMITS, keep_alive_s=1.0)
"""Lets go of those who could ask again and do not; a request has all the time."""
MAX_BODY = 20_000
HELD, LONG = 400, 10_000
"""Of tokens."""

GET = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\n"
ASTRAY = b"POST /nothing HTTP/1.1\r\nhost: h\r\n"
"""It is answered before its body is here."""


def post(*, tokens: int = 3, headers: bytes = b"", **fields: Any) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": tokens, **fields}).encode()
    return HEAD + headers + b"content-length: %d\r\n\r\n" % len(body) + body


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + end


class Client:
    """One connection. What is read is kept in `seen`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.seen = b""

    async def read(self, until_seen: bytes | None = None) -> bytes:
        """To the end, or until something was read."""
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


class Door:
    """A gateway in front of one scripted worker that answers each job at once, but for those of `held` tokens."""

    def __init__(self, rig: Rig, worker: ScriptedWorker, limits: HttpLimits) -> None:
        self.rig, self.worker = rig, worker
        self.server = HttpServer(
            create_app(rig.dispatch, AllowAll(), rig.config), "127.0.0.1", 0, graceful_s=1.0, limits=limits
        )
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

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the one answer, after which the connection must end."""
        client = await self.connect(request)
        answer = await client.read()
        client.leave()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]) if head else 0, body

    async def serves(self) -> None:
        status, body = await self.ask(post(headers=b"connection: close\r\n"))
        assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 3

    def connections(self) -> set[object]:
        return self.server._server.server_state.connections

    def tasks(self) -> set[Any]:
        return self.server._server.server_state.tasks


def token(key: JobKey, index: int) -> Token:
    """A letter."""
    return Token(key, index, SampledToken(60))


def events(job: Job) -> Sequence[JobEvent]:
    """All tokens; of a job that asks for `HELD` only the first, and of one that asks for `LONG` no end."""
    count = job.request.sampling.max_tokens
    if count == HELD:
        return [token(job.key, 0)]
    if count == LONG:
        return [token(job.key, index) for index in range(LONG - 1)]
    return [*(token(job.key, index) for index in range(count)), Finished(job.key, FinishReason.LENGTH, count, 0)]


async def open_door(make_rig: Callable[..., Rig], limits: HttpLimits) -> Door:
    rig = make_rig(max_body=Bytes(MAX_BODY), disaggregation="off")
    await rig.start()
    worker = await rig.add("m", "mixed")
    worker.max_model_len = 20_000
    await until(lambda: rig.dispatch.ready() is None)
    worker.after_submit = events
    door = Door(rig, worker, limits)
    await door.server.start()
    return door


async def close_door(door: Door) -> None:
    """Whatever came, the next one is served; then nothing is left."""
    for client in door.clients:
        client.leave()
    await until(lambda: not door.connections())
    await door.serves()
    await until(lambda: not door.rig.left_over() and not door.tasks() and not door.connections())
    await door.server.stop()


@pytest.fixture
async def door(make_rig: Callable[..., Rig]) -> AsyncIterator[Door]:
    door = await open_door(make_rig, LIMITS)
    yield door
    await close_door(door)


@pytest.fixture
async def hasty(make_rig: Callable[..., Rig]) -> AsyncIterator[Door]:
    door = await open_door(make_rig, HASTY)
    yield door
    await close_door(door)


async def drip(client: Client, data: bytes) -> None:
    """A byte at a time, for as long as somebody takes them."""
    with suppress(ConnectionError):
        for byte in data:
            client.writer.write(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0.02)


def code(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


# ---- slow senders


async def test_who_says_nothing_is_let_go(hasty: Door) -> None:
    assert await (await hasty.connect()).read() == b""


@pytest.mark.parametrize("request_", [HEAD + b"x: " + b"y" * 1000, post()[:-1] + b" " * 1000])
async def test_a_byte_at_a_time_is_refused(hasty: Door, request_: bytes) -> None:
    head = request_.find(b"\r\n\r\n")
    start = request_[: head + 5] if head > 0 else b""
    if head > 0:
        start = start.replace(b"content-length: ", b"content-length: 9")
    client = await hasty.connect(start)
    dripping = asyncio.create_task(drip(client, request_[len(start) :]))
    answer = await client.read()
    dripping.cancel()
    assert answer.startswith(b"HTTP/1.1 408 ") and code(answer.partition(b"\r\n\r\n")[2]) == "request_timeout"
    assert hasty.worker.jobs == []


async def test_a_body_that_drips_on_after_its_answer_is_let_go(hasty: Door) -> None:
    client = await hasty.connect(HEAD.replace(b"completions", b"nothing") + b"content-length: 100000\r\n\r\n")
    dripping = asyncio.create_task(drip(client, b" " * 1000))
    answer = await client.read()
    dripping.cancel()
    assert answer.startswith(b"HTTP/1.1 404 ") and answer.count(b"HTTP/1.1") == 1


async def test_a_request_behind_a_long_answer_has_all_the_time(make_rig: Callable[..., Rig]) -> None:
    """Not it is late, but we are: half of a second request does not end the first one."""
    door = await open_door(make_rig, replace(LIMITS, request_timeout_s=0.4))
    client = await door.connect(post(tokens=HELD, stream=True) + GET[:10])
    await client.read(b"data: ")
    for index in range(1, 4):
        await asyncio.sleep(0.25)
        door.worker.tell(token(door.worker.jobs[0].key, index))
    door.worker.tell(Finished(door.worker.jobs[0].key, FinishReason.LENGTH, 4, 0))
    client.writer.write(GET[10:])
    assert b"200 OK" in (await client.read(b'"ok"')).partition(b"[DONE]")[2]
    await close_door(door)


# ---- those who could ask again and do not

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
"""What is sent, piece by piece, and what of the answer is awaited before the next."""


async def converse(client: Client, pieces: list[tuple[bytes, bytes]]) -> None:
    for sent, awaited in pieces:
        client.writer.write(sent)
        await client.read(awaited)
        await asyncio.sleep(0.1)  # where nothing is awaited, that it comes by itself


async def test_who_asks_no_more_is_let_go(make_rig: Callable[..., Rig]) -> None:
    """However the last request and its answer came about; none of these needs a key."""
    door = await open_door(make_rig, FORGETFUL)

    async def is_let_go(pieces: list[tuple[bytes, bytes]]) -> bool:
        client = await door.connect()
        await converse(client, pieces)
        try:
            await client.read()
        except TimeoutError:
            return False
        return True

    found = await asyncio.gather(*map(is_let_go, IDLE.values()))
    assert [name for name, ended in zip(IDLE, found, strict=True) if not ended] == []
    await close_door(door)


async def test_stray_lines_put_nothing_off(make_rig: Callable[..., Rig]) -> None:
    door = await open_door(make_rig, FORGETFUL)
    client = await door.connect(GET)
    await client.read(b'"ok"')
    dripping = asyncio.create_task(drip(client, b"\r\n" * 2000))
    await client.read()
    dripping.cancel()
    await close_door(door)


@pytest.mark.parametrize("name", ["a body after its answer", "a head behind an answer"])
async def test_who_still_sends_is_not_taken_for_one_who_asks_no_more(make_rig: Callable[..., Rig], name: str) -> None:
    door = await open_door(make_rig, FORGETFUL)
    client = await door.connect()
    is_body = name == "a body after its answer"
    first = ASTRAY + b"content-length: 5\r\n\r\n" if is_body else post(tokens=4) + GET[:10]
    await converse(client, [(first, NOT_FOUND if is_body else b'"completion_tokens":4')])
    await asyncio.sleep(1.6 * FORGETFUL.keep_alive_s)
    await converse(client, [(b"hello" + GET if is_body else GET[10:], b'"ok"')])
    await close_door(door)


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


async def test_head_bombs(door: Door) -> None:
    for name, bomb in HEAD_BOMBS.items():
        status, body = await door.ask(bomb)
        assert (name, status, code(body)) == (name, 431, "headers_too_large")


async def test_a_head_as_large_as_allowed(door: Door) -> None:
    status, _ = await door.ask(post(headers=b"connection: close\r\nx: " + b"y" * 32_000 + b"\r\n"))
    assert status == 200


# ---- bodies


LARGE = {
    "announced": HEAD + b"content-length: 20001\r\nconnection: close\r\n\r\n",
    "announced and sent": HEAD + b"content-length: 99999999999\r\nconnection: close\r\n\r\n" + b" " * 100_000,
    "chunked": chunked(*([b" " * 1000] * 21)).replace(b"host: h", b"connection: close"),
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


async def test_bodies_over_the_limit(door: Door) -> None:
    for name, request in LARGE.items():
        status, body = await door.ask(request)
        assert (name, status, code(body)) == (name, 413, "body_too_large")


async def test_json_that_goes_deep_or_wrong(door: Door) -> None:
    for name, text in WRONG_JSON.items():
        head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(text)
        status, body = await door.ask(head + text)
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


async def test_what_is_not_http_is_refused(door: Door) -> None:
    for request in NOT_HTTP:
        status, body = await door.ask(request)
        assert (request, status, code(body)) == (request, 400, "invalid_request")


async def test_noise_harms_nobody(door: Door) -> None:
    """What of it looks like a request is answered; nothing is our fault."""
    noise = random.Random(0)
    good = post()
    for _ in range(60):
        request = bytearray(good)
        for _ in range(noise.randint(1, 6)):
            request[noise.randrange(len(request))] = noise.randrange(256)
        client = await door.connect(bytes(request))
        client.writer.write_eof()
        answer = await client.read()
        assert not answer.startswith(b"HTTP/1.1 5"), (request, answer)


async def test_requests_cut_at_every_byte(door: Door) -> None:
    whole = post(stream=True)
    for stop in range(len(whole)):
        for resets in (True, False):
            client = await door.connect(whole[:stop])
            await client.writer.drain()
            if resets:
                client.leave()
            else:
                client.writer.write_eof()
                assert not (await client.read()).startswith(b"HTTP/1.1 5")
                client.leave()
    assert door.worker.jobs == []


OLDER = [
    (version, headers) for version in (b"HTTP/1.0", b"HTTP/0.9") for headers in (b"", b"connection: keep-alive\r\n")
]
"""Versions of HTTP, and what else a head says."""


async def test_http_1_0_is_answered_and_ended(door: Door) -> None:
    for version, headers in OLDER:
        status, body = await door.ask(post(headers=headers).replace(b"HTTP/1.1", version))
        told = json.loads(body)["usage"]["completion_tokens"]
        assert (version, headers, status, told) == (version, headers, 200, 3)


async def test_a_stream_over_http_1_0_has_no_chunks_and_ends_with_its_connection(door: Door) -> None:
    """Who knows no chunks would take their lengths for text."""
    for version, headers in OLDER:
        client = await door.connect(post(headers=headers, stream=True).replace(b"HTTP/1.1", version))
        head, _, body = (await client.read()).partition(b"\r\n\r\n")
        assert b"\r\nconnection: close" in head, (version, headers)
        assert b"transfer-encoding" not in head and b"content-length" not in head, (version, headers)
        events = body.split(b"\n\n")
        assert all(event.startswith(b"data: ") for event in events[:-1]), (version, headers)
        assert events[-2:] == [b"data: [DONE]", b""], (version, headers)


async def test_http_1_0_behind_another_request(door: Door) -> None:
    client = await door.connect(post(stream=True) + post(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0") + GET)
    answer = await client.read()
    assert answer.count(b"HTTP/1.1 200 OK") == 2 and answer.count(b"transfer-encoding: chunked") == 1
    assert answer.endswith(b"\n\ndata: [DONE]\n\n")


async def test_an_upgrade_is_not_taken_and_the_request_is_answered(door: Door) -> None:
    """Java's client offers h2c with its first request. The connection can be used again."""
    for protocol in (b"websocket\r\nsec-websocket-key: eA==\r\nsec-websocket-version: 13", b"h2c"):
        request = post(tokens=2, headers=b"connection: Upgrade\r\nupgrade: " + protocol + b"\r\n")
        for cut in (len(request), len(request) - 30, len(request) - 60):
            client = await door.connect(request[:cut])
            await client.writer.drain()
            client.writer.write(request[cut:])
            await client.read(b'"completion_tokens":2')
            client.writer.write(post(tokens=4))
            await client.read(b'"completion_tokens":4')
            client.leave()


async def test_a_body_is_asked_for(door: Door) -> None:
    head, _, body = post(headers=b"expect: 100-continue\r\nconnection: close\r\n").partition(b"\r\n\r\n")
    client = await door.connect(head + b"\r\n\r\n")
    await client.read(b"100 Continue\r\n\r\n")
    client.writer.write(body)
    assert b"HTTP/1.1 200 OK" in await client.read()


async def test_a_body_that_is_shorter_than_announced(hasty: Door) -> None:
    status, body = await hasty.ask(HEAD + b"content-length: 500\r\n\r\n" + b"{}")
    assert status == 408 and code(body) == "request_timeout"


async def test_a_body_that_is_longer_than_announced(door: Door) -> None:
    """The rest is another request, and a bad one."""
    answer = await (await door.connect(HEAD + b"content-length: 2\r\n\r\n" + b"{}rubbish")).read()
    assert answer.startswith(b"HTTP/1.1 400 ") or answer == b""


# ---- many at once


async def test_pipelined_requests_are_answered_in_order(door: Door) -> None:
    client = await door.connect(post(tokens=2) + GET + post(tokens=4) + GET.replace(b"host: h", b"connection: close"))
    answer = await client.read()
    assert answer.count(b"HTTP/1.1 200 OK") == 4
    places = [answer.index(sign) for sign in (b'"completion_tokens":2', b'"ok"', b'"completion_tokens":4')]
    assert places == sorted(places)


async def test_too_many_pipelined_requests_end_the_connection(door: Door) -> None:
    client = await door.connect(post(tokens=HELD, stream=True))
    await client.read(b"data: ")
    client.writer.write(GET * 50)
    assert b"HTTP/1.1 4" not in await client.read(), "nothing comes in the middle of an answer"
    await until(lambda: "cancel" in door.worker.verbs(door.worker.jobs[0].request.id))


async def test_a_flood_of_connections_is_refused_and_passes(door: Door) -> None:
    held = [await door.connect(GET) for _ in range(LIMITS.max_connections)]
    for client in held:
        await client.read(b'"ok"')
    status, body = await door.ask(post())
    assert status == 503 and code(body) == "overloaded" and door.worker.jobs == []
    client = await door.connect(GET.replace(b"health", b"metrics"))
    assert b"\r\nretry-after: 1\r\nx-tandem-reject-reason: connections\r\n" in await client.read()
    for client in held:
        client.leave()
    await until(lambda: not door.connections())
    await door.serves()


async def test_probes_are_answered_among_too_many_connections(door: Door) -> None:
    held = [await door.connect(GET) for _ in range(LIMITS.max_connections)]
    for client in held:
        await client.read(b'"ok"')
    probe = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    for path in (b"/health", b"/live", b"/ready"):
        assert (await door.ask(probe.replace(b"/health", path)))[0] == 200
    silent = [await door.connect() for _ in range(LIMITS.probe_room)]
    status, body = await door.ask(probe)
    assert status == 503 and code(body) == "overloaded", "there is not room for all who might want to probe"
    for client in silent:
        assert await client.read() == b"", "who comes to probe does so at once"
    probing = await door.connect(GET)
    await probing.read(b'"ok"')
    probing.writer.write(post())
    assert b"x-tandem-reject-reason: connections" in await probing.read(), "a probe opens the door for nothing else"
    for client in held:
        client.leave()
    await until(lambda: not door.connections())
    await door.serves()


async def test_who_leaves_with_another_request_waiting_is_cancelled(door: Door) -> None:
    client = await door.connect(post(tokens=HELD, stream=True) + GET)
    await client.read(b"data: ")
    client.leave()
    key = door.worker.jobs[0].key
    for index in range(1, HELD):  # nothing is read of this client while an answer is due, so the next write tells
        if "cancel" in door.worker.verbs(key.request):
            return
        door.worker.tell(token(key, index))
        await asyncio.sleep(0.01)
    raise AssertionError("it ran on")


@pytest.mark.parametrize("num_idle", [200, pytest.param(1000, marks=pytest.mark.nightly)])
async def test_many_idle_streams_that_leave_at_once(make_rig: Callable[..., Rig], num_idle: int) -> None:
    door = await open_door(make_rig, HttpLimits())
    clients = [await door.connect(post(tokens=HELD, stream=True)) for _ in range(num_idle)]
    for client in clients:
        await client.read(b"data: ")
    await door.serves()
    for client in clients:
        client.leave()
    await until(lambda: not door.rig.left_over())
    held = {job.request.id for job in door.worker.jobs if job.request.sampling.max_tokens == HELD}
    await until(lambda: len(held & {key.request for verb, key in door.worker.seen if verb == "cancel"}) == num_idle)
    await close_door(door)


# ---- slow readers


async def test_a_reader_that_stalls_is_cut_off_and_cancelled(hasty: Door) -> None:
    """What waits for it is bounded: by the request's tokens here, by high-water marks below."""
    client = await hasty.connect(post(tokens=LONG, stream=True), receive_buffer=4096)
    await until(lambda: "cancel" in hasty.worker.verbs(hasty.worker.jobs[0].request.id) if hasty.worker.jobs else False)
    client.leave()


async def test_a_reader_that_takes_its_time_gets_all(door: Door) -> None:
    client = await door.connect(post(tokens=5_000, stream=True), receive_buffer=4096)
    seen = b""
    async with asyncio.timeout(PATIENCE_S):
        while not seen.endswith(b"0\r\n\r\n"):
            more = await client.reader.read(1 << 14)
            assert more, seen[-200:]
            seen += more
            await asyncio.sleep(0.001)
    assert b"[DONE]" in seen


async def test_an_application_waits_for_its_reader() -> None:
    """What a client does not take yet is bounded, whatever the application would send; when the client goes on, so does
    the application, and nobody counts how long the client has stood still any more."""
    peak, timers = 0, []

    async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
        nonlocal peak
        if scope["type"] == "lifespan":
            for step in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{step}.complete"})
            return
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
    server = HttpServer(application, "127.0.0.1", 0, graceful_s=1.0, limits=LIMITS)
    await server.start()
    client = Client(*await asyncio.open_connection("127.0.0.1", server.port, limit=1024))
    client.writer.write(GET)
    assert len(await client.read()) > CHUNKS * CHUNK
    client.leave()
    await server.stop()
    assert 0 < peak < 20 * CHUNK
    assert timers[0].cancelled()
