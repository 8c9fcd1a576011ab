"""Measure on real processes how fast running answers spread to a decode worker that is free again.

    python -m loadtest spread [--requests 12] [--outputs 900] [any flag of `tandem serve`]

A gateway, a prefill worker and two decode workers run as processes without Ray. Long answers run on both decode
workers. One of these drains, so that its answers migrate to the other, and accepts jobs again at once. The same is done
without the drain, with gateway.rebalance off, and with it on. A gap is the time between two tokens of one answer; every
answer must have the same tokens in all runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise

import aiohttp
import grpc.aio

from loadtest.client.client import Refused
from loadtest.client.sent_completion import SentCompletion, random_body
from loadtest.common.stats import percentile
from loadtest.common.tables import ms, table
from loadtest.processes.tandem_server import running_gateway
from loadtest.processes.workers import MeasurementError, WorkerClient
from tandem.core.clock import Clock, SystemClock, wall_ns
from tandem.core.config import ModelConfig
from tandem.core.errors import TandemError

RUNS = {"no drain": ("off", False), "`gateway.rebalance=off`": ("off", True), "`gateway.rebalance=on`": ("on", True)}
"""By the name of a run: its gateway.rebalance, and whether a worker drains."""
POOLS = ("prefill", "decode", "decode")
NUM_WARM = 60
"""Tokens of each answer before the drain."""
WINDOW_S = 2.0
LOOKS = (0, 1, 2, 4, 8)
"""Windows after the drain that the report shows."""
AS_GOOD = 1.2
"""A window is as good as without a drain if its p99 gap is at most this many times longer."""
DRAIN_S = 30.0
PATIENCE_S = 300.0
POLL_S = 0.1
_FAILURES = (Refused, TandemError, aiohttp.ClientError, grpc.aio.AioRpcError)


@dataclass(frozen=True, slots=True)
class SpreadRun:
    """Results of one run.

    `gaps_s`: the p99 gap of each window after the drain in which all answers run; `WINDOW_S` where no token came.
    `longest_s`: the longest gap after the drain. `num_moves`: moves and retries of answers beside those of the drain.
    `last_s`: seconds from the drain to the end of the last answer. `tokens`: those of each answer.
    """

    gaps_s: tuple[float, ...]
    longest_s: float
    num_moves: int
    last_s: float
    tokens: tuple[tuple[int, ...], ...]


def main(argv: Sequence[str]) -> int:
    args, flags = _parser().parse_known_args(argv)
    runs: dict[str, SpreadRun] = {}
    try:
        for name, (mode, drains) in RUNS.items():
            runs[name] = asyncio.run(_measure(args, ["--rebalance", mode, *flags], SystemClock(), drains=drains))
            sys.stderr.write(f"{name}: {runs[name].num_moves} moves\n")
            if runs[name].tokens != runs["no drain"].tokens:
                raise MeasurementError(f"{name}: an answer has other tokens than without a drain")
    except (KeyboardInterrupt, TimeoutError, MeasurementError, *_FAILURES) as error:
        sys.stderr.write(f"loadtest spread: {error!r}; this is what was measured until then\n")
        sys.stdout.write(report(runs))
        return 1
    sys.stdout.write(report(runs))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest spread", description="Measure the spread of running answers.")
    parser.add_argument("--model", default=ModelConfig().id, help="as for tandem serve (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=12, help="long answers (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each prompt (default: %(default)s)")
    parser.add_argument("--outputs", type=int, default=900, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), help="of each worker")
    return parser


async def _measure(args: argparse.Namespace, flags: Sequence[str], clock: Clock, *, drains: bool) -> SpreadRun:
    own = ("--model", args.model, "--max-num-seqs", str(2 * args.requests))
    async with AsyncExitStack() as stack:
        threads = dict.fromkeys(POOLS, args.threads)
        gateway = await stack.enter_async_context(running_gateway(POOLS, threads, 0, [*own, *flags]))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        client = await stack.enter_async_context(WorkerClient(gateway.workers[-1], clock))
        url = await gateway.url()
        async with asyncio.timeout(PATIENCE_S):
            while not await _has_all(session, url):  # noqa: ASYNC110 # another process sets no event
                await asyncio.sleep(POLL_S)
        bodies = [random_body(args.tokens, number, args.outputs) for number in range(args.requests)]
        url += "/v1/completions"
        answers = [SentCompletion(session, url, {**body, "model": client.model}) for body in bodies]
        async with asyncio.timeout(PATIENCE_S):
            while min(len(one.answer.tokens) for one in answers) < NUM_WARM:
                for one in answers:
                    if one.task.done():
                        one.task.result()
                        raise MeasurementError("an answer ended before the drain: more --outputs")
                await asyncio.sleep(POLL_S)
        num_drained = 0
        if drains:
            reply = await client.drain(DRAIN_S)
            num_drained = reply.num_moved + reply.num_given_back
            if reply.num_left or not reply.num_moved:
                raise MeasurementError(f"{num_drained} answers left the drained worker, {reply.num_left} did not")
            await client.undo_drain()
        began = wall_ns() / 1e9
        await asyncio.gather(*(one.task for one in answers))
    return _result(answers, began, num_drained)


async def _has_all(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    return all(f'tandem_live_workers{{pool="{pool}"}} {POOLS.count(pool)}.0' in text for pool in POOLS)


def _result(answers: Sequence[SentCompletion], began: float, num_drained: int) -> SpreadRun:
    stamps = [one.answer.stamps_s for one in answers]
    gaps = [(later - began, later - earlier) for each in stamps for earlier, later in pairwise(each) if later > began]
    first_end, last_end = min(each[-1] for each in stamps) - began, max(each[-1] for each in stamps) - began
    windows: list[list[float]] = [[] for _ in range(int(first_end / WINDOW_S))]
    if not windows:
        raise MeasurementError(f"an answer ended within {WINDOW_S:g} s of the drain: more --outputs")
    for at, gap in gaps:
        if at < len(windows) * WINDOW_S:
            windows[int(at / WINDOW_S)].append(gap)
    return SpreadRun(
        tuple(percentile(window, 0.99) if window else WINDOW_S for window in windows),
        max(gap for _, gap in gaps),
        sum(one.facts.attempts - 1 for one in answers) - num_drained,
        last_end,
        tuple(tuple(one.answer.tokens) for one in answers),
    )


def good_after(run: SpreadRun, calm: SpreadRun) -> str:
    """Return the seconds from the drain after which no window was worse than `AS_GOOD` times the median window of the
    run without a drain."""
    limit = AS_GOOD * percentile(calm.gaps_s, 0.5)
    bad = [number for number, gap in enumerate(run.gaps_s, 1) if gap > limit]
    if not bad:
        return "0"
    return f"{bad[-1] * WINDOW_S:g}" if bad[-1] < len(run.gaps_s) else "never"


def report(runs: dict[str, SpreadRun]) -> str:
    """Return a table with one row for each run."""
    looks = [f"p99 gap {after * WINDOW_S:g}-{(after + 1) * WINDOW_S:g} s after the drain, ms" for after in LOOKS]
    heads = [
        "run",
        *looks,
        f"within {AS_GOOD} x of no drain after, s",
        "longest gap, ms",
        "moves",
        "all answers after, s",
    ]
    rows = [
        [
            name,
            *(ms(run.gaps_s[after]) if after < len(run.gaps_s) else "" for after in LOOKS),
            good_after(run, runs["no drain"]) if name != "no drain" else "",
            ms(run.longest_s),
            str(run.num_moves),
            f"{run.last_s:.1f}",
        ]
        for name, run in runs.items()
    ]
    return table(heads, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
