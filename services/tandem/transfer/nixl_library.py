"""Finds the NIXL library and opens one of its agents; never moves a byte."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

from tandem.core.errors import ErrorKind, TandemError

PACKAGES = ("nixl_cu13", "nixl_cu12")
"""Import names, the first that is installed wins. Both work without a GPU; the package `nixl` pulls in both."""

_ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "error",
    "UCX_LOG_FILE": "stderr",
}
"""Read once, when the library is loaded. NIXL's own errors reach us as exceptions, and a peer that dies is no news
to print; UCX prints to stdout unless told otherwise."""


@dataclass(frozen=True, slots=True)
class NixlAgent:
    """An open agent with UCX as its only backend, its name, and the exceptions that its calls raise.

    `disconnected` is the one exception that proves that UCX closed the connection by force and ended its reads.
    """

    name: str
    api: Any
    errors: tuple[type[Exception], ...]
    disconnected: type[Exception]


def open_agent(name: str) -> NixlAgent:
    """Takes about half a second. Raises TandemError when NIXL is missing or does not work here.

    Without a progress thread: one that is idle burns a whole core. The owner must poll instead.
    """
    _set_environment()
    package = _find_package()
    api = importlib.import_module(f"{package}._api")
    bindings = importlib.import_module(f"{package}._bindings")
    errors = tuple(
        error for key, error in sorted(vars(bindings).items()) if key.startswith("nixl") and key.endswith("Error")
    )
    try:
        config = api.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"])
        agent = api.nixl_agent(name, config)
    except (*errors, RuntimeError) as error:
        raise TandemError(ErrorKind.UNSUPPORTED, f"NIXL cannot start here: {error}") from error
    if "UCX" not in agent.backends:
        raise TandemError(ErrorKind.UNSUPPORTED, "NIXL has no UCX plugin here: is NIXL_PLUGIN_DIR set wrongly?")
    return NixlAgent(name, agent, (*errors, RuntimeError), bindings.nixlRemoteDisconnectError)


def _find_package() -> str:
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError:
            continue
        return package
    raise TandemError(
        ErrorKind.UNSUPPORTED,
        "NIXL is not installed: pip install nixl-cu12 (or nixl-cu13), or set handoff.transport to local",
        param="handoff.transport",
    )


def _set_environment() -> None:
    """Only what the user left unset. Where an agent may not even look for its configuration in the home directory
    it fails, so there it is given an empty one."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        os.stat(os.path.join(os.environ.get("HOME", ""), ".nixl.cfg"))
    except PermissionError:
        os.environ.setdefault("NIXL_CONFIG_FILE", os.devnull)
    except OSError:
        return
