"""Build the Serve application of one pool from the `args` of a `serveConfigV2` document.

Serve calls `build` on any machine, also one without GPU and model, so this module imports neither torch nor the model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import DEFAULT_LAYER
from tandem.routing.worker_view import POOLS
from tandem.stores.settings_file import read_settings
from tandem.worker.serve.deployment import pool_application
from tandem.worker.serve.pool_spec import Layer, PoolSpec

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")


def build(args: Mapping[str, Any]) -> Any:
    """Return the Serve application of one pool of workers, from the `args` that a `serveConfigV2` document gives it:

    - `pool` (required): name of the pool. It is also the workers' role if it is a role name and no setting names
      another.
    - `config`: path of a settings file.
    - `settings`: more settings, nested or flat, which override the file and the environment.
    - `num_gpus`: GPUs of each rank; by default 1 where the model is on cuda.
    - `resources`: Ray resources of each worker, by name.

    Raises TandemError(INVALID_REQUEST) that names the key when a key or its value is not valid.
    """
    for key in args:
        if key not in _READERS:
            raise _refuse(str(key), f": there is no such key; there are: {', '.join(_READERS)}")
    options = {key: read(args[key], key) for key, read in _READERS.items() if args.get(key) is not None}
    if "pool" not in options:
        raise _refuse("pool", " is required")
    pool = _pool(options)
    resolved = pool.resolve(os.environ)
    if resolved.origins["worker.pool"] == DEFAULT_LAYER:
        raise _refuse("pool", f" = {pool.name!r} is not a role: set worker.pool to one of {', '.join(POOLS)}")
    return pool_application(pool, resolved.config)


def _pool(options: Mapping[str, Any]) -> PoolSpec:
    name = options["pool"]
    below: list[Layer] = [("args.pool", {"worker.pool": name})] if name in POOLS else []
    if "config" in options:
        below.append((str(options["config"]), read_settings(options["config"])))
    return PoolSpec(
        name=name,
        below=tuple(below),
        above=(("args.settings", options.get("settings", {})),),
        num_gpus=options.get("num_gpus"),
        resources=options.get("resources", {}),
    )


def _name(value: Any, key: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise _refuse(key, f" = {value!r} must be lower case letters, digits and '-', at most 40")
    return value


def _path(value: Any, key: str) -> Path:
    if not isinstance(value, str) or not value:
        raise _refuse(key, f" = {value!r} must be the path of a file")
    return Path(value)


def _mapping(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _refuse(key, f" = {value!r} must be a mapping")
    return dict(value)


def _amount(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise _refuse(key, f" = {value!r} must be a number of 0 or more")
    return float(value)


def _amounts(value: Any, key: str) -> dict[str, float]:
    return {name: _amount(amount, f"{key}.{name}") for name, amount in _mapping(value, key).items()}


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "pool": _name,
    "config": _path,
    "settings": _mapping,
    "num_gpus": _amount,
    "resources": _amounts,
}


def _refuse(key: str, problem: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, f"args.{key}{problem}", param=f"args.{key}")
