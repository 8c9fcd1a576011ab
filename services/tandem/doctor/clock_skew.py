"""How far clocks are apart: this machine's, Redis', gateways' and workers'; never sets one.

Redis and workers tell their time, which is known as exactly as asking was quick. Gateways tell theirs only in the Date
of their HTTP answers, which has whole seconds. That is enough: a call to a worker is believed within 30 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.doctor.finding import Finding, fail, ok, skip, warn
from tandem.wire.call_auth import MAX_SKEW_S

WARN_S = 5.0
DATE_S = 1.0
"""What a Date header cuts off."""


@dataclass(frozen=True, slots=True)
class Skew:
    """`who` is `ahead_s` before this machine's clock, known to `within_s`."""

    who: str
    ahead_s: float
    within_s: float


def judge_skews(skews: Sequence[Skew]) -> tuple[Finding, ...]:
    """What is out of bounds, each; else one finding for all."""
    if not skews:
        return (skip("clock", "nobody was asked who has another clock (--redis-url, --url)"),)
    wrong = tuple(_wrong(skew) for skew in skews if _least(skew) > WARN_S)
    told = ", ".join(f"{skew.who} {_seconds(abs(skew.ahead_s) + skew.within_s)}" for skew in skews)
    return wrong or (ok("clock", f"apart from this machine's at most: {told}"),)


def _wrong(skew: Skew) -> Finding:
    fix = "set the clock of whichever is wrong by NTP (`timedatectl set-ntp true`, `chronyc tracking`)"
    if _least(skew) > MAX_SKEW_S:
        refused = f"{skew.who} {_told(skew)}: beyond {MAX_SKEW_S:g} s workers refuse calls (cluster.secret_file)"
        return fail("clock", refused, fix)
    return warn("clock", f"{skew.who} {_told(skew)}; at {MAX_SKEW_S:g} s workers refuse calls", fix)


def _least(skew: Skew) -> float:
    """What it is apart at least."""
    return max(0.0, abs(skew.ahead_s) - skew.within_s)


def _told(skew: Skew) -> str:
    return f"is {_seconds(abs(skew.ahead_s))} {'ahead' if skew.ahead_s > 0 else 'behind'}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds:.1f} s"
