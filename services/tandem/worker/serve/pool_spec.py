"""What all workers of one pool are told alike: settings, GPUs, resources of Ray; never what one finds where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.core.config import Config, value_of
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import Resolved, from_environment, resolve, settings

Layer = tuple[str, Mapping[str, Any]]
"""Where settings come from, and they; as `tandem.core.settings.resolve` takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """`below` and `above` are layers of settings under and over the environment of the process that reads them, so that
    each worker knows what only its own pod is told and a secret in the environment stays there. `num_gpus`: of each
    rank, None for one where the model is on cuda. `resources`: of Ray, by name, of each worker."""

    name: str
    below: tuple[Layer, ...] = ()
    above: tuple[Layer, ...] = ()
    num_gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def deployment(self) -> str:
        return f"tandem-{self.name}"

    def resolve(self, environ: Mapping[str, str]) -> Resolved:
        """The settings of a process with this environment. Raises TandemError that names key and layer."""
        return resolve([*self.below, ("environment", from_environment(environ)), *self.above])

    def gpus_per_rank(self, config: Config) -> float:
        """Raises TandemError where ranks would have no GPU each, or one that they cannot use."""
        is_cuda = config.model.device == "cuda"
        given = float(is_cuda) if self.num_gpus is None else self.num_gpus
        if is_cuda and config.engine.tensor_parallel > 1 and given != 1:
            raise _refuse(f"{given:g}: with engine.tensor_parallel more than 1 each rank has 1 GPU")
        if is_cuda and not 0 < given <= 1:
            raise _refuse(f"{given:g}: on cuda a worker of one rank has more than 0 and at most 1 GPU")
        if not is_cuda and given:
            raise _refuse(f"{given:g}: model.device is cpu")
        return given


def told_all(config: Config, source: str) -> Layer:
    """A layer that leaves nothing to the others."""
    return source, {setting.key: value_of(config, setting.key) for setting in settings()}


def _refuse(told: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, f"num_gpus = {told}", param="num_gpus")
