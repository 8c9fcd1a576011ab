"""Define the latency targets of each lane."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.config import SloConfig
from tandem.core.lane import Lane
from tandem.core.slo import Slo


@dataclass(frozen=True, slots=True)
class LaneSlo:
    """Hold the latency targets of one lane (priority class), in seconds: `ttft_s` until the first token, `itl_s`
    between two tokens. 0 means no target."""

    ttft_s: float = 0.0
    itl_s: float = 0.0

    @property
    def slo(self) -> Slo:
        """Return the targets as an `Slo`, in which None instead of 0 means no target."""
        return Slo(self.ttft_s or None, self.itl_s or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTargets:
    """Hold the latency targets of each lane (priority class)."""

    interactive: LaneSlo = LaneSlo()
    standard: LaneSlo = LaneSlo()
    batch: LaneSlo = LaneSlo()

    @classmethod
    def of(cls, slo: SloConfig) -> LatencyTargets:
        """Return the targets in the settings `slo`, converted from milliseconds to seconds."""
        return cls(
            interactive=LaneSlo(slo.ttft_ms / 1e3, slo.itl_ms / 1e3),
            standard=LaneSlo(slo.standard_ttft_ms / 1e3, slo.standard_itl_ms / 1e3),
            batch=LaneSlo(slo.batch_ttft_ms / 1e3, slo.batch_itl_ms / 1e3),
        )

    def lane(self, lane: Lane) -> LaneSlo:
        return (self.interactive, self.standard, self.batch)[lane]


NO_TARGETS = LatencyTargets()
