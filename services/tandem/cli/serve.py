"""Implement `tandem serve`: start Redis, workers and a gateway on this machine, and stop them in order."""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType

from tandem.cli.gateway_checks import gateway_ports, require_auth_if_public, require_tls_files
from tandem.cli.gateway_process import GatewayProcess
from tandem.cli.ports import require_free_ports
from tandem.cli.private_directory import secret_file
from tandem.cli.process_session import enter_own_session
from tandem.cli.progress_lines import ProgressLines
from tandem.cli.resource_assignment import gpu_share, threads_by_pool
from tandem.cli.worker_logs import starting_workers
from tandem.core.addresses import is_loopback
from tandem.core.clock import SystemClock
from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import Resolved
from tandem.obs.logs.logging_setup import set_up_logging
from tandem.stores.embedded_redis import EmbeddedServer

READY_TIMEOUT_S = 180.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(resolved: Resolved, _args: argparse.Namespace) -> int:
    """Start Redis, workers and a gateway on this machine, serve until SIGINT or SIGTERM, then drain and stop them all.

    Blocks until all have stopped, and returns the exit code of the command. Raises TandemError if a part cannot start
    or the gateway ends by itself."""
    require_free_ports(gateway_ports(resolved.config.gateway))
    require_auth_if_public(resolved)
    require_tls_files(resolved.config.gateway)
    if resolved.config.engine.nnodes > 1:
        message = "engine.nnodes must be 1 with `tandem serve`, which starts all workers on this machine"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="engine.nnodes")
    code = enter_own_session()
    if code is not None:
        return code
    set_up_logging(resolved.config.telemetry, "tandem-serve")
    signals = StopSignals()
    progress = ProgressLines(SystemClock())
    try:
        with ExitStack() as stack:
            with signals.starting():
                config = _private(resolved.config, stack, progress)
                gateway, logs = _start(config, stack, progress, signals)
            progress.step("ready", "")
            shown = banner(gateway.url, gateway.grpc_target, config, logs, shows_redis=not resolved.config.redis.url)
            print(shown, flush=True)  # noqa: T201 - the command's output
            while not signals.wait(0.5):
                if gateway.exit_code() is not None:
                    raise TandemError(
                        ErrorKind.INTERNAL,
                        f"the gateway process ended with exit code {gateway.exit_code()}; its log above says why",
                    )
            print("\ndraining ...", file=sys.stderr, flush=True)  # noqa: T201
        print("stopped", file=sys.stderr, flush=True)  # noqa: T201
    except KeyboardInterrupt:
        print("\nstopped before it was ready", file=sys.stderr, flush=True)  # noqa: T201
    return 0


def _private(config: Config, stack: ExitStack, progress: ProgressLines) -> Config:
    """Return the settings with an embedded Redis server and a cluster secret for this run, unless the user set them."""
    redis, cluster = config.redis, config.cluster
    if not redis.url:
        progress.step("redis", "starting an embedded server")
        redis = replace(redis, url=stack.enter_context(EmbeddedServer.start()).url)
    if not cluster.secret_file:
        cluster = replace(cluster, secret_file=str(stack.enter_context(run_secret())))
    return replace(config, redis=redis, cluster=cluster)


def _start(
    config: Config, stack: ExitStack, progress: ProgressLines, signals: StopSignals
) -> tuple[GatewayProcess, Path]:
    """Start everything and return the gateway and the directory of the workers' logs; `stack` stops what was started.

    The gateway is started first, so that it starts while Ray, which takes longest, does; before the thread of the
    progress lines, so that its process is forked from one thread.
    """
    gateway = stack.enter_context(GatewayProcess(config))
    with progress:
        logs = _start_workers(config, stack, progress, signals, gateway)
    return gateway, logs


def _start_workers(
    config: Config, stack: ExitStack, progress: ProgressLines, signals: StopSignals, gateway: GatewayProcess
) -> Path:
    """Start Ray and the workers, wait until the gateway is ready, and return the directory of the workers' logs."""
    pools = {pool: size for pool in ("prefill", "decode", "mixed") if (size := getattr(config.serve, pool))}
    # A worker on a GPU does little work on the CPU: one thread is enough.
    num_threads = config.engine.num_threads or (1 if config.model.device == "cuda" else 0)
    threads = threads_by_pool(pools, num_threads)
    progress.step("model", f"preparing {config.model.id}")
    _prepare_model(config)
    progress.step("ray", "starting")
    num_workers, num_ranks = sum(pools.values()), config.engine.tensor_parallel
    keep_kv_on_loopback(config)
    local = stack.enter_context(import_module("tandem.cli.local_ray").local_ray(num_workers * num_ranks))
    signals.listen()
    stack.callback(gateway.stop)  # the gateway drains first, while the workers still run
    names = " + ".join(f"{size} {pool} ({_counted(threads[pool])})" for pool, size in pools.items())
    progress.step("workers", f"starting {names}", partial(starting_workers, local.logs, list(pools)))
    engine, num_gpus = config.engine, 0.0
    if config.model.device == "cuda":
        num_gpus, utilization = gpu_share(num_workers, local.num_gpus, engine.gpu_memory_utilization, num_ranks)
        engine = replace(engine, gpu_memory_utilization=utilization)
    engines = {pool: replace(engine, num_threads=threads[pool]) for pool in pools}
    local.deploy({pool: replace(config, engine=engine) for pool, engine in engines.items()}, pools, num_gpus)
    progress.step("gateway", "moving a test block between the workers")
    if not gateway.wait_until_listening():
        raise TandemError(ErrorKind.INTERNAL, "the gateway process ended before it listened; its log above says why")
    problem = gateway.wait_until_ready(READY_TIMEOUT_S)
    if problem is not None:
        raise TandemError(ErrorKind.INTERNAL, f"the gateway is not ready: {problem}\nlogs: {local.logs}")
    logs: Path = local.logs
    return logs


