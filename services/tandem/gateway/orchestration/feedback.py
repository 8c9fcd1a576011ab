"""What workers' words about a request teach of it and of them; never decides what becomes of it."""

from __future__ import annotations

from tandem.core.events import Finished, JobEvent, KVReceived, Token
from tandem.core.ids import WorkerRef
from tandem.flow.request_queue import PlacementQueue
from tandem.gateway.context.interfaces import KnownPrefixes
from tandem.gateway.orchestration.active_request import ActiveRequest
from tandem.gateway.orchestration.demand import DemandCounter
from tandem.gateway.telemetry.kv_flows import Flows
from tandem.gateway.workers.worker_pool import WorkerPool


class RoutingFeedback:
    """Of all requests of a gateway. Hears an event before their lives do."""

    def __init__(
        self, fleet: WorkerPool, waiting: PlacementQueue, prefixes: KnownPrefixes, demand: DemandCounter
    ) -> None:
        self._fleet = fleet
        self._waiting = waiting
        self._prefixes = prefixes
        self._demand = demand
        self.flows = Flows()

    def on_first_token(self, active: ActiveRequest, worker: WorkerRef, token: Token, now: float) -> None:
        """The first token of a job says where its time went, also where the client has the token already, and how much
        of the prompt was in a cache."""
        if token.stages is not None and active.life.attempts.is_open(worker, token.key.attempt):
            active.ledger.told(token.key.attempt, token.stages)
        if token.num_cached_tokens is not None:
            self._compare(active, token.num_cached_tokens, now)
            if active.life.num_cached is None and active.fixed_placement is None:
                self._demand.on_first_token(active.life.request, token.num_cached_tokens)

    def heard(self, active: ActiveRequest, worker: WorkerRef, event: JobEvent) -> None:
        """Anything but a token."""
        if isinstance(event, KVReceived):
            self._measured(active, worker, event)
        elif isinstance(event, Finished):
            self._waiting.breaker.on_success(worker)

    def _compare(self, active: ActiveRequest, num_cached: int, now: float) -> None:
        """What was predicted of its prompt with what was found."""
        placement = active.life.placement
        for predicted in active.take_predicted():
            self._prefixes.reported(predicted, num_cached)
            if placement is not None and placement.prefix is not None and placement.prefix.worker == predicted.worker:
                self._waiting.on_prefix_fetch(
                    (predicted.worker, placement.prefill), num_cached > predicted.num_before, now
                )

    def _measured(self, active: ActiveRequest, worker: WorkerRef, event: KVReceived) -> None:
        """Of what came to another worker than was chosen, nobody remembers from where."""
        placement = active.life.placement
        if event.source is not None:
            self.flows.moved(event.source.id, worker.id, "prefix", event.num_bytes)
        elif placement is not None and placement.decode == worker:
            self._fleet.measured(placement, event)
            if active.fixed_placement is None:
                self.flows.moved(placement.prefill.id, worker.id, "handoff", event.num_bytes)
