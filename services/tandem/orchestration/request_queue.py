"""Admit, order and place the requests that wait at a gateway.

The caller passes the time and a ranking of the workers. Only the first request of each model and lane is tried. So each
time the queue is tried, a request that cannot be placed costs one search, however many requests wait behind it or are
placed in other lanes. It stays first: only requests that precede it in the queue's order overtake it.

A request that waits for capacity blocks less urgent lanes at the workers that serve its lane, and nowhere else. So the
first request of a model blocks all others where all workers serve all lanes, and lanes with workers of their own do not
block each other. A request that no worker could serve blocks no other lane.

A request that workers refuse again and again, though there seemed to be room, pauses and is then sent alone, see
`NUM_REFUSALS`. It counts as one that waits for capacity.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from tandem.admission.request_queue import RequestQueue
from tandem.admission.tenant import OPEN, Tenant
from tandem.admission.tenant_queue import QueueItem
from tandem.admission.ttft_predictor import PrefillWorkerLoad, TtftForecast, forecast, queue_full, ttft_error
from tandem.core.config import Disaggregation, GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import BlockHash, RequestId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request import Request
from tandem.core.request_stages import Wait, WaitCause
from tandem.orchestration.commands import FindConsumer, Requeue
from tandem.orchestration.queue_waits import QueueWaits
from tandem.routing.candidates import pick_migration_target
from tandem.routing.circuit_breaker import CircuitBreakers, FailureBackoff
from tandem.routing.placement import NoPlacement, Placement
from tandem.routing.prefix_accuracy import Prediction, predict
from tandem.routing.prefix_index import PrefixHit
from tandem.routing.router import BUSY, BY_COST, NO_SEAT, WORTH_WAITING, Routing, place
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_ranking import WorkerRanking
from tandem.routing.worker_view import Pair, WorkerView
from tandem.sched.state.slo_targets import NO_TARGETS, LatencyTargets

BEHIND = NoPlacement("requests of a more urgent lane wait for the same workers", may_pass=True)
NOT_ALONE = NoPlacement("workers keep refusing it, so it is sent when others have their replies", may_pass=True)
REFUSAL_BACKOFF_S = 0.1
"""Seconds until a worker that refused is tried again, unless it reports more capacity before."""
NUM_REFUSALS = 4
"""Number of refusals in a row after which a request is sent alone: only while no other such request of its model waits
for its workers' replies, and after a pause. Otherwise two requests, each of which has reserved room on the worker that
the other one needs, could be refused and sent again together until they time out. The pauses differ, because the two
requests may be at two gateways."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Bound on the first pause of a request that is sent alone, in seconds, which doubles with each refusal, and its
limit."""
ALONE_S = 2.0
"""Longest time in seconds for which a request that was sent alone keeps others waiting."""
NUM_FETCH_FAILURES = 2
"""Number of failed prefix fetches in a row after which no prefix is fetched over a link for some time; a single failure
may be due to blocks that were evicted a moment ago. A link that no hand-off uses is not probed, and where it is down,
each fetch over it would delay its prompt until the worker's timeout."""


class Prefixes(Protocol):
    """Look up in a copy of the prefix index which worker holds which KV blocks."""

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerRef, PrefixHit]:
        """Return how many leading blocks of a prompt each worker holds; workers that hold none are left out.

        `hashes`: the hashes of the prompt's full blocks, in order.
        """
        ...

    def reported(self, predicted: Prediction, num_cached: int) -> None:
        """Compare the predicted prefix hit of a request with `num_cached`, the number of prompt tokens that its worker
        found in a cache."""
        ...


class Dispatchable(NamedTuple):
    """Hold a request that is sent to workers now, and its placement.

    `predicted`: how much of the prompt should be cached on the worker that computes it, and on the worker from which a
    prefix is read. `waits`: the seconds that the request waited in the queue for something other than its turn, by
    cause.
    """

    request: RequestId
    placement: Placement
    predicted: Sequence[Prediction] = ()
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True)
class AdmissionResult:
    """Result of the admission of a request.

    `leaves`: the request that the caller must end with `error`, because the queue is full; it may be the new request
    itself. Both are None when there is room. `prefill_s`: predicted minimum seconds of the new request's own prefill, 0
    where unknown or where `gateway.early_rejection` is off.
    """

    leaves: RequestId | None = None
    error: TandemError | None = None
    prefill_s: float = 0.0


