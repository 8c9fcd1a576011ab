"""Test malformed HTTP requests, byte by byte as a client may write them: each is refused with a typed error of OpenAI's
form, and the gateway serves the next client."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from itertools import product

import pytest

from tests.hostile.conftest import PATIENCE_S
from tests.unit.gateway.conftest import Front

pytestmark = pytest.mark.slow
HOST = b"host: 127.0.0.1\r\n"
END = b"connection: close\r\n\r\n"
BODY = b'{"model": "tiny", "prompt": "hi"}'
_TOKEN_BREAKERS = (b" ", b"\t", b"\0", b"\x01", b"\x7f", b"(", b"@", b"\xc3\xa4", b"/", b'"')


def _lines() -> Iterator[tuple[str, bytes]]:
    """Yield request lines that are not those of HTTP/1, or name nothing that is served."""
    methods = (b"FOO", b"get", b"G ET", b"GET\t", b"PRI", b"\0GET", b"-", b"M" * 9000, b"\xc3\xa4")
    for method in (b"", *methods):
        yield f"method {method[:9]!r}", method + b" /health HTTP/1.1\r\n" + HOST + END
    for method, path in product(
        (b"PUT", b"DELETE", b"PATCH", b"TRACE", b"LINK", b"PROPFIND"), (b"/health", b"/v1/models")
    ):
        yield f"method {method!r} of {path!r}", method + b" " + path + b" HTTP/1.1\r\n" + HOST + END
    for method in (b"GET", b"PUT", b"DELETE"):
        for path in (b"/v1/chat/completions", b"/v1/completions", b"/tokenize", b"/detokenize"):
            yield f"method {method!r} of {path!r}", method + b" " + path + b" HTTP/1.1\r\n" + HOST + END
    targets = (
        *(
            b"",
            b"health",
            b"*",
            b"/../health",
            b"/./health",
            b"/health/",
            b"/%00",
            b"/%",
            b"/%zz",
            b"/health%00",
            b"/\\",
        ),
        *(
            b"/v1/models/..%2f..%2fhealth",
            b"/v1//models",
            b"/;/health",
            b"/health;a",
            b"/a b",
            b"/\x7f",
            b"/\0",
            b"/\xff",
        ),
        *(
            b"/v1/models/none",
            b"/v1/models/" + b"a" * 9000,
            b"/%2e%2e/%2e%2e/etc/passwd",
            b"/console/../../secret",
            b"?",
        ),
    )
    for target in targets:
        yield f"target {target[:30]!r}", b"GET " + target + b" HTTP/1.1\r\n" + HOST + END
    versions = (
        b"",
        b"HTTP",
        b"HTTP/",
        b"HTTP/1",
        b"HTTP/1.",
        b"HTTP/.1",
        b"HTTP/1.11",
        b"HTTP/9.9",
        b"http/1.1",
        b"XTTP/1.1",
    )
    for version in (*versions, b"HTTP/1.1 x", b"HTTP/-1.1", b"HTTP/1,1", b"HTTP\\1.1"):
        yield f"version {version!r}", b"GET /nothing " + version + b"\r\n" + HOST + END


def _headers() -> Iterator[tuple[str, bytes]]:
    """Yield header lines that are no header lines, before a request that is refused for its path in any case."""
    for breaker in _TOKEN_BREAKERS:
        yield f"{breaker!r} in a name", b"x" + breaker + b"y: z\r\n"
    lines = (
        *(
            b"no colon\r\n",
            b": no name\r\n",
            b"x\r\n: y\r\n",
            b"x : y\r\n",
            b" x: y\r\n",
            b"x: a\r\n b\r\n",
            b"x: a\rb\r\n",
        ),
        *(
            b"x: \0\r\n",
            b"x: a\x7fb\r\n",
            b"x: a\x01b\r\n",
            b"\r: x\r\n",
            b"x: y\n",
            b"x: y\n\n",
            b"x\n: y\r\n",
            b"\x00\x00: a\r\n",
        ),
        *(
            b"content-encoding: gzip\r\n",
            b"content-type: \xff\r\n",
            b"expect: 200-maybe\r\n",
            b"te: trailers, chunked\r\n",
        ),
    )
    for line in lines:
        yield f"line {line[:20]!r}", line


def _framings() -> Iterator[tuple[str, bytes]]:
    """Yield the headers and the rest of a POST whose end two parsers may see at different places."""
    numbers = (
        b"-1",
        b"+5",
        b"0x5",
        b"5 5",
        b"5,5",
        b"5, 6",
        b"5;6",
        b"1e1",
        b"5.0",
        b"\xd9\xa5",
        b"9" * 20,
        b"9" * 400,
        b"",
    )
    for number in (*numbers, b"18446744073709551616", b"5\t5", b"five", b"0b1", b"'5'"):
        yield f"length {number[:22]!r}", b"content-length: " + number + b"\r\n\r\n" + BODY
    yield "two lengths", b"content-length: 5\r\ncontent-length: 6\r\n\r\n" + BODY
    yield "twice the same length", b"content-length: 33\r\ncontent-length: 33\r\n\r\n" + BODY
    codings = (
        *(
            b"chunked",
            b"Chunked",
            b" chunked",
            b"\tchunked",
            b"chunked ",
            b"identity, chunked",
            b"gzip, chunked",
            b"chunked, chunked",
        ),
        *(
            b"chunked, identity",
            b"xchunked",
            b"chunked;q=1",
            b'"chunked"',
            b"identity",
            b"gzip",
            b"chunked\x0b",
            b"cow",
            b"",
        ),
    )
    rest = b"0\r\n\r\nGET /secret HTTP/1.1\r\nx: y"
    for coding in codings:
        yield (
            f"coding {coding!r} and a length",
            b"content-length: 5\r\ntransfer-encoding: " + coding + b"\r\n\r\n" + rest,
        )
        yield (
            f"a length and coding {coding!r}",
            b"transfer-encoding: " + coding + b"\r\ncontent-length: 5\r\n\r\n" + rest,
        )
    for name in (
        b"transfer-encoding ",
        b"transfer_encoding",
        b"\ttransfer-encoding",
        b"transfer-encoding\0",
        b"x\ntransfer-encoding",
    ):
        yield f"a length and {name!r}", b"content-length: 5\r\n" + name + b": chunked\r\n\r\n" + rest
    sizes = (
        b"",
        b"z",
        b"-1",
        b"+1",
        b"0x1",
        b"1 1",
        b" 1",
        b"g",
        b"f" * 17,
        b"1;" + b"e" * 40_000,
        b"1\n",
        b"\0",
        b"10000000000000000",
    )
    for size in sizes:
        yield f"chunk of {size[:18]!r}", b"transfer-encoding: chunked\r\n\r\n" + size + b"\r\nx\r\n0\r\n\r\n"
    for wrong in (
        b"1\r\nxy\r\n0\r\n\r\n",
        b"1\r\nx0\r\n\r\n",
        b"1\nx\n0\n\n",
        b"1\r\nx\r\n0\r\nbad trailer\r\n\r\n",
        b"2\r\nx\r\n0\r\n\r\n",
    ):
        yield f"chunks {wrong!r}", b"transfer-encoding: chunked\r\n\r\n" + wrong


def _bombs() -> Iterator[tuple[str, bytes]]:
    head = b"POST /nothing HTTP/1.1\r\n" + HOST
    yield "a header of 40 kB", head + b"x: " + b"y" * 40_000 + b"\r\n" + END
    yield "a name of 40 kB", head + b"x" * 40_000 + b": y\r\n" + END
    yield "200 headers", head + b"".join(b"x-%d: y\r\n" % number for number in range(200)) + END
    yield "200 times one header", head + b"x: y\r\n" * 200 + END
    yield "a path of 40 kB", b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n" + HOST + END
    yield "a query of 40 kB", b"GET /health?" + b"a" * 40_000 + b" HTTP/1.1\r\n" + HOST + END
    yield "a cookie of 33 kB", head + b"cookie: " + b"a=b; " * 6_600 + b"\r\n" + END
    yield (
        "trailers",
        head + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(200)) + b"\r\n",
    )


def _values() -> Iterator[tuple[str, bytes]]:
    """Yield wrong values of the headers that the gateway reads."""
    wrong = {
        b"x-request-timeout-ms": (b"0", b"-1", b"1.5", b"abc", b"9" * 9, b"", b"1e3", b"\xb2"),
        b"x-tandem-lane": (b"fast", b"", b"0", b"interactive,batch", b"\xff"),
        b"x-tandem-disaggregation": (b"on", b"", b"off, strict", b"\xff"),
        b"x-tandem-explain": (b"2", b"true", b"-", b""),
        b"x-tandem-timing": (b"yes", b"10"),
        b"content-encoding": (b"gzip", b"br", b"identity, gzip", b"\xff"),
    }
    for name, values in wrong.items():
        for value in values:
            yield f"{name.decode()}: {value!r}", name + b": " + value + b"\r\n"


def _post(lines: bytes, body: bytes = BODY, path: bytes = b"/v1/completions") -> bytes:
    head = b"POST " + path + b" HTTP/1.1\r\n" + HOST + lines
    return head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body


CASES = {
    **dict(_lines()),
    **{name: b"GET /nothing HTTP/1.1\r\n" + HOST + line + END for name, line in _headers()},
    **{name: b"POST /nothing HTTP/1.1\r\n" + HOST + b"connection: close\r\n" + rest for name, rest in _framings()},
    **dict(_bombs()),
    **{name: _post(lines) for name, lines in _values()},
    **{f"{name} beside good ones": _post(b"x-request-id: 5\r\n" + lines) for name, lines in _values()},
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.0\r\n",
    "Redis": b"*1\r\n$4\r\nPING\r\n",
    "SMTP": b"EHLO example.org\r\n",
    "a blank": b" \r\n\r\n",
    "zeros": bytes(5_000),
}
NUM_CASES = 200
"""At least so many are tried: the lists above are not to shrink by mistake."""


def statuses(port: int, sent: bytes) -> list[int]:
    """Send bytes and half-close; return the status of each answer until the connection ends, after a check of its
    form."""
    found = []
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as link:
        try:
            link.sendall(sent)
            link.shutdown(socket.SHUT_WR)
        except OSError:  # it was refused before all was sent
            pass
        while True:
            response = HTTPResponse(link)
            try:
                response.begin()
            except (ConnectionError, OSError) as error:
                assert not isinstance(error, TimeoutError), "neither an answer nor an end"
                return found
            body = response.read()
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}, body
            found.append(response.status)
            if response.will_close:
                return found


def test_malformed_requests_are_refused(attacked: Front) -> None:
    assert len(CASES) >= NUM_CASES
    wrong = {}
    for name, sent in CASES.items():
        found = statuses(attacked.port, sent)
        # A request that is cut off, or has a second one behind it in bytes that it did not announce, ends without one.
        if not all(400 <= status < 500 for status in found):
            wrong[name] = found
    assert not wrong


def test_the_same_requests_in_pieces_are_refused(attacked: Front) -> None:
    """How the bytes arrive changes nothing, also where an element is cut."""
    wrong = {}
    for name, sent in list(CASES.items())[::5]:
        with socket.create_connection(("127.0.0.1", attacked.port), timeout=PATIENCE_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                for start in range(0, min(len(sent), 400), 7):
                    link.sendall(sent[start : start + 7])
                link.sendall(sent[406:])
                link.shutdown(socket.SHUT_WR)
                first = link.recv(1 << 16)
            except ConnectionError:
                continue
        if first and not first.startswith(b"HTTP/1.1 4"):
            wrong[name] = first[:80]
    assert not wrong
