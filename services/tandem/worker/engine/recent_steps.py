"""Keep the records of the most recent steps."""

from __future__ import annotations

from collections import deque

from tandem.sched.state.schedule_result import StepRecord

NUM_STEPS = 1024
"""Number of records kept by default."""


class RecentSteps:
    """A `StepObserver` with a ring of records. The engine's thread writes, any thread reads."""

    def __init__(self, num_steps: int = NUM_STEPS) -> None:
        self._records: deque[StepRecord] = deque(maxlen=num_steps)

    def observe(self, record: StepRecord) -> None:
        self._records.append(record)

    def recent(self) -> tuple[StepRecord, ...]:
        """Return the records, oldest first. The copy is a single call, so no step can end in the middle of it."""
        return tuple(self._records.copy())
