"""Measure the pause between a request's first two tokens, with and without a hand-off.

    python -m loadtest.kv.first_decode_gap [--transport nixl|local] [--tokens 128,512] [--rounds 7] [--json FILE]

A *remote* request is prefilled by one worker and decoded by another, so that between its first two tokens the last
chunk's KV is announced, read and checked. A *local* one of the same length runs whole on the decode worker. Both
alternate; a decode step is the median pause between later tokens of the local ones.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from loadtest.processes.workers import MeasurementError, WorkerClient, running_worker
from tandem.core.clock import SystemClock
from tandem.core.config import Config, ModelConfig
from tandem.core.device_defaults import with_device_defaults
from tandem.core.errors import TandemError
from tandem.core.events import Finished, KVReceived, Token
from tandem.core.ids import HandoffId, JobKey, RequestId
from tandem.core.request import GenerateJob, PrefillJob, Request, ResumeJob, SamplingParams

VOCABULARY = 32_000
"""Every served model has at least as many tokens."""
NUM_TOKENS = 6
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class GapRow:
    """Pauses between the first two tokens of requests of one prompt length, as medians in seconds.

    `local_s`, `remote_s`: without and with a hand-off. `exposed_s`: time from the last announcement at the consumer to
    the last checked block. `steps`: extra pause of a remote request over a local one, in decode steps.
    """

    prompt_tokens: int
    local_s: float
    remote_s: float
    step_s: float
    exposed_s: float
    steps: float


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        rows = asyncio.run(_measure(args))
    except (MeasurementError, TandemError, TimeoutError) as error:
        sys.stderr.write(f"loadtest.kv.first_decode_gap: {error}\n")
        return 1
    sys.stdout.write(_table(rows) + "\n")
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode([asdict(row) for row in rows])))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadtest.kv.first_decode_gap", description="Measure the pause that a hand-off costs."
    )
    parser.add_argument("--model", default=ModelConfig().id, help="as for tandem serve (default: %(default)s)")
    parser.add_argument("--transport", choices=("nixl", "tcp", "local"), default="nixl")
    parser.add_argument("--tokens", default="128,512,1024,2048", metavar="N,N,...")
    parser.add_argument("--budget", type=int, default=512, help="tokens of a chunk (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of each length (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each worker (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the medians there too")
    return parser


async def _measure(args: argparse.Namespace) -> list[GapRow]:
    flags = {
        "--model": args.model,
        "--transfer-backend": args.transport,
        "--max-num-batched-tokens": args.budget,
        "--num-threads": args.threads,
        "--block-size": with_device_defaults(Config()).engine.block_size,
    }
    words = [str(part) for pair in flags.items() for part in pair]
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-loadtest-")))
        clients: list[WorkerClient] = []
        for pool in ("prefill", "decode"):
            worker = await stack.enter_async_context(running_worker(pool, words, logs / pool))
            clients.append(await stack.enter_async_context(WorkerClient(worker, SystemClock())))
        producer, consumer = clients
        await _remote(producer, consumer, args.budget)
        return [await _row(producer, consumer, int(count), args.rounds) for count in args.tokens.split(",")]


async def _row(producer: WorkerClient, consumer: WorkerClient, count: int, rounds: int) -> GapRow:
    local: list[float] = []
    remote: list[float] = []
    steps: list[float] = []
    exposed: list[float] = []
    for _ in range(rounds):
        times = await _local(consumer, count)
        local.append(times[1] - times[0])
        steps += [after - before for before, after in itertools.pairwise(times[1:])]
        gap, exposed_s = await _remote(producer, consumer, count)
        remote.append(gap)
        exposed.append(exposed_s)
    mine, theirs, step = (statistics.median(values) for values in (local, remote, steps))
    return GapRow(count, mine, theirs, step, statistics.median(exposed), (theirs - mine) / step)


async def _local(worker: WorkerClient, count: int) -> list[float]:
    """Return the arrival time of each token."""
    request = _request(worker.model, count)
    job = GenerateJob(request=request, attempt=1)
    await worker.submit(job)
    return [await _token(worker, job.key, index) for index in range(NUM_TOKENS)]


async def _remote(producer: WorkerClient, consumer: WorkerClient, count: int) -> tuple[float, float]:
    """Return the seconds from the producer's first token to the second one, and the exposed seconds of the transfer."""
    request = _request(producer.model, count)
    handoff = HandoffId(f"handoff-{request.id}")
    resume = ResumeJob(request=request, attempt=1, handoff=handoff, source=producer.worker)
    await consumer.submit(resume)
    await producer.submit(PrefillJob(request=request, attempt=1, handoff=handoff))
    first = await _token(producer, resume.key, 0)
    second = await _token(consumer, resume.key, 1)
    _, pulled = await consumer.first(resume.key, lambda event: isinstance(event, KVReceived))
    for client in (producer, consumer):
        await client.first(resume.key, lambda event: isinstance(event, Finished))
    assert isinstance(pulled, KVReceived)
    return second - first, pulled.exposed_s


async def _token(worker: WorkerClient, key: JobKey, index: int) -> float:
    at, _ = await worker.first(key, lambda event: isinstance(event, Token) and event.index == index)
    return at


def _request(model: str, count: int) -> Request:
    """Return a request with a unique prompt of `count` tokens, which shares no prefix with another."""
    number = next(_numbers)
    prompt = tuple(1 + (number * 7919 + i * i * 31 + i) % VOCABULARY for i in range(count))
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    return Request(id=RequestId(f"r{number}"), model=model, prompt_tokens=prompt, sampling=sampling)


def _table(rows: Sequence[GapRow]) -> str:
    """Return the rows as a Markdown table."""
    heads = ("prompt tokens", "local gap", "remote gap", "more", "decode step", "more, in steps", "KV exposed")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---:|" * len(heads)]
    for row in rows:
        more = row.remote_s - row.local_s
        times = (row.local_s, row.remote_s, more, row.step_s)
        cells = (f"{row.prompt_tokens:,}", *(f"{seconds * 1e3:.1f} ms" for seconds in times), f"{row.steps:.2f}")
        lines.append("| " + " | ".join((*cells, f"{row.exposed_s * 1e3:.1f} ms")) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
