"""Compare Tandem with llama.cpp on the same GGUF file: prefill and decode of one request.

    python -m loadtest gguf FILE.gguf [--pairs N] [--prompt N] [--output N] [--threads N] [--flags ...]

Each pair measures one system and then the other, in turn first, while the other waits. Tandem's engine runs in this
process; llama.cpp is measured by its own `llama-bench`, compiled for this processor. Flags after `--flags` are a
worker's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loadtest.client.workloads import BenchRequest, Workload
from loadtest.engine.offline_command import worker_settings
from loadtest.peers.catalog import llama_bench
from tandem.core.clock import SystemClock
from tandem.core.errors import TandemError
from tandem.core.settings import resolve
from tandem.worker.main import prepare_process, settle_process
from tandem.workload.seeded_random import HIGHEST_TOKEN, LOWEST_TOKEN

if TYPE_CHECKING:
    from loadtest.engine.offline import OfflineEngine


class Speed(NamedTuple):
    """Tokens per second of a prompt and of the answer after its first token.

    `model`: those of the answer if only the time inside the model counted, which is what llama-bench measures, because
    it neither samples nor streams."""

    prefill: float
    decode: float
    model: float


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if not llama_bench().exists():
        sys.stderr.write(
            "loadtest gguf: run `python -m loadtest peers install llama-bench` first, a build of 15 minutes\n"
        )
        return 1
    prepare_process()
    try:
        sys.stdout.write(_report(_compare(args), args))
    except TandemError as error:
        sys.stderr.write(f"loadtest gguf: {error.message}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest gguf", description="Compare Tandem with llama.cpp on a GGUF file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of the answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="all that follows is for the worker")
    return parser


def _compare(args: argparse.Namespace) -> dict[str, list[Speed]]:
    """Return the speeds of each system, one per pair; the first pair warms up and is left out."""
    # Only now: importing torch reads the environment.
    from loadtest.engine.offline import OfflineEngine
    from tandem.worker.model.worker_model import load_worker_model

    flags = ["--model", str(args.file), "--num-threads", str(args.threads), "--max-num-batched-tokens", "512"]
    config = resolve([("command line", worker_settings([*flags, *args.flags]))]).config
    engine = OfflineEngine(config, load_worker_model(config), SystemClock())
    settle_process()
    source = random.Random(7)

    def ours() -> Speed:
        prompt = [source.randrange(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(args.prompt)]
        return _of_tandem(engine, prompt, args.output)

    systems: dict[str, Callable[[], Speed]] = {"tandem": ours, "llama.cpp": lambda: _of_llamacpp(args)}
    found: dict[str, list[Speed]] = {name: [] for name in systems}
    for pair in range(args.pairs + 1):
        for name in sorted(systems, reverse=pair % 2 == 0):
            found[name].append(systems[name]())
    return {name: speeds[1:] for name, speeds in found.items()}


def _of_llamacpp(args: argparse.Namespace) -> Speed:
    """Run llama.cpp's own benchmark, which loads the file, warms up and measures."""
    flags = {"-m": args.file, "-p": args.prompt, "-n": args.output, "-t": args.threads, "-r": 1, "-o": "json"}
    command = [str(llama_bench()), *(str(part) for pair in flags.items() for part in pair)]
    # Tandem's process has set how threads wait, which would slow the other.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    results = json.loads(done.stdout)
    prefill, decode = (
        next(result["avg_ts"] for result in results if result[field] > 0) for field in ("n_prompt", "n_gen")
    )
    return Speed(prefill, decode, decode)


def _of_tandem(engine: OfflineEngine, prompt: list[int], num_output: int) -> Speed:
    request = BenchRequest(name="one", group="one", prompt=tuple(prompt), max_tokens=num_output)
    run = engine.run(Workload(name="one", seed=0, turn=0, requests=(request,)))
    (record,) = run.records
    first, last = record.stamps_s[0], record.stamps_s[-1]
    in_model_s = sum(step.model_s for step in run.steps if step.num_decodes and not step.num_prefill_tokens)
    decoded = num_output - 1
    return Speed(len(prompt) / (first - record.sent_s), decoded / (last - first), decoded / in_model_s)


def _report(found: dict[str, list[Speed]], args: argparse.Namespace) -> str:
    lines = [
        f"{args.file.name}: {args.prompt} tokens in, {args.output} out, {args.threads} threads, {args.pairs} pairs"
    ]
    for field in Speed._fields:
        ours, theirs = ([getattr(speed, field) for speed in found[name]] for name in ("tandem", "llama.cpp"))
        ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
        lines.append(
            f"{field:>8}: tandem {statistics.median(ours):7.1f}, llama.cpp {statistics.median(theirs):7.1f} tokens/s; "
            f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    return "\n".join(lines) + "\n"
