"""Buffer the events of one gateway's jobs until they were sent.

Tokens are kept from a job's acceptance until some time after its end, so that a gateway whose stream broke can resume
from any index. Times are seconds of the caller's clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tandem.core.errors import ErrorKind
from tandem.core.events import Failed, JobEvent, KVReceived, MigrationOffered, PromptLogprobs, TerminalEvent, Token
from tandem.core.ids import GatewayId, JobKey

MAX_SCORES = 4096
"""Prompt scores per message: a prompt has many, and each takes about 350 bytes on the wire with all alternatives."""


@dataclass(slots=True)
class _ChoiceLog:
    """Events of one choice of a job. `tokens[i]` has output index `first_index + i`; tokens below `next_index` are not
    to be sent."""

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
        """Return the output index of the next token."""
        return self.first_index + len(self.tokens)

    @property
    def has_scores(self) -> bool:
        """Return whether scores are left to send."""
        return self.num_scores_sent < len(self.scores)

    def push(self, event: JobEvent) -> None:
        match event:
            case Token():
                assert event.index == self.stop, f"{event.key}: token {event.index} instead of token {self.stop}"
                self.tokens.append(event)
            case PromptLogprobs():
                self.scores.append(event)
            case KVReceived():
                self.pulled = event
            case MigrationOffered():
                self.moving = event
                self.moving_sent = False
            case _:
                self.end = event

    def take(self, now: float, max_scores: int) -> list[JobEvent]:
        """Return the events to send: scores, then tokens in order, then the end.

        At most as many whole score events are returned as begin within `max_scores`; nothing else follows until all
        scores are sent.
        """
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
        """Send again from `next_index` on. Returns False when the index lies before the first token of this job.

        The index may be ahead of the tokens here, since another worker of the same attempt may have sent more.
        """
        if next_index < self.first_index:
            return False
        self.next_index = next_index
        self.num_scores_sent = 0
        self.pulled_sent = False
        self.moving_sent = False
        self.end_sent_at = None
        return True

    def mute(self) -> None:
        """Skip all events so far; an end that comes later is still sent."""
        self.next_index = self.stop
        self.num_scores_sent = len(self.scores)
        self.pulled_sent = True
        self.moving_sent = True


class Outbox:
    """Own the event logs of one gateway's jobs. Ended jobs are kept for `keep_s` seconds after their end was sent."""

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

    def __iter__(self) -> Iterator[JobKey]:
        return iter(self._logs)

    def register(self, key: JobKey, first_index: int) -> None:
        """Create the log of a job that is about to be submitted; its first token will have index `first_index`."""
        self._logs[key] = _ChoiceLog(first_index, first_index)

    def discard(self, key: JobKey) -> None:
        """Remove the log of a job, for instance because it was not accepted."""
        self._logs.pop(key, None)
        self._fresh.pop(key, None)

    def push(self, event: JobEvent) -> None:
        """Append an event of a registered job; events after the end are dropped."""
        log = self._logs[event.key]
        if log.end is None:
            log.push(event)
            self._fresh[event.key] = None

    def take(self, now: float) -> list[JobEvent]:
        """Return all events that were not sent yet, with at most about `MAX_SCORES` scores."""
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
        """Return whether events are left to send at once, after the last `take`."""
        return bool(self._fresh or self._unknown)

    def resume(self, positions: Mapping[JobKey, int]) -> list[JobKey]:
        """Begin a new stream: send each listed job again from its position, and report listed jobs that are not here as
        failed.

        Returns the live jobs that the gateway did not list. Their ends are still sent, because a job may have been
        submitted after the gateway made its list.
        """
        self._fresh.clear()
        unlisted: list[JobKey] = []
        for key, log in list(self._logs.items()):
            if key in positions and log.rewind(positions[key]):
                self._fresh[key] = None
            elif log.end is None:
                log.mute()
                unlisted.append(key)
            else:
                del self._logs[key]
        self._unknown = [
            Failed(key, ErrorKind.WORKER_LOST, f"job {key} is not on this worker")
            for key in positions
            if key not in self._logs
        ]
        return unlisted

    def live(self) -> list[JobKey]:
        """Return the jobs that have not ended."""
        return [key for key, log in self._logs.items() if log.end is None]

    def forget(self, now: float) -> None:
        """Drop jobs whose end was sent at least `keep_s` seconds ago."""
        for key, log in list(self._logs.items()):
            if log.end_sent_at is not None and now - log.end_sent_at >= self._keep_s:
                self.discard(key)