class _ModelLane(NamedTuple):
    model: str
    lane: Lane

    @classmethod
    def of(cls, request: RoutingRequest) -> _ModelLane:
        return cls(request.model, request.lane)


class _Refusals(NamedTuple):
    """How often in a row workers had no room for a request, and the time before which it is not sent again."""

    number: int = 0
    not_before: float = -math.inf

    @property
    def are_many(self) -> bool:
        return self.number >= NUM_REFUSALS

    def another(self, request: RequestId, now: float) -> _Refusals:
        """Return the refusals after one more at the time `now`. The pause is drawn from the request's id and the
        number, so that a simulation repeats it."""
        number = self.number + 1
        if not _Refusals(number).are_many:
            return _Refusals(number)
        longest_s = min(FIRST_PAUSE_S * 2 ** (number - NUM_REFUSALS), LONGEST_PAUSE_S)
        return _Refusals(number, now + longest_s * zlib.crc32(f"{request} {number}".encode()) / 2**32)


class _SentAlone(NamedTuple):
    """The request of a model that was sent alone, and the time until which it may keep others waiting."""

    request: RequestId
    until: float


class PlacementQueue:
    """Queue admitted requests, and choose workers for the first request of each model and lane.

    A request is known from `admit` until `leave`. `ranking`: the live workers, ranked by load. `targets`: the latency
    targets of the lanes. `prefixes`: the copy of the prefix index; None where none is kept. `routing`: settings by
    which workers are compared.
    """

    def __init__(
        self, ranking: WorkerRanking, config: GatewayConfig, targets: LatencyTargets = NO_TARGETS,
        prefixes: Prefixes | None = None, routing: Routing = BY_COST,
    ) -> None:  # fmt: skip
        self.queue = RequestQueue(config.max_queued, config.kv_time_tokens)
        self.breaker = CircuitBreakers()
        self._prefix_fetches = FailureBackoff[Pair](NUM_FETCH_FAILURES)
        self._ranking = ranking
        self._config = config
        self._targets = targets
        self._routing = routing
        self._prefixes = prefixes
        self._requests: dict[RequestId, RoutingRequest] = {}
        self._full_until: dict[tuple[WorkerRef, Lane], float] = {}
        self._refusals: dict[RequestId, _Refusals] = {}
        self._sent_alone: dict[str, _SentAlone] = {}
        self._blocked: dict[_ModelLane, RoutingRequest] = {}
        self._why: dict[_ModelLane, NoPlacement] = {}
        self._hopeless_since: dict[_ModelLane, float] = {}
        self._served_since: dict[_ModelLane, float] = {}
        self.waits = QueueWaits()
        self._num_turns = 0

    def admit(
        self,
        request: Request,
        now: float,
        tenant: Tenant = OPEN,
        timeout_s: float | None = None,
        hashes: Sequence[BlockHash] = (),
        session: str = "",
    ) -> AdmissionResult:
        """Queue a request; the arguments are those of `RequestDirector.submit`. When the queue is full, the result
        names the request that the caller must end, which may be another one.

        Raises TandemError(SLO_MISS), and does not queue the request, when its first token is predicted to miss the
        latency target of its lane or the client's deadline and `gateway.early_rejection` is on; TandemError(NO_WORKER)
        when it insists on two workers, no pair can serve it, and other requests are served.
        """
        item = self.queue.item_for(request, tenant.weight)
        mode = tenant.disaggregation or self._config.disaggregation
        routing_request = RoutingRequest.of(request, mode, hashes, session)
        target_s = self._targets.lane(request.lane).ttft_s or 0.0
        predicted = None
        if self._config.early_rejection == "on" and (timeout_s is not None or target_s > 0):
            predicted = self._expect(item, routing_request)
        if predicted is not None:
            error = ttft_error(predicted, target_s, timeout_s)
            if error is not None:
                raise error
        self._require_pair(routing_request)
        leaves = self.queue.enter(request, item)
        self._requests[request.id] = routing_request
        self.waits.enter(request.id, _ModelLane.of(routing_request), now)
        prefill_s = 0.0 if predicted is None else predicted.prefill_s
        error = None if leaves is None else queue_full(self._config.max_queued, self._expect(item, routing_request))
        return AdmissionResult(leaves, error, prefill_s)

    def turns(self, now: float) -> Iterator[Dispatchable]:
        """Yield the requests to send to workers now, each with its placement, until the first request of every model
        and lane must wait.

        A request has left the queue when it is yielded. Before the caller asks for the next one, it must add the load
        of the yielded request to the workers of its placement. This leaves less room for others, so one call does not
        try a lane again whose first request must wait.
        """
        for model in self.queue.models():
            yield from self._turns(model, now)

    def leave(self, request: RequestId, num_cached: int | None = None) -> None:
        """Remove a request that has ended; does nothing when it is unknown.

        `num_cached`: number of its prompt tokens that were found in a prefix cache, by which its tenant's charge is
        corrected; None when unknown.
        """
        self.queue.leave(request, num_cached)
        self.waits.forget(request)
        self._requests.pop(request, None)
        self._refusals.pop(request, None)
        self._end_alone(request)

    def put_back(self, request: RequestId, now: float) -> None:
        """Return a request that was sent to workers to its old position in the queue, at the time `now`; does nothing
        when it has ended."""
        self.queue.put_back(request)
        self._end_alone(request)
        known = self._requests.get(request)
        if known is not None:
            self.waits.enter(request, _ModelLane.of(known), now)

    def check(self) -> None:
        """Raise AssertionError naming a request that has ended and is still counted as refused or as sent alone."""
        for request in [*self._refusals, *(sent.request for sent in self._sent_alone.values())]:
            assert request in self._requests, f"{request} has ended, and refusals of it are kept"

    def known(self) -> Iterable[RequestId]:
        """Return the requests that were admitted and have not ended."""
        return self._requests.keys()

    def why(self, model: str, lane: Lane, now: float) -> str:
        """Return what the first waiting request of a model and lane waits for, as text for error messages."""
        outcome, excluded = self._why.get(_ModelLane(model, lane)), self.breaker.why(now)
        return "; ".join(filter(None, ("its turn" if outcome is None else outcome.reason, excluded)))

    def hopeless_since(self, model: str, lane: Lane) -> float | None:
        """Return the time since which no worker, not even a full one, could serve the first request of a model and
        lane; None when one could."""
        return self._hopeless_since.get(_ModelLane(model, lane))

    def served_since(self, model: str, lane: Lane) -> float:
        """Return when a worker was last found again for the first request of a model and lane, after a time in which no
        worker, not even a full one, could serve it. -infinity where there was no such time."""
        return self._served_since.get(_ModelLane(model, lane), -math.inf)

    def num_held(self) -> Mapping[str, int]:
        """Return, by model, the number of waiting requests that no worker, not even a full one, could serve; models
        without any have no entry."""
        found: Counter[str] = Counter()
        for model, lane in self._hopeless_since.copy():
            found[model] += self.queue.num_waiting(model, lane)
        return +found

    def pick_consumer(self, model: str, lane: Lane, search: FindConsumer, now: float) -> WorkerRef | None:
        """Return a decode worker that can take over offered KV now, without the queue; None when there is none.
        `search`: the worker that offers the KV, and the workers to leave out. Those in `search.excluded` have refused
        the KV, so for a short time no request of `lane` or of a less urgent lane is placed on them. Workers whose jobs
        keep failing are chosen only where there is no other."""
        self.refused(search.excluded, lane, now)
        unfit, failing = search.unfit | self.full(lane, now), self.breaker.excluded(now)
        consumer = pick_migration_target(self._ranking.without(unfit | failing), model, lane, search.source)
        if consumer is None and failing:
            resting = self.breaker.resting(now)
            consumer = pick_migration_target(self._ranking.without(unfit | resting), model, lane, search.source)
        if consumer is not None:
            self.breaker.on_attempt((consumer,), now)
        return consumer

    # ---- reports on workers

    def on_prefix_fetch(self, link: Pair, has_succeeded: bool, now: float) -> None:
        """Record whether a prefix fetch over a link, a pair (producer, consumer) of workers, has succeeded. No prefixes
        are fetched for some time over a link that keeps failing."""
        if has_succeeded:
            self._prefix_fetches.clear(link)
        else:
            self._prefix_fetches.failed([link], now)

    def forget(self, worker: WorkerRef) -> None:
        """Remove the circuit breaker and the prefix fetch failures of a worker that is gone."""
        self.breaker.clear(worker)
        self._prefix_fetches.clear(*[link for link in self._prefix_fetches.failing() if worker in link])

    def refused(self, workers: Iterable[WorkerRef], lane: Lane, now: float) -> None:
        """Record that workers refused a request of `lane` for lack of room. For `REFUSAL_BACKOFF_S` seconds they get no
        requests of this lane or of less urgent ones; a request of a more urgent lane may find room there."""
        self._full_until.update(((worker, lane), now + REFUSAL_BACKOFF_S) for worker in workers)

    def count_refusal(self, request: RequestId, now: float) -> None:
        """Record that a worker had no room for a request that was sent to it."""
        if request in self._requests:
            self._refusals[request] = self._refusals.get(request, _Refusals()).another(request, now)

    def accepted(self, request: RequestId) -> bool:
        """Record that all workers to which a request was sent have accepted it, and return whether another request may
        be sent for that reason."""
        self._refusals.pop(request, None)
        return self._end_alone(request)

    def _end_alone(self, request: RequestId) -> bool:
        """End the turn of a request that was sent alone, and return whether it had one."""
        num_before = len(self._sent_alone)
        self._sent_alone = {model: sent for model, sent in self._sent_alone.items() if sent.request != request}
        return len(self._sent_alone) < num_before

    def _may_be_sent(self, request: RequestId, now: float) -> bool:
        """Return whether a request that workers keep refusing may be sent now; True for any other request."""
        refusals = self._refusals.get(request, _Refusals())
        if not refusals.are_many:
            return True
        sent = self._sent_alone.get(self._requests[request].model)
        return now >= refusals.not_before and (sent is None or now >= sent.until)

    def failed(self, request: RequestId, requeue: Requeue) -> None:
        """Record that the workers in `requeue.excluded` failed a request, so that the request prefers other workers
        from now on, and runs on one worker where `requeue.is_undivided` is set. Does nothing when the request has
        ended."""
        self._refusals.pop(request, None)
        known = self._requests.get(request)
        if known is not None:
            self._requests[request] = replace(
                known,
                avoided=known.avoided | requeue.excluded,
                is_undivided=known.is_undivided or requeue.is_undivided,
            )

    def may_go_on(self, view: WorkerView) -> bool:
        """Return whether a waiting request could possibly be placed, now that a worker reports more capacity. `view`:
        the worker with its new load. Forgets that this worker has refused requests.

        False when no request waits for this worker. Also False when the first request of the most urgent lane that
        waits for it still cannot be placed on it, because that lane blocks the others there.
        """
        refusals = [self._full_until.pop((view.ref, lane), None) for lane in Lane]
        waiting = [lane for lane in Lane if lane in view.lanes and self.queue.num_waiting(view.model, lane)]
        if not waiting or any(until is not None for until in refusals):
            return bool(waiting)
        key = _ModelLane(view.model, waiting[0])
        blocked = self._blocked.get(key)
        if blocked is None or (self._why[key] is NO_SEAT and view.decodes and view.has_seat(key.lane)):
            return True
        # A request that waits for prefill capacity needs a prefill worker, and one that can accept the request now.
        num_remote = blocked.max_remote_tokens(view.block_size) if self._routing.remote_prefix else 0
        return (view.prefills or blocked.mode in ("off", "auto")) and blocked.fits(view, num_remote)

    # ---- placement

    def _require_pair(self, request: RoutingRequest) -> None:
        """Raise TandemError(NO_WORKER) when a new request insists on two workers by its own choice or its tenant's, no
        pair could serve it, not even a full one, and single workers could. If it waited, it would be the first of its
        lane and block the requests that these workers serve."""
        if request.mode != "strict" or self._config.disaggregation == "strict":
            return
        # Among all workers: one that keeps failing, or has just refused a request, may be tried again soon.
        outcome = place(self._ranking, request, frozenset(), self._routing)
        if isinstance(outcome, Placement) or outcome.may_pass:
            return
        if not _is_hopeless(place(self._ranking, replace(request, mode="off"), frozenset(), self._routing)):
            message = f"no two workers can take the request, and its disaggregation is strict: {outcome.reason}"
            raise TandemError(ErrorKind.NO_WORKER, message, retry_after_s=1.0)

    def _turns(self, model: str, now: float) -> Iterator[Dispatchable]:
        tried: set[Lane] = set()
        yields_to: frozenset[Lane] = frozenset()
        while (request := self.queue.first(model, tried)) is not None:
            key = _ModelLane(model, self._requests[request].lane)
            outcome = BEHIND if self._is_behind(key, yields_to) else self._try(request, yields_to, now)
            if isinstance(outcome, Dispatchable):
                yield outcome
                continue
            self._wait(request, key, outcome, now)
            tried.add(key.lane)
            if outcome.may_pass:
                yields_to |= {key.lane}

    def _is_behind(self, key: _ModelLane, yields_to: frozenset[Lane]) -> bool:
        """Return whether requests of more urgent lanes wait for all workers that serve the lane of `key`.

        False for a lane whose first request no worker could serve: only a search shows whether it has a worker again.
        """
        if key in self._hopeless_since:
            return False
        served = [lanes for lanes in self._ranking.lanes(key.model) if key.lane in lanes]
        return bool(served) and not any(lanes.isdisjoint(yields_to) for lanes in served)

    def _try(self, request: RequestId, yields_to: frozenset[Lane], now: float) -> Dispatchable | NoPlacement:
        routing_request = self._looked_up(self._requests[request], self.queue.charged(request))
        if blocked_links := self._prefix_fetches.excluded(now):
            routing_request = replace(routing_request, blocked_links=blocked_links)
        if yields_to:
            routing_request = replace(routing_request, yields_to=yields_to)
        outcome = self._place(routing_request, now)
        if isinstance(outcome, Placement):
            if not self._may_be_sent(request, now):
                return NOT_ALONE
            return self._sent(request, routing_request, outcome, now)
        if outcome is BUSY or outcome is NO_SEAT:
            self._blocked[_ModelLane.of(routing_request)] = replace(routing_request, yields_to=frozenset())
        return outcome

    def _wait(self, request: RequestId, key: _ModelLane, outcome: NoPlacement, now: float) -> None:
        self._why[key] = outcome
        self.waits.tried(request, key, _cause(outcome), now)
        if outcome is not BUSY and outcome is not NO_SEAT:
            self._blocked.pop(key, None)
        if outcome.may_pass:
            self._has_worker(key, now)
        else:
            self._hopeless_since.setdefault(key, now)

    def _has_worker(self, key: _ModelLane, now: float) -> None:
        if self._hopeless_since.pop(key, None) is not None:
            self._served_since[key] = now

    def _looked_up(self, request: RoutingRequest, num_charged: int) -> RoutingRequest:
        """Return the routing request with the workers' current prefix hits. Where no hits are looked up, `num_charged`
        is the number of prompt tokens to compute."""
        hits = request.hits
        if self._prefixes is not None and request.hashes:
            hits = self._prefixes.match(request.hashes)
        return replace(request, num_tokens=num_charged, turn=self._num_turns, hits=hits)

    def _sent(
        self, request: RequestId, routing_request: RoutingRequest, placement: Placement, now: float
    ) -> Dispatchable:
        key = _ModelLane.of(routing_request)
        self._blocked.pop(key, None)
        self._has_worker(key, now)
        self.breaker.on_attempt((placement.prefill, placement.decode), now)
        self._num_turns += 1
        worker = self._ranking.find(routing_request.model, placement.prefill)
        assert worker is not None, f"{placement.prefill} was chosen"
        picked = placement.picked
        num_uncached = routing_request.num_uncached(worker) if picked is None else picked.cost.prefill.num_uncached
        self.queue.send(request, num_uncached)
        if self._refusals.get(request, _Refusals()).are_many:
            self._sent_alone[routing_request.model] = _SentAlone(request, now + ALONE_S)
        waits = self.waits.take(request, key, now)
        return Dispatchable(request, placement, _predictions(routing_request, placement, worker), waits)

    def _place(self, request: RoutingRequest, now: float) -> Placement | NoPlacement:
        """Choose workers for a request. Workers whose jobs keep failing are left out, unless no others exist: then each
        of them gets a request from time to time, as a trial."""
        full, failing = self.full(request.lane, now), self.breaker.excluded(now)
        candidates = self._ranking.without(failing)

        def choose(workers: WorkerRanking, excluded: Set[WorkerRef]) -> Placement | NoPlacement:
            return place(workers, request, excluded, self._routing)

        if request.avoided:
            outcome = choose(candidates, full | request.avoided)
            if _has_workers(outcome):
                return outcome
        outcome = choose(candidates, full)
        if not failing or not _is_hopeless(outcome) or (full and not _is_hopeless(choose(candidates, frozenset()))):
            return outcome
        retried = choose(self._ranking, full | self.breaker.resting(now))
        return retried if _has_workers(retried) else outcome

    def full(self, lane: Lane, now: float) -> Set[WorkerRef]:
        """Return the workers that have refused a request of `lane`, or of a more urgent one, within the last
        `REFUSAL_BACKOFF_S` seconds."""
        if not self._full_until:
            return frozenset()
        self._full_until = {key: until for key, until in self._full_until.items() if until > now}
        return {worker for worker, refused in self._full_until if refused <= lane}

    def _expect(self, item: QueueItem, request: RoutingRequest) -> TtftForecast | None:
        """Predict the time to first token of a new request, for the longest prefix that any worker holds; None where it
        is unknown.

        Requests of more urgent lanes delay the prompt only at workers that serve both lanes. So where some workers
        serve no more urgent lane, the prediction is not later than the one for these workers alone.
        """
        workers = _prompt_workers(self._ranking.workers(request.model, request.lane), request.mode)
        found = self._looked_up(request, item.num_tokens)
        best = min(map(found.num_uncached, workers), default=item.num_tokens)
        item = replace(item, num_tokens=max(1, best))
        undisturbed = [view for view in workers if min(view.lanes) == item.flow_key.lane]
        few = [workers] if len(undisturbed) in (0, len(workers)) else [workers, undisturbed]
        found_times = (self._forecast(views, item, request.model) for views in few)
        return min(filter(None, found_times), key=lambda times: times.ttft_s, default=None)

    def _forecast(self, workers: Sequence[WorkerView], item: QueueItem, model: str) -> TtftForecast | None:
        loads = [load for view in workers if (load := _prefill_load(view, item)) is not None]
        rivals = frozenset[Lane]().union(*{view.lanes for view in workers})
        return forecast(loads, self.queue.num_ahead(model, item, rivals), item.num_tokens)


