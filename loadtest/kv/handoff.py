"""Measure the hand-off of real prompts between two real workers and print a table.

    python -m loadtest.kv.handoff [--device cuda] [--transport nixl|local] [--tokens 128,512] [--repeats 3]

Each prompt is sent in the order of the design: `ResumeJob` to the decode worker, then `PrefillJob` to the prefill
worker. The clock starts before the first of them. No prompt shares a block with another one, so that no cache hits.
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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import msgspec

from loadtest.processes.workers import MeasurementError, WorkerClient, running_worker
from tandem.core.clock import Clock, SystemClock
from tandem.core.config import Config, ModelConfig
from tandem.core.device_defaults import with_device_defaults
from tandem.core.errors import TandemError
from tandem.core.events import Finished, KVReceived, Token
from tandem.core.ids import HandoffId, RequestId
from tandem.core.request import PrefillJob, Request, ResumeJob, SamplingParams

VOCABULARY = 32_000
"""Every served model has at least as many tokens."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class HandoffTimes:
    """Times of one hand-off, or medians of several; in seconds and bytes.

    `prefill_s` ends when the prefill worker's first token arrives; `second_s` when the decode worker's first own token
    does. `busy_s` is the time in which at least one read was in flight, `exposed_s` the time from the announcement of
    the last chunk to the last checked block. `left_bytes` were still to be moved at that announcement.
    """

    prompt_tokens: int
    prefill_s: float
    second_s: float
    moved_bytes: float
    busy_s: float
    exposed_s: float
    left_bytes: float
    limit_bytes: float

    @property
    def hidden(self) -> float:
        """Return the share of the transfer that overlapped with the prompt's computation."""
        return max(0.0, 1.0 - self.exposed_s / self.busy_s)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        rows = asyncio.run(_measure(args, SystemClock()))
    except (MeasurementError, TandemError, TimeoutError) as error:
        _print(f"\nloadtest.handoff: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(_table(rows) + "\n")
    if args.json:
        facts = {"transport": args.transport, "budget": args.budget, "repeats": args.repeats}
        rounds = [{**asdict(row), "hidden": row.hidden} for row in rows]
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode({**facts, "medians": rounds})))
    late = [row.prompt_tokens for row in rows if row.left_bytes > row.limit_bytes]
    if late:
        _print(f"more than the last chunk and a block was left to move: {late}\n")
    return 1 if late else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest.kv.handoff", description="Measure prefill, transfer and overlap.")
    parser.add_argument("--model", default=ModelConfig().id, help="as for tandem serve (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="two workers share the GPU 0")
    parser.add_argument("--kv-cache-memory", default="", metavar="SIZE", help="of each worker, by device if not given")
    parser.add_argument("--transport", choices=("nixl", "tcp", "local"), default="nixl")
    parser.add_argument("--tokens", type=_counts, default=(128, 512, 1024, 2048, 4096), metavar="N,N,...")
    parser.add_argument("--budget", type=int, default=512, help="tokens of a chunk (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), help="of each worker")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the medians there too")
    return parser


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


async def _measure(args: argparse.Namespace, clock: Clock) -> list[HandoffTimes]:
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-loadtest-")))
        clients: list[WorkerClient] = []
        for pool in ("prefill", "decode"):
            _print(f"starting a {pool} worker ...\n")
            worker = await stack.enter_async_context(running_worker(pool, _flags(args), logs / pool))
            clients.append(await stack.enter_async_context(WorkerClient(worker, clock)))
        meter = _Meter(clients[0], clients[1], clock, args.budget, block_size(args.device))
        _print("warming up ...\n")
        await meter.hand_over(args.budget)
        return [await _medians(meter, count, args.repeats) for count in args.tokens]


def block_size(device: Literal["cpu", "cuda"]) -> int:
    """Return the tokens of a block of a worker on a device."""
    return with_device_defaults(Config(model=ModelConfig(device=device))).engine.block_size


def _flags(args: argparse.Namespace) -> list[str]:
    flags = {
        "--model": args.model,
        "--device": args.device,
        "--transfer-backend": args.transport,
        "--max-num-batched-tokens": args.budget,
        "--num-threads": args.threads,
        "--block-size": block_size(args.device),
    }
    if args.kv_cache_memory:
        flags["--kv-cache-memory"] = args.kv_cache_memory
    return [str(part) for pair in flags.items() for part in pair]


async def _medians(meter: _Meter, count: int, repeats: int) -> HandoffTimes:
    rounds: list[HandoffTimes] = []
    for number in range(repeats):
        _print(f"\r{count:>6} tokens, {number + 1} of {repeats} ")
        rounds.append(await meter.hand_over(count))
    _print("\n")
    names = [field.name for field in fields(HandoffTimes) if field.name != "prompt_tokens"]
    return HandoffTimes(count, *(statistics.median(getattr(row, name) for row in rounds) for name in names))


@dataclass(frozen=True, slots=True)
class _Meter:
    producer: WorkerClient
    consumer: WorkerClient
    clock: Clock
    budget: int
    block_size: int

    async def hand_over(self, count: int) -> HandoffTimes:
        """Hand one prompt of `count` tokens over and wait until both of its jobs have ended."""
        request = _request(self.producer.model, count)
        handoff = HandoffId(f"handoff-{request.id}")
        resume = ResumeJob(request=request, attempt=1, handoff=handoff, source=self.producer.worker)
        key, began = resume.key, self.clock.now()
        await self.consumer.submit(resume)
        await self.producer.submit(PrefillJob(request=request, attempt=1, handoff=handoff))
        first_at, _ = await self.producer.first(key, lambda event: isinstance(event, Token))
        second_at, _ = await self.consumer.first(key, lambda event: isinstance(event, Token) and event.index == 1)
        _, pulled = await self.consumer.first(key, lambda event: isinstance(event, KVReceived))
        for client in (self.producer, self.consumer):
            await client.first(key, lambda event: isinstance(event, Finished))
        assert isinstance(pulled, KVReceived)
        if pulled.num_cached_tokens:
            raise MeasurementError(f"{pulled.num_cached_tokens} tokens of {request.id} were in the cache already")
        return HandoffTimes(
            prompt_tokens=count,
            prefill_s=first_at - began,
            second_s=second_at - began,
            moved_bytes=pulled.num_bytes,
            busy_s=pulled.busy_s,
            exposed_s=pulled.exposed_s,
            left_bytes=pulled.num_exposed_bytes,
            limit_bytes=self._limit_blocks(count) * pulled.num_bytes / pulled.num_blocks,
        )

    def _limit_blocks(self, count: int) -> int:
        """Return the blocks of the last chunk and one more, at most those of the prompt."""
        last_chunk = (count - 1) % self.budget + 1
        return min(-(-last_chunk // self.block_size) + 1, -(-count // self.block_size))


_numbers = itertools.count(1)


def _request(model: str, count: int) -> Request:
    """Return a request with a unique prompt of `count` tokens, which shares no prefix with another."""
    number = next(_numbers)
    prompt = tuple(1 + (number * 7919 + i * i * 31 + i) % VOCABULARY for i in range(count))
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    return Request(id=RequestId(f"r{number}"), model=model, prompt_tokens=prompt, sampling=sampling)


def _table(rows: Sequence[HandoffTimes]) -> str:
    """Return the rows as a Markdown table."""
    heads = (
        "prompt tokens",
        "first token (prefill)",
        "second token (decode)",
        "KV moved",
        "transfer busy",
        "GB/s",
        "hidden",
        "left after last chunk",
        "limit",
    )
    lines = ["| " + " | ".join(heads) + " |", "|" + "---:|" * len(heads)]
    return "\n".join([*lines, *(_line(row) for row in rows)])


def _line(row: HandoffTimes) -> str:
    cells = (
        f"{row.prompt_tokens:,}",
        f"{row.prefill_s:.2f} s",
        f"{row.second_s:.2f} s",
        f"{row.moved_bytes / MIB:.1f} MiB",
        f"{row.busy_s * 1e3:.0f} ms",
        f"{row.moved_bytes / row.busy_s / 1e9:.2f}",
        f"{row.hidden:.0%}",
        f"{row.left_bytes / MIB:.1f} MiB",
        f"{row.limit_bytes / MIB:.1f} MiB",
    )
    return "| " + " | ".join(cells) + " |"


def _print(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
