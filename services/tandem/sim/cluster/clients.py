"""Send each request to its gateway when it is due, and its follow-up turn after its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from tandem.core.events import Finished
from tandem.core.ids import RequestId
from tandem.sim.cluster.client_streams import Ended
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.gateway import SimGateway
from tandem.sim.kernel.event_queue import Actor, SimEventQueue
from tandem.workload.scheduled_request import ScheduledRequest


class Clients:
    """Own the upcoming requests of a run and schedule their sending.

    `owner` returns the gateway of a request; `sent` is called with each request when it is sent, `ended` with its trace
    at its end."""

    def __init__(
        self,
        agenda: SimEventQueue,
        party: Actor,
        owner: Callable[[RequestId], SimGateway],
        sent: Callable[[ScheduledRequest], None],
        ended: Ended,
    ) -> None:
        self._agenda = agenda
        self._party = party
        self._owner = owner
        self._sent = sent
        self._ended = ended
        self._upcoming: Iterator[ScheduledRequest] = iter(())
        self.num_open = 0
        """Requests that are running or scheduled."""

    def begin(self, requests: Iterable[ScheduledRequest]) -> None:
        """Schedule the requests, which are in the order of their due times; each is taken when the one before is
        sent."""
        self._upcoming = iter(requests)
        self._schedule_next()

    # ---- inside

    def _schedule_next(self) -> None:
        scheduled = next(self._upcoming, None)
        if scheduled is not None:
            self._schedule_due(scheduled, self._send_one)

    def _schedule_due(self, scheduled: ScheduledRequest, action: Callable[[ScheduledRequest], None]) -> None:
        self.num_open += 1
        to = self._owner(scheduled.request.id).party
        self._agenda.at(
            scheduled.due_s, f"ask {scheduled.request.id}", partial(action, scheduled), by=self._party, to=to
        )

    def _send_one(self, scheduled: ScheduledRequest) -> None:
        self._send(scheduled)
        self._schedule_next()

    def _send(self, scheduled: ScheduledRequest) -> None:
        self._sent(scheduled)
        self._owner(scheduled.request.id).open(scheduled, partial(self._over, scheduled))

    def _over(self, scheduled: ScheduledRequest, trace: ClientTrace) -> None:
        self._ended(trace)
        self.num_open -= 1
        if scheduled.follow is not None and isinstance(trace.outcome, Finished):
            self._schedule_due(scheduled.follow(trace.tokens or (), trace.ended_at), self._send)
