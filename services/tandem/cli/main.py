"""Parse the command line, merge the layers of settings, and import and run the chosen subcommand."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from tandem.cli.subcommands import SUBCOMMANDS, Subcommand
from tandem.core.config import Bytes
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.near_name import near_name
from tandem.core.settings import (
    DEFAULT_LAYER,
    Resolved,
    Setting,
    flags_of,
    format_default,
    from_environment,
    resolve,
    section_docs,
    settings,
)
from tandem.stores.settings_file import read_settings

_METAVARS = {int: "N", float: "NUMBER", str: "TEXT", Bytes: "SIZE"}
_SETTINGS = """\
Settings: every setting below has three names. engine.block_size is the flag --block-size (also --engine-block-size), \
the variable TANDEM_ENGINE__BLOCK_SIZE, and block_size under engine in the file of --config. A flag wins over the \
environment, the environment over the file, the file over the default. `tandem config` prints what results."""
_OVERVIEW = """\
Examples:
  tandem serve --model smollm2-135m-instruct
  tandem chat --url http://127.0.0.1:8000
  tandem doctor

`tandem COMMAND --help` explains a command and its flags. Exit status: 0 for success, 1 for a failure, 2 for a refused \
flag or setting, 130 after Ctrl-C; some commands say more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `tandem` command and return its exit code.

    `argv`: arguments, by default those of the process. The code is 2 for settings that are refused before anything is
    started, 1 for another TandemError, 130 after Ctrl-C, 141 if the reader of the output ends first, as `head` may, and
    otherwise the subcommand's."""
    # gRPC's core reads this when it is imported. Below ERROR it writes lines in a format of its own, such as one for
    # each client whose TLS handshake fails.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        resolved = resolve(_layers(args))
        code = _run(args.command, resolved, args)
        if sys.stdout is not None:  # None if file descriptor 1 is closed, as by `>&-`
            sys.stdout.flush()
        return code
    except TandemError as error:
        print(f"tandem {args.command}: {error.message}", file=sys.stderr)  # noqa: T201 - the command's own words
        return 2 if error.kind is ErrorKind.INVALID_REQUEST else 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs but not indented lines, and lists a setting with its shortest flag only."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (line if line.startswith(" ") else textwrap.fill(line, width) for line in text.splitlines())
        return textwrap.indent("\n".join(lines), indent)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if "." not in action.dest:
            return super()._format_action_invocation(action)
        flag = action.option_strings[0]
        return f"--[no-]{flag.removeprefix('--')}" if action.nargs == 0 else f"{flag} {action.metavar}"


class _Command(argparse.ArgumentParser):
    """Parser of a subcommand, which adds its flags only when it is chosen: those of all subcommands are thousands."""

    program: Subcommand

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        _add_flags(self, self.program)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            nearest = near_name(flag, self._option_string_actions)
            hint = f"did you mean {nearest}?" if nearest else f"`{self.prog} --help` lists all flags"
            self.error(f"unknown argument {flag}; {hint}")
        return found, unknown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem",
        usage="tandem COMMAND [FLAG ...]",
        description="Serve large language models with prefill and decode on separate workers.",
        epilog=_OVERVIEW,
        formatter_class=_HelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Command)
    for name, program in SUBCOMMANDS.items():
        usage = " ".join(filter(None, ("tandem", name, program.arguments, "[FLAG ...]")))
        description = f"{program.summary[0].upper()}{program.summary[1:]}.\n\n{program.details}"
        commands.add_parser(
            name,
            help=program.summary,
            prog=f"tandem {name}",
            usage=usage,
            description=description,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,  # a misspelt flag must not set another one
        ).program = program
    return parser


def _add_flags(command: argparse.ArgumentParser, program: Subcommand) -> None:
    program.add_flags(command)
    chosen = [s for s in settings() if program.sections is None or s.section in program.sections]
    command.add_argument("--config", metavar="FILE", help="YAML file with settings; the environment and flags win")
    if chosen:
        command.description = f"{command.description}\n\n{_SETTINGS}"
    flags, docs = flags_of(), section_docs()
    for section, members in groupby(chosen, key=lambda setting: setting.section):
        group = command.add_argument_group(f"{section} (TANDEM_{section.upper()}__...)", docs[section])
        for setting in members:
            _add_flag(group, setting, program.defaults.get(setting.key, setting.default), flags[setting.key])


def _add_flag(group: argparse._ArgumentGroup, setting: Setting, default: object, names: tuple[str, ...]) -> None:
    """Add the flag of a setting. Its value stays text, which `resolve` parses and checks like that of every layer."""
    text = f"{setting.doc} (default: {format_default(default)})".replace("%", "%%")
    if setting.type is bool:
        group.add_argument(*names, dest=setting.key, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    metavar = f"{{{','.join(setting.choices)}}}" if setting.choices else _METAVARS[setting.type]
    group.add_argument(*names, dest=setting.key, default=None, metavar=metavar, help=text)


def _layers(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    layers: list[tuple[str, dict[str, Any]]] = [(DEFAULT_LAYER, dict(SUBCOMMANDS[args.command].defaults))]
    if args.config:
        layers.append((args.config, read_settings(Path(args.config))))
    layers.append(("environment", from_environment(os.environ)))
    given = {key: value for key, value in vars(args).items() if "." in key and value is not None}
    layers.append(("command line", given))
    return layers


def _run(command: str, resolved: Resolved, args: argparse.Namespace) -> int:
    module, _, name = SUBCOMMANDS[command].target.partition(":")
    try:
        program: Callable[[Resolved, argparse.Namespace], int] = getattr(import_module(module), name)
        return program(resolved, args)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tandem"):
            raise
        message = f"{error.name} is not installed: pip install 'tandem[{SUBCOMMANDS[command].extra}]'"
        raise TandemError(ErrorKind.UNSUPPORTED, message) from error
