"""Define what all workers of one pool have in common: settings, GPUs and Ray resources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.core.config import Config, value_of
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import Resolved, from_environment, resolve, settings

Layer = tuple[str, Mapping[str, Any]]
"""A layer of settings, as `tandem.core.settings.resolve` takes it: name of the source, and values by setting key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Hold the settings and resources that all workers of one pool share.

    `name`: name of the pool. `below`: layers of settings that the environment variables of a worker's process override.
    `above`: layers of settings that override the environment variables. Each worker reads the environment variables of
    its own pod, so that secrets in them are not copied to other machines. `num_gpus`: GPUs per rank; None means one
    where the model is on cuda. `resources`: Ray resources of each worker on each of its machines, by name.
    """

    name: str
    below: tuple[Layer, ...] = ()
    above: tuple[Layer, ...] = ()
    num_gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def deployment(self) -> str:
        return f"tandem-{self.name}"

    def resolve(self, environ: Mapping[str, str]) -> Resolved:
        """Return the settings of a worker process, resolved from the pool's layers and the environment variables
        `environ` of the process. Raises TandemError that names key and layer when a setting is not valid."""
        return resolve([*self.below, ("environment", from_environment(environ)), *self.above])

    def gpus_per_rank(self, config: Config) -> float:
        """Return the number of GPUs that Ray reserves for each rank of a worker with the settings `config`. Raises
        TandemError when `num_gpus` leaves a rank without a GPU that it needs, or gives it GPUs that it cannot use."""
        is_cuda = config.model.device == "cuda"
        given = float(is_cuda) if self.num_gpus is None else self.num_gpus
        if is_cuda and config.engine.tensor_parallel > 1 and given != 1:
            raise _refuse(f"{given:g} must be 1, the GPUs of each rank, while engine.tensor_parallel is more than 1")
        if is_cuda and not 0 < given <= 1:
            raise _refuse(f"{given:g} must be more than 0 and at most 1 while model.device is cuda")
        if not is_cuda and given:
            raise _refuse(f"{given:g} must be 0 while model.device is cpu")
        return given


def full_layer(config: Config, source: str) -> Layer:
    """Return a layer named `source` with every setting of `config`, so that layers below it have no effect."""
    return source, {setting.key: value_of(config, setting.key) for setting in settings()}


def _refuse(problem: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, f"num_gpus = {problem}", param="num_gpus")
