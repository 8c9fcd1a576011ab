"""What a scaler holds and how carefully, as checked plain values; never reads a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.slo import Slo


def _require(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise TandemError(ErrorKind.INVALID_REQUEST, f"{name} {rule}", param=name)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Workers of one role: `min` at least, `max` at most, None: no limit. Raises TandemError(INVALID_REQUEST)."""

    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        _require(self.min >= 0, "min", f"must not be negative, got {self.min}")
        _require(self.max is None or self.max >= self.min, "max", f"must be at least {self.min}, got {self.max}")

    def clamped(self, number: int) -> int:
        number = max(self.min, number)
        return number if self.max is None else min(self.max, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPolicy:
    """`percentile` of requests and of gaps are to keep the targets of `slo`, with the share `headroom` of the capacity
    left free. A decision every `interval_s` looks at `window_s` of the past and `start_s` ahead, which a new worker
    takes until it serves; workers end when fewer were enough for `scale_down_s`. `change_roles`: a worker that one role
    can spare serves in the other one. Raises TandemError(INVALID_REQUEST) that names the field."""

    slo: Slo
    percentile: float = 99.0
    headroom: float = 0.15
    interval_s: float = 5.0
    window_s: float = 300.0
    start_s: float = 60.0
    scale_down_s: float = 300.0
    prefill: Bounds = Bounds()
    decode: Bounds = Bounds()
    change_roles: bool = True

    def __post_init__(self) -> None:
        for name in ("interval_s", "window_s", "start_s"):
            _require(getattr(self, name) > 0, name, "must be more than 0")
        _require(50 <= self.percentile < 100, "percentile", "must be at least 50 and less than 100")
        _require(0 <= self.headroom < 1, "headroom", "must be at least 0 and less than 1")
        _require(self.scale_down_s >= 0, "scale_down_s", "must not be negative")

    @property
    def tolerated(self) -> float:
        """The share that may miss a target."""
        return 1 - self.percentile / 100
