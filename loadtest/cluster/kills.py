"""Measure what clients see when a worker is killed, and how the pause divides into detection, placement, recomputation.

    python -m loadtest kills [--kills 20] [--streams 8] [--model tiny] [--before CHECKOUT] [--restart at-once] [any flag
        of `tandem serve`]

A gateway, two prefill and two decode workers run as processes without Ray. In each round streams run, one worker is
killed with SIGKILL, the streams end, and the worker is started again. Every answer must have the tokens of the same
request without a kill. With `--before`, the programs of another checkout do the same in alternation.

- A killed *decode* worker: the pause is the time between the two tokens of a stream around the kill.
- A killed *prefill* worker: the pause is the time from the kill to the first token of a request that the worker had.

The gateway's trace of a request divides the time since the kill: *detection* lasts until the request waits for workers
again, *placement* until workers have accepted it, *recomputation* until its next token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import aiohttp

from loadtest.client.client import Refused
from loadtest.client.sent_completion import SentCompletion
from loadtest.common.stats import percentile
from loadtest.common.tables import ms, table
from loadtest.common.tiny_model import make_tiny
from loadtest.processes.spans import SpanReceiver, TimedSpan, span_receiver
from loadtest.processes.workers import MeasurementError, WorkerProcess, start_worker
from tandem.core.clock import wall_ns
from tandem.core.config import ModelConfig
from tandem.core.errors import TandemError
from tandem.stores.embedded_redis import EmbeddedServer
from tandem.wire.channels import open_channel
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.gen.worker_pb2_grpc import WorkerStub

WORKERS = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
"""Pool of each worker, by name."""
TINY = "tiny"
MAX_TOKEN = 250
"""Prompts consist of token ids below, which every model has."""
PATIENCE_S = 300.0
POLL_S = 0.02


class Pause(NamedTuple):
    """Hold the seconds that one request lost by a kill; `total_s` is what its client saw, from the kill or
    from the last token before."""

    total_s: float
    detection_s: float
    placement_s: float
    recomputation_s: float


def pause_of(
    stamps: Sequence[float], waits: Sequence[TimedSpan], killed_at: float, *, is_decoding: bool
) -> Pause | None:
    """Divide the pause of a request that was tried again after a kill; None where `waits` has no wait of the new
    attempt.

    `stamps`: arrivals of its tokens. `waits`: its spans in the queue or between submission and acceptance.
    `is_decoding`: the pause is that between two tokens, otherwise that from the kill to the first token. All times are
    seconds since the epoch."""
    again = sorted((wait for wait in waits if killed_at <= wait.began_at), key=lambda wait: wait.began_at)
    if not again:
        return None
    detected_at, next_at = again[0].began_at, min(stamp for stamp in stamps if stamp > again[0].ended_at)
    placed_at = max(wait.ended_at for wait in again if wait.began_at < next_at)
    last_at = max(stamp for stamp in stamps if stamp < next_at) if is_decoding else killed_at
    return Pause(next_at - last_at, detected_at - killed_at, placed_at - detected_at, next_at - placed_at)


class Load(NamedTuple):
    """The requests of a round. `num_warm`: tokens that each stream has at least when the worker is killed; 0: the
    worker is killed at the first token of any stream."""

    num_streams: int
    num_prompt: int
    num_output: int
    num_warm: int

    def prompt(self, number: int) -> list[int]:
        draw = random.Random(f"{self.num_prompt}-{number}")
        return [draw.randrange(3, MAX_TOKEN) for _ in range(self.num_prompt)]


def main(argv: Sequence[str] | None = None) -> int:
    args, flags = _parser().parse_known_args(argv)
    found: Found = {}
    problem: BaseException | None = None
    try:
        asyncio.run(_measure(args, flags, found))
    except (KeyboardInterrupt, MeasurementError, Refused, TandemError, TimeoutError, aiohttp.ClientError) as error:
        problem = error
        sys.stderr.write(f"loadtest.cluster.kills: {error!r}; this is what was measured until then\n")
    sys.stdout.write(report(found))
    return 0 if problem is None else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest kills", description="Measure the pause after a killed worker.")
    parser.add_argument(
        "--model",
        default=ModelConfig().id,
        help=f"as for tandem serve, or {TINY} for a random one (default: %(default)s)",
    )
    parser.add_argument("--transport", choices=("nixl", "tcp", "local"), default="nixl")
    parser.add_argument("--kills", type=int, default=20, help="of each role (default: %(default)s)")
    parser.add_argument("--roles", default="decode,prefill", help="which workers are killed (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=8, help="open at each kill (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each prompt, for decode (default: %(default)s)")
    parser.add_argument(
        "--outputs", type=int, default=96, help="tokens of each answer, for decode (default: %(default)s)"
    )
    parser.add_argument(
        "--long", type=int, default=768, help="tokens of each prompt, for prefill (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), help="of each worker")
    parser.add_argument("--before", type=Path, help="a checkout of another commit, compared in alternation")
    parser.add_argument(
        "--restart",
        choices=("after", "at-once"),
        default="after",
        help="when the killed worker starts again: after the streams, or at once as under Ray Serve, which takes "
        "processor time from the streams (default: %(default)s)",
    )
    return parser


Found = dict[tuple[str, str], list[list[Pause]]]
"""By role of the killed worker and side (`before` or `after`): for each kill the pauses of its requests."""


async def _measure(args: argparse.Namespace, more_flags: Sequence[str], found: Found) -> None:
    """Add the pauses of each kill to `found`. `more_flags`: of all programs. Raises MeasurementError."""
    roles = args.roles.split(",")
    loads = {
        "decode": Load(args.streams, args.tokens, args.outputs, num_warm=8),
        "prefill": Load(args.streams, args.long, 8, num_warm=0),
    }
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-kills-")))
        receiver = stack.enter_context(span_receiver())
        model = str(make_tiny(directory / TINY)) if args.model == TINY else args.model
        threads = ("--num-threads", str(args.threads))
        flags = ("--model", model, "--transfer-backend", args.transport, *threads, *more_flags)
        clusters: dict[str, StruckCluster] = {}
        for side, checkout in (("before", args.before), ("after", None)):
            if side == "after" or checkout is not None:
                place = directory / side
                place.mkdir()
                clusters[side] = await stack.enter_async_context(running_cluster(place, flags, checkout, receiver))
        expected = {
            role: [one.answer.tokens for one in await clusters["after"].undisturbed(loads[role])] for role in roles
        }
        if "before" in clusters:
            for role in roles:  # warms up as well
                await clusters["before"].undisturbed(loads[role])
        for number in range(args.kills):
            for role in roles:
                for side in sorted(clusters, reverse=bool(number % 2)):
                    pauses = await clusters[side].round(
                        role, loads[role], expected[role], is_restarted_at_once=args.restart == "at-once"
                    )
                    found.setdefault((role, side), []).append(pauses)
                    _progress(f"{role} {number + 1}/{args.kills} {side}", pauses)
                    if args.restart == "at-once":
                        await clusters[side].mend()
                # Here, so that no start takes processor time from the streams of the other side.
                await asyncio.gather(*(cluster.mend() for cluster in clusters.values()))


def _progress(what: str, pauses: Sequence[Pause]) -> None:
    text = ", ".join(ms(pause.total_s) for pause in pauses)
    sys.stderr.write(f"{what}: {len(pauses)} requests were on the killed worker, ms: {text}\n")


def report(found: Found) -> str:
    """Return a table with the percentiles of the pauses and of their parts, and the ratios of both sides."""
    heads = ["killed", "kills", "requests", *(f"{part} {share}" for part in _PARTS for share in ("p50", "p99"))]
    pauses = {key: list(chain.from_iterable(kills)) for key, kills in found.items()}
    rows = []
    for (role, side), kills in found.items():
        parts = zip(*pauses[role, side], strict=True)
        cells = [ms(percentile(part, share)) for part in parts for share in _SHARES]
        rows.append([f"{role}, {side}", str(len(kills)), str(len(pauses[role, side])), *cells])
    lines = [table(heads, rows)]
    for role in dict.fromkeys(role for role, _ in found):
        sides = [[pause.total_s for pause in pauses.get((role, side), ())] for side in ("after", "before")]
        if all(sides):
            after, before = ([percentile(side, share) for share in _SHARES] for side in sides)
            ratios = " / ".join(f"{a / b:.2f}" for a, b in zip(after, before, strict=True))
            lines.append(f"{role}: pause after / before, p50 / p99: {ratios}\n")
    return "\n".join(lines)


_PARTS = ("pause", "detection", "placement", "recomputation")
_SHARES = (0.5, 0.99)


# ---- one cluster


class StruckCluster:
    """Own one gateway and its workers, all programs of one checkout. `url`: of the gateway. `processes`: the workers
    that run, by name."""

    def __init__(
        self,
        directory: Path,
        flags: Sequence[str],
        environment: Mapping[str, str],
        receiver: SpanReceiver,
        session: aiohttp.ClientSession,
    ) -> None:
        self.url = ""
        self.model = ""
        self.processes: dict[str, WorkerProcess] = {}
        self.gateway_log = directory / "gateway.log"
        self._directory = directory
        self._flags = flags
        self._environment = environment
        self._receiver = receiver
        self._session = session
        self._num_starts = 0
        self._missing = ""
        self._restarting: asyncio.Task[None] | None = None
        self._log_offset = 0
        self._num_salts = 0

    async def start_worker(self, name: str) -> None:
        self._num_starts += 1
        log = self._directory / f"{name}-{self._num_starts}.log"
        flags = ("--worker-id", name, *self._flags)
        self.processes[name] = await start_worker(WORKERS[name], flags, log, self._environment)

    async def start(self) -> None:
        """Wait until the gateway uses all workers, and ask it for the model's name."""
        await self._wait_whole(list(WORKERS), 0)
        async with self._session.get(f"{self.url}/v1/models") as response:
            self.model = (await response.json())["data"][0]["id"]

    async def _wait_whole(self, names: Sequence[str], log_offset: int) -> None:
        """Wait until the gateway has all workers, and a test block has moved between each worker of `names` and both
        workers of the other pool, as its log says from `log_offset` on."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self._is_whole(names, log_offset):  # noqa: ASYNC110 # another process sets no event
                await asyncio.sleep(POLL_S)

    async def _is_whole(self, names: Sequence[str], log_offset: int) -> bool:
        lines = self.gateway_log.read_bytes()[log_offset:].decode(errors="replace").splitlines()
        moved = [line for line in lines if "a test block moved from worker" in line]
        if any(sum(f"worker {name}" in line for line in moved) < 2 for name in names):
            return False
        async with self._session.get(f"{self.url}/metrics") as response:
            metrics = (await response.text()).splitlines()
        return all(f'tandem_live_workers{{pool="{pool}"}} 2.0' in metrics for pool in ("prefill", "decode"))

    async def undisturbed(self, load: Load) -> list[SentCompletion]:
        streams = self._open(load)
        await asyncio.gather(*(stream.task for stream in streams))
        return streams

    async def round(
        self, role: str, load: Load, expected: Sequence[Sequence[int]], *, is_restarted_at_once: bool
    ) -> list[Pause]:
        """Run the streams of a load, kill a worker of this role meanwhile, and return the pauses of the requests that
        it had; `mend` must follow. Raises MeasurementError where an answer differs from the `expected` tokens."""
        streams = self._open(load)
        await self._until_warm(streams, load.num_warm)
        victim = await self._victim(role)
        self._log_offset = self.gateway_log.stat().st_size
        self._missing = victim
        worker, killed_at = self.processes.pop(victim), wall_ns() / 1e9
        killing = asyncio.create_task(worker.kill())
        self._restarting = asyncio.create_task(self.start_worker(victim)) if is_restarted_at_once else None
        await asyncio.gather(killing, *(stream.task for stream in streams))
        for stream, tokens in zip(streams, expected, strict=True):
            if stream.answer.tokens != tokens:
                raise MeasurementError(f"{stream.trace}: the tokens differ from those without a kill of {victim}")
        is_decoding = load.num_warm > 0
        struck = [stream for stream in streams if stream.facts.attempts > 1]
        if not is_decoding:  # the others have handed over their KV, or lose some of it
            struck = [stream for stream in struck if stream.answer.stamps_s[0] > killed_at]
        return [await self._pause(stream, killed_at, is_decoding=is_decoding) for stream in struck]

    async def mend(self) -> None:
        """Start the killed worker again unless that was done at once, and wait until the gateway uses it; do nothing
        where none is missing."""
        if self._missing:
            await (self.start_worker(self._missing) if self._restarting is None else self._restarting)
            await self._wait_whole([self._missing], self._log_offset)
            self._missing = ""

    async def _victim(self, role: str) -> str:
        """Return the name of the worker of this role with the most sequences."""
        names = [name for name, pool in WORKERS.items() if pool == role]
        held = {name: await _num_sequences(self.processes[name].ref.address) for name in names}
        return max(names, key=lambda name: held[name])

    def _open(self, load: Load) -> list[SentCompletion]:
        # With a salt of its own no round finds the blocks of another.
        self._num_salts += 1
        bodies = [
            {
                "model": self.model,
                "prompt": load.prompt(number),
                "max_tokens": load.num_output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
                "cache_salt": f"round {self._num_salts}",
            }
            for number in range(load.num_streams)
        ]
        return [SentCompletion(self._session, f"{self.url}/v1/completions", body) for body in bodies]

    async def _until_warm(self, streams: Sequence[SentCompletion], num_warm: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not all(stream.task.done() for stream in streams):
                numbers = [len(stream.answer.tokens) for stream in streams]
                if min(numbers) >= num_warm if num_warm else max(numbers):
                    return
                await asyncio.sleep(0.001)
        await asyncio.gather(*(stream.task for stream in streams))  # raises why they ended
        raise MeasurementError("the streams ended before the kill: request longer answers")

    async def _pause(self, stream: SentCompletion, killed_at: float, *, is_decoding: bool) -> Pause:
        """Wait for the request's trace, and return its pause."""

        def find() -> Pause | None:
            spans = self._receiver.spans(stream.trace)
            waits = [span for span in spans if span.name in ("queue", "route")]
            return pause_of(stream.answer.stamps_s, waits, killed_at, is_decoding=is_decoding)

        async with asyncio.timeout(PATIENCE_S):
            while (pause := find()) is None:  # noqa: ASYNC110 # as above
                await asyncio.sleep(POLL_S)
        return pause


