"""Those who ask: each request goes to its gateway when it is due, and what follows on an answer after that; never knows
what becomes of one in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from tandem.core.events import Finished
from tandem.core.ids import RequestId
from tandem.sim.cluster.client_streams import Ended
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.gateway import SimGateway
from tandem.sim.kernel.event_queue import Actor, SimEventQueue
from tandem.workload.ask import ScheduledRequest


class Clients:
    """`owner` says to which gateway a request goes; `sent` is told each as it comes, `ended` what became of it."""

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
        self._coming: Iterator[ScheduledRequest] = iter(())
        self.num_open = 0
        """Requests that are under way, or whose time is known."""

    def begin(self, asks: Iterable[ScheduledRequest]) -> None:
        """In the order of their time, taken one at a time."""
        self._coming = iter(asks)
        self._await_one()

    # ---- inside

    def _await_one(self) -> None:
        ask = next(self._coming, None)
        if ask is not None:
            self._await_due(ask, self._send_one)

    def _await_due(self, ask: ScheduledRequest, action: Callable[[ScheduledRequest], None]) -> None:
        self.num_open += 1
        to = self._owner(ask.request.id).party
        self._agenda.at(ask.due_s, f"ask {ask.request.id}", partial(action, ask), by=self._party, to=to)

    def _send_one(self, ask: ScheduledRequest) -> None:
        self._send(ask)
        self._await_one()

    def _send(self, ask: ScheduledRequest) -> None:
        self._sent(ask)
        self._owner(ask.request.id).open(ask, partial(self._over, ask))

    def _over(self, ask: ScheduledRequest, trace: ClientTrace) -> None:
        self._ended(trace)
        self.num_open -= 1
        if ask.follow is not None and isinstance(trace.outcome, Finished):
            self._await_due(ask.follow(trace.tokens or (), trace.ended_at), self._send)
