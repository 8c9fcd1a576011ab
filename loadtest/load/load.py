"""Send a workload to a running endpoint and report the results.

python -m loadtest load http://127.0.0.1:8000 --workload mix [--count 200 --rate 0.5] [--json FILE --chart FILE.png]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from loadtest.bench.report import add_slo_flags
from loadtest.client.calls import Caller
from loadtest.client.client import TIMEOUT_S, Client
from loadtest.client.endpoint import ANSWER_TOKENS, Endpoint, NoEndpoint, base_url, first_model
from loadtest.client.open_loop import MAX_OPEN, OpenLoop, open_session
from loadtest.client.records import Record
from loadtest.common.plot import chart_path, save
from loadtest.common.progress import show
from loadtest.load.load_chart import render
from loadtest.load.load_markdown import markdown
from loadtest.load.load_report import ClientFacts, LoadReport
from loadtest.load.stats_collector import StatsCollector
from loadtest.load.steps import RecordedSteps, read_steps, within
from loadtest.load.steps_markdown import steps_markdown
from tandem.core.clock import Clock, SystemClock, wall_ns
from tandem.core.errors import TandemError
from tandem.core.slo import Slo
from tandem.workload.scheduled_request import ScheduledRequest
from tandem.workload.source import open_workload

STOPPED = 130
STEPS_WRITTEN_S = 1.0
"""Seconds to wait for step logs; workers write them twice a second."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status.

    1: a request failed or a file could not be read or written. 130: Ctrl-C. Otherwise 0.
    """
    args = _parser().parse_args(argv)
    try:
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(args.record.open("wb")) if args.record else None
            requests = _requests(args)
            first = list(itertools.islice(requests, 1))  # what cannot be read is found before anything is sent
            test = LoadTest(args, SystemClock(), out)
            status = _run(test, itertools.chain(first, requests))
        return max(status, _write_report(test.report(is_whole=not status), args))
    except (NoEndpoint, TandemError, OSError) as error:
        sys.stderr.write(f"loadtest load: {error}\n")
        return 1


def _requests(args: argparse.Namespace) -> Iterator[ScheduledRequest]:
    """Return the requests of the workload. Raises TandemError."""
    requests = open_workload(
        args.workload, seed=args.seed, count=args.count, rate=args.rate, speedup=args.speedup, salt=args.salt
    )
    return itertools.takewhile(lambda request: request.due_s < args.duration_s, requests)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest load", description="Measure an OpenAI-compatible endpoint.")
    parser.add_argument("url", help="with or without /v1")
    parser.add_argument("--workload", default="mix", metavar="NAME|FILE", help="mix or trace (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, metavar="N", help="requests (default: all; a mix has no end)")
    parser.add_argument("--duration-s", type=float, default=math.inf, metavar="S", help="send only what is due before")
    parser.add_argument("--rate", type=float, metavar="R", help="requests per second (default: the workload's)")
    parser.add_argument("--speedup", type=float, default=1.0, metavar="X", help="of a trace's times")
    parser.add_argument(
        "--salt", default="", metavar="TEXT", help="another one: other tokens, unknown to prefix caches"
    )
    parser.add_argument("--name", default="endpoint", help="in what is printed")
    parser.add_argument("--model", help="default: the first one that the endpoint lists")
    parser.add_argument("--key", type=_key, action="append", default=[], metavar="TENANT=KEY", help="to authorize with")
    parser.add_argument("--send-priority", action="store_true", help="send priorities; not every endpoint takes them")
    parser.add_argument("--max-open", type=_positive, default=MAX_OPEN, help="requests at once (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="of one answer (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument("--chart", type=chart_path, metavar="FILE.svg|.png", help="draw it there")
    parser.add_argument("--record", type=Path, metavar="FILE.jsonl", help="write each request's times there")
    parser.add_argument("--steps", type=Path, nargs="+", default=[], metavar="FILE", help="step logs of the workers")
    add_slo_flags(parser)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _key(text: str) -> tuple[str, str]:
    tenant, sign, key = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not TENANT=KEY")
    return tenant, key


def _run(test: LoadTest, requests: Iterable[ScheduledRequest]) -> int:
    """Run the test and return its exit status.

    A bad line of a trace or a full disk ends a test as Ctrl-C does: the measurements so far are reported.
    """
    status = 0
    try:
        asyncio.run(test.run(requests))
    except* (TandemError, OSError) as group:
        sys.stderr.write(f"loadtest load: {group.exceptions[0]}\n")
        status = 1
    except* KeyboardInterrupt:
        status = STOPPED
    return status


class LoadTest:
    """One load test of an endpoint; `out` receives a line for each request."""

    def __init__(self, args: argparse.Namespace, clock: Clock, out: BinaryIO | None) -> None:
        self._args, self._clock, self._out = args, clock, out
        self._slo = Slo.of_ms(args.slo_ttft_ms, args.slo_itl_ms)
        self._tally = StatsCollector(self._slo, args.seed)
        self._loop: OpenLoop | None = None
        self._facts: dict[str, str] = {}
        self._began = wall_ns() / 1e9

    async def run(self, requests: Iterable[ScheduledRequest]) -> None:
        """Send all requests and record their answers.

        Raises NoEndpoint, or an exception group of the workload's TandemErrors.
        """
        args, keys = self._args, dict(self._args.key)
        url = base_url(args.url)
        model = args.model or await first_model(url, next(iter(keys.values()), None))
        endpoint = Endpoint(url=url, model=model, extra=ANSWER_TOKENS)
        caller = Caller(endpoint, keys, with_priority=args.send_priority)
        self._facts = _facts(args, endpoint)
        async with open_session() as session:
            client = Client(endpoint, session, self._clock, args.timeout_s)
            self._loop = OpenLoop(client, self._clock, asyncio.sleep, args.max_open, self._ended, self._tally.sent)
            watching = asyncio.create_task(show(self._line, sys.stderr))
            self._began = wall_ns() / 1e9
            try:
                await self._loop.run(map(caller.call, requests))
            finally:
                watching.cancel()

    def report(self, *, is_whole: bool) -> LoadReport:
        """Return the report; `is_whole`: the test was not stopped early. Raises NoEndpoint when nothing was
        measured."""
        loop = self._loop
        if loop is None or not self._tally.num_ended:
            raise NoEndpoint("no request has ended, so there is nothing to report")
        late = self._tally.late.spread()
        assert late is not None
        wall_s = max(self._tally.last_end_s, 1e-9)
        return LoadReport(
            name=self._args.name,
            facts=self._facts,
            began=self._began,
            wall_s=wall_s,
            is_whole=is_whole,
            slo=self._slo,
            scopes=self._tally.scopes(wall_s),
            windows=self._tally.windows(wall_s),
            client=ClientFacts(
                late_p99_s=late.p99,
                late_max_s=late.max,
                most_open=loop.most_open,
                num_held=loop.num_held,
                held_s=loop.held_s,
            ),
            examples=self._tally.examples,
            sample=self._tally.sample(),
        )

    def _ended(self, record: Record, num_open: int) -> None:
        self._tally.ended(record, num_open)
        if self._out is not None:
            kept = msgspec.structs.replace(record, text="", tokens=None)
            self._out.write(msgspec.json.encode(kept) + b"\n")

    def _line(self) -> str:
        loop, tally = self._loop, self._tally
        assert loop is not None
        failed = f" ({tally.num_failed:,} failed)" if tally.num_failed else ""
        rate = tally.num_tokens / max(loop.now_s, 1e-9)
        counts = f"sent {loop.num_sent:,}  open {loop.num_open:,}  ended {tally.num_ended:,}{failed}"
        return f"{loop.now_s:8.1f} s  {counts}  {rate:,.0f} tok/s so far"


def _facts(args: argparse.Namespace, endpoint: Endpoint) -> dict[str, str]:
    given = {
        "count": args.count,
        "rate": args.rate,
        "salt": args.salt or None,
        "speedup": args.speedup if args.speedup != 1 else None,
    }
    facts = {"workload": Path(args.workload).name, "seed": args.seed, **given}
    named = {name: str(value) for name, value in facts.items() if value is not None}
    return {"url": endpoint.url, "model": endpoint.model, **named}


def _write_report(report: LoadReport, args: argparse.Namespace) -> int:
    sys.stdout.write(markdown(report))
    if args.json:
        args.json.write_bytes(msgspec.json.encode(report))
    logs: list[RecordedSteps] = []
    if args.steps:
        time.sleep(STEPS_WRITTEN_S)
        logs = [within(read_steps(path), report.began, report.wall_s) for path in args.steps]
        sys.stdout.write("\n" + steps_markdown(logs))
    if args.chart:
        save(render(report, logs), args.chart)
    return 1 if report.scopes[0].num_whole < report.scopes[0].num_requests else 0
