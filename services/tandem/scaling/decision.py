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
    """Change of the role of `number` workers from `source` to `to`, which saves stopping workers of one role and
    starting workers of the other."""

    source: Role
    to: Role
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandForecast:
    """Demand that is expected when a worker that is started now begins to serve.

    - `request_rate`, `input_rate`, `output_rate`: requests, prompt tokens that no cache holds, and output tokens per
      second.
    - `cached_share`: fraction of prompt tokens found in caches; `mean_context`: mean number of tokens that a sequence
      attends to in a decode step.
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
    """Hold the numbers of prefill and decode workers that there should be, and the reasons for them.

    - `target`: workers of each role after the decision, counted after the role changes in `changes`.
    - `needed`: workers of each role that the forecast demand alone requires, before the bounds of the settings and the
      delay of removals (`StabilizationWindow`) are applied.
    - `forecast`: the expected demand; None where too little was known to forecast it.
    - `reasons`: sentences that explain the decision to people.
    - `held_back`: why the decision keeps the current workers, within the bounds of the settings, whatever the demand
      is; empty where it follows the demand.
    """

    target: ReplicaTarget
    changes: tuple[RoleChange, ...] = ()
    needed: ReplicaTarget
    forecast: DemandForecast | None
    reasons: tuple[str, ...]
    held_back: str = ""
