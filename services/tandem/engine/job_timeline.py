"""Notes when each live job did what, and gives it out once, with the job's last choice; never reads a clock and never
decides anything.

A decoded token costs nothing here: what is noted are jobs that come and go, chunks of prompts and first tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from tandem.core.errors import ErrorKind
from tandem.core.ids import JobKey
from tandem.core.request import Job, ResumeJob
from tandem.core.request_stages import JobStages
from tandem.engine.job_timings import MAX_CHUNKS, JobTimes, Outcome, PrefillChunk, PullTimes, stages_of
from tandem.sched.state.schedule_result import ScheduleResult, SequenceUpdate


class EndedChoice(NamedTuple):
    """How a choice ends, after so many output tokens."""

    outcome: Outcome
    num_output: int = 0
    error_kind: ErrorKind | None = None
    error: str = ""


class _JobTimer:
    """Of one job, whose choices are `live`. `firsts`: of each, the output index of the first token drawn here."""

    __slots__ = (
        "accepted_at", "chunks", "end", "first_token_at", "firsts", "job", "live", "num_cached", "num_output", "pull",
        "started_at",
    )  # fmt: skip

    def __init__(self, job: Job, now: float) -> None:
        self.job = job
        self.accepted_at = now
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.num_cached = 0
        self.num_output = 0
        self.live = list(job.keys)
        self.firsts: dict[JobKey, int] = {}
        self.chunks: list[PrefillChunk] = []
        self.pull: PullTimes | None = None
        self.end: EndedChoice | None = None

    def computed(self, chunk: PrefillChunk) -> None:
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(chunk)
        else:
            last = self.chunks[-1]
            self.chunks[-1] = PrefillChunk(last.planned_at, chunk.ended_at, last.num_tokens + chunk.num_tokens)

    def close(self, now: float) -> JobTimes:
        assert self.end is not None, f"{self.job.key} has not ended"
        return JobTimes(
            job=self.job,
            outcome=self.end.outcome,
            accepted_at=self.accepted_at,
            ended_at=now,
            started_at=self.started_at,
            first_token_at=self.first_token_at,
            num_cached=self.num_cached,
            num_output=self.num_output,
            chunks=tuple(self.chunks),
            pull=self.pull,
            error_kind=self.end.error_kind,
            error=self.end.error,
        )


class _Plan(NamedTuple):
    """One that is open: when it was begun, and the chunks that it computes."""

    begun_at: float
    chunks: tuple[tuple[_JobTimer, int], ...]


class JobTimeline:
    """`undrawn`: the choices that are being computed, or are ready to be, and have drawn nothing here yet."""

    def __init__(self) -> None:
        self.undrawn: dict[JobKey, _JobTimer] = {}
        self._sheets: dict[JobKey, _JobTimer] = {}
        self._open: deque[_Plan] = deque()
        self._plan = _Plan(0.0, ())

    def accepted(self, job: Job, now: float) -> None:
        sheet = _JobTimer(job, now)
        for key in job.keys:
            self._sheets[key] = sheet

    def planned(self, planned: ScheduleResult, now: float) -> None:
        """What is to be computed next, if anything is."""
        if planned.step is None:
            return
        for start in planned.starts:
            sheet = self._sheets[start.key]
            if sheet.started_at is None:
                sheet.started_at = now
                if not isinstance(sheet.job, ResumeJob):
                    sheet.num_cached = start.num_cached
                    self._expect(sheet)
        chunks = tuple((self._sheets[key], size) for key, size in planned.chunks) if planned.chunks else ()
        self._open.append(_Plan(now, chunks))

    def finished(self, now: float) -> None:
        """The oldest open plan has ended; what it drew is told next."""
        self._plan = plan = self._open.popleft()
        for sheet, num_tokens in plan.chunks:
            sheet.computed(PrefillChunk(plan.begun_at, now, num_tokens))

    def drew(self, part: SequenceUpdate, now: float) -> JobStages:
        """One of the `undrawn` choices drew its first tokens here, in the plan that has ended."""
        sheet = self.undrawn.pop(part.key)
        plan, job = self._plan, sheet.job
        if sheet.started_at is None:
            sheet.started_at = plan.begun_at
        if sheet.first_token_at is None:
            sheet.first_token_at = now
            # The last token of a prompt alone in a step is no chunk that a plan tells of.
            if not isinstance(job, ResumeJob) and all(sheet is not chunked for chunked, _ in plan.chunks):
                sheet.computed(PrefillChunk(plan.begun_at, now, 1))
        sheet.firsts[part.key] = part.first_index
        return stages_of(job, (sheet.accepted_at, sheet.started_at, now), sheet.pull)

    def pulled(self, name: JobKey, pull: PullTimes, num_cached: int) -> None:
        """A job's pull is over. `num_cached`: of a Resume, the tokens that needed no reading."""
        sheet = self._sheets[name]
        sheet.pull = pull
        if isinstance(sheet.job, ResumeJob):
            sheet.num_cached = num_cached
            if pull.outcome == "done":
                self._expect(sheet)

    def left(self, key: JobKey, leaving: EndedChoice, now: float) -> JobTimes | None:
        """A choice has ended; with the last one its job. A job failed if a choice of it did, else it ended as the last
        did."""
        sheet = self._sheets[key]
        self.undrawn.pop(key, None)
        first = sheet.firsts.pop(key, None)
        sheet.num_output += 0 if first is None else leaving.num_output - first
        sheet.live.remove(key)
        if sheet.end is None or sheet.end.error_kind is None:
            sheet.end = leaving
        if sheet.live:
            return None
        for each in sheet.job.keys:
            del self._sheets[each]
        return sheet.close(now)

    def check(self, names: Iterable[JobKey]) -> None:
        """`names` of all live jobs. Raises AssertionError naming what is off."""
        assert {sheet.job.key for sheet in self._sheets.values()} == set(names), "times of other jobs than are live"
        assert self.undrawn.keys() <= self._sheets.keys(), "a choice that has ended is to draw"

    def __repr__(self) -> str:
        return f"<times of {len(self._sheets)} choices, {len(self.undrawn)} undrawn, {len(self._open)} plans open>"

    def _expect(self, sheet: _JobTimer) -> None:
        """First tokens of all choices that have not ended."""
        for key in sheet.live:
            self.undrawn[key] = sheet