def keep_kv_on_loopback(config: Config) -> None:
    """Restrict UCX to the loopback device in processes that are started from now on, if `worker.host` is a loopback
    address.

    Ports of UCX have no authentication, and such workers must not be reachable from other machines. The restriction is
    the environment variable UCX_NET_DEVICES. It is not set if the user has set the variable, or if `transfer.require`
    is "rdma", because RDMA needs other devices."""
    if is_loopback(config.worker.host) and config.transfer.require != "rdma":
        os.environ.setdefault("UCX_NET_DEVICES", "lo")


def _counted(num_threads: int) -> str:
    return "1 thread" if num_threads == 1 else f"{num_threads} threads"


def _prepare_model(config: Config) -> None:
    """Download and convert the model once, before several workers load it."""
    catalog = import_module("tandem.runtime.model_store")
    catalog.resolve_model(config.model.id, catalog.cache_root(config.model.cache_dir))


def banner(url: str, grpc_target: str, config: Config, logs: Path, *, shows_redis: bool) -> str:
    """Return what `tandem serve` prints when it is ready: at most twelve lines on how to use the gateway at `url`.

    `shows_redis`: print the command that lists the workers, with the address of Redis; not to be set for a user's own
    Redis, whose URL may hold a password."""
    model = config.model.served_names[0]
    key = ' -H "authorization: Bearer $TANDEM_API_KEY"' if config.gateway.auth == "keys" else ""
    console = f"  console: {url}/console\n" if config.gateway.console else ""
    redis = config.redis
    where = f"--redis-url {redis.url} --namespace {redis.namespace} --secret-file {config.cluster.secret_file}"
    program = _own_name()
    operating = f"  workers, and flags of further gateways: {program} role {where}\n" if shows_redis else ""
    question = '"messages": [{"role": "user", "content": "What is the capital of France?"}]'
    return f"""
Tandem serves {model} at {url}
and over gRPC at {grpc_target}

  curl -i {url}/v1/chat/completions -H 'content-type: application/json'{key} \\
    -d '{{"model": "{model}", "temperature": 0, {question}}}'

  {program} chat --url {url} --temperature 0        Ctrl-C drains and stops
{console}  logs of the workers: {logs}
{operating}"""


def _own_name() -> str:
    """Return how the user can call this program: by its path where it is not found by its name."""
    path = Path(sys.argv[0])
    return os.path.relpath(path) if path.name == "tandem" and shutil.which("tandem") is None else "tandem"


class Stopped(KeyboardInterrupt):
    """Raised in the main thread when a signal interrupts the start of `tandem serve`.

    It is a subclass of KeyboardInterrupt because of `python -m`: if KeyboardInterrupt itself passes through code that a
    C extension runs, as in the import of torch, the interpreter exits by SIGINT even though the exception was caught.
    """


class StopSignals:
    """Handles SIGINT and SIGTERM of `tandem serve`: the first one interrupts a start, or ends `wait`.

    A start is interrupted by the exception `Stopped`, because it mostly waits inside libraries that know nothing of the
    signal. `has_received` is true from the first signal on."""

    def __init__(self) -> None:
        self.has_received = False
        # A handler may interrupt the main thread anywhere, even in another call of the handler. SimpleQueue.put is
        # reentrant; an Event is not: the interrupted code may hold its lock.
        self._received: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_starting = False

    def wait(self, timeout_s: float) -> bool:
        """Block until SIGINT or SIGTERM is received, for at most `timeout_s` seconds.

        Returns whether a signal has been received since the program began; if so, it does not block.
        """
        if not self.has_received:
            with suppress(queue.Empty):
                self._received.get(timeout=timeout_s)
        return self.has_received

    def listen(self) -> None:
        """Install the handlers of SIGINT and SIGTERM.

        To be called again after a library was started that installs its own handlers."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Return a context manager that installs the handlers; inside it the first signal raises Stopped."""
        self._is_starting = True
        self.listen()
        try:
            yield
        finally:
            self._is_starting = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.has_received = True
        self._received.put(number)
        if self._is_starting:
            self._is_starting = False  # do not interrupt the cleanup by a second signal
            raise Stopped


@contextmanager
def run_secret() -> Iterator[Path]:
    """Return a context manager that yields the path of a file with a new cluster secret, and removes it at the end.

    Only the owner can read the file. The secret is not passed as an argument or environment variable, where other users
    could see it."""
    with tempfile.TemporaryDirectory(prefix="tandem-serve-") as directory:
        yield secret_file(Path(directory) / "secret")
