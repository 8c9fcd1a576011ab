"""What one gateway is still to be told of each choice of its jobs, kept until it was; never cancels one or does I/O.

Tokens are kept from a job's acceptance until some time after its end, so that a gateway whose stream broke can ask
again from any index. Times are seconds of the caller's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.core.errors import ErrorKind
from tandem.core.events import Failed, JobEvent, KVReceived, MigrationOffered, PromptLogprobs, TerminalEvent, Token
from tandem.core.ids import GatewayId, JobKey

MAX_SCORES = 4096
"""Scores that go out at once: of prompts they are many, and with all alternatives some 350 bytes each on the wire."""


@dataclass(slots=True)
class _ChoiceLog:
    """One choice of a job. `tokens[i]` has output index `first_index + i`; indices below `next_index` are not to be
    sent."""

    first_index: int
    next_index: int
    tokens: list[Token] = field(default_factory=list)
    scores: list[PromptLogprobs] = field(default_factory=list)
    num_scores_sent: int = 0
    pulled: KVReceived | None = None
    pulled_sent: bool = False
    moving: MigrationOffered | None = None
    moving_sent: bool = False
    end: TerminalEvent | None = None
    end_sent_at: float | None = None

    @property
    def stop(self) -> int:
        """The index of the next token that will come."""
        return self.first_index + len(self.tokens)

    @property
    def has_scores(self) -> bool:
        """Some are to be sent."""
        return self.num_scores_sent < len(self.scores)

    def push(self, event: JobEvent) -> None:
        match event:
            case Token():
                assert event.index == self.stop, f"{event.key}: token {event.index} came when {self.stop} was due"
                self.tokens.append(event)
            case PromptLogprobs():
                self.scores.append(event)
            case KVReceived():
                self.pulled = event
            case MigrationOffered():
                self.moving, self.moving_sent = event, False
            case _:
                self.end = event

    def take(self, now: float, max_scores: int) -> list[JobEvent]:
        """Tokens in order, the end last. Scores come before all tokens, and only as many whole events as begin within
        `max_scores`; until all are sent nothing else follows."""
        events: list[JobEvent] = []
        if self.pulled is not None and not self.pulled_sent:
            self.pulled_sent = True
            events.append(self.pulled)
        if self.moving is not None and not self.moving_sent:
            self.moving_sent = True
            events.append(self.moving)
        while max_scores > 0 and self.has_scores:
            scores = self.scores[self.num_scores_sent]
            self.num_scores_sent += 1
            max_scores -= len(scores.tokens)
            events.append(scores)
        if self.has_scores:
            return events
        events += self.tokens[self.next_index - self.first_index :]
        self.next_index = max(self.next_index, self.stop)
        if self.end is not None and self.end_sent_at is None:
            self.end_sent_at = now
            events.append(self.end)
        return events

    def rewind(self, next_index: int) -> bool:
        """Send again from `next_index`, which may be ahead of what is here: another worker of the same attempt may
        have sent more. False when it lies before all that this job was to draw."""
        if next_index < self.first_index:
            return False
        self.next_index = next_index
        self.num_scores_sent = 0
        self.pulled_sent = self.moving_sent = False
        self.end_sent_at = None
        return True

    def mute(self) -> None:
        """Of what has come so far, send nothing (again); an end that comes is sent."""
        self.next_index = self.stop
        self.num_scores_sent = len(self.scores)
        self.pulled_sent = self.moving_sent = True


class Outbox:
    """One gateway's jobs. Ended ones are kept for `keep_s` after their end was sent."""

    def __init__(self, gateway: GatewayId, keep_s: float) -> None:
        self.gateway = gateway
        self._keep_s = keep_s
        self._logs: dict[JobKey, _ChoiceLog] = {}
        self._fresh: dict[JobKey, None] = {}
        self._unknown: list[TerminalEvent] = []

    def __repr__(self) -> str:
        num_live = len(self.live())
        return (
            f"<outbox of {self.gateway}: {num_live} live, {len(self._logs) - num_live} ended, "
            f"{len(self._fresh)} to send>"
        )

    def __contains__(self, key: JobKey) -> bool:
        return key in self._logs

    def expect(self, key: JobKey, first_index: int) -> None:
        """A job may be accepted from now on; its first token will have this index."""
        self._logs[key] = _ChoiceLog(first_index, first_index)

    def discard(self, key: JobKey) -> None:
        """A job was not accepted after all."""
        self._logs.pop(key, None)
        self._fresh.pop(key, None)

    def push(self, event: JobEvent) -> None:
        """Take in an event of an expected job; after its end nothing more is taken."""
        log = self._logs[event.key]
        if log.end is None:
            log.push(event)
            self._fresh[event.key] = None

    def take(self, now: float) -> list[JobEvent]:
        """What is to be sent and was not: all of it, but no more scores than one message should hold."""
        events: list[JobEvent] = [*self._unknown]
        room = MAX_SCORES
        for key in self._fresh:
            taken = self._logs[key].take(now, room)
            room -= sum(len(event.tokens) for event in taken if isinstance(event, PromptLogprobs))
            events += taken
        self._unknown.clear()
        self._fresh = {key: None for key in self._fresh if self._logs[key].has_scores}
        return events

    @property
    def has_more(self) -> bool:
        """Something is to be sent at once, after what was taken last."""
        return bool(self._fresh or self._unknown)

    def resume(self, positions: Mapping[JobKey, int]) -> list[JobKey]:
        """A new stream: send each listed job again from its position on, and tell of those that are not here.

        Returns the live jobs that nobody waits for. Their ends are still sent, because a job may be missing from the
        list only because it was submitted after the list was made.
        """
        self._fresh.clear()
        unwanted: list[JobKey] = []
        for key, log in list(self._logs.items()):
            if key in positions and log.rewind(positions[key]):
                self._fresh[key] = None
            elif log.end is None:
                log.mute()
                unwanted.append(key)
            else:
                del self._logs[key]
        self._unknown = [
            Failed(key, ErrorKind.WORKER_LOST, f"job {key} is not on this worker")
            for key in positions
            if key not in self._logs
        ]
        return unwanted

    def live(self) -> list[JobKey]:
        return [key for key, log in self._logs.items() if log.end is None]

    def forget(self, now: float) -> None:
        """Drop jobs whose end was sent long enough ago."""
        for key, log in list(self._logs.items()):
            if log.end_sent_at is not None and now - log.end_sent_at >= self._keep_s:
                self.discard(key)
