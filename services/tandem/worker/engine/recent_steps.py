"""The records of the steps that ran last, for whoever wants to look; never kept for longer than the ring is long."""

from __future__ import annotations

from collections import deque

from tandem.sched.state.schedule_result import StepRecord

NUM_STEPS = 1024


class RecentSteps:
    """A `StepObserver`. The engine's thread writes, any thread reads."""

    def __init__(self, num_steps: int = NUM_STEPS) -> None:
        self._records: deque[StepRecord] = deque(maxlen=num_steps)

    def observe(self, record: StepRecord) -> None:
        self._records.append(record)

    def recent(self) -> tuple[StepRecord, ...]:
        """Oldest first. One copy in one call, so that no step ends in the middle of it."""
        return tuple(self._records.copy())
