"""Check the addresses of this machine's programs: that those on which they listen are free, or are used by a running
Tandem already; that other machines can use the one that workers advertise; and that the machines of one worker can
reach its first one.
"""

from __future__ import annotations

import errno
import http.client
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import grpc

from tandem.core.addresses import format_host, host_of, is_loopback
from tandem.core.config import ClusterConfig, Config, WorkerConfig
from tandem.core.errors import TandemError
from tandem.doctor.finding import Finding, fail, ok, skip, warn
from tandem.doctor.tls import http_connection, trusting
from tandem.wire.channels import TLS_NAME
from tandem.wire.tls import TlsFiles

_ANSWER_S = 2.0
_HEALTH = "/grpc.health.v1.Health/Check"
_REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}
Speaks = Literal["http", "grpc", "metrics"]
AddressRule = Callable[[WorkerConfig, Mapping[str, str]], str]
"""Signature of a rule: `rule(settings, environment)` returns the host:port to advertise, and raises TandemError if
there is none."""


@dataclass(frozen=True, slots=True)
class ConfiguredAddress:
    """Describe an address on which a program would listen with the checked settings.

    `key`: name of the setting of the port. `host`, `port`: the address; port 0 means any free port. `speaks`: what is
    served at the address: the gateway's HTTP, gRPC, or a worker's metrics endpoint. `cert_file`: the certificate that
    clients of the gateway see at this address; empty without TLS."""

    key: str
    host: str
    port: int
    speaks: Speaks
    cert_file: str = ""

    @property
    def part(self) -> str:
        """Return the part of Tandem that listens at the address: "gateway" or "worker"."""
        return self.key.partition(".")[0]


def configured_addresses(config: Config) -> tuple[ConfiguredAddress, ...]:
    """Return the addresses to check: each address that has a port number, and besides the worker's gRPC address.

    The worker's host is checked even if its port is 0, which means any free port."""
    gateway, worker = config.gateway, config.worker
    places = (
        ConfiguredAddress("gateway.port", gateway.host, gateway.port, "http", gateway.tls_cert_file),
        ConfiguredAddress("gateway.grpc_port", gateway.host, gateway.own_grpc_port, "grpc", gateway.tls_cert_file),
        ConfiguredAddress(
            "gateway.metrics_port", gateway.own_metrics_host, gateway.metrics_port, "http", gateway.tls_cert_file
        ),
        ConfiguredAddress("worker.port", worker.host, worker.port, "grpc"),
        ConfiguredAddress("worker.metrics_port", worker.host, worker.metrics_port, "metrics"),
    )
    return tuple(place for place in places if place.port > 0 or place.key == "worker.port")


def check_address(configured: ConfiguredAddress, cluster: ClusterConfig) -> Finding:
    """Return a finding on whether a program can listen on the address. It can if the address is free; if a Tandem
    program listens there already, the finding is OK too.

    `cluster`: has the TLS files with which to call a worker that listens at the address. Blocks for up to a few seconds
    if the address is in use.
    """
    summary = f"{configured.key} {_endpoint(configured)}"
    fix = f"set a {configured.part}.host of this machine (`ip addr`; 0.0.0.0 means all), and a port above 1023"
    try:
        family, *_, address = socket.getaddrinfo(configured.host, configured.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return fail("ports", f"{summary}: {configured.host} is not a known host: {error.strerror}", fix)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return fail("ports", f"{summary}: {error.strerror or error}", fix)
            if _is_ours(configured, cluster):
                return ok("ports", f"{summary} is taken by a Tandem that answers")
            end = f"end the process that listens there (`ss -ltnp 'sport = :{configured.port}'` shows it)"
            return fail("ports", f"{summary} is taken by another program", f"{end}, or set another {configured.key}")
    return ok("ports", f"{summary} is free" if configured.port else f"{summary} takes any free port of this machine")


def _is_ours(configured: ConfiguredAddress, cluster: ClusterConfig) -> bool:
    host = _REACHED_AT.get(configured.host, configured.host)
    if configured.speaks == "grpc" and configured.cert_file:
        return _presents(host, configured.port, configured.cert_file)
    if configured.speaks == "grpc":
        target = _endpoint(replace(configured, host=host))
        return _answers_grpc(target, _credentials(cluster) if configured.part == "worker" else None)
    body = _get(host, configured.port, configured.cert_file)
    return body.startswith(b'{"status":"ok"') if configured.speaks == "http" else body == b"ok\n"


def _get(host: str, port: int, cert_file: str) -> bytes:
    """Return the body of /health; empty if there is no response with status 200, over TLS with the certificate of
    `cert_file` where there is one."""
    with suppress(OSError, http.client.HTTPException):
        context = trusting(cert_file) if cert_file else None
        with http_connection(host, port, _ANSWER_S, context) as connection:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            return answer.read(1024) if answer.status == 200 else b""
    return b""


def _presents(host: str, port: int, cert_file: str) -> bool:
    """Check whether an HTTP/2 server with the certificate of `cert_file` listens, as a gateway's gRPC server does.
    Makes no call, which would need a client's certificate where the gateway requires one."""
    with suppress(OSError):
        context = trusting(cert_file)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, port), _ANSWER_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            return connection.selected_alpn_protocol() == "h2"
    return False


