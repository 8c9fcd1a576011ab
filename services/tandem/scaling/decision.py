"""What was decided and why, as frozen values; never carries anything out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.scaling.cluster_state import Role


class ReplicaTarget(NamedTuple):
    """How many workers of each role there should be, those that start included, those that drain not."""

    prefill: int
    decode: int


class RoleChange(NamedTuple):
    """So many workers of the role `source` go on in the role `to`, rather than end while others start."""

    source: Role
    to: Role
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandForecast:
    """What is expected by the time at which a worker that starts now serves. Rates are per second; input tokens are
    those to compute, without what caches have. `prefill_load`: so many workers would compute prompts all the time;
    `num_decoding`: sequences that decode at once, in the middle. The correction factors say how much more was needed
    lately than these models say; 1: nothing."""

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
    """`target` is what should run from now on; it contains `changes`. `needed` is what the forecast asks for by itself,
    before bounds and before what is held for a while. `reasons` are plain sentences. `held_back`: why the fleet is left
    as it is whatever is needed, empty when it is not. `forecast` is None where nothing could be forecast."""

    target: ReplicaTarget
    changes: tuple[RoleChange, ...] = ()
    needed: ReplicaTarget
    forecast: DemandForecast | None
    reasons: tuple[str, ...]
    held_back: str = ""

    @property
    def is_held_back(self) -> bool:
        return bool(self.held_back)
