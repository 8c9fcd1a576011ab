"""Check the times that one engine reports for its jobs, as they arrive."""

from __future__ import annotations

from itertools import pairwise

from tandem.core.events import Cancelled, Failed, Finished, JobEvent, Token
from tandem.core.ids import JobKey
from tandem.core.request import ResumeJob
from tandem.core.request_stages import JobStages, Stage
from tandem.engine.job_timeline import MAX_CHUNKS, JobTimes


class TimesWitness:
    """Check the stage times that one incarnation of one worker reports. A choice is sampled here from the token with
    stages on."""

    def __init__(self) -> None:
        self._ends: dict[JobKey, JobEvent] = {}
        self._reported: set[JobKey] = set()
        self._num_sampled: dict[JobKey, int] = {}
        self._stages: dict[JobKey, JobStages] = {}
        self.outcomes: set[str] = set()

    def on_event(self, event: JobEvent) -> None:
        if isinstance(event, Token):
            if event.stages is not None:
                assert event.key not in self._stages, f"{event.key} draws its first token twice"
                assert min(event.stages.seconds) >= 0.0, event
                _check_waits(event.stages)
                self._stages[event.key] = event.stages
                self._num_sampled[event.key] = 0
            if event.key in self._stages:
                self._num_sampled[event.key] += 1
        elif isinstance(event, Finished | Failed | Cancelled):
            self._ends[event.key] = event

    def ended(self, times: JobTimes, num_preempted: int) -> None:
        """`num_preempted` sequences of the engine so far."""
        keys, job = times.job.keys, times.job
        assert self._reported.isdisjoint(keys), f"{job.key} ends twice"
        self._reported.update(keys)
        self.outcomes.add(times.outcome)
        assert times.num_output == sum(self._num_sampled.get(key, 0) for key in keys), times
        assert (times.first_token_at is None) == self._stages.keys().isdisjoint(keys), times
        moments = (times.accepted_at, times.started_at, times.first_token_at, times.ended_at)
        _check_order(*(at for at in moments if at is not None))
        assert times.first_token_at is None or times.started_at is not None, times
        if job.num_choices == 1:
            assert times.stages == self._stages.get(job.key), times
        self._check_chunks(times, num_preempted)
        self._check_pull(times)
        assert (times.outcome == "failed") == (times.error_kind is not None) == bool(times.error), times

    def check_quiet(self) -> None:
        """Check, when nothing is live, that each job was reported once for all its choices, and no other job."""
        assert self._reported == self._ends.keys()

    def _check_chunks(self, times: JobTimes, num_preempted: int) -> None:
        assert len(times.chunks) <= MAX_CHUNKS
        for chunk in times.chunks:
            assert chunk.num_tokens > 0 and times.started_at is not None
            _check_order(times.started_at, chunk.planned_at, chunk.ended_at, times.ended_at)
        for one, two in pairwise(times.chunks):
            _check_order(one.planned_at, two.planned_at)
        if not isinstance(times.job, ResumeJob) and times.first_token_at is not None:
            num_computed = sum(chunk.num_tokens for chunk in times.chunks)
            num_needed = times.job.num_known_tokens - times.num_cached
            # What gave its blocks up is computed again, and so is a choice that found no seat beside the first.
            may_repeat = num_preempted > 0 or times.job.num_choices > 1
            assert num_computed == num_needed or (may_repeat and num_computed > 0), times

    def _check_pull(self, times: JobTimes) -> None:
        pull = times.pull
        if pull is None:
            assert not isinstance(times.job, ResumeJob), "every Resume pulls"
            return
        assert (pull.kind == "handoff") == isinstance(times.job, ResumeJob)
        moments = (pull.first_announced_at, pull.last_announced_at, pull.ready_at)
        _check_order(times.accepted_at, *moments, times.ended_at)
        assert 0 <= pull.num_exposed_bytes <= pull.num_bytes and pull.busy_s >= 0.0
        assert isinstance(times.job, ResumeJob) <= (pull.outcome == "done" or times.first_token_at is None), times


def _check_order(*moments: float) -> None:
    for one, two in pairwise(moments):
        # Times that were reported as durations have the rounding error of a subtraction.
        assert one <= two + 1e-9, moments


def _check_waits(stages: JobStages) -> None:
    """Check that a job waited for something, and in no stage longer than the stage took."""
    assert all(wait.seconds > 0 for wait in stages.waits), stages
    for stage, most_s in ((Stage.PREFILL_QUEUE, stages.prefill_queue_s), (Stage.TRANSFER, stages.transfer_s)):
        assert sum(wait.seconds for wait in stages.waits if wait.stage is stage) <= most_s + 1e-9, stages
    assert len({wait[:2] for wait in stages.waits}) == len(stages.waits), stages