def _prompt_workers(workers: Sequence[WorkerView], mode: Disaggregation) -> Sequence[WorkerView]:
    """Return those of the `workers` that may compute the prompt of a request with this mode of disaggregation."""
    decoding = [view for view in workers if view.decodes]
    has_roles = bool(decoding) and any(view.pool == "prefill" for view in workers)
    if mode == "strict" or (mode == "prefer" and has_roles):
        return [view for view in workers if view.prefills]
    return workers if mode == "auto" else decoding or workers


def _prefill_load(view: WorkerView, item: QueueItem) -> PrefillWorkerLoad | None:
    """Return what a request waits for at a worker; None where the worker drains or has not reported its step cost."""
    if view.step_cost is None or view.load.draining:
        return None
    return PrefillWorkerLoad(view.step_cost, view.num_step_tokens, view.num_ahead(item.num_tokens, item.flow_key.lane))


def _predictions(request: RoutingRequest, placement: Placement, worker: WorkerView) -> list[Prediction]:
    """Return the predicted prefix hits of a placement: the blocks that `worker`, which computes the prompt, has cached,
    and the blocks after them that it reads from another worker."""
    hit = None if request.hits is None else request.hits.get(worker.ref)
    num_hit = 0 if hit is None or not worker.block_size else hit.num_blocks
    found = [(worker.ref, num_hit, 0)]
    if placement.prefix is not None and worker.block_size:
        found.append((placement.prefix.producer, placement.prefix.num_blocks, num_hit))
    return [
        predict(ref, num_blocks, request.num_prompt, worker.block_size, num_before)
        for ref, num_blocks, num_before in found
        if num_blocks
    ]


def _cause(outcome: NoPlacement) -> WaitCause:
    """Return what a request waits for, by the outcome of the search that could not place it."""
    if outcome is BEHIND:
        return WaitCause.URGENT_LANES
    return WaitCause.NO_ROOM if outcome.may_pass else WaitCause.NO_WORKER


def _has_workers(outcome: Placement | NoPlacement) -> bool:
    """Return whether workers were found that take the request now or will have capacity soon."""
    return isinstance(outcome, Placement) or any(outcome is one for one in (BUSY, NO_SEAT, WORTH_WAITING))


def _is_hopeless(outcome: Placement | NoPlacement) -> bool:
    return isinstance(outcome, NoPlacement) and not outcome.may_pass
