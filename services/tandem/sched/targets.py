"""What latency each lane was promised, frozen; never measures one.

A lane is a priority. Those up to 0 are interactive, those above it are batch; lower runs first in either.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTargets:
    """Seconds to the first token and between two tokens; 0 promises nothing."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    batch_ttft_s: float = 0.0
    batch_itl_s: float = 0.0

    def ttft(self, priority: int) -> float:
        """Of the lane; 0: none."""
        return self.ttft_s if priority <= 0 else self.batch_ttft_s

    def itl(self, priority: int) -> float:
        """Of the lane; 0: none."""
        return self.itl_s if priority <= 0 else self.batch_itl_s


NO_TARGETS = LatencyTargets()
