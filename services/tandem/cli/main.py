"""Parses the command line, merges the layers of settings and hands over to one program; imports it only then."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tandem.cli import doctor_flags, member_flags, planner, simulate_flags
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import DEFAULT_LAYER, Resolved, Setting, flags_of, from_environment, resolve, settings
from tandem.stores.settings_file import read_settings


class _Subcommand(NamedTuple):
    """`target` is `module:function`, called with the resolved settings and the parsed arguments. It has flags for the
    settings of `sections`, None for all, and those that `add_flags` adds; `defaults` replace the settings' own."""

    doc: str
    target: str
    extra: str
    sections: tuple[str, ...] | None = None
    defaults: Mapping[str, str] = MappingProxyType({})
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda _: None


def _add_chat_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", help="where the gateway listens (default: --host and --port)")
    command.add_argument("--max-tokens", type=int, default=512, help="longest answer (default: 512)")


# Imported on use: the gateway must start without torch, and `tandem config` without anything.
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
        "run a workload on a cluster that one does not have",
        "tandem.cli.simulate:run",
        "sim",
        (*simulate_flags.SECTIONS, "planner"),
        simulate_flags.DEFAULTS,
        simulate_flags.add_simulate_flags,
    ),
    "plan": _Subcommand(
        "find the cheapest cluster that keeps a promise",
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
        "list the workers, or set what one is taken for",
        "tandem.cli.role:run",
        "gateway",
        ("redis", "cluster"),
        add_flags=member_flags.add_role_flags,
    ),
    "drain": _Subcommand(
        "have a worker take no new work, and wait for what it has",
        "tandem.cli.drain:run",
        "gateway",
        ("redis", "cluster", "worker"),
        add_flags=member_flags.add_drain_flags,
    ),
    "planner": _Subcommand(
        "hold the targets by changing how many workers there are",
        "tandem.cli.planner:run",
        "gateway,kubernetes",
        ("planner", "slo", "redis", "cluster", "telemetry"),
        add_flags=planner.add_flags,
    ),
    "doctor": _Subcommand(
        "look whether this machine, and a cluster, have what Tandem needs, and say what to do",
        "tandem.cli.doctor:run",
        "gateway",
        add_flags=doctor_flags.add_doctor_flags,
    ),
    "key": _Subcommand("draw an API key, and its hash for the tenants file", "tandem.cli.key:run", "", ()),
    "config": _Subcommand("print the resolved settings and where each came from", "tandem.cli.config:run", ""),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The `tandem` command. Returns the exit code: 2 for settings that are refused, before anything is started."""
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
    """Has its flags once it is the one that was chosen: of all commands they are thousands."""

    program: _Subcommand

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        _add_flags(self, self.program)
        return super().parse_known_args(args, namespace)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tandem", description="LLM serving with prefill and decode apart.")
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
    """Values stay text here; `resolve` reads and checks them like those of every other layer."""
    text = f"{setting.doc} (default: {default})".replace("%", "%%")
    if setting.type is bool:
        command.add_argument(*names, dest=setting.key, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    command.add_argument(*names, dest=setting.key, default=None, metavar="VALUE", help=text)


def _layers(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    layers: list[tuple[str, dict[str, Any]]] = [(DEFAULT_LAYER, dict(_PROGRAMS[args.command].defaults))]
    if args.config:
        layers.append((args.config, read_settings(Path(args.config))))
    layers.append(("environment", dict(from_environment(os.environ))))
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
