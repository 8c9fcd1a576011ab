"""Build the Serve application of one pool from the `args` of a `serveConfigV2` document.

Serve calls `build` on any machine, also one without GPU and model, so this module imports neither torch nor the model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import DEFAULT_LAYER
from tandem.routing.worker_view import POOLS
from tandem.stores.settings_file import read_settings
from tandem.worker.serve.deployment import pool_application
from tandem.worker.serve.pool_spec import Layer, PoolSpec

_Amount = Annotated[float, Meta(ge=0, lt=1e15)]
_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "pool": (
        Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?\Z")],
        "lower case letters, digits and '-', at most 40",
    ),
    "config": (Annotated[str, Meta(min_length=1)], "the path of a file"),
    "settings": (dict[str, Any], "a mapping"),
    "num_gpus": (_Amount, "a number of 0 or more"),
    "resources": (dict[str, _Amount], "a mapping of names to numbers of 0 or more"),
}
"""For each key of `args`, the type of its value and the words by which an error describes a valid value."""


def build(args: Mapping[str, Any]) -> Any:
    """Return the Serve application of one pool of workers, from the `args` that a `serveConfigV2` document gives it:

    - `pool` (required): name of the pool. It is also the workers' role if it is a role name and no setting names
      another.
    - `config`: path of a settings file.
    - `settings`: more settings, nested or flat, which override the file and the environment.
    - `num_gpus`: GPUs of each rank; by default 1 where the model is on cuda.
    - `resources`: Ray resources of each worker, by name. A worker of several machines (engine.nnodes) takes them on
      each of these.

    Raises TandemError(INVALID_REQUEST) that names the key when a key or its value is not valid.
    """
    for key in args:
        if key not in _ARGUMENTS:
            raise _refuse(str(key), f": there is no such key; there are: {', '.join(_ARGUMENTS)}")
    options = {key: _convert(key, args[key]) for key in _ARGUMENTS if args.get(key) is not None}
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
        below.append((options["config"], read_settings(Path(options["config"]))))
    return PoolSpec(
        name=name,
        below=tuple(below),
        above=(("args.settings", options.get("settings", {})),),
        num_gpus=options.get("num_gpus"),
        resources=options.get("resources", {}),
    )


def _convert(key: str, value: Any) -> Any:
    argument_type, expected = _ARGUMENTS[key]
    try:
        return msgspec.convert(value, argument_type)
    except msgspec.ValidationError:
        raise _refuse(key, f" = {value!r} must be {expected}") from None


def _refuse(key: str, problem: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, f"args.{key}{problem}", param=f"args.{key}")
