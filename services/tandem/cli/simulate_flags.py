"""Define the flags of `tandem simulate`, `tandem plan` and `tandem fit-cost`, without importing the simulator."""

from __future__ import annotations

import argparse
from pathlib import Path

SECTIONS = ("engine", "slo", "handoff", "gateway")
DEFAULTS = {"engine.max_num_batched_tokens": "2048", "engine.max_num_seqs": "256"}
"""Defaults for accelerators; the settings' own defaults are for a CPU."""


def add_simulate_flags(command: argparse.ArgumentParser) -> None:
    group = _group(command)
    group.add_argument("--pools", default="mixed=1", help="workers: prefill=4,decode=8 or mixed=4 (default: mixed=1)")
    group.add_argument("--tp", default="", help="accelerators of a worker: 2, or prefill=1,decode=2 (default: 1)")
    group.add_argument(
        "--autoscale", default="", metavar="POLICY",
        help="autoscale the workers: planner, or queue=2:16 (target requests at each prefill and decode worker)",
    )  # fmt: skip
    _add_workload(command, count=1000)
    command.add_argument("--chart", metavar="FILE", help="draw the run into a .svg, .png or .pdf file")


def add_plan_flags(command: argparse.ArgumentParser) -> None:
    group = _group(command)
    group.add_argument("--percentile", type=float, default=99.0, help="percentile that must meet the SLO (default: 99)")
    group.add_argument("--max-gpus", type=int, default=64, help="maximum number of accelerators (default: 64)")
    group.add_argument("--tp", default="1,2,4,8", help="degrees of tensor parallelism to try (default: 1,2,4,8)")
    group.add_argument("--budgets", default="512,2048,8192", help="step budgets to try (default: 512,2048,8192)")
    group.add_argument(
        "--break-even",
        default="",
        metavar="AXES",
        help="find where the cheaper kind changes along these axes: prompt,load,link",
    )
    _add_workload(command, count=1000)
    command.add_argument("--chart", metavar="FILE", help="draw the tried clusters into a .svg, .png or .pdf file")


def add_fit_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="step logs, or directories of them")
    command.add_argument("--output", type=Path, required=True, metavar="FILE", help="profile to write, as JSON")
    command.add_argument("--note", default="", help="what the logs were measured on, for the profile's provenance")
    command.add_argument("--latency-ms", type=float, default=1.0, help="one-way, client to worker (default: 1)")
    command.add_argument("--bandwidth", type=float, default=1e9, help="bytes/s of a worker's link (default: 1e9)")


def _group(command: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = command.add_argument_group("model and hardware")
    group.add_argument("--model", dest="shape", default="llama-3.1-8b", help="model shape (default: llama-3.1-8b)")
    group.add_argument("--hardware", default="h200", help="h100, h200, b200, a100 or l40s (default: h200)")
    group.add_argument("--profile", metavar="FILE", help="profile of `tandem fit-cost`, instead of model and hardware")
    group.add_argument("--weights", choices=("bf16", "fp8"), default="bf16", help="precision of the layers")
    group.add_argument("--kv", choices=("bf16", "fp8"), default="bf16", help="precision of the KV cache")
    group.add_argument(
        "--efficiency",
        default="",
        metavar="NAME=VALUE,...",
        help="reached fractions of memory, compute and link, times of overhead and sum: memory=0.85,overhead=2ms",
    )
    group.add_argument(
        "--link",
        type=float,
        metavar="GB/S",
        help="bandwidth between workers, per accelerator (default: its network port)",
    )
    group.add_argument(
        "--price", type=float, metavar="PER_HOUR", help="price of one accelerator (default: a list price)"
    )
    return group


def _add_workload(command: argparse.ArgumentParser, count: int) -> None:
    group = command.add_argument_group("workload")
    group.add_argument(
        "--workload", "--trace", dest="workload", default="mix", metavar="NAME|FILE",
        help="a built-in mix, a mix (*.yaml) or a trace of requests (default: mix)",
    )  # fmt: skip
    group.add_argument("--rate", type=float, help="requests per second (default: the workload's own)")
    group.add_argument("--count", type=int, help=f"number of requests (default: {count:,}, or all of a trace)")
    group.add_argument("--speedup", type=float, default=1.0, help="factor for the speed of a trace (default: 1)")
    group.add_argument("--seed", type=int, default=0, help="seed of workload and cluster (default: 0)")
    group.add_argument("--slo", default="", help="latency targets: ttft=500ms,itl=40ms")
    group.add_argument("--json", metavar="FILE", help="write the report as JSON")
