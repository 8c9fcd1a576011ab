"""Find the NIXL library and open an agent with one backend."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.core.errors import ErrorKind, TandemError

UCX = "UCX"
PACKAGES = ("nixl_cu13", "nixl_cu12")
"""Import names of the NIXL builds; the first that is installed is used. Both work without a GPU.

Tandem does not require the package `nixl`, because it depends on both builds, which take gigabytes.
"""

_ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "error",
    "UCX_LOG_FILE": "stderr",
}
"""Environment that quiets the libraries, which read it once, when they are loaded.

NIXL's errors arrive as exceptions, so its log adds nothing, for example when a peer dies. UCX logs to stdout by
default.
"""
_CUDA_ENVIRONMENT = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on", "UCX_MEMTYPE_CACHE": "n"}
"""Environment for pools in GPU memory.

`GET_ZCOPY`: workers only read, and UCX reads over cuda_ipc between GPUs without NVLink only when this is on; otherwise
it would choose TCP. `MEMTYPE_CACHE`: the pool is allocated before UCX is loaded, and the cache takes memory that was
allocated earlier for host memory. Without the cache UCX asks the driver, once for each registration.
"""


@dataclass(frozen=True, slots=True)
class NixlAgent:
    """Hold an open NIXL agent, the object that registers memory and moves bytes, with one backend.

    `name`: name of the agent. `api`: the agent of the NIXL library, whose methods transports call. `errors`: the
    exceptions that calls of `api` raise. `disconnected`: the exceptions in `errors` that prove that the backend closed
    the connection by force and ended its reads; empty for backends other than UCX. `backend`: name of the backend.
    """

    name: str
    api: Any
    errors: tuple[type[Exception], ...]
    disconnected: tuple[type[Exception], ...]
    backend: str


def open_agent(name: str, backends: Sequence[str] = (UCX,), *, uses_cuda: bool = False) -> NixlAgent:
    """Open a NIXL agent called `name` with the first of `backends` that works here, which takes about half a second.
    `uses_cuda`: the agent will register GPU memory.

    The agent has no progress thread, because an idle one burns a whole core; the owner must poll instead. Raises
    TandemError when NIXL is missing or no backend works here, or when UCX_TLS excludes the transports of GPU memory.
    """
    _set_environment(_ENVIRONMENT | _CUDA_ENVIRONMENT if uses_cuda else _ENVIRONMENT)
    if uses_cuda and UCX in backends:
        _check_ucx_tls(os.environ.get("UCX_TLS", "all"))
    package = _find_package()
    api = importlib.import_module(f"{package}._api")
    bindings = importlib.import_module(f"{package}._bindings")
    errors = tuple(
        error for key, error in sorted(vars(bindings).items()) if key.startswith("nixl") and key.endswith("Error")
    )
    problems = []
    for backend in backends:
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=[backend])
            agent = api.nixl_agent(name, config)
        except (*errors, RuntimeError) as error:
            problems.append(f"{backend}: {error}")
            continue
        if backend in agent.backends:
            proofs = (bindings.nixlRemoteDisconnectError,) if backend == UCX else ()
            return NixlAgent(name, agent, (*errors, RuntimeError), proofs, backend)
        problems.append(f"{backend}: its plugin is missing; unset NIXL_PLUGIN_DIR, or correct it")
    raise TandemError(
        ErrorKind.UNSUPPORTED,
        f"NIXL cannot start with {'; '.join(problems)}; `tandem doctor --only ucx` checks UCX, and LIBFABRIC needs "
        "libfabric.so.1",
        param="transfer.nixl_backends",
    )


def _find_package() -> str:
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError:
            continue
        return package
    raise TandemError(
        ErrorKind.UNSUPPORTED,
        "NIXL is not installed: pip install nixl-cu12 (or nixl-cu13), or set transfer.backend to auto or tcp",
        param="transfer.backend",
    )


def _check_ucx_tls(ucx_tls: str) -> None:
    """Raise TandemError when `ucx_tls` excludes cuda_copy, without which UCX does not recognise GPU memory.

    `ucx_tls`: a comma-separated list of UCX transports, or `^` and a list of those left out.
    """
    names = set(ucx_tls.lstrip("^").split(","))
    if bool(names & {"cuda", "cuda_copy"}) is ucx_tls.startswith("^") and "all" not in names:
        raise TandemError(
            ErrorKind.UNSUPPORTED,
            f"UCX_TLS={ucx_tls} leaves out cuda_copy, without which no GPU memory moves: "
            "unset it, or name cuda_copy and cuda_ipc too",
            param="transfer.backend",
        )


def _set_environment(defaults: Mapping[str, str]) -> None:
    """Set the environment variables in `defaults` that the user left unset.

    An agent fails to start where this process may not look into the home directory for the agent's configuration file.
    In that case NIXL_CONFIG_FILE is set to an empty file.
    """
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    try:
        os.stat(os.path.join(os.environ.get("HOME", ""), ".nixl.cfg"))
    except PermissionError:
        os.environ.setdefault("NIXL_CONFIG_FILE", os.devnull)
    except OSError:
        return
