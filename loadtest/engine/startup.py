"""Measure `tandem serve` from its first instruction to its first answer.

    python -m loadtest.engine.startup [--pairs 3] [--json FILE]

An empty Ray with as many replicas of an empty Serve deployment, set up as `serve` does, alternates with it: the
difference is Tandem's own time. The model must be in the cache, because a first start downloads it.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tandem.core.clock import Clock, SystemClock

END_S = 90.0
STAGE = re.compile(r"^ +([\d.]+) s  (\w+)")
LISTENS = re.compile(r"Tandem serves (\S+) at (http://\S+)")
EMPTY_APP = """
import os, sys
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "token"
import logging
import ray
from ray import serve
logging.getLogger("ray.serve").setLevel(logging.WARNING)
num_replicas = int(sys.argv[1])
ray.init(address="local", num_cpus=num_replicas + 1, include_dashboard=False, log_to_driver=False,
         object_store_memory=100 << 20, logging_level="WARNING")
print("ray", flush=True)
serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
print("serve", flush=True)

@serve.deployment(ray_actor_options={"num_cpus": 1})
class Empty:
    def __call__(self):
        return 1

targets = [serve.RunTarget(Empty.options(name=f"empty-{i}").bind(), name=f"empty-{i}", route_prefix=None)
           for i in range(num_replicas)]
serve.run_many(targets)
print("answer", flush=True)
sys.stdin.readline()
ray.shutdown()
"""


@dataclass(frozen=True, slots=True)
class Start:
    """Times of one start, in seconds from the start of the process.

    `stages` are the times at which each stage began, `answer_s` is the first answer.
    """

    answer_s: float
    stages: dict[str, float] = field(default_factory=dict)


class StartError(Exception):
    """Raised when a measured start failed; the message holds the output of the process."""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    clock = SystemClock()
    served: list[Start] = []
    empty: list[Start] = []
    try:
        for _ in range(args.pairs):
            empty.append(_start_empty(args.prefill + args.decode, clock))
            served.append(_start_served(args, clock))
            sys.stderr.write(f"empty {empty[-1].answer_s:.1f} s, tandem serve {served[-1].answer_s:.1f} s\n")
    except StartError as error:
        sys.stderr.write(f"loadtest.engine.startup: {error}\n")
        return 1
    beyond = [ours.answer_s - theirs.answer_s for ours, theirs in zip(served, empty, strict=True)]
    sys.stdout.write(_table(served, empty, beyond) + "\n")
    if args.json:
        rows = {"served": [asdict(start) for start in served], "empty": [asdict(start) for start in empty]}
        args.json.write_text(json.dumps({**rows, "beyond_s": beyond}, indent=2))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest.engine.startup", description="Measure the start of tandem serve.")
    parser.add_argument("--pairs", type=int, default=3, help="starts of each kind (default: %(default)s)")
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=1, help="decode workers (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all starts there too")
    return parser


def _start_empty(num_replicas: int, clock: Clock) -> Start:
    began = clock.now()
    command = (sys.executable, "-c", EMPTY_APP, str(num_replicas))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        stages = _stages_until(process, "answer", began, clock)
        process.communicate("\n", timeout=END_S)
    return Start(stages.pop("answer"), stages)


def _stages_until(process: subprocess.Popen[str], last: str, began: float, clock: Clock) -> dict[str, float]:
    assert process.stdout is not None
    stages: dict[str, float] = {}
    for line in process.stdout:
        stages[line.strip()] = clock.now() - began
        if line.strip() == last:
            return stages
    raise StartError("the empty Serve application did not start")


def _start_served(args: argparse.Namespace, clock: Clock) -> Start:
    began = clock.now()
    command = (sys.executable, "-m", "tandem.cli", "serve", "--port", "0")
    pools = ("--prefill", str(args.prefill), "--decode", str(args.decode))
    process = subprocess.Popen((*command, *pools), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        ready_info, stages = _read_until_ready(process)
        _request_first_token(*ready_info)
        answered = clock.now() - began
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=END_S)
    return Start(answered, stages)


def _read_until_ready(process: subprocess.Popen[str]) -> tuple[tuple[str, str], dict[str, float]]:
    """Return the model's name, the address, and the times of the stages, which count from just after the process
    started."""
    assert process.stdout is not None
    stages: dict[str, float] = {}
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if found := STAGE.match(line):
            stages[found[2]] = float(found[1])
        if found := LISTENS.search(line):
            return (found[1], found[2]), stages
    raise StartError(f"tandem serve did not start:\n{''.join(lines)[-2000:]}")


def _request_first_token(model: str, url: str) -> None:
    body = {"model": model, "temperature": 0, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=END_S) as response:
        answer = json.loads(response.read())
    if answer["usage"]["completion_tokens"] != 1:
        raise StartError(f"the first answer is not one token: {answer}")


def _table(served: list[Start], empty: list[Start], beyond: list[float]) -> str:
    names = list(dict.fromkeys(name for start in (*empty, *served) for name in start.stages))
    lines = [f"| start | {' | '.join(names)} | answer |", "|---" * (len(names) + 2) + "|"]
    for kind, starts in (("empty Ray + Serve", empty), ("tandem serve", served)):
        cells = [_cell([start.stages[name] for start in starts if name in start.stages]) for name in names]
        lines.append(f"| {kind} | {' | '.join(cells)} | {_cell([start.answer_s for start in starts])} |")
    lines.append(f"\nbeyond: median {statistics.median(beyond):.1f} s of {[round(b, 1) for b in beyond]}")
    return "\n".join(lines)


def _cell(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f} s" if seconds else ""


if __name__ == "__main__":
    sys.exit(main())
