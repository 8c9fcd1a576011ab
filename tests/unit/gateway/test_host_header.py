"""Test which host a request names, and which hosts a listener answers for."""

from __future__ import annotations

import pytest

from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.http.host_header import AllowedHosts, requested_host
from tandem.gateway.http.protocol_limits import HttpLimits

LOCAL = "10.0.0.5"
"""Address of the gateway's side of a connection."""


@pytest.mark.parametrize(
    ("value", "host"),
    [
        (b"Example.COM:8000", "example.com"),
        (b"example.com.", "example.com"),
        (b"example.com:", "example.com"),
        (b"127.0.0.1", "127.0.0.1"),
        (b"[::1]:8000", "::1"),
        (b"a_b-c.d", "a_b-c.d"),
        (b"%41", "%41"),
        (b"", ""),
        (b":80", ""),
    ],
)
def test_the_host_in_a_header(value: bytes, host: str) -> None:
    for version in ("1.0", "1.1"):
        assert requested_host([(b"x", b"y"), (b"host", value)], b"/", version) == host


@pytest.mark.parametrize(
    "value",
    [b"h:x", b"h h", b"h/", b"u@h", b"::1", b"[::1", b"[h]", b"h\n", b"%4", "é".encode(), b"http://h"],
)
def test_an_invalid_host_is_refused(value: bytes) -> None:
    for target in (b"/", b"http://good/"):
        with pytest.raises(TandemError, match="Host is invalid") as refused:
            requested_host([(b"host", value)], target, "1.1")
        assert refused.value.kind is ErrorKind.INVALID_REQUEST


def test_a_host_is_sent_once_and_in_http_1_1_always() -> None:
    assert requested_host([], b"/", "1.0") == ""
    for headers, version in (([], "1.1"), ([(b"host", b"h")] * 2, "1.1"), ([(b"host", b"h")] * 2, "1.0")):
        with pytest.raises(TandemError, match="headers Host: send one"):
            requested_host(headers, b"/", version)


@pytest.mark.parametrize(
    ("target", "host"),
    [
        (b"http://Other.example:80/x", "other.example"),
        (b"http://[::1]:8000/x", "::1"),
        (b"*", "h"),
        (b"//other/x", "h"),
    ],
)
def test_the_host_of_the_request_line_overrides_the_header(target: bytes, host: str) -> None:
    assert requested_host([(b"host", b"h")], target, "1.1") == host


def answered(hosts: AllowedHosts, *names: str) -> list[str]:
    return [name for name in names if hosts.allow(name, LOCAL)]


LOOPBACK = ("localhost", "127.0.0.1", "127.9.9.9", "::1", LOCAL)
OTHERS = ("example.com", "a.example.com", "a.b.example.com", "badexample.com", "localhost.example.com", "10.0.0.6")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_a_loopback_listener_answers_for_loopback_names(host: str) -> None:
    assert answered(AllowedHosts.of(host, ()), *LOOPBACK, *OTHERS, host, "") == [*LOOPBACK, host, ""]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gateway.internal"])
def test_any_other_listener_answers_for_every_host(host: str) -> None:
    assert answered(AllowedHosts.of(host, ()), *LOOPBACK, *OTHERS, "") == [*LOOPBACK, *OTHERS, ""]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_listed_hosts_are_answered_beside_loopback_names(host: str) -> None:
    for patterns, added in (
        (["example.com"], ["example.com"]),
        (["*.example.com"], ["a.example.com", "a.b.example.com", "localhost.example.com"]),
        (["10.0.0.6", "badexample.com"], ["badexample.com", "10.0.0.6"]),
        (["x", "*"], list(OTHERS)),
    ):
        assert answered(AllowedHosts.of(host, patterns), *LOOPBACK, *OTHERS) == [*LOOPBACK, *added]


def test_the_configured_host_is_answered() -> None:
    assert answered(AllowedHosts.of("Gateway.internal", ["example.com"]), "gateway.internal") == ["gateway.internal"]


def test_the_limits_are_those_of_the_settings() -> None:
    config = GatewayConfig(allowed_hosts=" Example.com, [fd00::1]", min_body_bytes_per_s=7, body_grace_s=8)
    limits = HttpLimits.of(config, frozenset())
    assert answered(limits.allowed_hosts, *OTHERS, "fd00::1") == ["example.com", "fd00::1"]
    assert (limits.min_body_bytes_per_s, limits.body_grace_s) == (7, 8)
