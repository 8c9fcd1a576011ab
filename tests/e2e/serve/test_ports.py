"""Test that `tandem serve` listens where SECURITY.md says, and answers there without a credential what it says."""

from __future__ import annotations

import http.client
import os
import re
import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from tests.e2e.gateway.tenants import tenants_file
from tests.e2e.serve.served import Served
from tests.listening import Listener, listeners
from tests.ports import free_port
from tests.security_tables import names, security_table

pytestmark = pytest.mark.timeout(400)

ANSWER_S = 20.0
GREETING_S = 2.0
NO_PATH, ANY_PATH = "/nothing-has-this-path", "any path"
PATHS = (
    *("/v1/models", "/health", "/live", "/ready", "/metrics", "/metrics/targets", "/metrics/endpoint-picker"),
    *("/openapi.json", "/docs", "/console", "/console/state"),
    *("/", "/api/version", "/api/jobs/", "/api/serve/applications/", "/nodes", "/logs"),  # of Ray
)
CALLS = {
    "Health/Check": "grpc.health.v1.Health/Check",
    "Inference/ListModels": "tandem.v1.Inference/ListModels",
    "Worker/Describe": "tandem.v1.Worker/Describe",
    **{
        name: f"ray.rpc.{name}"
        for name in (
            "NodeInfoGcsService/GetAllNodeInfo",
            "InternalKVGcsService/InternalKVKeys",
            "NodeManagerService/GetSystemConfig",
            "NodeManagerService/GetNodeStats",
            "CoreWorkerService/GetCoreWorkerStats",
            "ReporterService/GetTraceback",
        )
    },
}
REFLECTION = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
OF_THE_GATEWAY = {
    "HTTP": {path for path in PATHS if path.startswith(("/v1", "/health", "/live", "/ready", "/metrics", "/open"))}
    | {"/docs", "/console", "/console/state"},
    "gRPC": {"Health/Check", "Inference/ListModels", "ServerReflection"},
}
"""What a gateway without keys answers, of what is asked for here."""


def http_answers(listener: Listener) -> set[str] | None:
    """Return the paths that are answered with success, or ANY_PATH; None where HTTP is not spoken."""
    answered: set[str] = set()
    for path in (NO_PATH, *PATHS):
        try:
            with closing(http.client.HTTPConnection(*listener.reached_at, timeout=ANSWER_S)) as connection:
                connection.request("GET", path)
                if connection.getresponse().status < 300:
                    answered.add(path)
        except (http.client.HTTPException, OSError):
            return None
    return {ANY_PATH} if NO_PATH in answered else answered


def grpc_answers(listener: Listener) -> set[str] | None:
    """Return the calls that succeed; None where gRPC is not spoken."""
    host, port = listener.reached_at
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    answered, codes = set(), set()
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        for name, method in CALLS.items():
            try:
                channel.unary_unary(f"/{method}", None, None)(b"", timeout=ANSWER_S)
                answered.add(name)
            except grpc.RpcError as error:
                codes.add(error.code())
        try:
            request = ServerReflectionRequest(list_services="").SerializeToString()
            next(iter(channel.stream_stream(f"/{REFLECTION}", None, None)(iter([request]), timeout=ANSWER_S)))
            answered.add("ServerReflection")
        except grpc.RpcError as error:
            codes.add(error.code())
    silent = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
    return None if not answered and codes <= silent else answered


def greets_readers(listener: Listener) -> bool:
    """Return whether KV is served there over TCP."""
    with socket.create_connection(listener.reached_at, ANSWER_S) as connection:
        connection.settimeout(GREETING_S)
        try:
            return connection.recv(8) == b"TANDEM/1"
        except TimeoutError:
            return False


@dataclass(frozen=True)
class Running:
    """What a `tandem serve` listens on.

    `lines`: command lines by process. `metrics_port`: the gateway's, or -1."""

    lines: Mapping[int, str]
    worker_ports: frozenset[int]
    metrics_port: int

    @classmethod
    def of(cls, served: Served, metrics_port: int = -1) -> Running:
        logs = Path(re.findall(r"logs of the workers: (\S+)", served.output)[0])
        text = "".join(path.read_text() for path in logs.glob("replica_*.log"))
        ports = frozenset(int(port) for port in re.findall(r"worker \S+:(\d+) serves ", text))
        return cls({pid: line for (pid, _), line in served.look().items()}, ports, metrics_port)

    def row(self, listener: Listener, protocol: str) -> tuple[str, str]:
        """Return the first two cells of the listener's row in SECURITY.md."""
        line = self.lines[listener.pid]
        if "tandem.cli gateway" in line:
            return "gateway", "metrics" if listener.port == self.metrics_port else protocol
        if line.startswith("ray::ServeReplica") and listener.address.is_unspecified:
            return "Ray Serve", protocol
        is_worker = line.startswith("ray::ServeReplica") and (protocol != "gRPC" or listener.port in self.worker_ports)
        return "worker" if is_worker else "Ray", protocol

    def rows(self) -> dict[tuple[str, str], tuple[str, set[str]]]:
        """Return from where each is reached, and what it answers without a credential."""
        found: dict[tuple[str, str], tuple[str, set[str]]] = {}
        for listener in listeners(self.lines):
            over_http = http_answers(listener)
            over_grpc = grpc_answers(listener) if over_http is None else None
            others = "KV over TCP" if greets_readers(listener) else "NIXL"
            protocol = "HTTP" if over_http is not None else "gRPC" if over_grpc is not None else others
            key = self.row(listener, protocol)
            reach = "this machine" if listener.is_loopback else "everywhere"
            before, answers = found.get(key, (reach, set()))
            assert before == reach, (key, listener)
            found[key] = reach, answers | (over_http or over_grpc or set())
        return found


def documented(column: int) -> dict[tuple[str, str], tuple[str, set[str]]]:
    """Return the table of SECURITY.md as `Running.rows` does; `column` is 3 without keys and 4 with them."""
    table = {}
    for row in security_table("Ports of `tandem serve`"):
        who, place, reach, cell = row[0], row[1].split(",")[0], row[2], row[column]
        table[who, place] = reach, OF_THE_GATEWAY[place] if cell == "everything" else names(cell)
    return table


def test_ports_are_those_of_the_document(served: Served) -> None:
    expected = documented(3)
    del expected["gateway", "metrics"]
    assert Running.of(served).rows() == expected
    assert served.chat("Hi", max_tokens=2).status_code == 200, "garbage at its ports does no harm"


def test_other_users_cannot_enter_its_directories(served: Served) -> None:
    logs = re.findall(r"logs of the workers: (\S+)", served.output)
    sockets = [re.findall(r"/\S*/tandem-redis-\w+", line) for line in served.look().values()]
    environments = [(Path("/proc") / str(pid) / "environ").read_bytes() for pid, _ in served.look()]
    tokens = {token for each in environments for token in re.findall(rb"RAY_AUTH_TOKEN_PATH=([^\0]+)", each)}
    for inside in (logs[0], next(path[0] for path in sockets if path), *map(os.fsdecode, tokens)):
        modes = [place.stat().st_mode & 0o777 for place in (Path(inside), *Path(inside).parents)]
        assert 0o700 in modes, (inside, modes)
    assert tokens or os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}


@pytest.mark.nightly
def test_ports_with_keys_are_those_of_the_document(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(tenants_file({"acme": ""}))
    metrics_port = free_port()
    keys = ("--auth", "keys", "--tenants", str(file), "--gateway-metrics-port", str(metrics_port))
    with Served("--port", "0", *keys) as served:
        assert Running.of(served.wait_ready(), metrics_port).rows() == documented(4)
