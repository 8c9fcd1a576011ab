"""Build the events that a worker sends to gateways when a job progresses or ends."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.core.errors import ErrorKind
from tandem.core.events import Failed, Finished, KVReceived, Token
from tandem.core.ids import JobKey
from tandem.core.request import Job, ResumeJob
from tandem.core.request_stages import JobStages
from tandem.engine.effects import Effect
from tandem.engine.job_timeline import PullTimes
from tandem.kv.handoff import Announcement
from tandem.sched.state.schedule_result import SequenceUpdate


def tokens(part: SequenceUpdate, stages: JobStages | None) -> list[Effect]:
    """Build one token event for each token that a step sampled for a choice; empty where it sampled none.

    `part`: what the step changed for the choice. `stages`: how the time up to the choice's first token on this worker
    divides into stages, to be attached to the first of the events; None where the step did not sample that first token.
    """
    first = part.first_index
    num_cached = part.num_cached if first == len(part.job.output_tokens) else None
    out: list[Effect] = [
        Token(part.key, first + i, token, None if i else num_cached) for i, token in enumerate(part.tokens)
    ]
    if part.tokens and (stages is not None or part.preemption is not None):
        out[0] = Token(part.key, first, part.tokens[0], num_cached, stages, part.preemption)
    return out


def ending(part: SequenceUpdate) -> Finished | Failed:
    """Build the final event of a choice that the scheduler has ended: Failed where `part.error` is set, else
    Finished."""
    if part.error is not None:
        return Failed(part.key, part.error_kind, part.error)
    return Finished(part.key, part.finish, part.num_output, part.num_cached)


def pull_failure_event(key: JobKey, job: Job, kind: ErrorKind, message: str) -> Finished | Failed:
    """Build the final event of a choice whose pull failed: Failed with `kind` and `message`, but Finished where `kind`
    is CANCELLED.

    CANCELLED means that the source has nothing left to hand over. The source's own event then ends the request at the
    gateway, but may arrive after this event, so this event must not report a failure.
    """
    if kind is ErrorKind.CANCELLED:
        return Finished(key, None, len(job.output_tokens), 0)
    return Failed(key, kind, message)


def kv_received(key: JobKey, pull: PullTimes) -> KVReceived:
    """Build the event that reports to a gateway what a pull has read.

    `key`: the choice for which the gateway gets the event. `pull`: sizes and times of the pull. The event names the
    source only for a remote prefix.
    """
    return KVReceived(
        key=key,
        num_blocks=pull.num_blocks,
        num_bytes=pull.num_bytes,
        num_cached_tokens=pull.num_cached_tokens,
        num_exposed_bytes=pull.num_exposed_bytes,
        total_s=pull.ready_at - pull.first_announced_at,
        exposed_s=pull.ready_at - pull.last_announced_at,
        busy_s=pull.busy_s,
        source=pull.source if pull.kind == "prefix" else None,
    )


def first_tokens(job: ResumeJob, keys: Iterable[JobKey], message: Announcement) -> list[Effect]:
    """Build a token event for each sampled token in an announcement that the job did not know; empty where the
    announcement has no such token.

    `keys`: the choices of the job that have not ended.
    """
    if not message.first_tokens:
        return []
    if job.num_choices > 1:
        sampled = dict(enumerate(message.first_tokens, job.choice))
        return [Token(key, 0, sampled[key.choice], message.num_cached) for key in keys]
    known, first = len(job.output_tokens), first_index(job, message)
    fresh = enumerate(message.first_tokens[known - first :], known)
    return [Token(job.key, i, token, None if i > known else message.num_cached) for i, token in fresh]


def first_index(job: ResumeJob, message: Announcement) -> int:
    """Return the output position of the first token in `message.first_tokens`, for a job of one choice."""
    return message.num_computed - len(job.request.prompt_tokens) + 1 - len(message.first_tokens)


def validate_announcement(job: ResumeJob, message: Announcement) -> str | None:
    """Check whether a `ResumeJob` can continue from the tokens in its source's last announcement; return the reason if
    it cannot, else None.

    Returns None for every announcement without tokens.
    """
    num_sampled = len(message.first_tokens)
    if not num_sampled:
        return None
    is_growing = message.is_migrating and job.num_choices == 1
    if not is_growing and (num_sampled, message.num_computed) != (job.num_choices, job.num_known_tokens):
        return f"the source sampled {num_sampled} first tokens for {job.num_choices} choices"
    if is_growing and not 0 <= first_index(job, message) <= len(job.output_tokens):
        return f"the source hands over tokens from {first_index(job, message)} on, {len(job.output_tokens)} are known"
    return None
