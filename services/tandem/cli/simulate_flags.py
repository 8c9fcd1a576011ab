"""Define the flags of `tandem simulate`, `tandem plan` and `tandem fit-cost`, without importing the simulator."""

from __future__ import annotations

import argparse
from pathlib import Path

from tandem.core.model_catalog import PUBLISHED

SECTIONS = ("engine", "slo", "lanes", "handoff", "gateway")
DEFAULTS = {"engine.max_num_batched_tokens": "2048", "engine.max_num_seqs": "256"}
"""Defaults for accelerators; the settings' own defaults are for a CPU."""

BUILT_IN_MIXES = (
    *("mix", "rag", "agent", "tenants", "noisy", "cached-documents"),
    *("batch-night", "flood", "long-paste", "month-end"),
)
"""Names of the mixes in `tandem.workload.mixes`, in the order of docs/simulator.md."""


def add_simulate_flags(command: argparse.ArgumentParser) -> None:
    group = _group(command)
    group.add_argument(
        "--pools",
        default="mixed=1",
        help="number of workers by role: prefill=4,decode=8 or mixed=4 (default: mixed=1); "
        "decode=6,decode=2:batch adds workers for some lanes only, separated by +",
    )
    group.add_argument("--tp", default="", help="GPUs of each worker: 2, or prefill=1,decode=2 (default: 1)")
    group.add_argument(
        "--autoscale", default="", metavar="POLICY",
        help="change the number of workers during the run: planner, or queue=2:16 for 2 requests per prefill worker "
        "and 16 per decode worker",
    )  # fmt: skip
    _add_workload(command, count=1000)
    command.add_argument("--chart", metavar="FILE", help="draw the run into a .svg, .png or .pdf file")


def add_plan_flags(command: argparse.ArgumentParser) -> None:
    group = _group(command)
    group.add_argument(
        "--percentile", type=float, default=99.0, help="percentage of requests that must meet --slo (default: 99)"
    )
    group.add_argument("--max-gpus", type=int, default=64, help="most GPUs of a cluster (default: 64)")
    group.add_argument("--tp", default="1,2,4,8", help="numbers of GPUs per worker to try (default: 1,2,4,8)")
    group.add_argument(
        "--budgets",
        default="512,2048,8192",
        help="values of engine.max_num_batched_tokens to try (default: 512,2048,8192)",
    )
    group.add_argument(
        "--break-even",
        default="",
        metavar="AXES",
        help="show how prompt length, load and link bandwidth change the cheapest cluster: any of prompt,load,link",
    )
    _add_workload(command, count=1000)
    command.add_argument("--chart", metavar="FILE", help="draw the tried clusters into a .svg, .png or .pdf file")


def add_fit_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "logs", nargs="+", type=Path, metavar="LOG", help="step log of a worker, or directory of step logs"
    )
    command.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON file to write the profile to")
    command.add_argument(
        "--note", default="", metavar="TEXT", help="what the logs were measured on, kept in the profile"
    )
    command.add_argument(
        "--latency-ms", type=float, default=1.0, metavar="MS", help="one-way delay from client to worker (default: 1)"
    )
    command.add_argument(
        "--bandwidth",
        type=float,
        default=1e9,
        metavar="BYTES",
        help="bytes per second of a worker's link (default: 1e9)",
    )


def _group(command: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = command.add_argument_group("model and hardware")
    group.add_argument(
        "--model",
        dest="shape",
        default="llama-3.1-8b",
        metavar="NAME",
        help=f"model to simulate ({', '.join(PUBLISHED)}), also by its name on Hugging Face (default: llama-3.1-8b)",
    )
    group.add_argument(
        "--hardware", default="h200", metavar="NAME", help="h100, h200, b200, a100 or l40s (default: h200)"
    )
    group.add_argument(
        "--profile", metavar="FILE", help="profile that `tandem fit-cost` has written, instead of model and hardware"
    )
    group.add_argument(
        "--weights", choices=("bf16", "fp8"), default="bf16", help="precision of the weights (default: bf16)"
    )
    group.add_argument(
        "--kv", choices=("bf16", "fp8"), default="bf16", help="precision of the KV cache (default: bf16)"
    )
    group.add_argument(
        "--efficiency",
        default="",
        metavar="NAME=VALUE,...",
        help="how much of its peak the hardware reaches: fractions for memory, compute and link, times for overhead "
        "and sum, as in memory=0.85,overhead=2ms",
    )
    group.add_argument(
        "--link",
        type=float,
        metavar="GB/S",
        help="gigabytes per second between workers, for each GPU (default: its network port)",
    )
    group.add_argument(
        "--price", type=float, metavar="PER_HOUR", help="price of one GPU per hour (default: a list price)"
    )
    return group


def _add_workload(command: argparse.ArgumentParser, count: int) -> None:
    group = command.add_argument_group("workload")
    group.add_argument(
        "--workload", "--trace", dest="workload", default="mix", metavar="NAME|FILE",
        help=f"a built-in mix ({', '.join(BUILT_IN_MIXES)}), a mix (*.yaml) or a trace of requests (default: mix)",
    )  # fmt: skip
    group.add_argument("--rate", type=float, metavar="N", help="requests per second (default: the workload's own)")
    group.add_argument(
        "--count",
        type=int,
        metavar="N",
        help=f"number of requests, and of conversations in a mix with turns (default: {count:,}, or all of a trace)",
    )
    group.add_argument(
        "--speedup", type=float, default=1.0, metavar="N", help="factor on the speed of a trace (default: 1)"
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of workload and cluster; the same seed gives the same result (default: 0)",
    )
    group.add_argument("--slo", default="", metavar="TARGETS", help="latency targets: ttft=500ms,itl=40ms")
    group.add_argument("--json", metavar="FILE", help="write the report into this file as JSON")
