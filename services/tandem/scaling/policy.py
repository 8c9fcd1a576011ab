"""Define the targets and limits of a scaler, as checked plain values."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.slo import Slo


def _require(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise TandemError(ErrorKind.INVALID_REQUEST, f"{name} {rule}", param=name)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Range of the number of workers of one role: `min` to `max`, None: no limit. Raises
    TandemError(INVALID_REQUEST)."""

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
    """Targets and limits of a scaler. Raises TandemError(INVALID_REQUEST) that names the field.

    `percentile` of requests and of gaps are to meet the targets of `slo`, with the fraction `headroom` of the capacity
    kept free. A decision every `interval_s` uses `window_s` of history and forecasts `start_s` ahead, the time until a
    new worker serves; workers end after fewer have been enough for `scale_down_s`. `change_roles`: spare workers of one
    role may change to the other.
    """

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
        """Return the fraction that may miss a target."""
        return 1 - self.percentile / 100
