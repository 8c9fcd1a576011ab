"""Start, query and stop the programs of one small cluster."""

from __future__ import annotations

import asyncio
import signal
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import redis as redis_client

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.stores.embedded_redis import find_program
from tandem.stores.worker_registry import WorkerRegistry
from tandem.wire.channels import CHANNEL_OPTIONS
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.gen.worker_pb2_grpc import WorkerStub
from tandem.wire.peer_auth import PeerAuth
from tandem.wire.worker_codec import decode_books
from tests.e2e.cluster import PATIENCE_S, Program, spawn


def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Evaluate a condition repeatedly; return its first true value."""
    deadline = time.monotonic() + patience_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.005)
    return answer


class Worker(Program):
    """Own a worker process, queried over gRPC with the credentials of `trust`."""

    trust = PeerAuth("test")

    def describe(self) -> pb.DescribeReply:
        with self._describing() as describe:
            return describe()

    def books(self) -> pb.Books:
        """Return the engine statistics; retry while a step keeps the worker from counting."""
        with self._describing() as describe:

            def look() -> pb.Books | None:
                reply = describe()
                return reply.books if reply.HasField("books") else None

            books: pb.Books = until(look, f"the books of {self.name}")
            return books

    @contextmanager
    def _describing(self) -> Iterator[Callable[[], pb.DescribeReply]]:
        with grpc.insecure_channel(self.ready["address"], options=CHANNEL_OPTIONS) as channel:
            stub: Any = WorkerStub(channel)  # type: ignore[arg-type]  # made for asynchronous calls by its types only

            def describe() -> pb.DescribeReply:
                signed = self.trust.sign("/tandem.v1.Worker/Describe", self.ready["incarnation"])
                reply: pb.DescribeReply = stub.Describe(
                    pb.DescribeRequest(), timeout=PATIENCE_S, metadata=signed.metadata
                )
                return reply

            yield describe

    def is_idle(self) -> bool:
        """Return whether nothing is held by anything."""
        books = decode_books(self.books())
        held = books.num_table_blocks + books.num_leased_blocks + books.num_reading_blocks
        rest = books.num_quarantined_blocks + books.num_sequences + books.num_leases + books.num_pulls
        return held + rest == 0 and books.num_free_blocks == books.num_blocks

    def assign_role(self, redis_url: str, namespace: str, role: str) -> None:
        """Change the role in which gateways use the worker, as `tandem role` does."""

        async def change_role() -> bool:
            registry = WorkerRegistry(redis_url, namespace)
            try:
                ready = self.ready
                ref = WorkerRef(WorkerId(ready["worker"]), Incarnation(ready["incarnation"]), ready["address"])
                return await registry.set_role(ref, role)
            finally:
                await registry.close()

        assert asyncio.run(change_role())


class Gateway(Program):
    """Own a gateway process, queried over HTTP. `grpc_target` is its gRPC address, `context` that of a client where the
    gateway has TLS."""

    context: ssl.SSLContext | bool = True

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    @property
    def grpc_target(self) -> str:
        return str(self.ready["grpc"])

    @property
    def metrics_url(self) -> str:
        address = self.ready["metrics"]
        return f"http://{address}/metrics" if address else f"{self.url}/metrics"

    def missing(self) -> str | None:
        """Return None when the gateway is ready, else what is missing."""
        answer = httpx.get(f"{self.url}/ready", timeout=PATIENCE_S, trust_env=False, verify=self.context)
        return None if answer.status_code == 200 else str(answer.json()["reason"])

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(self.metrics_url, timeout=PATIENCE_S, trust_env=False).text.splitlines()
        samples = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in samples}

    def num_live(self, pool: str) -> float:
        """Return the number of workers of a pool that it sees."""
        return self.metrics()[f'tandem_live_workers{{pool="{pool}"}}']

    def wait_serving(self) -> None:
        self.wait_ready()
        until(lambda: self.missing() is None, f"a {self.name} that serves")


class Cluster:
    """Own the programs around one Redis, all with the same settings. Leaving the context stops what still runs."""

    def __init__(self, directory: Path, redis_url: str, model: Path | str, *settings: str) -> None:
        self.programs: list[Program] = []
        self._directory = directory
        self._settings = ("--model", str(model), "--redis-url", redis_url, "--num-threads", "1", *settings)

    def worker(self, name: str, pool: str, *settings: str, within: Sequence[str] = ()) -> Worker:
        """Start a worker; `wait_ready` returns when it serves. `within` is that of `Program`."""
        arguments = ("worker", "--worker-id", name, "--pool", pool, *self._settings, *settings)
        return self._add(Worker(self._directory, name, *arguments, within=within))

    def gateway(self, name: str, *settings: str, within: Sequence[str] = ()) -> Gateway:
        """Start a gateway; `within` is that of `Program`. Without `--auth` in `settings` it requires no keys, else its
        metrics have their own port."""
        more = ("--gateway-metrics-port", "0") if "--auth" in settings else ("--auth", "off")
        program = ("gateway", "--port", "0", *more)
        return self._add(Gateway(self._directory, name, *program, *self._settings, *settings, within=within))

    def again(self, worker: Worker) -> Worker:
        """Start a new incarnation of a worker that has ended."""
        return self._add(Worker(self._directory, worker.name, *worker.arguments, within=worker.within))

    def wait_serving(self) -> None:
        """Wait until all programs are ready and all gateways serve."""
        for program in self.programs:
            program.wait_ready()
        for program in self.programs:
            if isinstance(program, Gateway):
                program.wait_serving()

    def complaints(self) -> list[str]:
        return [line for program in self.programs for line in program.complaints()]

    def log_lines(self, *words: str) -> list[str]:
        """Return the lines of all logs that have one of the words."""
        lines = (f"{program.name}: {line}" for program in self.programs for line in program.log.splitlines())
        return [line for line in lines if any(word in line for word in words)]

    def stop(self) -> None:
        """Stop the gateways first: they would log workers that end."""
        for kind in (Gateway, Worker):
            for program in self.programs:
                if isinstance(program, kind):
                    program.stop()

    def _add(self, program: Any) -> Any:
        self.programs.append(program)
        return program


class Redis:
    """Own a Redis server that can be stopped and restarted under the same address."""

    def __init__(self, directory: Path) -> None:
        self._socket = directory / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def start(self) -> None:
        options = ("--port", "0", "--unixsocket", str(self._socket), "--save", "")
        self._process = spawn(str(find_program()), *options, stdout=subprocess.DEVNULL, cwd=self._socket.parent)
        until(self._socket.exists, "the socket of a Redis server")

    def start_again(self) -> None:
        """Start the server unless it runs."""
        if self._process is None:
            self.start()

    def pause(self) -> None:
        """Let the server accept connections and commands without answering any."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._socket.unlink(missing_ok=True)
            self._process = None

    def open_reservations(self) -> list[bytes]:
        """Return the names of the requests whose quota is reserved."""
        with redis_client.Redis.from_url(self.url) as client:
            return [name for key in client.scan_iter("*:quota:*:open") for name in client.hkeys(key)]

    def lapse_reservations(self) -> None:
        """Move the expiry of open reservations into the past, as time alone would."""
        with redis_client.Redis.from_url(self.url) as client:
            for key in client.scan_iter("*:quota:*:expiry"):
                client.zadd(key, dict.fromkeys(client.zrange(key, 0, -1), 1))


@contextmanager
def redis_server() -> Iterator[Redis]:
    """Run a Redis server of its own."""
    with tempfile.TemporaryDirectory(prefix="tandem-") as directory:
        redis = Redis(Path(directory))
        redis.start()
        try:
            yield redis
        finally:
            redis.stop()


@contextmanager
def cluster(directory: Path, redis_url: str, model: Path | str, *settings: str) -> Iterator[Cluster]:
    """Yield an empty cluster; the programs started in it end with the context."""
    running = Cluster(directory, redis_url, model, *settings)
    try:
        yield running
    finally:
        running.stop()
