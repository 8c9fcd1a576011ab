"""Steps of one worker that were looked at ahead, and those of them that have ended; never takes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.events import TokenRun
from tandem.core.worker_load import WorkerLoad
from tandem.sched.phases.decode_run import DecodeRun


@dataclass(eq=False, slots=True)
class Lookahead:
    """A run's steps as they will end if nothing comes: when each does, how long it takes, and how many blocks are free
    after it. `num_before` were taken in already."""

    run: DecodeRun
    ends: list[float]
    seconds: list[float]
    num_free: list[int]
    num_before: int = 0

    def cut(self, num_steps: int) -> None:
        """No more than so many."""
        for values in (self.ends, self.seconds, self.num_free):
            del values[num_steps:]

    def rest(self, run: DecodeRun, num_done: int) -> Lookahead:
        """What is left after the first ones; `run` goes on from there."""
        num_before = self.num_before + num_done
        return Lookahead(run, self.ends[num_done:], self.seconds[num_done:], self.num_free[num_done:], num_before)


@dataclass(frozen=True, slots=True)
class StepRun:
    """What a worker says of steps that have ended at `ends`: a token of each sequence in each, and its load after
    each, which differs in the number of free blocks only."""

    ends: Sequence[float]
    tokens: Sequence[TokenRun]
    load: WorkerLoad
    num_free: Sequence[int]

    def split(self, num_steps: int) -> tuple[StepRun, StepRun]:
        """The first steps, and all others."""
        return self._part(0, num_steps), self._part(num_steps, len(self.ends))

    def _part(self, first: int, stop: int) -> StepRun:
        tokens = [TokenRun(t.key, t.first_index + first, t.ids[first:stop]) for t in self.tokens]
        return StepRun(self.ends[first:stop], tokens, self.load, self.num_free[first:stop])
