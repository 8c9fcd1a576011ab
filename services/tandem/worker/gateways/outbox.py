"""Buffer the events of each gateway's jobs until they were sent over its stream.

Tokens are kept from a job's acceptance until some time after its end, so that a gateway whose stream broke can resume
from any index. Times are seconds of the caller's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.core.errors import ErrorKind
from tandem.core.events import (
    Failed,
    JobEvent,
    KVReceived,
    MigrationOffered,
    Preempted,
    PromptLogprobs,
    TerminalEvent,
    Token,
)
from tandem.core.ids import GatewayId, JobKey

MAX_SCORES = 4096
"""Prompt scores per message: a prompt has many, and each takes about 350 bytes on the wire with all alternatives."""


@dataclass(slots=True)
class _ChoiceLog:
    """Events of one choice of a job. `tokens[i]` has output index `first_index + i`; tokens below `next_index` are not
    to be sent. `scores`: the prompt's log probabilities, of which the first `num_scores_sent` events were sent.
    `notices`: the newest event of each kind that is sent before tokens. `due_notices`: those of them that are not sent
    yet."""

    first_index: int
    next_index: int
    tokens: list[Token] = field(default_factory=list)
    scores: list[PromptLogprobs] = field(default_factory=list)
    num_scores_sent: int = 0
    notices: dict[type[JobEvent], JobEvent] = field(default_factory=dict)
    due_notices: dict[type[JobEvent], JobEvent] = field(default_factory=dict)
    end: TerminalEvent | None = None
    end_sent_at: float | None = None

    @property
    def stop(self) -> int:
        """Return the output index that the next token will have."""
        return self.first_index + len(self.tokens)

    @property
    def has_scores(self) -> bool:
        """Return whether prompt scores are left to send."""
        return self.num_scores_sent < len(self.scores)

    def push(self, event: JobEvent) -> None:
        match event:
            case Token():
                assert event.index == self.stop, f"{event.key}: token {event.index} instead of token {self.stop}"
                self.tokens.append(event)
            case PromptLogprobs():
                self.scores.append(event)
            case KVReceived() | MigrationOffered() | Preempted():
                self.notices[type(event)] = event
                self.due_notices[type(event)] = event
            case _:
                self.end = event

    def take(self, now: float, max_scores: int) -> list[JobEvent]:
        """Return the events to send now, and count them as sent at the time `now`. Their order is: notices, then prompt
        scores, then tokens by index, then the end.

        Score events are taken whole, until they have `max_scores` scores or more together. Tokens and end follow only
        when no score event is left.
        """
        events = list(self.due_notices.values())
        self.due_notices.clear()
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
        """Let `take` send all events again, of the tokens those from the index `next_index` on. Returns False, with
        nothing changed, when the index is below that of the first token of this job.

        The index may be above that of the last token here, since another worker of the same attempt may have sent more
        tokens.
        """
        if next_index < self.first_index:
            return False
        self.next_index = next_index
        self.num_scores_sent = 0
        self.due_notices = dict(self.notices)
        self.end_sent_at = None
        return True

    def mute(self) -> None:
        """Let `take` skip all events so far. If the job ends later, its end is still sent."""
        self.next_index = self.stop
        self.num_scores_sent = len(self.scores)
        self.due_notices.clear()


class GatewayStream:
    """Hold the state of one Watch stream, over which a gateway receives the events of its outbox (`box`).

    `wake`: set when there may be something to send. `is_over`: True once a newer stream of the gateway has replaced
    this one. `is_closing`: True if the stream is to end as soon as everything was sent.
    """

    def __init__(self, box: Outbox) -> None:
        self.box = box
        self.wake = asyncio.Event()
        self.is_over = False
        self.is_closing = False

    def close(self) -> None:
        self.is_closing = True
        self.wake.set()


class Outbox:
    """Keep the events of one gateway's jobs until they were sent and for some time after, so that a gateway whose
    stream broke can receive them again.

    `keep_s`: seconds for which the events of an ended job are kept after the job's end was sent. `stream`: the
    gateway's newest Watch stream; None if that has ended or there was none. `absent_since`: while `stream` is None, the
    time when the last stream ended, or `now` (when the outbox was made) if there was none.
    """

    def __init__(self, keep_s: float, now: float = 0.0) -> None:
        self.stream: GatewayStream | None = None
        self.absent_since = now
        self._keep_s = keep_s
        self._logs: dict[JobKey, _ChoiceLog] = {}
        self._fresh: dict[JobKey, None] = {}
        self._unknown: list[TerminalEvent] = []

    def __repr__(self) -> str:
        num_live = len(self.live())
        return f"<outbox: {num_live} live, {len(self._logs) - num_live} ended, {len(self._fresh)} to send>"

    def __iter__(self) -> Iterator[JobKey]:
        return iter(self._logs)

    def __contains__(self, key: JobKey) -> bool:
        return key in self._logs

    def register(self, key: JobKey, first_index: int) -> None:
        """Start to keep the events of the job `key`, which is about to be submitted. `first_index`: output index that
        its first token will have."""
        self._logs[key] = _ChoiceLog(first_index, first_index)

    def discard(self, key: JobKey) -> None:
        """Drop all events of a job, for instance because the engine did not accept it; does nothing for an unknown
        job."""
        self._logs.pop(key, None)
        self._fresh.pop(key, None)

    def push(self, event: JobEvent) -> None:
        """Append an event to the events of its job, which must be registered; drop an event that comes after the job's
        end.

        Raises KeyError if the job is not registered, and AssertionError if the index of a token is not one above that
        of the token before.
        """
        log = self._logs[event.key]
        if log.end is None:
            log.push(event)
            self._fresh[event.key] = None

    def take(self, now: float) -> list[JobEvent]:
        """Return the events to send now, and count them as sent at the time `now`.

        At most about `MAX_SCORES` prompt scores (log probabilities of prompt tokens) are returned; `has_more` tells
        whether events are left.
        """
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
        """Return whether there are events to send, so that the stream should call `take` again without waiting.

        There are if the last `take` left events behind because of the limit on prompt scores, or if new events have
        arrived.
        """
        return bool(self._fresh or self._unknown)

    def resume(self, positions: Mapping[JobKey, int]) -> list[JobKey]:
        """Prepare the outbox for a new stream of the gateway, so that `take` returns what the gateway lacks.

        `positions`: for each job that the gateway knows, the output index of the first token that it has not received.
        `take` then returns the events of each of these jobs from that index on, or a `Failed` event if this outbox does
        not have the job. Returns the live jobs that are not in `positions`, which the caller may cancel. The end of
        such a job is still sent, because the job may have been submitted after the gateway made `positions`.
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
        """Return the jobs that have not ended, which are those for which no end event was pushed."""
        return [key for key, log in self._logs.items() if log.end is None]

    def forget(self, now: float) -> None:
        """Drop the events of jobs whose end was sent at least `keep_s` seconds before `now`."""
        for key, log in list(self._logs.items()):
            if log.end_sent_at is not None and now - log.end_sent_at >= self._keep_s:
                self.discard(key)


