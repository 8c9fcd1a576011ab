"""`python -m loadtest run URL`: workloads against an endpoint that runs already; starts and ends nothing.

python -m loadtest run http://127.0.0.1:8000 [WORKLOAD ...] [--slo-ttft-ms N --slo-itl-ms N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import aiohttp

from loadtest.contenders import ServedContender, attached
from loadtest.model import encoder, model_directory
from loadtest.records import Run
from loadtest.report import Bench, add_report_flags, report_to
from loadtest.systems import Server
from loadtest.workloads import NAMES, workload
from tandem.core.clock import Clock, SystemClock
from tandem.core.config import ModelConfig


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="loadtest run", description="Measure an OpenAI-compatible endpoint.")
    parser.add_argument("url", help="without /v1")
    parser.add_argument("workloads", nargs="*", default=["decode", "throughput"], help=f"of {', '.join(NAMES)}")
    parser.add_argument("--name", default="endpoint", help="of the system in what is printed")
    parser.add_argument("--model", default=ModelConfig().id, help="whose tokenizer is used (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual number of requests")
    add_report_flags(parser)
    args = parser.parse_args(argv)
    try:
        runs = asyncio.run(_run(args, SystemClock()))
    except (aiohttp.ClientError, OSError) as error:
        sys.stderr.write(f"loadtest run: {error}\n")
        return 1
    return report_to(Bench(systems=(args.name,), runs=tuple(runs), facts={"url": args.url}), args)


async def _run(args: argparse.Namespace, clock: Clock) -> list[Run]:
    encode = encoder(model_directory(args.model))
    contender = ServedContender(Server(await attached(args.name, args.url)), clock)
    return [await contender.run(workload(name, args.seed, 0, encode, args.scale)) for name in args.workloads]
