"""Run a small cluster on five hosts, started by the commands of docs/operations.md."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tandem.stores.embedded_redis import find_program
from tandem.wire.peer_auth import PeerAuth
from tandem.wire.secret_file import SecretFile
from tests.chaos.world import live
from tests.e2e.cluster import spawn
from tests.e2e.gateway.http import completion, send
from tests.e2e.gateway.processes import PATIENCE_S, Cluster, Gateway, Worker, cluster, until
from tests.hosts.network import Network, networks

HOSTS = ("data", "gate", "a", "b", "c")


@dataclass
class Hosts:
    """A cluster on hosts of its own: Redis on `data`, gateways on `gate`, a prefill worker on `a`, decode workers on
    `b`, whose link can be impaired, and on `c`. `whole` is a gateway that splits no request. `flags` are those by which
    programs find the cluster."""

    network: dict[str, Network]
    programs: Cluster
    gateway: Gateway
    whole: Gateway
    workers: dict[str, Worker]
    flags: tuple[str, ...]

    def complete(self, salt: int, *, length: int = 300, max_tokens: int = 24, split: bool = True) -> dict[str, Any]:
        """Return what `complete` does, from the gateway that splits requests or from the other one."""
        return complete(self.gateway if split else self.whole, completion(length, salt, max_tokens))

    def text(self, salt: int, **options: Any) -> str:
        return text_of(self.complete(salt, **options))

    def start_worker(self, host: str, pool: str) -> Worker:
        where = self.network[host]
        worker = self.programs.worker(
            f"w{host}", pool, "--worker-host", where.address, *self.flags, within=where.within
        )
        self.workers[host] = worker
        return worker

    def wait_whole(self) -> None:
        """Wait until the gateway sees all three workers and all are idle."""

        for gateway in (self.gateway, self.whole):
            until(lambda gateway=gateway: live(gateway) == (1, 2), "a gateway that sees all")  # type: ignore[misc]
        for worker in self.workers.values():
            until(worker.is_idle, f"an idle {worker.name}")

    def tandem(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of an operator on the gateway's host."""
        return tandem(self.network["gate"], *words, *self.flags)


def complete(gateway: Gateway, body: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a request with reasons, and its path and status under keys of their own."""
    answer = send(gateway.url, body, headers={"x-tandem-explain": "1"})
    reply: dict[str, Any] = answer.json()
    return reply | {"status": answer.status, "path": answer.path}


def tandem(network: Network, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of an operator on a host."""
    command = (*network.within, sys.executable, "-m", "tandem.cli", *words)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


@contextmanager
def redis_on(network: Network, directory: Path, port: int = 6379) -> Iterator[str]:
    """Run a Redis with a password on a host, and yield its URL."""
    password = secrets.token_hex(16)
    options = ("--port", str(port), "--bind", network.address, "--requirepass", password, "--save", "")
    redis = spawn(*network.within, str(find_program()), *options, stdout=subprocess.DEVNULL, cwd=directory)
    try:
        yield f"redis://:{password}@{network.address}:{port}"
    finally:
        redis.kill()
        redis.wait()


@contextmanager
def empty_hosts(
    directory: Path,
    model: Path | str,
    names: Sequence[str],
    *settings: str,
    with_relay: str = "",
    with_two: Sequence[str] = (),
) -> Iterator[tuple[dict[str, Network], Cluster, tuple[str, ...]]]:
    """Make the hosts `names`, start Redis on the first of them, and yield the networks, an empty cluster with
    `settings`, and the flags by which programs find it. Raises NoNamespaces."""
    with ExitStack() as stack:
        made = stack.enter_context(networks(*names, with_relay=with_relay, with_two=with_two))
        network = dict(zip(names, made, strict=True))
        secret = directory / "secret"
        secret.write_text(secrets.token_hex(32))
        stack.enter_context(patch.object(Worker, "trust", PeerAuth("test", SecretFile(secret))))
        url = stack.enter_context(redis_on(network[names[0]], directory))
        flags = ("--secret-file", str(secret))
        programs = stack.enter_context(cluster(directory, url, model, *settings))
        yield network, programs, (*flags, "--redis-url", url)


@contextmanager
def running_hosts(directory: Path, model: Path | str, *settings: str) -> Iterator[Hosts]:
    """Make the hosts, start a cluster with `settings` on them, and yield it once it serves. Raises NoNamespaces."""
    with empty_hosts(directory, model, HOSTS, *settings, with_relay="b") as (network, programs, flags):
        gate = network["gate"]
        listen = ("--host", gate.address, *flags)
        gateway = programs.gateway("gateway", *listen, within=gate.within)
        whole = programs.gateway("whole", *listen, "--disaggregation", "off", within=gate.within)
        made = Hosts(network, programs, gateway, whole, {}, flags)
        for host, pool in (("a", "prefill"), ("b", "decode"), ("c", "decode")):
            made.start_worker(host, pool)
        programs.wait_serving()
        made.wait_whole()
        yield made


def text_of(reply: dict[str, Any]) -> str:
    assert reply["status"] == 200, reply
    return str(reply["choices"][0]["text"])


def reasons_of(reply: dict[str, Any]) -> dict[str, Any]:
    """Return why a reply's workers were chosen."""
    (reasons,) = reply["tandem"]["reasons"]
    return dict(reasons)


def findings_of(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["findings"]
    return found
