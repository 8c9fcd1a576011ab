"""Define a scaling decision and its reasons, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.scaling.cluster_state import Role


class ReplicaTarget(NamedTuple):
    """Workers of each role that there should be, including starting and excluding draining ones."""

    prefill: int
    decode: int


class RoleChange(NamedTuple):
    """A change of `number` workers from role `source` to role `to`, instead of ending and starting workers."""

    source: Role
    to: Role
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandForecast:
    """The demand forecast for the time at which a worker that starts now serves.

    Rates are per second; input tokens exclude cached tokens. `prefill_load`: number of workers that would be computing
    prompts all the time; `num_decoding`: mean number of sequences that decode at once. The correction factors are the
    recent ratio of needed capacity to what the models predicted; 1: no correction.
    """

    request_rate: float
    input_rate: float
    output_rate: float
    cached_share: float
    mean_context: float
    prefill_load: float
    num_decoding: float
    prefill_correction: float = 1.0
    decode_correction: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A scaling decision. `target` is the desired state; it includes `changes`.

    `needed` is the forecast demand alone, before bounds and stabilization. `reasons` are sentences for people.
    `held_back` says why the workers are left as they are regardless of demand; empty when they are not. `forecast` is
    None where none was possible.
    """

    target: ReplicaTarget
    changes: tuple[RoleChange, ...] = ()
    needed: ReplicaTarget
    forecast: DemandForecast | None
    reasons: tuple[str, ...]
    held_back: str = ""

    @property
    def is_held_back(self) -> bool:
        return bool(self.held_back)
