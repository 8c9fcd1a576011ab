"""Define the report of one decision and its outcome, for logs, traces, metrics and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tandem.planner.actuator import Outcome
from tandem.scaling.cluster_state import ClusterState
from tandem.scaling.decision import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Describe one decision of the planner and what was done with it, for logs, traces, metrics and JSON.

    - `at`: time of the decision, in seconds since the epoch. `seconds`: duration of observing, deciding and applying.
      `model`: name of the model that is scaled.
    - `outcome`: "carried_out"; "explained" (nothing is applied in mode explain); "held_back" (workers stay as they are
      whatever the demand is); "standby" (another planner leads); or "failed". `leads`: whether this planner's decisions
      are applied.
    - `observed`: state of the cluster on which the decision is based. `decision` and `observed` are None if too little
      could be observed; `notes` then begin with the reason.
    - `replicas`: number of requested workers, by the role of their pool; in mode explain, of workers that would have
      been requested. `workers`: role of each registered worker of the model, by worker id.
    - `notes`: sentences on what was done and on missing data. `num_gateways`: number of gateways that have published a
      record."""

    at: float
    model: str
    outcome: Outcome
    leads: bool
    num_gateways: int = 0
    observed: ClusterState | None = None
    decision: Decision | None = None
    replicas: Mapping[str, int] = field(default_factory=dict)
    workers: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return the decision's reasons followed by the notes on what was done, as sentences for people."""
        return (*(self.decision.reasons if self.decision is not None else ()), *self.notes)

    @property
    def summary(self) -> tuple[object, ...]:
        """Return what identifies the decision and its outcome, without times, for comparison with the previous report.

        A report whose summary equals that of the previous one is logged at level DEBUG only."""
        decision = self.decision
        decided = () if decision is None else (decision.target, decision.held_back, decision.changes)
        return (self.outcome, self.leads, *decided, self.notes)

    @property
    def headline(self) -> str:
        if self.decision is None:
            return f"the planner decided nothing ({self.outcome})"
        target = ", ".join(f"{number} {role}" for role, number in self.decision.target._asdict().items())
        return f"the planner decided on {target} ({self.outcome})"

    def as_json(self) -> dict[str, Any]:
        decision, observed = self.decision, self.observed
        report: dict[str, Any] = {
            "at": round(self.at, 3),
            "model": self.model,
            "outcome": self.outcome,
            "leads": self.leads,
            "reasons": list(self.sentences),
            "replicas": dict(self.replicas),
            "workers": dict(self.workers),
            "num_gateways": self.num_gateways,
            "seconds": round(self.seconds, 6),
        }
        if decision is not None:
            report |= {
                "target": decision.target._asdict(),
                "needed": decision.needed._asdict(),
                "changes": [change._asdict() for change in decision.changes],
                "held_back": decision.held_back,
                "forecast": None if decision.forecast is None else asdict(decision.forecast),
            }
        if observed is not None:
            report["observed"] = asdict(observed)
        return report

    def attributes(self) -> dict[str, str | int | float | bool | tuple[str, ...]]:
        """Return the attributes of the trace span of this decision, by name."""
        found: dict[str, str | int | float | bool | tuple[str, ...]] = {
            "tandem.plan.model": self.model,
            "tandem.plan.outcome": self.outcome,
            "tandem.plan.leads": self.leads,
            "tandem.plan.reasons": self.sentences,
            "tandem.plan.num_gateways": self.num_gateways,
            "tandem.plan.num_workers": len(self.workers),
        }
        if self.decision is not None:
            found["tandem.plan.held_back"] = self.decision.held_back
            for name, target in (("target", self.decision.target), ("needed", self.decision.needed)):
                found |= {f"tandem.plan.{name}.{role}": number for role, number in target._asdict().items()}
        return found | {f"tandem.plan.replicas.{role}": number for role, number in self.replicas.items()}
