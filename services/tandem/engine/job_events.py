"""What the engine's gateways hear of a job that went on or ended, as functions; never decides how one ends."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.core.errors import ErrorKind
from tandem.core.events import Failed, Finished, Token
from tandem.core.ids import JobKey
from tandem.core.request import Job, ResumeJob
from tandem.core.request_stages import JobStages
from tandem.engine.effects import Effect, SendEvent
from tandem.kv.handoff import Announcement
from tandem.kv.pull_actions import PullFailed
from tandem.sched.state.schedule_result import SequenceUpdate


def tokens(part: SequenceUpdate, stages: JobStages | None) -> list[Effect]:
    """`stages`: of a choice that draws for the first time here."""
    first = part.first_index
    told = part.num_cached if first == len(part.job.output_tokens) else None
    out: list[Effect] = [
        SendEvent(Token(part.key, first + i, token, None if i else told)) for i, token in enumerate(part.tokens)
    ]
    if stages is not None and part.tokens:
        out[0] = SendEvent(Token(part.key, first, part.tokens[0], told, stages))
    return out


def ending(part: SequenceUpdate) -> Finished | Failed:
    if part.error is not None:
        return Failed(part.key, part.error_kind, part.error)
    return Finished(part.key, part.finish, part.num_output, part.num_cached)


def pull_failure_event(key: JobKey, job: Job, lost: PullFailed) -> Finished | Failed:
    """The end of a job whose KV does not come. Where the source has nothing left to hand over, its own word to the
    gateway ends the request; ours may come first, so it must not be an error."""
    if lost.kind is ErrorKind.CANCELLED:
        return Finished(key, None, len(job.output_tokens), 0)
    return Failed(key, lost.kind, lost.message)


def first_tokens(job: ResumeJob, keys: Iterable[JobKey], message: Announcement) -> list[Effect]:
    """Those that the source drew and the job did not know, of the choices that are live."""
    if not message.first_tokens:
        return []
    if job.num_choices > 1:
        drawn = dict(enumerate(message.first_tokens, job.choice))
        return [SendEvent(Token(key, 0, drawn[key.choice], message.num_cached)) for key in keys]
    known, first = len(job.output_tokens), first_index(job, message)
    fresh = enumerate(message.first_tokens[known - first :], known)
    return [SendEvent(Token(job.key, i, token, None if i > known else message.num_cached)) for i, token in fresh]


def first_index(job: ResumeJob, message: Announcement) -> int:
    """The output index of the first token that the source of one choice hands over."""
    return message.num_computed - len(job.request.prompt_tokens) + 1 - len(message.first_tokens)


def validate_announcement(job: ResumeJob, message: Announcement) -> str | None:
    """Why the job cannot go on with what its source hands over; None where it can, or where that is not known yet."""
    num_sampled = len(message.first_tokens)
    if not num_sampled:
        return None
    grows = message.is_migrating and job.num_choices == 1
    if not grows and (num_sampled, message.num_computed) != (job.num_choices, job.num_known_tokens):
        return f"the source drew {num_sampled} first tokens for {job.num_choices} choices"
    if grows and not 0 <= first_index(job, message) <= len(job.output_tokens):
        return f"the source hands over tokens from {first_index(job, message)} on, {len(job.output_tokens)} are known"
    return None
