"""Define when a job did what on the engine where it ended, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tandem.core.errors import ErrorKind
from tandem.core.ids import WorkerRef
from tandem.core.request import GenerateJob, Job, PrefillJob, ResumeJob
from tandem.core.request_stages import JobStages

MAX_CHUNKS = 256

Outcome = Literal["finished", "handed_over", "moved", "given_back", "cancelled", "failed"]
"""Final state of a job. "handed_over": a Prefill sampled its first token and offers the KV. "moved": the sequence
migrated to another worker. "given_back": a draining worker failed it as DRAINING, and its gateway places it again."""
Reading = Literal["handoff", "prefix"]
"""What a pull reads: the KV of a Resume, or a cached prefix of another worker."""

PullOutcome = Literal["done", "cancelled", "failed"]


class PrefillChunk(NamedTuple):
    """Known tokens that one step computed. With two plans open the step was planned while the step before it ran."""

    planned_at: float
    ended_at: float
    num_tokens: int


_KINDS = {GenerateJob: "generate", PrefillJob: "prefill", ResumeJob: "resume"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PullTimes:
    """What a job read from another worker, and when.

    `num_exposed_bytes` of the `num_bytes` had not been read when the last announcement arrived. `num_cached_tokens`
    needed no reading, because they were in this worker's prefix cache. `ready_at`: when the
    last block was checked, or the pull was given up. Without announcements both announcement times are when the pull
    was opened.
    """

    kind: Reading
    outcome: PullOutcome
    source: WorkerRef
    num_blocks: int
    num_bytes: int
    num_exposed_bytes: int
    num_cached_tokens: int = 0
    first_announced_at: float
    last_announced_at: float
    ready_at: float
    busy_s: float

    @property
    def exposed_s(self) -> float:
        """Return the seconds that reading went on after the source's last announcement; 0 where nothing was read."""
        return self.ready_at - self.last_announced_at if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    """A job that has ended with all its choices. Times are the engine's `now`, in seconds.

    `started_at`: its first step was planned; for a Resume, set once that step has ended. `first_token_at`: end of the
    first step that sampled one of its tokens here. `num_cached`: known tokens whose KV was here before. `num_output`:
    tokens sampled here. `chunks`: the steps that computed known tokens, at most MAX_CHUNKS; the last one includes all
    later steps. `error_kind` and `error` are set for a failed job.
    """

    job: Job
    outcome: Outcome
    accepted_at: float
    ended_at: float
    started_at: float | None = None
    first_token_at: float | None = None
    num_cached: int = 0
    num_output: int = 0
    chunks: tuple[PrefillChunk, ...] = ()
    pull: PullTimes | None = None
    error_kind: ErrorKind | None = None
    error: str = ""

    @property
    def kind(self) -> str:
        """Return "generate", "prefill" or "resume"."""
        return _KINDS[type(self.job)]

    @property
    def ready_at(self) -> float | None:
        """Return when the job waited only for this worker's own steps; None if it ended before."""
        if not isinstance(self.job, ResumeJob):
            return self.accepted_at
        return self.pull.ready_at if self.pull is not None and self.pull.outcome == "done" else None

    @property
    def stages(self) -> JobStages | None:
        """Return where the time to its first token sampled here went; None if it sampled none."""
        if self.first_token_at is None or self.started_at is None:
            return None
        return stages_of(self.job, (self.accepted_at, self.started_at, self.first_token_at), self.pull)


def stages_of(job: Job, times: tuple[float, float, float], pull: PullTimes | None) -> JobStages:
    """Split the time to a job's first token. `times`: when it was accepted, was started, and sampled its first
    token."""
    accepted_at, started_at, sampled_at = times
    if not isinstance(job, ResumeJob):
        return JobStages(prefill_queue_s=started_at - accepted_at, prefill_s=sampled_at - started_at)
    assert pull is not None, f"{job.key} samples without KV"
    decode_queue_s, decode_s = started_at - pull.ready_at, sampled_at - started_at
    return JobStages(transfer_s=pull.exposed_s, decode_queue_s=decode_queue_s, decode_s=decode_s)
