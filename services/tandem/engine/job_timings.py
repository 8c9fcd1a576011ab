"""When a job did what on the engine that it ends on, as frozen values; never measures it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tandem.core.errors import ErrorKind
from tandem.core.ids import WorkerRef
from tandem.core.request import GenerateJob, Job, PrefillJob, ResumeJob
from tandem.core.request_stages import JobStages

MAX_CHUNKS = 256

Outcome = Literal["finished", "handed_over", "moved", "given_back", "cancelled", "failed"]
"""HANDED_OVER: a Prefill drew its token and offers the KV. MOVED: another worker goes on with it. GIVEN_BACK: a worker
that drains had not begun it."""
Reading = Literal["handoff", "prefix"]
"""What was read: the KV of a Resume, or a cached prefix that another worker lent."""

PullEnd = Literal["done", "cancelled", "failed"]


class PrefillChunk(NamedTuple):
    """Known tokens that one step computed. With two plans open it was planned while the step before it ran."""

    planned_at: float
    ended_at: float
    num_tokens: int


_KINDS = {GenerateJob: "generate", PrefillJob: "prefill", ResumeJob: "resume"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PullTimes:
    """What a job read from another worker. `num_exposed_bytes` of the `num_bytes` were unread when the last
    announcement had come; `ready_at`: the last block was checked, or the pull was given up. While nothing was announced
    both announcements count as the moment in which it was asked for."""

    kind: Reading
    outcome: PullEnd
    source: WorkerRef
    num_blocks: int
    num_bytes: int
    num_exposed_bytes: int
    first_announced_at: float
    last_announced_at: float
    ready_at: float
    busy_s: float

    @property
    def exposed_s(self) -> float:
        """What of it came after the source's last word; 0 where nothing was read."""
        return self.ready_at - self.last_announced_at if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    """A job that has ended, with all its choices. Times are the engine's own `now`, in seconds.

    `started_at`: its first step was planned; of a Resume that is known once the step has ended. `first_token_at`: the
    first step ended that drew a token of it here. `num_cached` of its known tokens had their KV here before,
    `num_output` tokens were drawn here. `chunks` are the steps that computed known tokens, at most MAX_CHUNKS: the last
    takes in what comes after. `error_kind` and `error` of one that failed.
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
        """generate, prefill or resume."""
        return _KINDS[type(self.job)]

    @property
    def ready_at(self) -> float | None:
        """From then on only this worker's own steps were waited for; None: it ended before."""
        if not isinstance(self.job, ResumeJob):
            return self.accepted_at
        return self.pull.ready_at if self.pull is not None and self.pull.outcome == "done" else None

    @property
    def stages(self) -> JobStages | None:
        """Where the time to its first own token went; None where it drew none."""
        if self.first_token_at is None or self.started_at is None:
            return None
        return stages_of(self.job, (self.accepted_at, self.started_at, self.first_token_at), self.pull)


def stages_of(job: Job, times: tuple[float, float, float], pull: PullTimes | None) -> JobStages:
    """`times`: accepted, started, first token drawn."""
    accepted_at, started_at, sampled_at = times
    if not isinstance(job, ResumeJob):
        return JobStages(prefill_queue_s=started_at - accepted_at, prefill_s=sampled_at - started_at)
    assert pull is not None, f"{job.key} draws without KV"
    decode_queue_s, decode_s = started_at - pull.ready_at, sampled_at - started_at
    return JobStages(transfer_s=pull.exposed_s, decode_queue_s=decode_queue_s, decode_s=decode_s)
