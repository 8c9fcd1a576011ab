"""Measure the first token of prompts that a worker computes against those that it reads from another worker's cache.

    python -m loadtest remote-prefix [--transport nixl|local] [--tokens 256,1024,4096] [--repeats 5]

Two real workers. Each prompt is computed by one of them and then read by the other, which computes the next one, so
that both modes alternate. The clock starts before a job is submitted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.processes.workers import MeasurementError, WorkerClient, running_worker
from tandem.core.clock import Clock, SystemClock
from tandem.core.config import Config, ModelConfig
from tandem.core.device_defaults import with_device_defaults
from tandem.core.errors import TandemError
from tandem.core.events import Finished, KVReceived, Token
from tandem.core.ids import HandoffId, RequestId
from tandem.core.request import GenerateJob, RemotePrefix, Request, SamplingParams

BLOCK_SIZE = with_device_defaults(Config()).engine.block_size
VOCABULARY = 32_000
"""Every served model has at least as many tokens."""
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class PrefixFetchTimes:
    """Times of the prompts of one length: seconds until the first token if the KV is computed, and if it is read.

    `bandwidth`: of the reads from the other worker, in bytes per second.
    """

    computed_s: float
    read_s: float
    bandwidth: float


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        asyncio.run(_measure(args, SystemClock()))
    except (MeasurementError, TandemError, TimeoutError) as error:
        sys.stderr.write(f"\nloadtest remote-prefix: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadtest remote-prefix", description="Prompts computed against prompts read."
    )
    parser.add_argument("--model", default=ModelConfig().id, help="as for tandem serve (default: %(default)s)")
    parser.add_argument("--transport", choices=("nixl", "tcp", "local"), default="nixl")
    parser.add_argument("--tokens", type=_counts, default=(256, 1024, 4096), metavar="N,N,...")
    parser.add_argument("--repeats", type=int, default=5, help="prompts of each length (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), help="of each worker")
    return parser


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


async def _measure(args: argparse.Namespace, clock: Clock) -> None:
    flags = ["--model", args.model, "--transfer-backend", args.transport, "--num-threads", str(args.threads)]
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-loadtest-")))
        clients: list[WorkerClient] = []
        for name in ("one", "other"):
            worker = await stack.enter_async_context(running_worker("mixed", flags, logs / name))
            clients.append(await stack.enter_async_context(WorkerClient(worker, clock)))
        for each in (clients, clients[::-1]):  # connects the two
            await _measure_prompt(each[0], each[1], BLOCK_SIZE * 4, clock)
        sys.stdout.write("| prompt tokens | computed | read | GB/s of the reads |\n|---:|---:|---:|---:|\n")
        for count in args.tokens:
            rows = []
            for number in range(args.repeats):
                source, consumer = clients if number % 2 else clients[::-1]
                rows.append(await _measure_prompt(source, consumer, count, clock))
            sys.stdout.write(_line(count, rows))
            sys.stdout.flush()


async def _measure_prompt(source: WorkerClient, consumer: WorkerClient, count: int, clock: Clock) -> PrefixFetchTimes:
    """Compute one prompt of `count` tokens at its source, read it at the consumer, and return both times."""
    request = _request(source.model, count)
    computed_s = await _first_token(source, GenerateJob(request=request, attempt=1), clock)
    prefix = RemotePrefix(handoff=HandoffId(f"loan-{request.id}"), source=source.worker, num_blocks=count // BLOCK_SIZE)
    job = GenerateJob(request=replace(request, id=RequestId(f"{request.id}-read")), attempt=1, prefix=prefix)
    read_s = await _first_token(consumer, job, clock)
    pulled = next((event for _, event in consumer.events_of(job.key) if isinstance(event, KVReceived)), None)
    if pulled is None or pulled.num_blocks != (count - 1) // BLOCK_SIZE:
        raise MeasurementError(f"{consumer.worker} has read {pulled}, not a prompt of {count} tokens")
    return PrefixFetchTimes(computed_s, read_s, pulled.num_bytes / pulled.busy_s)


async def _first_token(client: WorkerClient, job: GenerateJob, clock: Clock) -> float:
    """Return the seconds until the job's first token."""
    began = clock.now()
    await client.submit(job)
    at, _ = await client.first(job.key, lambda event: isinstance(event, Token))
    await client.first(job.key, lambda event: isinstance(event, Finished))
    return at - began


def _request(model: str, count: int) -> Request:
    """Return a request with a unique prompt of `count` tokens, which shares no prefix with another."""
    number = next(_numbers)
    prompt = tuple(1 + (number * 7919 + i * i * 31 + i) % VOCABULARY for i in range(count))
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    return Request(id=RequestId(f"r{number}"), model=model, prompt_tokens=prompt, sampling=sampling)


def _line(count: int, rows: Sequence[PrefixFetchTimes]) -> str:
    """Return one table row: medians, and in brackets the least and the greatest value."""
    computed, read = ([getattr(row, name) * 1e3 for row in rows] for name in ("computed_s", "read_s"))
    cells = [f"{statistics.median(ms):,.0f} ms ({min(ms):,.0f}-{max(ms):,.0f})" for ms in (computed, read)]
    bandwidth = statistics.median(row.bandwidth for row in rows) / 1e9
    return f"| {count:,} | {cells[0]} | {cells[1]} | {bandwidth:.1f} |\n"


if __name__ == "__main__":
    sys.exit(main())
