"""Run workloads on several systems in alternation and keep the record of every run.

    python -m loadtest bench [--systems tandem,vllm,NAME=URL] [--workloads decode,mix] [--rounds 2] [--json FILE]

With systems A and B the order is A B A B A, so that a drift of the machine's speed favours neither. `--variant
NAME="FLAGS"` adds Tandem with other flags as a system, so that two configurations can be compared in the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadtest.bench.report import BenchRun, add_report_flags, report_to
from loadtest.bench.systems_under_test import Failure, SystemFactory, SystemUnderTest
from loadtest.client.records import Probe, Run
from loadtest.client.workloads import NAMES, Encode, workload
from loadtest.common.float_copy import float_copy
from loadtest.common.model import encoder, model_directory
from loadtest.peers.catalog import PEERS, Settings, is_installed
from loadtest.processes.systems import NotStarted
from tandem.core.clock import Clock, SystemClock
from tandem.core.config import ModelConfig

DEFAULT_WORKLOADS = NAMES


class Turn(NamedTuple):
    """One run in the schedule of a bench: which system runs with which seed.

    `turn` counts the runs of one system at one seed.
    """

    system: str
    seed: int
    turn: int


def schedule(systems: Sequence[str], seeds: Sequence[int], rounds: int) -> list[Turn]:
    """Return the order of runs: each seed `rounds` times, alternating over all systems.

    With one seed the first system runs once more at the end, so that each run of another system has a run of the first
    on both sides.
    """
    turns = [Turn(system, seed, number) for seed in seeds for number in range(rounds) for system in systems]
    if len(seeds) == 1 and len(systems) > 1:
        turns.append(Turn(systems[0], seeds[0], rounds))
    return turns


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    try:
        bench = asyncio.run(_bench(args, SystemClock()))
    except (Failure, NotStarted) as error:
        sys.stderr.write(f"loadtest bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return report_to(bench, args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest bench", description="Compare systems on the same workloads.")
    parser.add_argument("--model", default=ModelConfig().id, help="as for tandem serve (default: %(default)s)")
    installed = ["tandem", "tandem-offline", *(name for name in PEERS if is_installed(name))]
    parser.add_argument("--systems", type=_words, default=installed, help="the first is compared with all others")
    parser.add_argument("--variant", action="append", type=_variant, default=[], metavar='NAME="FLAGS"')
    parser.add_argument("--workloads", type=_words, default=DEFAULT_WORKLOADS, help=f"of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each system at each seed (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mix-seeds", type=int, default=1, help="seeds of mix and mix-burst, pooled (default: 1)")
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual number of requests")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="compute threads of each system"
    )
    parser.add_argument("--chunk", type=int, default=256, help="tokens of one step (default: %(default)s)")
    parser.add_argument("--no-probe", action="store_true", help="do not measure the machine between runs")
    add_report_flags(parser)
    return parser


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _variant(text: str) -> tuple[str, list[str]]:
    name, _, flags = text.partition("=")
    return name, shlex.split(flags)


async def _bench(args: argparse.Namespace, clock: Clock) -> BenchRun:
    directory = model_directory(args.model)
    settings = Settings(model=directory, floats=float_copy(directory), threads=args.threads, chunk=args.chunk)
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
        factory = SystemFactory(settings, dict(args.variant), clock, logs, stack)
        names = [*args.systems, *(name for name, _ in args.variant if name not in args.systems and name != "tandem")]
        systems = [await factory.enter(name) for name in names]
        runs: list[Run] = []
        runner = _BenchRunner(args, clock, encoder(directory), runs)
        for name in args.workloads:
            await runner.run_all(name, systems)
        return BenchRun(systems=tuple(c.name for c in systems), runs=tuple(runs), facts=_facts(args))


def _facts(args: argparse.Namespace) -> dict[str, str]:
    return {
        "processor": _processor(),
        "threads": str(args.threads),
        "chunk": str(args.chunk),
        "model": str(args.model),
        "rounds": str(args.rounds),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else "unknown"


class _BenchRunner:
    """Runs one workload after another and appends each result to `runs`."""

    def __init__(self, args: argparse.Namespace, clock: Clock, encode_text: Encode, runs: list[Run]) -> None:
        self._args, self._clock, self._encode, self._runs = args, clock, encode_text, runs

    async def run_all(self, name: str, systems: Sequence[SystemUnderTest]) -> None:
        args = self._args
        num_seeds = args.mix_seeds if name.startswith("mix") else 1
        able = {c.name: c for c in systems if c.runs(workload(name, args.seed, 0, self._encode, args.scale))}
        seeds = range(args.seed, args.seed + num_seeds)
        probe = await self._probe()
        for turn in schedule(list(able), seeds, args.rounds):
            requests = workload(name, turn.seed, turn.turn, self._encode, args.scale)
            began = self._clock.now()
            run = await able[turn.system].run(requests)
            before, probe = probe, await self._probe()
            run = msgspec.structs.replace(run, began=began, before=before, after=probe)
            self._runs.append(run)
            _print_run(run)

    async def _probe(self) -> Probe | None:
        """Measure the machine's speed in a child process, whose threads are gone when the next run begins."""
        if self._args.no_probe:
            return None
        command = (sys.executable, "-m", "loadtest.common.machine_probe", str(self._args.threads))
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        return msgspec.json.decode(out, type=Probe) if process.returncode == 0 else None


def _print_run(run: Run) -> None:
    failed = f", {len(run.failures)} FAILED: {run.failures[0]}" if run.failures else ""
    probe = f", probe {run.after.gflops:.0f} GFLOP/s {run.after.read_gbs:.0f} GB/s" if run.after else ""
    sys.stderr.write(f"{run.workload:>13} {run.system:<16} seed {run.seed} {run.wall_s:7.2f} s{probe}{failed}\n")
