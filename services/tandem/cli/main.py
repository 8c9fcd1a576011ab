"""Parse the command line, merge the layers of settings, and import and run the chosen subcommand."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from tandem.cli import simulate_flags
from tandem.core.config import Pool
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import DEFAULT_LAYER, Resolved, Setting, flags_of, from_environment, resolve, settings
from tandem.stores.settings_file import read_settings


class _Subcommand(NamedTuple):
    """Definition of a subcommand.

    `target`: `module:function`, called with the resolved settings and the parsed arguments. `extra`: extras of the
    package that it needs. `sections`: sections of settings that have flags, None for all. `defaults`: values that
    replace the settings' own defaults. `add_flags`: adds further flags.
    """

    doc: str
    target: str
    extra: str
    sections: tuple[str, ...] | None = None
    defaults: Mapping[str, str] = MappingProxyType({})
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda _: None


def _add_chat_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", help="where the gateway listens (default: --host and --port)")
    command.add_argument("--max-tokens", type=int, default=512, help="longest answer (default: 512)")


def add_doctor_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    command.add_argument("--strict", action="store_true", help="exit with 1 for warnings too")
    command.add_argument("--url", default="", help="URL of a running gateway to check as well")
    command.add_argument("--only", metavar="CHECK,...", default="", help="run only these checks")
    pairs = command.add_mutually_exclusive_group()
    pairs.add_argument("--pairs", action="store_true", help="measure the links of a few pairs of workers")
    pairs.add_argument("--all-pairs", action="store_true", help="measure every pair of workers in both directions")


def _add_role_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("worker", nargs="?", help="id of the worker; without one all workers are listed")
    command.add_argument("role", nargs="?", choices=get_args(Pool), help="role by which routers use it from now on")


def _add_drain_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("worker", nargs="?", help="id of the worker")
    command.add_argument("--local", action="store_true", help="drain every worker on this machine, found in --run-dir")
    command.add_argument(
        "--timeout", type=float, metavar="S", help="seconds to wait for its jobs (default: --worker-drain-s)"
    )


def _add_planner_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--once", action="store_true", help="make one decision, print its reasons, and exit")
    command.add_argument("--json", action="store_true", help="write each decision as a line of JSON")


# Targets are imported on use: the gateway must start without torch, and `tandem config` without optional packages.
_PROGRAMS = {
    "serve": _Subcommand(
        "start workers and a gateway on this machine",
        "tandem.cli.serve:run",
        "gateway,worker",
        defaults=MappingProxyType({"gateway.auth": "off"}),
    ),
    "gateway": _Subcommand("run one gateway; workers are found in Redis", "tandem.cli.programs:run_gateway", "gateway"),
    "worker": _Subcommand("run one worker", "tandem.cli.programs:run_worker", "worker"),
    "chat": _Subcommand("talk to a running gateway", "tandem.cli.chat:run", "gateway", add_flags=_add_chat_flags),
    "simulate": _Subcommand(
        "simulate a workload on a cluster",
        "tandem.cli.simulate:run",
        "sim",
        (*simulate_flags.SECTIONS, "planner"),
        simulate_flags.DEFAULTS,
        simulate_flags.add_simulate_flags,
    ),
    "plan": _Subcommand(
        "find the cheapest cluster that meets an SLO",
        "tandem.cli.plan:run",
        "sim",
        simulate_flags.SECTIONS,
        simulate_flags.DEFAULTS,
        simulate_flags.add_plan_flags,
    ),
    "fit-cost": _Subcommand(
        "make a profile for simulate and plan from the step logs of real workers",
        "tandem.cli.fit_cost:run",
        "",
        (),
        add_flags=simulate_flags.add_fit_flags,
    ),
    "role": _Subcommand(
        "list the workers, or set the role of one",
        "tandem.cli.role:run",
        "gateway",
        ("redis", "cluster"),
        add_flags=_add_role_flags,
    ),
    "drain": _Subcommand(
        "stop a worker from accepting jobs, and wait for the jobs it has",
        "tandem.cli.drain:run",
        "gateway",
        ("redis", "cluster", "worker"),
        add_flags=_add_drain_flags,
    ),
    "planner": _Subcommand(
        "autoscale the workers to meet the latency targets",
        "tandem.cli.programs:run_planner",
        "gateway,kubernetes",
        ("planner", "slo", "redis", "cluster", "telemetry"),
        add_flags=_add_planner_flags,
    ),
    "doctor": _Subcommand(
        "check this machine and a cluster, and print remedies",
        "tandem.cli.doctor:run",
        "gateway",
        add_flags=add_doctor_flags,
    ),
    "key": _Subcommand("generate an API key, and its hash for the tenants file", "tandem.cli.key:run", "", ()),
    "config": _Subcommand("print the resolved settings and their origins", "tandem.cli.config:run", ""),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `tandem` command and return its exit code.

    `argv`: arguments, by default those of the process. The code is 2 for settings that are refused before anything is
    started, 1 for another TandemError, 130 after Ctrl-C, and otherwise the subcommand's."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        resolved = resolve(_layers(args))
        return _run(args.command, resolved, args)
    except TandemError as error:
        print(f"tandem {args.command}: {error.message}", file=sys.stderr)  # noqa: T201 - the command's own words
        return 2 if error.kind is ErrorKind.INVALID_REQUEST else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


class _Command(argparse.ArgumentParser):
    """Parser of a subcommand, which adds its flags only when it is chosen: those of all subcommands are thousands."""

    program: _Subcommand

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        _add_flags(self, self.program)
        return super().parse_known_args(args, namespace)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tandem", description="LLM serving with disaggregated prefill and decode.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Command)
    for name, program in _PROGRAMS.items():
        commands.add_parser(name, help=program.doc, description=program.doc).program = program
    return parser


def _add_flags(command: argparse.ArgumentParser, program: _Subcommand) -> None:
    command.add_argument("--config", metavar="FILE", help="YAML file with settings; flags and environment win")
    program.add_flags(command)
    flags = flags_of()
    for setting in settings():
        if program.sections is None or setting.section in program.sections:
            default = program.defaults.get(setting.key, setting.default)
            _add_flag(command, setting, default, flags[setting.key])


def _add_flag(command: argparse.ArgumentParser, setting: Setting, default: object, names: tuple[str, ...]) -> None:
    """Add the flag of a setting. Its value stays text, which `resolve` parses and checks like that of every layer."""
    text = f"{setting.doc} (default: {default})".replace("%", "%%")
    if setting.type is bool:
        command.add_argument(*names, dest=setting.key, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    command.add_argument(*names, dest=setting.key, default=None, metavar="VALUE", help=text)


def _layers(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    layers: list[tuple[str, dict[str, Any]]] = [(DEFAULT_LAYER, dict(_PROGRAMS[args.command].defaults))]
    if args.config:
        layers.append((args.config, read_settings(Path(args.config))))
    layers.append(("environment", from_environment(os.environ)))
    given = {key: value for key, value in vars(args).items() if "." in key and value is not None}
    layers.append(("command line", given))
    return layers


def _run(command: str, resolved: Resolved, args: argparse.Namespace) -> int:
    module, _, name = _PROGRAMS[command].target.partition(":")
    try:
        program: Callable[[Resolved, argparse.Namespace], int] = getattr(import_module(module), name)
        return program(resolved, args)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tandem"):
            raise
        message = f"{error.name} is not installed: pip install 'tandem[{_PROGRAMS[command].extra}]'"
        raise TandemError(ErrorKind.UNSUPPORTED, message) from error
