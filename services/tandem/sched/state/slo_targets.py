"""Define the latency targets of each lane."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.config import SloConfig
from tandem.core.lane import Lane
from tandem.core.slo import Slo

_NO_TARGET = Slo()


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTargets:
    """Hold the latency targets of each lane (priority class)."""

    interactive: Slo = _NO_TARGET
    standard: Slo = _NO_TARGET
    batch: Slo = _NO_TARGET

    @classmethod
    def of(cls, slo: SloConfig) -> LatencyTargets:
        """Return the targets in the settings `slo`, where 0 milliseconds mean no target."""
        return cls(
            interactive=Slo.of_ms(slo.ttft_ms or None, slo.itl_ms or None),
            standard=Slo.of_ms(slo.standard_ttft_ms or None, slo.standard_itl_ms or None),
            batch=Slo.of_ms(slo.batch_ttft_ms or None, slo.batch_itl_ms or None),
        )

    def lane(self, lane: Lane) -> Slo:
        return (self.interactive, self.standard, self.batch)[lane]


NO_TARGETS = LatencyTargets()