class WatchSessions:
    """Own the outboxes and Watch streams of all gateways, and put each event into the outbox of its job's gateway.

    All calls must be on the event loop; times are seconds of the caller's clock. A gateway that has had no stream for
    `grace_s` seconds counts as gone.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self._boxes: dict[GatewayId, Outbox] = {}
        # The outbox of each registered job. It may still have jobs that their outbox has dropped since the last sweep.
        self._box_of: dict[JobKey, Outbox] = {}
        self._is_closing = False

    def __repr__(self) -> str:
        return f"<gateways {self._boxes}>"

    def __len__(self) -> int:
        """Return the number of gateways that have a Watch stream, or whose last one ended less than `grace_s` seconds
        ago."""
        return len(self._boxes)

    def register(self, gateway: GatewayId, keys: Sequence[JobKey], first_index: int, now: float) -> bool:
        """Start to keep the events of a job of `gateway` that is about to be submitted at the time `now`.

        `keys`: one key for each choice of the job. `first_index`: output index of the first token of each choice.
        Returns True; or False, with nothing changed, when one of the choices is registered already.
        """
        if any(key in self._box_of and key in self._box_of[key] for key in keys):
            return False
        box = self._open(gateway, now)
        for key in keys:
            box.register(key, first_index)
            self._box_of[key] = box
        return True

    def discard(self, keys: Iterable[JobKey]) -> None:
        """Drop the events of registered jobs that were not accepted; unknown keys are ignored."""
        for key in keys:
            box = self._box_of.pop(key, None)
            if box is not None:
                box.discard(key)

    def deliver(self, events: Iterable[JobEvent]) -> None:
        """Put each event into the outbox of its job's gateway and wake that gateway's stream; events of unregistered
        jobs are dropped."""
        touched: set[GatewayStream] = set()
        for event in events:
            box = self._box_of.get(event.key)
            if box is not None and event.key in box:
                box.push(event)
                if box.stream is not None:
                    touched.add(box.stream)
        for stream in touched:
            stream.wake.set()

    def wake(self) -> None:
        """Wake every stream, so that each sends a message to its gateway: the events that wait, or an empty message as
        a heartbeat."""
        for stream in self._streams():
            stream.wake.set()

    def attach(
        self, gateway: GatewayId, positions: Mapping[JobKey, int], now: float
    ) -> tuple[GatewayStream, list[JobKey]]:
        """Open a new Watch stream of `gateway` at the time `now`; an older stream of this gateway ends. `positions`:
        for each job that the gateway knows, the output index of the first token that it has not received. Returns the
        new stream, and the live jobs that are not in `positions`, which the caller should cancel."""
        box = self._open(gateway, now)
        unlisted = box.resume(positions)
        if box.stream is not None:
            box.stream.is_over = True
            box.stream.wake.set()
        stream = box.stream = GatewayStream(box)
        if self._is_closing:
            stream.close()
        return stream, unlisted

    def detach(self, stream: GatewayStream, now: float) -> None:
        """Record that a stream has ended at the time `now`. From then on its gateway counts as absent, unless the
        gateway has opened a newer stream."""
        if stream.box.stream is stream:
            stream.box.stream = None
            stream.box.absent_since = now

    def sweep(self, now: float) -> list[JobKey]:
        """Drop the events of jobs whose end was sent `grace_s` seconds or more before `now`, and the outboxes of
        gateways that have had no stream for that long.

        Returns the live jobs of the dropped gateways, which the caller should cancel.
        """
        lost: list[JobKey] = []
        for gateway, box in list(self._boxes.items()):
            box.forget(now)
            if box.stream is None and now - box.absent_since >= self.grace_s:
                lost += self._boxes.pop(gateway).live()
        self._box_of = {key: box for box in self._boxes.values() for key in box}
        return lost

    def close(self) -> None:
        """Make every stream end as soon as it has sent the events in its outbox. This also holds for streams that are
        opened later."""
        self._is_closing = True
        for stream in self._streams():
            stream.close()

    def _streams(self) -> list[GatewayStream]:
        return [box.stream for box in self._boxes.values() if box.stream is not None]

    def _open(self, gateway: GatewayId, now: float) -> Outbox:
        if gateway not in self._boxes:
            self._boxes[gateway] = Outbox(self.grace_s, now)
        return self._boxes[gateway]
