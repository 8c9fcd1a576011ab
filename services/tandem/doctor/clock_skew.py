"""Compare the clocks of Redis, gateways and workers with that of this machine.

Redis and workers return their time, which is known up to half of the round trip. A gateway's clock is read from the
Date header of its HTTP responses, which has whole seconds. That is enough: workers accept calls that were signed up to
30 s ago.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.doctor.finding import Finding, ok, skip, wrong
from tandem.wire.call_auth import MAX_SKEW_S

WARN_S = 5.0
DATE_S = 1.0
"""Resolution of a Date header in seconds."""


@dataclass(frozen=True, slots=True)
class Skew:
    """Hold the measured difference between another program's clock and this machine's.

    `who`: name of the other program for reports. `ahead_s`: the other clock minus this machine's in seconds, known to
    plus or minus `within_s`.
    """

    who: str
    ahead_s: float
    within_s: float


def judge_skews(skews: Sequence[Skew]) -> tuple[Finding, ...]:
    """Return a finding for each clock that differs by more than `WARN_S` seconds from this machine's; if none does,
    return one finding for all clocks.

    A difference so large that workers would refuse calls is a failure, any other a warning. If `skews` is empty, the
    check is skipped.
    """
    if not skews:
        return (skip("clock", "there is no other clock to compare with (--redis-url, --url)"),)
    too_far = tuple(_too_far(skew) for skew in skews if _least(skew) > WARN_S)
    summary = ", ".join(f"{skew.who} {_seconds(abs(skew.ahead_s) + skew.within_s)}" for skew in skews)
    return too_far or (ok("clock", f"differences from this machine are at most: {summary}"),)


def _too_far(skew: Skew) -> Finding:
    fix = "synchronize the clock that is wrong by NTP (`timedatectl set-ntp true`, `chronyc tracking`)"
    differs = f"{_seconds(abs(skew.ahead_s))} {'ahead' if skew.ahead_s > 0 else 'behind'}"
    found = f"{skew.who} is {differs}; beyond {MAX_SKEW_S:g} s workers refuse signed calls"
    return wrong("clock", found, fix, is_fatal=_least(skew) > MAX_SKEW_S)


def _least(skew: Skew) -> float:
    """Return the least difference of a clock, in seconds, that the measurement allows."""
    return max(0.0, abs(skew.ahead_s) - skew.within_s)


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds:.1f} s"
