"""The addresses that Tandem wants to listen at: whether they can be had or are Tandem's already; never keeps one."""

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
class Wanted:
    """`key` is the setting that names it. `port` 0 takes any free one."""

    key: str
    host: str
    port: int
    speaks: Speaks

    @property
    def part(self) -> str:
        """Of Tandem, that listens there."""
        return self.key.partition(".")[0]


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """`problem`: why nobody can listen there, empty where one can. `is_taken`: somebody listens there already, and
    `is_ours` that it answers as Tandem does."""

    wanted: Wanted
    problem: str = ""
    is_taken: bool = False
    is_ours: bool = False


def wanted_places(config: Config) -> tuple[Wanted, ...]:
    """Those with a number; any free port can always be had."""
    gateway, worker = config.gateway, config.worker
    places = (
        Wanted("gateway.port", gateway.host, gateway.port, "http"),
        Wanted("gateway.grpc_port", gateway.host, gateway.own_grpc_port, "grpc"),
        Wanted("worker.port", worker.host, worker.port, "grpc"),
        Wanted("worker.metrics_port", worker.host, worker.metrics_port, "metrics"),
    )
    return tuple(place for place in places if place.port > 0 or place.key == "worker.port")


def read_place(wanted: Wanted, cluster: ClusterConfig) -> ListenAddress:
    """`cluster` as the programs have it: a worker that has TLS answers nobody else."""
    try:
        family, *_, address = socket.getaddrinfo(wanted.host, wanted.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return ListenAddress(wanted, problem=f"{wanted.host} is no host: {error.strerror}")
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            return ListenAddress(wanted, error.strerror or str(error), is_taken, is_taken and _is_ours(wanted, cluster))
    return ListenAddress(wanted)


def judge_place(place: ListenAddress) -> Finding:
    wanted = place.wanted
    told = f"{wanted.key} {_endpoint(wanted)}"
    if not place.problem:
        return ok("ports", f"{told} is free" if wanted.port else f"{told}: any free port of a host of this machine")
    if place.is_ours:
        return ok("ports", f"{told} is taken by a Tandem that answers")
    if place.is_taken:
        fix = f"end who listens there (`ss -ltnp 'sport = :{wanted.port}'`), or another {wanted.key}"
        return fail("ports", f"{told} is taken by somebody else", fix)
    fix = (
        f"a {wanted.part}.host of this machine (`ip addr`; 0.0.0.0 is every one), and a port from 1024 on but for root"
    )
    return fail("ports", f"{told}: {place.problem}", fix)


def _is_ours(wanted: Wanted, cluster: ClusterConfig) -> bool:
    host = "127.0.0.1" if wanted.host == _WILDCARDS[0] else "::1" if wanted.host == _WILDCARDS[1] else wanted.host
    if wanted.speaks == "grpc":
        target = f"[{host}]:{wanted.port}" if ":" in host else f"{host}:{wanted.port}"
        return _answers_grpc(target, _credentials(cluster) if wanted.part == "worker" else None)
    body = _get(host, wanted.port)
    return body.startswith(b'{"status":"ok"') if wanted.speaks == "http" else body == b"ok\n"


def _get(host: str, port: int) -> bytes:
    """The body of /health; empty where there is none."""
    with suppress(OSError, http.client.HTTPException), closing(http.client.HTTPConnection(host, port, _ANSWER_S)) as to:
        to.request("GET", "/health")
        answer = to.getresponse()
        return answer.read(1024) if answer.status == 200 else b""
    return b""


def _credentials(cluster: ClusterConfig) -> grpc.ChannelCredentials | None:
    """None without TLS, and where its files cannot be used, which is another check's finding."""
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
    """It is a gateway's that serves, or a worker's, which knows no such call or does not believe us."""
    workers = {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED}
    with _channel(target, credentials) as channel:
        try:
            channel.unary_unary(_HEALTH, None, None)(b"", timeout=_ANSWER_S)
        except grpc.RpcError as error:
            return isinstance(error, grpc.Call) and error.code() in workers
    return True


def _endpoint(wanted: Wanted) -> str:
    return f"[{wanted.host}]:{wanted.port}" if ":" in wanted.host else f"{wanted.host}:{wanted.port}"
