"""Test a worker's /metrics endpoint over real sockets."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tandem.obs.metrics import metrics_server as module
from tandem.obs.metrics.metrics_server import Exposition, MetricsEndpoint

pytestmark = pytest.mark.usefixtures("every_thread_ends")


@contextmanager
def an_endpoint(
    exposition: Exposition = lambda accept: ("text/x", f"for {accept}".encode()),
) -> Iterator[MetricsEndpoint]:
    endpoint = MetricsEndpoint("127.0.0.1", 0, exposition)
    endpoint.start()
    try:
        yield endpoint
    finally:
        endpoint.close()


@pytest.fixture
def endpoint() -> Iterator[MetricsEndpoint]:
    with an_endpoint() as opened:
        yield opened


def dialled(endpoint: MetricsEndpoint) -> socket.socket:
    host, _, port = endpoint.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def connected(endpoint: MetricsEndpoint) -> http.client.HTTPConnection:
    host, _, port = endpoint.address.rpartition(":")
    return http.client.HTTPConnection(host, int(port), timeout=30)


def fetch(
    connection: http.client.HTTPConnection, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, str, bytes]:
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.headers.get("Content-Type", ""), answer.read()


def test_what_is_served(endpoint: MetricsEndpoint) -> None:
    assert fetch(connected(endpoint), "/metrics", Accept="a/b") == (200, "text/x", b"for a/b")
    assert fetch(connected(endpoint), "/metrics?format=x") == (200, "text/x", b"for ")
    assert fetch(connected(endpoint), "/health")[0::2] == (200, b"ok\n")
    assert fetch(connected(endpoint), "/", "GET")[0] == 404


def test_head_has_no_body(endpoint: MetricsEndpoint) -> None:
    connection = connected(endpoint)
    connection.request("HEAD", "/metrics")
    answer = connection.getresponse()
    assert (answer.status, answer.headers["Content-Length"], answer.read()) == (200, "4", b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "x"])
def test_nothing_else_is_served(endpoint: MetricsEndpoint, method: str) -> None:
    assert fetch(connected(endpoint), "/metrics", method)[0] == 405


def test_a_body_is_never_taken_for_a_request(endpoint: MetricsEndpoint) -> None:
    with dialled(endpoint) as connection:
        smuggled = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        head = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % len(smuggled) + smuggled)
        answered = b""
        while more := connection.recv(65536):
            answered += more
    assert answered.count(b"HTTP/1.0") == 1 and answered.endswith(b"ok\n")


@pytest.mark.parametrize(
    "sent", [b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET /" + b"x" * 70_000, b"GET / HTTP/9.9\r\n\r\n"]
)
def test_garbage_ends_a_connection_and_nothing_else(endpoint: MetricsEndpoint, sent: bytes) -> None:
    with dialled(endpoint) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    connection_after = connected(endpoint)
    assert fetch(connection_after, "/health")[0] == 200
    connection_after.close()


def test_a_failed_collection_is_answered_with_500_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken(accept: str) -> tuple[str, bytes]:
        raise RuntimeError("the owner is gone")

    with an_endpoint(broken) as endpoint:
        connection = connected(endpoint)
        assert fetch(connection, "/metrics")[0] == 500
        assert "the owner is gone" in caplog.text
        assert fetch(connected(endpoint), "/health")[0] == 200


def test_only_so_many_are_served_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)
    with an_endpoint() as endpoint:
        kept = [dialled(endpoint) for _ in range(2)]
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            fetch(connected(endpoint), "/health")
        for connection in kept:
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.0 200")
            connection.close()
        while True:  # the threads of the closed connections still have to end
            try:
                assert fetch(connected(endpoint), "/health")[0] == 200
                break
            except (http.client.RemoteDisconnected, ConnectionError):
                continue


def test_a_connection_for_which_no_thread_starts_does_not_count_as_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 1)
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with an_endpoint() as endpoint:
        monkeypatch.setattr(threading.Thread, "start", fail)
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            fetch(connected(endpoint), "/health")
        monkeypatch.setattr(threading.Thread, "start", start)
        assert fetch(connected(endpoint), "/health")[0] == 200


def test_who_is_idle_is_left(endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._Handler.timeout == module.TIMEOUT_S
    monkeypatch.setattr(module._Handler, "timeout", 0.05)
    with dialled(endpoint) as connection:
        connection.sendall(b"GET /heal")
        assert connection.recv(1) == b""


def test_nothing_listens_after_closing(endpoint: MetricsEndpoint) -> None:
    assert fetch(connected(endpoint), "/health")[0] == 200
    endpoint.close()
    with pytest.raises(OSError):
        dialled(endpoint)


def test_a_port_in_use_is_an_error_that_names_it(endpoint: MetricsEndpoint) -> None:
    port = int(endpoint.address.rpartition(":")[2])
    second = MetricsEndpoint("127.0.0.1", port, lambda accept: ("", b""))
    with pytest.raises(OSError):
        second.start()
    second.close()
