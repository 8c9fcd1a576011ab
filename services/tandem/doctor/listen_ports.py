"""Check that the addresses on which Tandem listens are free, or are used by a running Tandem already."""

from __future__ import annotations

import errno
import http.client
import socket
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Literal

import grpc

from tandem.core.config import ClusterConfig, Config
from tandem.core.errors import TandemError
from tandem.doctor.finding import Finding, fail, ok
from tandem.wire.channels import TLS_NAME
from tandem.wire.tls import TlsFiles

_ANSWER_S = 2.0
_HEALTH = "/grpc.health.v1.Health/Check"
_WILDCARDS = ("0.0.0.0", "::")
Speaks = Literal["http", "grpc", "metrics"]


@dataclass(frozen=True, slots=True)
class ConfiguredAddress:
    """Address on which a program is set to listen.

    `key`: the setting of the port. `port`: 0 means any free port. `speaks`: protocol that is served there.
    """

    key: str
    host: str
    port: int
    speaks: Speaks

    @property
    def part(self) -> str:
        """Part of Tandem that listens there: gateway or worker."""
        return self.key.partition(".")[0]


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Result of trying to listen on a configured address.

    `problem`: why it cannot be bound, else empty. `is_taken`: another process listens there. `is_ours`: that process
    answers as Tandem does.
    """

    configured: ConfiguredAddress
    problem: str = ""
    is_taken: bool = False
    is_ours: bool = False


def configured_addresses(config: Config) -> tuple[ConfiguredAddress, ...]:
    """Return the addresses to check: those with a port number, and the worker's, whose host must exist."""
    gateway, worker = config.gateway, config.worker
    places = (
        ConfiguredAddress("gateway.port", gateway.host, gateway.port, "http"),
        ConfiguredAddress("gateway.grpc_port", gateway.host, gateway.own_grpc_port, "grpc"),
        ConfiguredAddress("worker.port", worker.host, worker.port, "grpc"),
        ConfiguredAddress("worker.metrics_port", worker.host, worker.metrics_port, "metrics"),
    )
    return tuple(place for place in places if place.port > 0 or place.key == "worker.port")


def probe_address(configured: ConfiguredAddress, cluster: ClusterConfig) -> ListenAddress:
    """Try to bind an address. `cluster` has the TLS files with which to reach a worker that listens there already."""
    try:
        family, *_, address = socket.getaddrinfo(configured.host, configured.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return ListenAddress(configured, problem=f"{configured.host} is not a known host: {error.strerror}")
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            return ListenAddress(
                configured, error.strerror or str(error), is_taken, is_taken and _is_ours(configured, cluster)
            )
    return ListenAddress(configured)


def judge_address(place: ListenAddress) -> Finding:
    configured = place.configured
    summary = f"{configured.key} {_endpoint(configured)}"
    if not place.problem:
        return ok(
            "ports", f"{summary} is free" if configured.port else f"{summary}: any free port of a host of this machine"
        )
    if place.is_ours:
        return ok("ports", f"{summary} is taken by a Tandem that answers")
    if place.is_taken:
        fix = (
            f"end the process that listens there (`ss -ltnp 'sport = :{configured.port}'`), or another {configured.key}"
        )
        return fail("ports", f"{summary} is taken by another program", fix)
    fix = (
        f"a {configured.part}.host of this machine (`ip addr`; 0.0.0.0 means all), and a port from 1024 on unless root"
    )
    return fail("ports", f"{summary}: {place.problem}", fix)


def _is_ours(configured: ConfiguredAddress, cluster: ClusterConfig) -> bool:
    host = (
        "127.0.0.1"
        if configured.host == _WILDCARDS[0]
        else "::1"
        if configured.host == _WILDCARDS[1]
        else configured.host
    )
    if configured.speaks == "grpc":
        target = f"[{host}]:{configured.port}" if ":" in host else f"{host}:{configured.port}"
        return _answers_grpc(target, _credentials(cluster) if configured.part == "worker" else None)
    body = _get(host, configured.port)
    return body.startswith(b'{"status":"ok"') if configured.speaks == "http" else body == b"ok\n"


def _get(host: str, port: int) -> bytes:
    """Return the body of /health; empty if there is no response with status 200."""
    with (
        suppress(OSError, http.client.HTTPException),
        closing(http.client.HTTPConnection(host, port, _ANSWER_S)) as connection,
    ):
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return answer.read(1024) if answer.status == 200 else b""
    return b""


def _credentials(cluster: ClusterConfig) -> grpc.ChannelCredentials | None:
    """Return the TLS credentials; None without TLS or if its files are unusable, which the check `tls` reports."""
    try:
        return TlsFiles(cluster).channel_credentials() if cluster.has_tls else None
    except TandemError:
        return None


def _channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    options = [("grpc.enable_http_proxy", 0), ("grpc.ssl_target_name_override", TLS_NAME)]
    if credentials is None:
        return grpc.insecure_channel(target, options=options[:1])
    return grpc.secure_channel(target, credentials, options=options)


def _answers_grpc(target: str, credentials: grpc.ChannelCredentials | None) -> bool:
    """Check whether a Tandem program answers a gRPC health call.

    A serving gateway answers it. A worker refuses it with UNIMPLEMENTED, or with UNAUTHENTICATED since it is not
    signed."""
    workers = {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED}
    with _channel(target, credentials) as channel:
        try:
            channel.unary_unary(_HEALTH, None, None)(b"", timeout=_ANSWER_S)
        except grpc.RpcError as error:
            return isinstance(error, grpc.Call) and error.code() in workers
    return True


def _endpoint(configured: ConfiguredAddress) -> str:
    return (
        f"[{configured.host}]:{configured.port}" if ":" in configured.host else f"{configured.host}:{configured.port}"
    )
