"""Test clients that send or read badly against a gateway process with workers: their resources are freed, and others
are served. All kinds of hostile clients are in tests/unit/gateway/test_http_guard.py.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.gateway.http import LONG_ANSWER, Post, completion, send
from tests.e2e.gateway.pair import Pair
from tests.e2e.gateway.processes import PATIENCE_S, Gateway, until

MAX_CONNECTIONS = 300
LIMITS = ("--request-timeout-s", "1", "--stalled-client-s", "1")
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
BODY = json.dumps(completion(40, 90, LONG_ANSWER, stream=True)).encode()
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def strict_gateway(calm: Pair) -> Gateway:
    gateway = calm.cluster.gateway("door", *LIMITS)
    gateway.wait_serving()
    return gateway


@pytest.fixture(autouse=True)
def _nothing_left(calm: Pair, strict_gateway: Gateway) -> Iterator[None]:
    """Check that nothing is held after the test, and that the next request is served."""
    yield
    calm.wait_idle()
    assert send(strict_gateway.url, completion(20, 1, 4)).status == 200


def connect(strict_gateway: Gateway, sent: bytes = b"") -> socket.socket:
    where = urlsplit(strict_gateway.url)
    link = socket.create_connection((where.hostname, where.port), timeout=PATIENCE_S)
    with suppress(ConnectionError):
        link.sendall(sent)
    return link


def peak_bytes(strict_gateway: Gateway) -> int:
    lines = Path(f"/proc/{strict_gateway.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def read_all(link: socket.socket) -> bytes:
    seen = b""
    with suppress(ConnectionError):
        while more := link.recv(1 << 16):
            seen += more
    return seen


def test_a_stalled_reader_holds_no_blocks(calm: Pair, strict_gateway: Gateway) -> None:
    with Post(strict_gateway.url, completion(40, 70, LONG_ANSWER, stream=True), receive_buffer=4096) as post:
        until(lambda: calm.decode.books().num_table_blocks > 4, "decoding")
        calm.wait_idle()
        assert b"[DONE]" not in post.rest(), "it was served to its end, so this tests nothing"


def test_other_clients_are_served_among_hostile_ones(calm: Pair, strict_gateway: Gateway) -> None:
    """The clients are silent, send half heads and bodies or bombs, or drop streams; one sends a proper request."""
    expected = calm.complete(40, 71, 64).text()
    before = peak_bytes(strict_gateway)
    with ExitStack() as stack:
        for sent in (b"", HEAD + b"x: y", WHOLE[:-20]) * 30:
            stack.enter_context(connect(strict_gateway, sent))
        for _ in range(30):
            for bomb in (HEAD + b"x: " + b"y" * 900_000, HEAD + b"content-length: 99999999\r\n\r\n" + b" " * 900_000):
                stack.enter_context(connect(strict_gateway, bomb))
            connect(strict_gateway, WHOLE).close()
        assert send(strict_gateway.url, completion(40, 71, 64, stream=True)).text() == expected
    assert peak_bytes(strict_gateway) - before < 64 << 20


def test_a_flood_of_connections_does_not_disturb_open_ones(calm: Pair) -> None:
    """This gateway allows idle connections: otherwise earlier ones could be closed before the flood is complete."""
    crowded = calm.cluster.gateway("crowded", "--max-connections", str(MAX_CONNECTIONS))
    crowded.wait_serving()
    expected = calm.complete(40, 72, 400).text()
    with ExitStack() as stack, Post(crowded.url, completion(40, 72, 400, stream=True)) as post:
        post.wait_events(1)
        flood = [stack.enter_context(connect(crowded)) for _ in range(MAX_CONNECTIONS + 100)]
        refused = read_all(flood[-1])
        assert refused.startswith(b"HTTP/1.1 503 ") and b"retry-after: " in refused
        assert post.finish().text() == expected
