"""Tells a waiting person what is being started and since when; never what a log line says."""

from __future__ import annotations

import sys

from tandem.core.clock import Clock


class Progress:
    """One whole line per stage on standard error, so that log lines of others stand between them and not inside."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = clock.now()

    def step(self, stage: str, doing: str) -> None:
        elapsed = self._clock.now() - self._began
        print(f"  {elapsed:5.1f} s  {stage:<8} {doing}".rstrip(), file=sys.stderr, flush=True)  # noqa: T201
