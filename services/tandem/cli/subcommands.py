"""Define the subcommands of `tandem`: help text, flags, and the function that runs each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, get_args

from tandem.cli import simulate_flags
from tandem.core.config import Pool


class Subcommand(NamedTuple):
    """Definition of a subcommand.

    `summary`: its line in `tandem --help`. `target`: `module:function`, called with the resolved settings and the
    parsed arguments. `extra`: extras of the package that it needs. `details`: the rest of its `--help`, with an example
    and the exit status where it matters. `arguments`: its positional arguments, as in the usage line. `sections`:
    sections of the settings for which it has flags; None: all. `defaults`: values that replace the settings' own
    defaults. `add_flags`: function that adds further flags to its parser."""

    summary: str
    target: str
    extra: str
    details: str
    arguments: str = ""
    sections: tuple[str, ...] | None = None
    defaults: Mapping[str, str] = MappingProxyType({})
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda _: None


def _add_ca_flag(command: argparse.ArgumentParser) -> None:
    text = "PEM file with the CA that signed the certificate of an https:// gateway (default: the system's CAs)"
    command.add_argument("--ca-file", metavar="FILE", help=text)


def _temperature(text: str) -> float:
    """Return the temperature that `text` gives. Raises ArgumentTypeError, or ValueError for no number."""
    value = float(text)
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError("must lie between 0 and 2")
    return value


def _add_chat_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", help="URL of the gateway (default: that of --host and --port)")
    _add_ca_flag(command)
    command.add_argument("--cert-file", metavar="FILE", help="PEM file with a client certificate, for mutual TLS")
    command.add_argument("--key-file", metavar="FILE", help="PEM file with its private key, if --cert-file has none")
    command.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="most tokens of one answer (default: 512)"
    )
    command.add_argument(
        "--temperature",
        type=_temperature,
        metavar="T",
        help="randomness of the answers; 0 always takes the likeliest token (default: the model's own)",
    )


def add_doctor_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    command.add_argument("--strict", action="store_true", help="exit with 1 for warnings too")
    command.add_argument("--url", default="", help="URL of a running gateway to check as well")
    _add_ca_flag(command)
    command.add_argument("--only", metavar="CHECK,...", default="", help="run only the checks that report these names")
    pairs = command.add_mutually_exclusive_group()
    pairs.add_argument("--pairs", action="store_true", help="measure the links of a few pairs of workers")
    pairs.add_argument("--all-pairs", action="store_true", help="measure every pair of workers in both directions")


def _add_role_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("worker", nargs="?", help="id of the worker; without one all workers are listed")
    command.add_argument("role", nargs="?", choices=get_args(Pool), help="role in which gateways use it from now on")


def _add_drain_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("worker", nargs="?", help="id of the worker, as `tandem role` lists it")
    command.add_argument("--local", action="store_true", help="drain every worker on this machine, found in --run-dir")
    command.add_argument(
        "--timeout", type=float, metavar="S", help="seconds to wait for its jobs (default: --worker-drain-s)"
    )
    command.add_argument("--undo", action="store_true", help="end the drain of the worker: it accepts jobs again")


def _add_planner_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--once", action="store_true", help="make one decision, print its reasons, and exit")
    command.add_argument("--json", action="store_true", help="write each decision as a line of JSON")


# Targets are imported on use: the gateway must start without torch, and `tandem config` without optional packages.
SUBCOMMANDS = {
    "serve": Subcommand(
        "start workers and a gateway on this machine",
        "tandem.cli.serve:run",
        "gateway,worker",
        """Starts Redis, the workers and a gateway, downloads the model at the first start, and prints the URL when it \
can serve. Ctrl-C or SIGTERM drains and stops everything.

Example, Llama on two GPUs:
  tandem serve --model meta-llama/Llama-3.1-8B-Instruct --device cuda --prefill 1 --decode 1 --port 8000

Exit status: 0 after a stop, 1 if a part fails, 2 if a flag or setting is refused.""",
        defaults=MappingProxyType({"gateway.auth": "off"}),
    ),
    "gateway": Subcommand(
        "run one gateway; it finds workers in Redis",
        "tandem.cli.programs:run_gateway",
        "gateway",
        """Serves the HTTP and gRPC APIs and sends requests to the workers that are registered in Redis. It runs until \
Ctrl-C or SIGTERM, then drains for gateway.drain_s seconds.

Example:
  tandem gateway --redis-url redis://redis:6379 --secret-file secret --auth keys --tenants tenants.yaml

Exit status: 0 after a stop, 1 if it fails, 2 if a flag or setting is refused.""",
    ),
    "worker": Subcommand(
        "run one worker",
        "tandem.cli.programs:run_worker",
        "worker",
        """Loads the model, registers in Redis and computes what gateways send. It runs until Ctrl-C or SIGTERM, then \
drains for worker.drain_s seconds.

Example:
  tandem worker --model meta-llama/Llama-3.1-8B-Instruct --device cuda --pool prefill \\
    --redis-url redis://redis:6379 --secret-file secret --worker-host 0.0.0.0

Exit status: 0 after a stop, 1 if it fails, 2 if a flag or setting is refused.""",
    ),
    "chat": Subcommand(
        "chat with a running gateway in the terminal",
        "tandem.cli.chat:run",
        "gateway",
        """Sends what you type to the first model of the gateway and prints the answer while it arrives. The API key \
is read from the variable TANDEM_API_KEY.

