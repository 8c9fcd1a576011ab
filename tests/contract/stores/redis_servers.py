"""Real servers for tests of stores: one that listens on TCP and can be stopped, and a Redis Cluster of three, whose
primaries may have replicas; never knows what is kept in them."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis as blocking
from redis.backoff import ConstantBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from tandem.stores.embedded_redis import find_program
from tests.e2e.cluster import PATIENCE_S, spawn
from tests.ports import free_port

NUM_SLOTS = 16384
NO_FAILOVER = ("--cluster-require-full-coverage", "no", "--cluster-node-timeout", "60000")
"""A node that stands still takes its own slots along, and nobody else's."""
FAILOVER = (
    *("--cluster-require-full-coverage", "no", "--cluster-node-timeout", "1000"),
    *("--repl-diskless-sync-delay", "0"),
)
"""The replica of a node that is gone takes over within some seconds. A new one does not wait for others before it asks
for all that its primary has."""


class NoServer(Exception):
    """The server's program cannot do what a test needs; says what."""


class TcpServer:
    """Keeps its port over restarts."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.port = free_port()
        self._directory = directory
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self, password: str | None = None) -> blocking.Redis:
        return blocking.Redis(
            port=self.port, socket_timeout=PATIENCE_S, password=password, retry=Retry(ConstantBackoff(0.0), 0)
        )

    def start(self) -> None:
        options = ("--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._directory))
        log = ("--logfile", str(self._directory / "log"))
        self._process = spawn(str(find_program()), *options, *log, *self._options, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise NoServer((self._directory / "log").read_text()[-500:])
            time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It takes connections and commands, and answers none."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except (RedisError, OSError):
            return False


class ClusterServers:
    """Three primaries, a third of the slots each."""

    def __init__(self, directory: Path, stack: ExitStack, options: Sequence[str]) -> None:
        self._directory = directory
        self._stack = stack
        self._options = options
        self._bus_ports: dict[TcpServer, int] = {}
        self.nodes = [self._start() for _ in range(3)]
        self._join()

    def replica(self, primary: TcpServer) -> TcpServer:
        """A new one, that has all that its primary has."""
        replica = self._start()
        self._meet(replica)
        _until(lambda: self._knows_all(replica), "a replica finds its cluster")
        self._execute(replica, "CLUSTER REPLICATE", self._name(primary))

        _until(lambda: int(self._execute(primary, "WAIT", 1, 100)) == 1, "a replica has what its primary has")
        return replica

    @property
    def url(self) -> str:
        nodes = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://{nodes}"

    def owner(self, key: str) -> TcpServer:
        slot = self.slot(key)
        return next(node for node in self.nodes if any(a <= slot <= b for a, b in self._slots(node)))

    def slot(self, key: str) -> int:
        return int(self._execute(self.nodes[0], "CLUSTER KEYSLOT", key))

    def move(self, key: str, to: TcpServer) -> None:
        """The empty slot of a key, at once."""
        slot, name = self.slot(key), self._name(to)
        for node in (to, *(node for node in self.nodes if node is not to)):
            self._execute(node, "CLUSTER SETSLOT", slot, "NODE", name)

    def open(self, key: str, to: TcpServer) -> None:
        """Begin to move a slot: its owner sends clients on with ASK for what it has not."""
        slot, owner = self.slot(key), self.owner(key)
        self._execute(to, "CLUSTER SETSLOT", slot, "IMPORTING", self._name(owner))
        self._execute(owner, "CLUSTER SETSLOT", slot, "MIGRATING", self._name(to))

    def empty(self) -> None:
        for node in self.nodes:
            self._execute(node, "FLUSHALL")

    def _join(self) -> None:
        share = -(-NUM_SLOTS // len(self.nodes))
        for number, node in enumerate(self.nodes):
            last = min(NUM_SLOTS, (number + 1) * share) - 1
            self._execute(node, "CLUSTER ADDSLOTSRANGE", number * share, last)
            self._execute(node, "CLUSTER SET-CONFIG-EPOCH", number + 1)
            self._meet(node)
        _until(lambda: all(map(self._knows_all, self.nodes)), "the nodes of a cluster find each other")

    def _start(self) -> TcpServer:
        place, port = self._directory / str(len(self._bus_ports)), free_port()
        place.mkdir()
        node = TcpServer(place, "--cluster-enabled", "yes", "--cluster-port", str(port), *self._options)
        self._stack.callback(node.stop)
        self._bus_ports[node] = port
        return node

    def _meet(self, node: TcpServer) -> None:
        self._execute(self.nodes[0], "CLUSTER MEET", "127.0.0.1", node.port, self._bus_ports[node])

    def _knows_all(self, node: TcpServer) -> bool:
        info = self._execute(node, "CLUSTER INFO")
        text = info.decode() if isinstance(info, bytes) else "\n".join(f"{k}:{v}" for k, v in info.items())
        return "cluster_state:ok" in text and f"cluster_slots_ok:{NUM_SLOTS}" in text

    def _slots(self, node: TcpServer) -> list[tuple[int, int]]:
        slots = self._execute(self.nodes[0], "CLUSTER SLOTS")
        return [(first, last) for first, last, owner, *_ in _ranges(slots) if owner == node.port]

    def _name(self, node: TcpServer) -> str:
        name = self._execute(node, "CLUSTER MYID")
        return name.decode() if isinstance(name, bytes) else str(name)

    def _execute(self, node: TcpServer, *command: str | int) -> Any:
        with node.client() as client:
            return client.execute_command(*command)  # type: ignore[no-untyped-call]


def _until(condition: Callable[[], bool], what: str) -> None:
    """Raises NoServer."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise NoServer(f"never came: {what}")
        time.sleep(0.05)


def _ranges(slots: object) -> Iterator[tuple[int, int, int]]:
    """First and last slot and the port of the primary; the library gives a dict of pairs or the plain list."""
    if isinstance(slots, dict):
        for (first, last), nodes in slots.items():
            yield first, last, nodes["primary"][1]
    else:
        assert isinstance(slots, list)
        for first, last, primary, *_ in slots:
            yield first, last, primary[1]


@contextmanager
def tcp_server(*options: str) -> Iterator[TcpServer]:
    with tempfile.TemporaryDirectory(prefix="tr-") as directory:
        server = TcpServer(Path(directory), *options)
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def cluster_servers(*options: str) -> Iterator[ClusterServers]:
    """Raises NoServer where the program knows no cluster."""
    with tempfile.TemporaryDirectory(prefix="tc-") as directory, ExitStack() as stack:
        yield ClusterServers(Path(directory), stack, options)
