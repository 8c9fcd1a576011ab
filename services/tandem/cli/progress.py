"""Tells a waiting person what is being started and how long it took; never what a log line says."""

from __future__ import annotations

import sys

from tandem.core.clock import Clock


class Progress:
    """One line per stage on standard error."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self._stage_began = clock.now()
        self._stage = ""

    def step(self, stage: str, doing: str) -> None:
        self._finish()
        self._stage, self._stage_began = stage, self._clock.now()
        print(f"  {stage:<8} {doing} ...", end="", file=sys.stderr, flush=True)  # noqa: T201

    def done(self) -> None:
        self._finish()
        print(f"  ready after {self._clock.now() - self._began:.1f} s", file=sys.stderr, flush=True)  # noqa: T201

    def _finish(self) -> None:
        if self._stage:
            print(f" {self._clock.now() - self._stage_began:.1f} s", file=sys.stderr, flush=True)  # noqa: T201
            self._stage = ""
