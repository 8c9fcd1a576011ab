"""Define a scaling decision and its reasons, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.scaling.cluster_state import Role


class ReplicaTarget(NamedTuple):
    """Number of workers that each role should have; workers that start count, workers that drain do not."""

    prefill: int
    decode: int


class RoleChange(NamedTuple):
    """Change the role of `number` workers from `source` to `to`, instead of stopping and starting workers."""

    source: Role
    to: Role
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandForecast:
    """Demand that is expected when a worker that is started now begins to serve.

    - `request_rate`, `input_rate`, `output_rate`: requests, prompt tokens that no cache holds, and output tokens per
      second.
    - `cached_share`: fraction of prompt tokens found in caches; `mean_context`: tokens that a decode attends to.
    - `prefill_load`: mean number of workers busy with prompts; `num_decoding`: mean number of sequences that decode at
      a time.
    - `prefill_correction`, `decode_correction`: factors on the demand of each role, learned from late requests
      (`model_correction`); 1: no correction.
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
    """How many workers there should be, and why.

    - `target`: workers of each role after the decision, with the role changes in `changes` already made.
    - `needed`: workers for the forecast demand alone, before the bounds of the settings and before stabilization.
    - `forecast`: None where none was possible.
    - `reasons`: sentences for people.
    - `held_back`: why the decision leaves the workers as they are whatever the demand is; empty otherwise.
    """

    target: ReplicaTarget
    changes: tuple[RoleChange, ...] = ()
    needed: ReplicaTarget
    forecast: DemandForecast | None
    reasons: tuple[str, ...]
    held_back: str = ""

    @property
    def is_held_back(self) -> bool:
        """Return whether `held_back` is set: the decision leaves the workers as they are, whatever the demand is."""
        return bool(self.held_back)
