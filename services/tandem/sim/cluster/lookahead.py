"""Define the decode steps that one simulated worker has computed ahead of the clock, and its report of steps that
ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.events import TokenRun
from tandem.core.worker_load import WorkerLoad
from tandem.sched.phases.decode_run import DecodeRun


@dataclass(eq=False, slots=True)
class Lookahead:
    """Decode steps of one worker that were computed ahead of the clock; they are valid if the worker receives no
    command before they end.

    `run`: the engine's forecast of a series of decode steps of the same sequences; the predicted steps are the first of
    it. `ends`: virtual time at which each step ends. `seconds`: duration of each step. `num_free`: free blocks after
    each step. `num_before`: steps of the same series that the engine has applied already.
    """

    run: DecodeRun
    ends: list[float]
    seconds: list[float]
    num_free: list[int]
    num_before: int = 0

    def cut(self, num_steps: int) -> None:
        """Keep only the first `num_steps` steps."""
        for values in (self.ends, self.seconds, self.num_free):
            del values[num_steps:]

    def rest(self, run: DecodeRun, num_done: int) -> Lookahead:
        """Return a lookahead with the predicted steps that remain after the engine has applied the first `num_done`
        steps.

        `run`: a new forecast of the engine, made after it applied these steps. It replaces the old one, because a
        forecast must begin with the engine's next step."""
        num_before = self.num_before + num_done
        return Lookahead(run, self.ends[num_done:], self.seconds[num_done:], self.num_free[num_done:], num_before)


@dataclass(frozen=True, slots=True)
class StepRun:
    """Report of a worker about consecutive steps, which ended at the virtual times `ends`.

    `tokens`: for each sequence, the tokens that these steps sampled, one in each step. `load`: the worker's load, which
    differs between the steps only in the free blocks. `num_free`: free blocks after each step.
    """

    ends: Sequence[float]
    tokens: Sequence[TokenRun]
    load: WorkerLoad
    num_free: Sequence[int]

    def split(self, num_steps: int) -> tuple[StepRun, StepRun]:
        """Return two reports: one of the first `num_steps` steps, one of the remaining steps."""
        return self._part(0, num_steps), self._part(num_steps, len(self.ends))

    def _part(self, first: int, stop: int) -> StepRun:
        tokens = [TokenRun(t.key, t.first_index + first, t.ids[first:stop]) for t in self.tokens]
        return StepRun(self.ends[first:stop], tokens, self.load, self.num_free[first:stop])
