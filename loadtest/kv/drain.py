"""Measure the drain of a worker with running sequences into another worker.

    python -m loadtest drain [--sequences 32] [--tokens 256] [--outputs 400] [--transport nixl|local]

The program replaces the gateway: it answers each offer with a `ResumeJob` at the other worker, and counts a token when
the first of both workers reports it. The *bump* of a request is its longest time between two consecutive tokens from
the drain on, compared with the median before it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from loadtest.processes.workers import MeasurementError, WorkerClient, running_worker
from tandem.core.clock import Clock, SystemClock
from tandem.core.config import Config, ModelConfig
from tandem.core.device_defaults import with_device_defaults
from tandem.core.errors import TandemError
from tandem.core.events import Finished, KVReceived, MigrationOffered, Token
from tandem.core.ids import RequestId
from tandem.core.request import GenerateJob, Request, ResumeJob, SamplingParams

VOCABULARY = 32_000
"""Every served model has at least as many tokens."""
WARM_TOKENS = 20
"""Tokens of each output before the drain begins."""
DRAIN_S = 300.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Drain:
    """Results of a drain; times are in seconds.

    `before_s` is the median time between two tokens before the drain; `worst_s` holds for each request the longest time
    between two tokens after it. `moved_bytes` is the KV moved in total.
    """

    num_moved: int
    num_given_back: int
    num_left: int
    drain_s: float
    moved_bytes: int
    before_s: float
    worst_s: tuple[float, ...]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        drain = asyncio.run(_measure(args, SystemClock()))
    except (MeasurementError, TandemError, TimeoutError) as error:
        sys.stderr.write(f"loadtest.kv.drain: {error}\n")
        return 1
    sys.stdout.write(_report(drain) + "\n")
    return 0 if drain.num_moved == args.sequences else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest drain", description="Measure the drain of a decode worker.")
    parser.add_argument("--model", default=ModelConfig().id, help="as for tandem serve (default: %(default)s)")
    parser.add_argument("--transport", choices=("nixl", "tcp", "local"), default="nixl")
    parser.add_argument(
        "--sequences", type=int, default=32, help="that run when the drain begins (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=256, help="of each prompt (default: %(default)s)")
    parser.add_argument("--outputs", type=int, default=400, help="tokens of each output (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), help="of each worker")
    return parser


async def _measure(args: argparse.Namespace, clock: Clock) -> Drain:
    flags = {
        "--model": args.model,
        "--transfer-backend": args.transport,
        "--num-threads": args.threads,
        "--max-num-seqs": 2 * args.sequences,
        "--block-size": with_device_defaults(Config()).engine.block_size,
        "--queue-horizon-ms": 10**6,
    }
    words = [str(part) for pair in flags.items() for part in pair]
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-loadtest-")))
        clients: list[WorkerClient] = []
        for name in ("producer", "consumer"):
            worker = await stack.enter_async_context(running_worker("decode", words, logs / name))
            clients.append(await stack.enter_async_context(WorkerClient(worker, clock)))
        producer, consumer = clients
        jobs = [_job(producer.model, i, args) for i in range(args.sequences)]
        await asyncio.gather(*(producer.submit(job) for job in jobs))
        for job in jobs:
            await producer.first(job.key, lambda e: isinstance(e, Token) and e.index >= WARM_TOKENS)
        began = clock.now()
        draining = asyncio.create_task(producer.drain(DRAIN_S))
        moves = await asyncio.gather(*(_move(producer, consumer, job) for job in jobs))
        reply, drain_s = await draining, clock.now() - began
        for move in moves:
            await consumer.first(move.key, lambda e: isinstance(e, Finished))
        gaps = [_gaps(producer, consumer, job, move) for job, move in zip(jobs, moves, strict=True)]
        before = [gap for request in gaps for at, gap in request if at < began]
        worst = tuple(max(gap for at, gap in request if at >= began) for request in gaps)
        pulled = [event for move in moves for _, event in consumer.events_of(move.key) if isinstance(event, KVReceived)]
    num_bytes = sum(event.num_bytes for event in pulled)
    return Drain(
        reply.num_moved, reply.num_given_back, reply.num_left, drain_s, num_bytes, statistics.median(before), worst
    )


def _job(model: str, number: int, args: argparse.Namespace) -> GenerateJob:
    prompt = tuple((7 * number + 13 * i) % VOCABULARY for i in range(args.tokens))
    sampling = SamplingParams(max_tokens=args.outputs, temperature=0.0)
    request = Request(id=RequestId(f"drain-{number}"), model=model, prompt_tokens=prompt, sampling=sampling)
    return GenerateJob(request=request, attempt=1)


async def _move(producer: WorkerClient, consumer: WorkerClient, job: GenerateJob) -> ResumeJob:
    """Answer a job's offer with the tokens that its client has."""
    _, event = await producer.first(job.key, lambda e: isinstance(e, MigrationOffered))
    assert isinstance(event, MigrationOffered)
    known = tuple(e.token.id for _, e in producer.events_of(job.key) if isinstance(e, Token))
    resume = ResumeJob(
        request=job.request,
        attempt=2,
        output_tokens=known,
        handoff=event.offer.handoff,
        offer_attempt=event.offer.attempt,
        source=producer.worker,
    )
    await consumer.submit(resume)
    return resume


def _gaps(
    producer: WorkerClient, consumer: WorkerClient, job: GenerateJob, move: ResumeJob
) -> list[tuple[float, float]]:
    """Return (when, how long) between neighbouring tokens as the client receives them.

    Raises MeasurementError when a token is lost.
    """
    arrivals: dict[int, float] = {}
    for at, event in sorted(
        [*producer.events_of(job.key), *consumer.events_of(move.key)], key=lambda stamped: stamped[0]
    ):
        if isinstance(event, Token):
            arrivals.setdefault(event.index, at)
    if sorted(arrivals) != list(range(job.request.sampling.max_tokens)):
        raise MeasurementError(f"{job.key} lost a token")
    times = [arrivals[index] for index in sorted(arrivals)]
    return [(later, later - earlier) for earlier, later in pairwise(times)]


def _report(drain: Drain) -> str:
    worst = sorted(drain.worst_s)
    return "\n".join(
        [
            f"moved {drain.num_moved}, given back {drain.num_given_back}, left {drain.num_left}",
            f"drained in {drain.drain_s:.2f} s, {drain.moved_bytes / MIB:.0f} MiB moved",
            f"between tokens: {1e3 * drain.before_s:.1f} ms before (median); the longest of each request "
            f"from the drain on: {1e3 * statistics.median(worst):.0f} ms (median), {1e3 * worst[-1]:.0f} ms (worst)",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
