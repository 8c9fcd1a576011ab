"""Measure what HTTP, gateway, gRPC and worker add to a request of the bare engine.

    python -m loadtest.gateway.overhead [--model tiny] [--concurrency 1,16] [--rounds 5] [--json FILE]

The same requests take three paths in turn: into an engine inside this process, by gRPC to a worker process, and by
HTTP, streamed, to a gateway process in front of the same worker. `tiny` is a random model whose steps take almost no
time, so that what is left is the path's cost. Processor time per token is the kernel's accounting of each process and
of the threads that carry tokens; the engine's thread also computes its share of the model, and the time of this client
is reported separately as `here`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.gateway.overhead_paths import NAME, EnginePath, GrpcPath, HttpPath, Prompts, SendPath, Served
from tandem.core.clock import SystemClock
from tandem.core.config import Bytes, Config, EngineConfig, ModelConfig
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.stores.embedded_redis import EmbeddedServer
from tandem.worker.engine.driver import THREAD_NAME as ENGINE_THREAD
from tandem.worker.main import prepare_process

KV_BYTES = 128 << 20
TINY_KV_BYTES = 16 << 20
"""An idle worker re-checks its accounting, which takes time per block: use as few of the tiny blocks as suffice."""
PATHS = ("engine", "grpc", "http")
CARRIERS = ("worker_loop", "worker_engine", "gateway")
"""Processes and threads that a token passes, by the names of `Processes.cpu_s`."""


@dataclass(slots=True)
class PathTotals:
    """Totals of all rounds of one request path at one concurrency; `cpu_s` is by process."""

    served: list[Served] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def add(self, served: Iterable[Served], cpu_s: dict[str, float]) -> None:
        self.served += served
        for name, seconds in cpu_s.items():
            self.cpu_s[name] = self.cpu_s.get(name, 0.0) + seconds

    def summary(self) -> dict[str, float]:
        """Return the latencies of requests and tokens in milliseconds, by name; `cpu_*` are processor milliseconds per
        token."""
        firsts = [one.first_s for one in self.served]
        gaps = [gap for one in self.served for gap in one.gaps_s]
        num_tokens = sum(one.num_tokens for one in self.served)
        figures = {
            "ttft_p50_ms": statistics.median(firsts) * 1e3,
            "ttft_p99_ms": _p99(firsts) * 1e3,
            "token_p50_ms": statistics.median(one.token_s for one in self.served) * 1e3,
            "gap_p99_ms": _p99(gaps) * 1e3,
        }
        return figures | {f"cpu_{name}_ms": seconds / num_tokens * 1e3 for name, seconds in self.cpu_s.items()}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    prepare_process()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="tandem-overhead-") as directory:
        tallies = asyncio.run(_measure(args, Path(directory)))
    summaries = {f"{path} {count}": tally.summary() for (path, count), tally in tallies.items()}
    sys.stdout.write(_table(summaries, args.concurrency) + "\n")
    if args.json:
        facts = {"model": args.model, "threads": args.threads, "rounds": args.rounds}
        args.json.write_text(json.dumps({**facts, "ways": summaries}, indent=2))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadtest.gateway.overhead", description="Measure what the way to a worker adds."
    )
    parser.add_argument("--model", default="tiny", help="tiny, or as for tandem serve (default: %(default)s)")
    parser.add_argument("--concurrency", type=_counts, default=(1, 16), metavar="N,N,...")
    parser.add_argument("--rounds", type=int, default=5, help="times that each way is gone (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=8, help="requests in a row of each client (default: 8)")
    parser.add_argument("--input", type=int, default=16, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the model (default: all cores)"
    )
    parser.add_argument("--paths", type=lambda text: tuple(text.split(",")), default=PATHS, metavar="PATH,PATH,...")
    parser.add_argument("--wait", action="store_true", help="name the processes and wait for a line: for a profiler")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


async def _measure(args: argparse.Namespace, directory: Path) -> dict[tuple[str, int], PathTotals]:
    # Imports torch, which must find the process prepared.
    from loadtest.common.tiny_model import make_tiny

    model, kv_bytes = args.model, KV_BYTES
    if model == "tiny":
        model, kv_bytes = str(make_tiny(directory / "model")), TINY_KV_BYTES
    config = Config(
        model=ModelConfig(id=model, served_name=NAME),
        engine=EngineConfig(num_threads=args.threads, kv_cache_memory=Bytes(kv_bytes)),
    )
    async with AsyncExitStack() as stack:
        processes = Processes(config, directory)
        stack.callback(processes.end)
        worker, url = await asyncio.to_thread(processes.start)
        clock = SystemClock()
        paths: dict[str, SendPath] = {
            "engine": EnginePath(config, clock),
            "grpc": await stack.enter_async_context(GrpcPath(worker, clock)),
            "http": HttpPath(url, clock),
        }
        await asyncio.to_thread(processes.wait_serving, url)
        if args.wait:
            sys.stderr.write(f"{processes.ids()}\n")
            await asyncio.to_thread(sys.stdin.readline)
        tallies: dict[tuple[str, int], PathTotals] = {
            (path, n): PathTotals() for path in args.paths for n in args.concurrency
        }
        prompts = Prompts(args.input, args.output)
        for number in range(args.rounds + 1):  # the first one warms up
            for (path, count), tally in tallies.items():
                before = processes.cpu_s()
                served = [await paths[path](prompts.take(count)) for _ in range(args.repeats)]
                used = {name: seconds - before[name] for name, seconds in processes.cpu_s().items()}
                if number:
                    tally.add((one for wave in served for one in wave), used)
        return tallies


# ---- the processes


class Processes:
    """Redis, one worker and one gateway, started for the measurement, and their processor time."""

    def __init__(self, config: Config, directory: Path) -> None:
        self._config = config
        self._directory = directory
        self._redis: EmbeddedServer | None = None
        self._started: dict[str, subprocess.Popen[str]] = {}

    def start(self) -> tuple[WorkerRef, str]:
        self._redis = EmbeddedServer.start().__enter__()
        engine = self._config.engine
        flags = [
            *("--model", self._config.model.id, "--served-model-name", NAME, "--redis-url", self._redis.url),
            *("--num-threads", str(engine.num_threads), "--kv-cache-memory", str(engine.kv_cache_memory)),
            *("--transfer-backend", "local", "--disaggregation", "off"),
        ]
        for name, more in (("worker", ("--pool", "mixed")), ("gateway", ("--port", "0", "--auth", "off"))):
            log = (self._directory / f"{name}.log").open("w")
            command = (sys.executable, "-m", "tandem.cli", name, *more, *flags)
            self._started[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        hello, url = self._first_words("worker"), self._first_words("gateway")["url"]
        return WorkerRef(WorkerId(hello["worker"]), Incarnation(hello["incarnation"]), hello["address"]), url

    def wait_serving(self, url: str) -> None:
        import httpx

        for _ in range(600):
            with contextlib.suppress(httpx.TransportError, subprocess.TimeoutExpired):
                if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                    return
                self._started["gateway"].wait(0.1)
        raise RuntimeError("the gateway is not ready")

    def ids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._started.items()}

    def cpu_s(self) -> dict[str, float]:
        """Return the processor seconds by name: of this process (`here`), of the other processes, and of their threads
        that carry tokens."""
        times = os.times()
        figures = {"here": times.user + times.system}
        for name, pid in self.ids().items():
            tasks = list(Path(f"/proc/{pid}/task").iterdir())
            figures[name] = sum(map(_scheduled_s, tasks))
            figures[f"{name}_loop"] = _scheduled_s(Path(f"/proc/{pid}/task/{pid}"))
        figures["worker_engine"] = self._engine_s()
        return figures

    def _engine_s(self) -> float:
        """Return the time of the step thread; the worker names its threads before it reports that it is ready."""
        tasks = Path(f"/proc/{self._started['worker'].pid}/task").iterdir()
        return sum(_scheduled_s(task) for task in tasks if (task / "comm").read_text().strip() == ENGINE_THREAD)

    def end(self) -> None:
        for process in self._started.values():
            process.terminate()
        for process in self._started.values():
            process.wait(60)
        if self._redis is not None:
            self._redis.__exit__(None, None, None)

    def _first_words(self, name: str) -> dict[str, Any]:
        stdout = self._started[name].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the {name} did not start:\n{(self._directory / f'{name}.log').read_text()[-1500:]}")
        hello: dict[str, Any] = json.loads(line)
        return hello


def _scheduled_s(task: Path) -> float:
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0  # it has just ended


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))] if values else 0.0


def _table(summaries: dict[str, dict[str, float]], concurrency: Sequence[int]) -> str:
    columns = sorted({name for summary in summaries.values() for name in summary}, key=lambda n: (n[:3] == "cpu", n))
    lines = ["| way, clients | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, summary in summaries.items():
        lines.append(f"| {name} | " + " | ".join(f"{summary.get(column, 0.0):.3f}" for column in columns) + " |")
    for count in concurrency:
        for path in ("grpc", "http"):
            if {f"{path} {count}", f"engine {count}"} <= summaries.keys():
                bare, gone = summaries[f"engine {count}"], summaries[f"{path} {count}"]
                added = [f"{name} {gone[name] - bare[name]:+.2f}" for name in columns if name[:3] != "cpu"]
                lines.append(f"\n{path}, {count} clients, added: {', '.join(added)}")
                used = [f"{name} {gone[f'cpu_{name}_ms']:.3f}" for name in CARRIERS]
                lines.append(f"{path}, {count} clients, processor ms per token: {', '.join(used)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
