"""Run workloads on our engine in this process: `python -m loadtest offline`.

python -m loadtest offline [WORKLOAD ...] [--json FILE] [--flags any flag of `tandem worker`]
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadtest.bench.report import BenchRun, add_report_flags, report_to
from loadtest.client.records import Run, encode
from loadtest.client.workloads import NAMES, Workload, warm_up, workload
from loadtest.common.model import encoder, model_directory
from tandem.core.clock import SystemClock
from tandem.core.config import Config
from tandem.core.errors import TandemError
from tandem.core.settings import flags_of, resolve, settings
from tandem.worker.main import prepare_process, settle_process


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    prepare_process()
    logging.disable(logging.INFO if args.quiet else logging.NOTSET)
    try:
        config = resolve([("command line", worker_settings(args.flags))]).config
        runs = _run(args, config)
    except TandemError as error:
        sys.stderr.write(f"loadtest offline: {error.message}\n")
        return 1
    if args.workload_file:
        args.json.write_bytes(encode(runs[0]))
        return 0
    return report_to(BenchRun(systems=("tandem-offline",), runs=tuple(runs)), args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest offline", description="Run workloads on the engine itself.")
    parser.add_argument("workloads", nargs="*", default=["decode", "throughput"], help=f"of {', '.join(NAMES)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual number of requests")
    parser.add_argument("--workload-file", type=Path, metavar="FILE", help="run this one, and write the run to --json")
    parser.add_argument("--quiet", action="store_true", help="no log lines")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="all that follows is for the worker")
    add_report_flags(parser)
    return parser


def worker_settings(words: Sequence[str]) -> dict[str, str | bool]:
    """Return the settings layer of these flags of `tandem worker`."""
    parser = argparse.ArgumentParser(prog="loadtest offline --flags")
    names = flags_of()
    for leaf in settings():
        if leaf.type is bool:
            parser.add_argument(*names[leaf.key], dest=leaf.key, action=argparse.BooleanOptionalAction, default=None)
        else:
            parser.add_argument(*names[leaf.key], dest=leaf.key, default=None)
    return {key: value for key, value in vars(parser.parse_args(words)).items() if value is not None}


def _run(args: argparse.Namespace, config: Config) -> list[Run]:
    # Only now: importing torch reads the environment.
    from loadtest.engine.offline import OfflineEngine
    from tandem.worker.model.worker_model import load_worker_model

    engine = OfflineEngine(config, load_worker_model(config), SystemClock())
    settle_process()
    runs = []
    for number, current in enumerate(_workloads(args, config)):
        engine.run(warm_up(number))
        runs.append(engine.run(current))
        sys.stderr.write("" if args.quiet else f"{current.name:>13} {runs[-1].wall_s:7.2f} s\n")
    return runs


def _workloads(args: argparse.Namespace, config: Config) -> list[Workload]:
    if args.workload_file:
        return [msgspec.json.decode(args.workload_file.read_bytes(), type=Workload)]
    encode_text = encoder(model_directory(config.model.id))
    return [workload(name, args.seed, 0, encode_text, args.scale) for name in args.workloads]
