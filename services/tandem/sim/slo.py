"""What clients were promised: targets of latency and what meeting them means; never measures."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError
from tandem.sim.trace import Trace

TOLERATED = 0.05
"""The share of a request's gaps that may exceed the target and the request still counts as good."""
_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in seconds; None is no target.

    A request is good when its first token comes inside `ttft_s` and 95 % of its gaps are inside `itl_s`; a failed one
    never is. A set-up *holds* the targets at percentile p when in every class at most (100 - p) % of the requests
    failed or got their first token late, and at most as many of all gaps are late: the percentiles lie inside.
    """

    ttft_s: float | None = None
    itl_s: float | None = None

    def __str__(self) -> str:
        told = [f"{name} {_told(s)}" for name, s in (("TTFT", self.ttft_s), ("ITL", self.itl_s)) if s is not None]
        return ", ".join(told) or "no targets"

    def is_late(self, trace: Trace) -> bool:
        """It failed or its first token came after the target."""
        return not trace.is_complete or (self.ttft_s is not None and trace.ttft_s > self.ttft_s)

    def num_late(self, gaps_s: list[float]) -> int:
        """How many gaps exceed the target."""
        limit = self.itl_s
        return 0 if limit is None else sum(gap > limit for gap in gaps_s)


def parse_slo(text: str) -> Slo:
    """Of `ttft=500ms,itl=40ms`; either may be left out. Raises TandemError(INVALID_REQUEST)."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name not in ("ttft", "itl") or name in found:
            raise _refuse(f"--slo {text}: {part!r} is neither ttft=TIME nor itl=TIME, each once")
        found[name] = parse_time(value, f"--slo {text}")
    return Slo(found.get("ttft"), found.get("itl"))


def parse_time(text: str, where: str) -> float:
    """Seconds of `500ms` or `1.5s`. Raises TandemError(INVALID_REQUEST) that begins with `where`."""
    unit = "ms" if text.endswith("ms") else "s"
    try:
        seconds = float(text.removesuffix(unit)) * _UNITS[unit] if text.endswith(unit) else -1.0
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise _refuse(f"{where}: {text!r} is no time: write 500ms or 1.5s")
    return seconds


def _told(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{1e3 * seconds:g} ms"


def _refuse(message: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, message, param="slo")