Example:
  tandem chat --url http://127.0.0.1:8000 --temperature 0

Exit status: 0 at the end of the input, 1 if no gateway answers or it refuses the key.""",
        sections=("gateway",),
        add_flags=_add_chat_flags,
    ),
    "simulate": Subcommand(
        "simulate a workload on a cluster",
        "tandem.cli.simulate:run",
        "sim",
        """Runs Tandem's scheduler and router in virtual time and reports TTFT, ITL, goodput and cost. It needs no GPU \
and no model.

Example:
  tandem simulate --workload rag --rate 8 --count 500 --pools prefill=3,decode=1 --slo ttft=2s,itl=40ms

Exit status: 0 also if requests miss the targets; 2 if a flag or setting is refused.""",
        sections=(*simulate_flags.SECTIONS, "planner"),
        defaults=simulate_flags.DEFAULTS,
        add_flags=simulate_flags.add_simulate_flags,
    ),
    "plan": Subcommand(
        "find the cheapest cluster that meets latency targets",
        "tandem.cli.plan:run",
        "sim",
        """Simulates clusters of different sizes, prints the cheapest one that meets the targets of --slo, and says \
whether separate prefill and decode workers pay.

Example:
  tandem plan --workload rag --rate 8 --count 500 --tp 1 --slo ttft=2s,itl=40ms

Exit status: 0 if a cluster meets the targets, 1 if none does, 2 if a flag or setting is refused.""",
        sections=simulate_flags.SECTIONS,
        defaults=simulate_flags.DEFAULTS,
        add_flags=simulate_flags.add_plan_flags,
    ),
    "fit-cost": Subcommand(
        "fit a profile for simulate and plan from the step logs of workers",
        "tandem.cli.fit_cost:run",
        "",
        """Reads the step logs that workers write to worker.step_log, fits a model of the step time, and writes it as \
the file for --profile of `tandem simulate` and `tandem plan`.

Example:
  tandem serve --step-log steps       (and send it typical requests)
  tandem fit-cost steps --output profile.json

Exit status: 0 if the profile was written, 2 if the logs cannot be used.""",
        arguments="LOG [LOG ...]",
        sections=(),
        add_flags=simulate_flags.add_fit_flags,
    ),
    "role": Subcommand(
        "list the workers, or set the role of one",
        "tandem.cli.role:run",
        "gateway",
        """Without arguments it lists the registered workers. With a worker and a role it changes the role in which \
gateways use the worker, within a second and without a restart.

Example:
  tandem role w1 prefill --redis-url redis://redis:6379 --secret-file secret

Exit status: 0 if it was done, 1 if Redis does not answer or there is no such worker, 2 if a flag is refused.""",
        arguments="[WORKER ROLE]",
        sections=("redis", "cluster"),
        add_flags=_add_role_flags,
    ),
    "drain": Subcommand(
        "stop a worker from accepting jobs, and wait for the jobs it has",
        "tandem.cli.drain:run",
        "gateway",
        """The worker accepts no new jobs from now on, until the drain is undone or the worker restarts. Its jobs \
finish or migrate to other workers.

Example:
  tandem drain w1 --timeout 30 --redis-url redis://redis:6379 --secret-file secret

Exit status: 0 if the worker has no jobs left, 1 if some are left after the timeout or it does not answer, 2 if a \
flag is refused.""",
        arguments="WORKER | --local",
        sections=("redis", "cluster", "worker"),
        add_flags=_add_drain_flags,
    ),
    "planner": Subcommand(
        "change the number of workers to meet the latency targets",
        "tandem.cli.programs:run_planner",
        "gateway,kubernetes",
        """Reads the demand from the gateways, predicts how many prefill and decode workers the targets of slo need, \
and logs its decisions. It changes the cluster only with --mode act.

Example, one decision with its reasons:
  tandem planner --once --ttft-ms 500 --itl-ms 40 --redis-url redis://redis:6379 --secret-file secret

Exit status: 0 after a stop, 1 if the decision of --once fails, 2 if a flag or setting is refused.""",
        sections=("planner", "slo", "redis", "cluster", "telemetry"),
        add_flags=_add_planner_flags,
    ),
    "doctor": Subcommand(
        "check this machine and a cluster, and print fixes",
        "tandem.cli.doctor:run",
        "gateway",
        """Checks what Tandem needs on this machine, the settings, and with --redis-url and --url a running cluster. \
It changes nothing.

Example:
  tandem doctor --redis-url redis://redis:6379 --secret-file secret --url http://127.0.0.1:8000

Exit status: 0 if no check fails, 1 if one fails (with --strict also for warnings), 2 if a flag or setting is \
refused.""",
        add_flags=add_doctor_flags,
    ),
    "key": Subcommand(
        "generate an API key, and its hash for the tenants file",
        "tandem.cli.key:run",
        "",
        """Prints the key, which clients send as `authorization: Bearer KEY`, and the hash, which belongs under `keys` \
of a tenant in the file of gateway.tenants. The key is stored nowhere.

Example:
  tandem key""",
        sections=(),
    ),
    "config": Subcommand(
        "print every setting with its value and origin",
        "tandem.cli.config:run",
        "",
        """Prints YAML that --config can read, each setting with its description and whether a flag, the environment, \
a file or the default set it.

Example:
  tandem config --max-num-seqs 128 > tandem.yaml

Exit status: 0 if all settings are valid, 2 if one is refused.""",
    ),
}