@asynccontextmanager
async def running_cluster(
    directory: Path, flags: Sequence[str], checkout: Path | None, receiver: SpanReceiver
) -> AsyncIterator[StruckCluster]:
    """Start a Redis, the workers and a gateway, and yield the cluster once all pairs of workers are tested.

    `checkout`: whose programs run; None: this one. The gateway's traces go to `receiver`."""
    environment = dict(os.environ)
    if checkout is not None:
        environment["PYTHONPATH"] = os.pathsep.join(str(checkout / part) for part in ("services", "kernels", ""))
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        redis = await asyncio.to_thread(EmbeddedServer.start)
        stack.callback(redis.stop)
        cluster = StruckCluster(directory, (*flags, "--redis-url", redis.url), environment, receiver, session)
        stack.push_async_callback(_end_all, cluster)
        await asyncio.gather(*map(cluster.start_worker, WORKERS))
        port = _free_port()
        command = ("gateway", "--auth", "off", "--port", str(port), "--redis-url", redis.url, *flags)
        with cluster.gateway_log.open("wb") as log:
            gateway = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tandem.cli", *command),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment | receiver.environment,
            )
        stack.push_async_callback(_terminate, gateway)
        assert gateway.stdout is not None
        if not await gateway.stdout.readline():
            raise MeasurementError(
                f"the gateway did not start: {cluster.gateway_log.read_text(errors='replace')[-1500:]}"
            )
        cluster.url = f"http://127.0.0.1:{port}"
        await cluster.start()
        yield cluster


async def _num_sequences(address: str) -> int:
    async with open_channel(address) as channel:
        reply = await WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=PATIENCE_S)
        return int(reply.books.num_sequences)


async def _end_all(cluster: StruckCluster) -> None:
    await asyncio.gather(*(process.end() for process in cluster.processes.values()))


async def _terminate(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    await process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