def _credentials(cluster: ClusterConfig) -> grpc.ChannelCredentials | None:
    """Return the TLS credentials; None without TLS or if its files are unusable, which the check `tls` reports."""
    try:
        return TlsFiles.of_cluster(cluster).channel_credentials() if cluster.has_tls else None
    except TandemError:
        return None


def _answers_grpc(target: str, credentials: grpc.ChannelCredentials | None) -> bool:
    """Check whether a Tandem program answers a gRPC health call.

    A serving gateway answers it. A worker refuses it with UNIMPLEMENTED, or with UNAUTHENTICATED since it is not
    signed."""
    workers = {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED}
    options = [("grpc.enable_http_proxy", 0), ("grpc.ssl_target_name_override", TLS_NAME)]
    secured = credentials and grpc.secure_channel(target, credentials, options=options)
    with secured or grpc.insecure_channel(target, options=options[:1]) as channel:
        try:
            channel.unary_unary(_HEALTH, None, None)(b"", timeout=_ANSWER_S)
        except grpc.RpcError as error:
            return isinstance(error, grpc.Call) and error.code() in workers
    return True


def _endpoint(configured: ConfiguredAddress) -> str:
    return f"{format_host(configured.host)}:{configured.port}"


def check_advertised(worker: WorkerConfig, environ: Mapping[str, str], rule: AddressRule) -> Finding:
    """Return a finding on whether other machines can use the address that a worker with the settings `worker` would
    advertise.

    `environ`: environment variables. `rule`: computes that address as a worker does. Resolves the host name in the
    address, which may block."""
    try:
        address = rule(worker, environ)
    except TandemError as error:
        fix = (
            "set worker.advertise_address=HOST:0 with a HOST that others reach; in a pod set POD_IP by the downward API"
        )
        return fail("advertise-address", error.message, fix)
    summary = f"workers are advertised at {address.removesuffix(':0')}"
    try:
        found = socket.getaddrinfo(host_of(address), None, type=socket.SOCK_STREAM)
    except OSError:
        fix = (
            "set worker.advertise_address to a name that the other machines' DNS knows, or to an IP address of this "
            "machine"
        )
        return fail("advertise-address", f"{summary}, which cannot be resolved: nobody can reach them", fix)
    leads_to = list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
    if is_loopback(leads_to[0]) and not is_loopback(worker.host):
        fix = "set worker.advertise_address=HOST:0 at which other machines reach this one (`hostname -I`)"
        return warn("advertise-address", f"{summary}, a loopback address: other machines would reach themselves", fix)
    if any(map(_is_local, leads_to)):
        return ok("advertise-address", f"{summary}, which is on this machine")
    return ok("advertise-address", f"{summary} ({', '.join(leads_to)}), which must forward to this machine")


def _is_local(address: str) -> bool:
    """Check whether an IP address belongs to this machine, by binding it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def check_nodes(config: Config) -> Finding:
    """Return a finding on whether the ranks of a worker that spans engine.nnodes machines can find each other, as far
    as this machine's settings and name resolution show it. Resolves engine.master_addr, which may block."""
    engine = config.engine
    if engine.nnodes == 1:
        return skip("nodes", "all ranks of a worker are on its machine: engine.nnodes is 1")
    ranks = f"{engine.ranks_per_node} of the {engine.tensor_parallel} ranks are on each of {engine.nnodes} machines"
    where = f"{engine.master_addr}:{engine.master_port}"
    if is_loopback(config.worker.host):
        fix = "set worker.host to this machine's address in their private network"
        return warn("nodes", f"{ranks}, and worker.host is a loopback address, which the others do not reach", fix)
    if not engine.master_addr:
        return ok("nodes", f"{ranks}; the first machine accepts the others at port {engine.master_port}")
    try:
        found = socket.getaddrinfo(engine.master_addr, engine.master_port, type=socket.SOCK_STREAM)
    except OSError as error:
        fix = "set engine.master_addr to a name that DNS knows on all machines, or to an IP address of the first one"
        return fail("nodes", f"{ranks}, and {engine.master_addr} cannot be resolved: {error}", fix)
    if engine.node_rank and is_loopback(str(found[0][4][0])):
        fix = "set engine.master_addr to the address of the first machine in the private network"
        return warn("nodes", f"{ranks}, and {where} is this machine itself, which is not the first one", fix)
    return ok("nodes", f"{ranks}; the first machine accepts the others at {where}")
