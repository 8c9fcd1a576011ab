"""Define latency targets and whether a request meets them, for simulated and measured requests alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError

TOLERATED = 0.05
"""The fraction of a request's gaps that may exceed the target while the request still counts as good."""
_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets in seconds; None is no target. A gap is the time between two consecutive output tokens.

    A request is good when its first token arrives within `ttft_s` and 95 % of its gaps are within `itl_s`; a failed
    request is not good. A deployment *holds* the targets at percentile p when, in every class of requests, at most (100
    - p) % of the requests failed or got their first token late, and at most (100 - p) % of all gaps are late.
    """

    ttft_s: float | None = None
    itl_s: float | None = None

    def __str__(self) -> str:
        targets = [
            f"{name} {_format_time(s)}" for name, s in (("TTFT", self.ttft_s), ("ITL", self.itl_s)) if s is not None
        ]
        return ", ".join(targets) or "no targets"

    @classmethod
    def of_ms(cls, ttft_ms: float | None, itl_ms: float | None) -> Slo:
        """Return targets that are given in milliseconds; None stays None."""
        return cls(*(None if target is None else target / 1e3 for target in (ttft_ms, itl_ms)))

    def violates_ttft(self, ttft_s: float | None) -> bool:
        """Return whether the first token was later than the target; `ttft_s` of None means that the request failed,
        which counts as late."""
        return ttft_s is None or (self.ttft_s is not None and ttft_s > self.ttft_s)

    def num_late(self, gaps_s: Sequence[float]) -> int:
        """Return how many of the gaps between tokens, in seconds, exceed the target `itl_s`; 0 without a target."""
        limit = self.itl_s
        return 0 if limit is None else sum(gap > limit for gap in gaps_s)

    def is_met(self, ttft_s: float | None, num_late: int, num_gaps: int) -> bool:
        """Return whether a request is good: its first token in time and at most 5 % of its gaps late.

        `num_late` of its `num_gaps` gaps were late; `ttft_s` of None means that it failed.
        """
        return not self.violates_ttft(ttft_s) and num_late <= TOLERATED * num_gaps


def parse_slo(text: str) -> Slo:
    """Parse targets such as `ttft=500ms,itl=40ms`; either may be left out. Raises TandemError (INVALID_REQUEST) for
    other text."""
    targets_s: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name not in ("ttft", "itl") or name in targets_s:
            raise _refuse(
                f"--slo {text}: {part!r} must be ttft=TIME or itl=TIME, each at most once, as in ttft=500ms,itl=40ms"
            )
        targets_s[name] = parse_time(value, f"--slo {text}")
    return Slo(targets_s.get("ttft"), targets_s.get("itl"))


def parse_time(text: str, where: str) -> float:
    """Parse `500ms` or `1.5s` into seconds. Raises TandemError (INVALID_REQUEST), with a message that begins with
    `where`, for other text and for times that are not positive."""
    unit = "ms" if text.endswith("ms") else "s"
    try:
        seconds = float(text.removesuffix(unit)) * _UNITS[unit] if text.endswith(unit) else -1.0
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise _refuse(f"{where}: {text!r} is not a time: write 500ms or 1.5s")
    return seconds


def _format_time(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{1e3 * seconds:g} ms"


def _refuse(message: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, message, param="slo")
