"""Finds the NIXL library and opens one of its agents; never moves a byte."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
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
_CUDA_ENVIRONMENT = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on", "UCX_MEMTYPE_CACHE": "n"}
"""For GPU memory. We only ever read, and UCX reads over cuda_ipc of GPUs without NVLink only when it is told to: its
choice would be TCP. The pool is older than UCX here, whose cache knows what was allocated since it was loaded and takes
all else for the host's: without it UCX asks the driver, once for each registration."""


@dataclass(frozen=True, slots=True)
class NixlAgent:
    """An open agent with UCX as its only backend, its name, and the exceptions that its calls raise.

    `disconnected` is the one exception that proves that UCX closed the connection by force and ended its reads.
    """

    name: str
    api: Any
    errors: tuple[type[Exception], ...]
    disconnected: type[Exception]


def open_agent(name: str, *, uses_cuda: bool = False) -> NixlAgent:
    """Takes about half a second. Raises TandemError when NIXL is missing or does not work here, or where UCX is told to
    use no way that moves the memory of GPUs.

    Without a progress thread: one that is idle burns a whole core. The owner must poll instead.
    """
    _set_environment(_ENVIRONMENT | _CUDA_ENVIRONMENT if uses_cuda else _ENVIRONMENT)
    if uses_cuda:
        _check_ways(os.environ.get("UCX_TLS", "all"))
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


def _check_ways(told: str) -> None:
    """Without cuda_copy UCX does not know GPU memory for what it is. `told` is a list, or `^` and what is left out."""
    names = set(told.lstrip("^").split(","))
    if bool(names & {"cuda", "cuda_copy"}) is told.startswith("^") and "all" not in names:
        raise TandemError(
            ErrorKind.UNSUPPORTED,
            f"UCX_TLS={told} leaves out cuda_copy, without which no GPU memory moves: "
            "unset it, or name cuda_copy and cuda_ipc too",
            param="handoff.transport",
        )


def _set_environment(wanted: Mapping[str, str]) -> None:
    """Only what the user left unset. Where an agent may not even look for its configuration in the home directory
    it fails, so there it is given an empty one."""
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    try:
        os.stat(os.path.join(os.environ.get("HOME", ""), ".nixl.cfg"))
    except PermissionError:
        os.environ.setdefault("NIXL_CONFIG_FILE", os.devnull)
    except OSError:
        return
