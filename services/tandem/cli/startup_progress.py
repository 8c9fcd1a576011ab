"""Print the stages of a start to a waiting user."""

from __future__ import annotations

import sys

from tandem.core.clock import Clock


class Progress:
    """Print one whole line for each stage to standard error, so that log lines do not break into it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = clock.now()

    def step(self, stage: str, doing: str) -> None:
        elapsed = self._clock.now() - self._began
        print(f"  {elapsed:5.1f} s  {stage:<8} {doing}".rstrip(), file=sys.stderr, flush=True)  # noqa: T201
