"""Own every open request of one gateway: admission, queueing, placement, attempts, retries and deadlines.

Events go in, commands come out, and `now` is an argument: seconds of one clock that never goes back. The gateway drives
a director with asyncio (`gateway.orchestration.driver`), the simulator with its event queue (`sim.cluster.gateway`), so
simulations run the same code for queueing, placement and retries as the product."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tandem.admission.tenant import OPEN, Tenant
from tandem.admission.tenant_quota_state import TokenUsage
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished, JobEvent, KVReceived, Pauses, Preempted, Preemption, PromptLogprobs, Token
from tandem.core.ids import BlockHash, HandoffId, JobKey, RequestId, TenantId, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request import Request, SamplingParams
from tandem.orchestration.commands import (
    Command,
    EndRequest,
    FindConsumer,
    KVMoved,
    MoveOutcome,
    PromptComputed,
    ReportMove,
    ReportWorkerFailure,
    Requeue,
    StateCommand,
    SubmitJob,
)
from tandem.orchestration.job_group import JobGroupPhase
from tandem.orchestration.known_workers import KnownWorkers
from tandem.orchestration.phase_ledger import LedgerPhase, PhaseLedger
from tandem.orchestration.rebalancer import Rebalancer
from tandem.orchestration.request_queue import PlacementQueue, Prefixes
from tandem.orchestration.request_state import RequestState
from tandem.routing.circuit_breaker import BreakerState
from tandem.routing.placement import Placement
from tandem.routing.prefix_accuracy import Prediction
from tandem.routing.rebalance import Rebalancing
from tandem.routing.worker_view import WorkerView
from tandem.scaling.demand_totals import QueueBacklog
from tandem.sched.state.slo_targets import NO_TARGETS, LatencyTargets

TICK_S = 0.05
"""How often a driver calls `on_timer` while requests are open."""
KV_PERIOD_S = 0.5
"""How often KV time is charged for each open request. Charges at every tick would double the duration of the tick."""
PROBE_TIMEOUT_S = 30.0
"""Longest time of a link probe. A probe that takes longer has failed."""


def probe_request(request: RequestId, model: str) -> Request:
    """Return the request with the id `request` that probes a link: the smallest one that moves a KV block. It has one
    prompt token and samples two output tokens greedily."""
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    return Request(id=request, model=model, prompt_tokens=(0,), sampling=sampling)


class OpenRequest:
    """Represent one open request: its state machine (`state`), the account of its time (`ledger`), and its deadlines.

    - Times are seconds of the director's clock. `progress_at`: when a worker last reported on the request;
      `delivered_at`: when its client last got something new, at first the time of its admission; `failed_at`: when its
      last attempt failed, at first the same; `deadline`: when its client gives up, None without a deadline.
    - `prefill_s`: predicted minimum seconds of computing its prompt, 0 where unknown or without early rejection.
    - `predicted`: the prefix hits that were predicted for its last placement, to be compared with the worker's report;
      empty once the worker that computes the prompt has reported.
    - `fixed_placement`: the workers of a link probe, which is not routed; None for a client's request.
    - `has_begun`: True once workers have begun to compute it, in any attempt. `is_prompt_computed`: True once a worker
      has reported its first token.
    - `kv_charged_s`: the seconds that it had spent at workers when its tenant was last charged for KV time;
      `kv_charged_at`: the time of that charge.
    """

    __slots__ = (
        "deadline", "delivered_at", "failed_at", "fixed_placement", "has_begun", "is_prompt_computed", "kv_charged_at",
        "kv_charged_s", "ledger", "predicted", "prefill_s", "progress_at", "state",
    )  # fmt: skip

    def __init__(self, state: RequestState, ledger: PhaseLedger, now: float) -> None:
        self.state = state
        self.ledger = ledger
        self.progress_at = now
        self.delivered_at = now
        self.failed_at = now
        self.deadline: float | None = None
        self.prefill_s = 0.0
        self.predicted: Sequence[Prediction] = ()
        self.fixed_placement: Placement | None = None
        self.has_begun = False
        self.is_prompt_computed = False
        self.kv_charged_s = 0.0
        self.kv_charged_at = now

    @property
    def id(self) -> RequestId:
        return self.state.request.id

    @property
    def is_queued(self) -> bool:
        return self.state.phase is JobGroupPhase.QUEUED

    @property
    def workers(self) -> Sequence[WorkerId]:
        """Return the workers of the request's last placement, first the one that computes its prompt. One worker that
        runs all of it is returned once; empty before the first placement."""
        placement = self.state.placement
        return () if placement is None else tuple(dict.fromkeys((placement.prefill.id, placement.decode.id)))

    def usage(self) -> TokenUsage | None:
        """Return the tokens that count against the tenant's quota: the prompt tokens that were computed, and the output
        tokens that the client has. None where no worker has begun the request.

        Where the request ends before its first token, it is unknown how much of the prompt was computed, so all of it
        counts."""
        if not self.has_begun:
            return None
        num_computed = len(self.state.request.prompt_tokens) - (self.state.num_cached or 0)
        return TokenUsage(num_computed, self.state.num_delivered)

    def take_kv_time(self, now: float) -> float:
        """Return the KV time of the request since the last call, in token-seconds: the seconds that it spent at
        workers, times the tokens that it has now. Records `now` as the time of the last charge."""
        before_s, self.kv_charged_s, self.kv_charged_at = self.kv_charged_s, self.ledger.worker_seconds(now), now
        return self.state.num_context * (self.kv_charged_s - before_s)

    def move_ledger(self, now: float) -> None:
        phase = self.state.attempts.ledger_phase
        if phase is not self.ledger.phase:
            self.ledger.move(phase, now)

    def __repr__(self) -> str:
        return f"<open {self.state!r}>"


class AdmittedRequest(NamedTuple):
    """A request that was admitted, and the commands to carry out now, which may already include its end."""

    open_request: OpenRequest
    commands: list[Command]


class RequestDirector:
    """Decide what happens to every open request of one gateway: admission, queueing, placement, attempts, retries,
    deadlines.

    The caller passes events in and carries out the returned commands; the director performs no I/O and reads no clock.
    Every admitted request ends in exactly one `EndRequest`. When an exception is raised while the director handles one
    request, only this request ends, with an INTERNAL error whose `__cause__` is that exception.

    `workers`: the workers that the gateway knows. `new_handoff`: function that returns, for a request, a hand-off id
    that no other hand-off of this cluster has. `targets`: the latency targets of the lanes. `prefixes`: the copy of the
    prefix index; None where none is kept."""

    def __init__(
        self,
        workers: KnownWorkers[Any],
        config: GatewayConfig,
        new_handoff: Callable[[RequestId], HandoffId],
        targets: LatencyTargets = NO_TARGETS,
        prefixes: Prefixes | None = None,
    ) -> None:
        self._workers = workers
        self._config = config
        self._new_handoff = new_handoff
        self._prefixes = prefixes
        self._queue = PlacementQueue(workers.candidates(), config, targets, prefixes, workers.routing)
        self.queue = self._queue.queue
        """Which admitted requests wait, in which order, and the tokens that tenants were charged for each."""
        targets_s = {lane: target_s for lane in Lane if (target_s := targets.lane(lane).itl_s)}
        rules = Rebalancing(targets_s, config.rebalance_min_gain, workers.routing.links)
        self._rebalancer = Rebalancer(
            workers.candidates(), rules, config.rebalance_max_moves, only_advises=config.rebalance == "explain"
        )
        self._open: dict[RequestId, OpenRequest] = {}

    # ---- what is open

    def requests(self) -> Sequence[OpenRequest]:
        """Return all open requests, link probes included."""
        return list(self._open.values())

    def num_queued(self) -> Mapping[Lane, int]:
        """Return, by lane, how many requests wait to be placed on workers, link probes included; every lane has an
        entry."""
        found = dict.fromkeys(Lane, 0)
        for open_request in self.requests():
            found[open_request.state.request.lane] += open_request.is_queued
        return found

    def backlog(self) -> Mapping[str, QueueBacklog]:
        """Return, by model, how many requests wait to be placed on workers and how many tokens their prompts have;
        models without any have no entry."""
        found: dict[str, list[int]] = {}
        for request in (one.state.request for one in self.requests() if one.is_queued):
            found.setdefault(request.model, []).append(len(request.prompt_tokens))
        return {model: QueueBacklog(num_requests=len(sizes), num_tokens=sum(sizes)) for model, sizes in found.items()}

    def num_held(self) -> Mapping[str, int]:
        """Return, by model, how many requests wait because no worker, not even a full one, could serve them; models
        without any have no entry."""
        return self._queue.num_held()

    def num_open(self) -> Mapping[tuple[TenantId, bool], int]:
        """Return the number of clients' open requests, by (tenant, whether the request waits to be placed on workers).
        Link probes do not count."""
        return Counter((one.state.request.tenant, one.is_queued) for one in self._of_clients())

    def breakers(self, now: float) -> Mapping[WorkerId, BreakerState]:
        """Return the state, at the time `now`, of the circuit breaker of each worker that has failed since its last
        success."""
        return self._queue.breaker.states(now)

    def positions(self, worker: WorkerRef) -> list[tuple[JobKey, int]]:
        """Return, for each choice about which `worker` still has to send events to this gateway, the pair (key of the
        choice's job there, index of the next token that the client needs)."""
        return [position for open_request in self._open.values() for position in open_request.state.positions(worker)]

    def check(self) -> None:
        """Raise AssertionError where the queue and the open requests disagree, or the queue contradicts itself. For
        tests."""
        self.queue.check()
        self._queue.check()
        for request in self._queue.known():
            assert request in self._open, f"{request} has a place in the queue and is not open"
        for request in self._queue.waits.requests():
            assert request in self._open, f"the waits of {request} are counted, and it is not open"
        for open_request in self._of_clients():
            assert open_request.id in self.queue, f"{open_request!r} is open and has no place"
        num_queued = sum(open_request.is_queued for open_request in self._of_clients())
        assert num_queued == len(self.queue), f"{num_queued} requests are queued, {len(self.queue)} wait"

    # ---- requests

    def submit(
        self,
        request: Request,
        now: float,
        tenant: Tenant = OPEN,
        *,
        timeout_s: float | None = None,
        hashes: Sequence[BlockHash] = (),
        session: str = "",
        ledger: PhaseLedger | None = None,
    ) -> AdmittedRequest:
        """Admit a request of `tenant`, place it now or let it wait in the queue, and return it with the commands to
        carry out. The commands may also end another request that was displaced from a full queue.

        The caller has already applied the tenant's policy to the request. `timeout_s`: seconds until its client's
        deadline, None without one. `hashes`: the hashes of its prompt's full blocks, empty where they are not known.
        `session`: name of the client's session, whose requests are preferably placed on the same worker; empty without
        one. `ledger`: the account of the request's time, if the caller began one; None: a new one begins now.

        Raises TandemError, and keeps nothing of the request, when it is predicted to miss its latency target or
        deadline (SLO_MISS), the queue is full of requests that precede it (OVERLOADED), or it insists on two workers
        where only single ones can serve it (NO_WORKER)."""
        admission = self._queue.admit(request, now, tenant, timeout_s, hashes, session)
        out: list[Command] = []
        if admission.leaves is not None and admission.error is not None:
            displaced = self._open.get(admission.leaves)
            if displaced is None:  # the newcomer itself
                self._queue.leave(admission.leaves)
                raise admission.error
            self._apply(displaced, partial(displaced.state.failed, admission.error), now, out)
        open_request = self._begin(request, ledger, now, self._config.max_retries)
        open_request.prefill_s = admission.prefill_s
        if timeout_s is not None:
            open_request.deadline = now + timeout_s
        self._place_queued(now, out)
        return AdmittedRequest(open_request, out)

    def probe(self, request: Request, placement: Placement, now: float) -> AdmittedRequest:
        """Begin a test of the link between the two workers of `placement`, and return the open request of the test with
        the commands to carry out. `request`: a `probe_request`; it bypasses queue and router.

        The test has ended when the request ends, after `PROBE_TIMEOUT_S` seconds at most; a failed attempt is not
        retried. Then `state.pulled` of the open request shows the result: it is None unless KV has moved between the
        workers.
        """
        open_request = self._begin(request, None, now, max_retries=0)
        open_request.deadline = now + PROBE_TIMEOUT_S
        open_request.fixed_placement = placement
        out: list[Command] = []
        self._apply(open_request, partial(open_request.state.placed, placement), now, out)
        return AdmittedRequest(open_request, out)

    def cancel(self, request: RequestId, now: float) -> list[Command]:
        """End a request whose client has disconnected or needs no more output, and return the commands to carry out;
        none where the request has ended already."""
        return self._decide(request, RequestState.cancelled, now)

    def finish(self, request: RequestId, choice: int, now: float) -> list[Command]:
        """End one choice of which the client needs no more output, and return the commands to carry out; none where the
        choice or its request has ended already."""
        out = self._decide(request, partial(RequestState.finished, index=choice), now)
        open_request = self._open.get(request)
        if open_request is not None and not open_request.is_queued:
            self.queue.withdraw(request)  # the choice may have been the last one of it that waited
        return out

    def fail(self, request: RequestId, error: TandemError, now: float) -> list[Command]:
        """End a request with an error, and return the commands to carry out; none where the request has ended
        already."""
        return self._decide(request, partial(RequestState.failed, error=error), now)

    def abort(self, request: RequestId, failure: Exception, now: float) -> list[Command]:
        """End a request with an INTERNAL error because the exception `failure` was raised while handling it, and return
        the commands to carry out; none where the request has ended already."""
        out: list[Command] = []
        open_request = self._open.get(request)
        if open_request is not None:
            self._abort(open_request, failure, now, out)
        return out

    # ---- what workers report

    def on_worker_events(self, worker: WorkerRef, events: Sequence[JobEvent], now: float) -> list[Command]:
        """Apply the events that a worker reports about its jobs, in order, and return the commands to carry out. Events
        of requests that have ended are ignored. Requests that return to the queue are placed again at once."""
        out: list[Command] = []
        has_queued = False
        for event in events:
            open_request = self._open.get(event.key.request)
            if open_request is None:
                continue
            open_request.progress_at = now
            if type(event) is not Token:
                self._learn(open_request, worker, event, now, out)
            # A job's first token, and one after a pause, reports more than what was sampled.
            elif event.num_cached_tokens is not None or event.stages is not None or event.preemption is not None:
                self._learn_from_token(open_request, worker, event, now, out)
            elif open_request.state.streamed(worker, event.key, event.index, (event.token.id,)):
                open_request.delivered_at = now
                open_request.has_begun = True
                self.queue.charge_output(event.key.request, 1)
                out.append(event)
                if open_request.ledger.phase is not LedgerPhase.DECODE:
                    open_request.move_ledger(now)
                continue
            self._apply(open_request, partial(open_request.state.reported, worker, event), now, out)
            has_queued |= open_request.is_queued
        if has_queued:
            self._place_queued(now, out)
        return out

    def on_tokens(self, worker: WorkerRef, key: JobKey, first_index: int, ids: Sequence[int], now: float) -> bool:
        """Record consecutive tokens of one choice in one call, and return whether they can be delivered.

        True: the caller delivers all of them to the client. False: nothing has changed, and the caller passes each
        token to `on_worker_events`. `ids`: the token ids from output position `first_index` on.
        """
        open_request = self._open.get(key.request)
        if open_request is None or not open_request.state.streamed(worker, key, first_index, ids):
            return False
        open_request.progress_at = now
        open_request.delivered_at = now
        open_request.has_begun = True
        self.queue.charge_output(key.request, len(ids))
        open_request.move_ledger(now)
        return True

    def on_submit_result(self, worker: WorkerRef, key: JobKey, error: TandemError | None, now: float) -> list[Command]:
        """Apply the result of submitting the job `key` to a worker, and return the commands to carry out. `error`: None
        where the worker has accepted the job; else why it was rejected (WORKER_LOST: the worker could not be
        reached)."""
        out: list[Command] = []
        open_request = self._open.get(key.request)
        if open_request is None:
            return out
        if error is None:
            open_request.progress_at = now
            self._apply(open_request, partial(open_request.state.accepted, worker, key), now, out)
            if open_request.state.phase is JobGroupPhase.RUNNING:
                open_request.has_begun = True
                if self._queue.accepted(open_request.id):
                    self._place_queued(now, out)
        elif open_request.fixed_placement is not None and error.kind is ErrorKind.WORKER_LOST:
            # A probe has no other workers.
            self._apply(open_request, partial(open_request.state.failed, error), now, out)
        else:
            if error.kind is ErrorKind.OVERLOADED:
                self._queue.count_refusal(key.request, now)
            self._apply(open_request, partial(open_request.state.refused, worker, key, error), now, out)
        if open_request.is_queued and key.request in self._open:
            self._place_queued(now, out)
        return out

    def on_worker_lost(self, worker: WorkerRef, reason: str, now: float) -> list[Command]:
        """Handle the loss of a worker, and return the commands to carry out. Each request that had a job there is
        retried on other workers, or goes on with KV that another worker still offers, or fails. Requests for which no
        other worker has room wait in the queue. `reason`: why the worker is lost, for error texts."""
        self._queue.forget(worker)
        self._rebalancer.forget(worker)
        out: list[Command] = []
        for open_request in self.requests():
            self._apply(open_request, partial(open_request.state.worker_lost, worker, reason), now, out)
        self._place_queued(now, out)
        return out

    def on_capacity(self, worker: WorkerView, now: float) -> list[Command]:
        """Place waiting requests if `worker`, which reports more capacity, may take one of them; return the commands to
        carry out."""
        return self.place_queued(now) if self._queue.may_go_on(worker) else []

    def place_queued(self, now: float) -> list[Command]:
        """Place waiting requests in queue order, until the first request of each model and lane finds no worker; return
        the commands to carry out."""
        out: list[Command] = []
        self._place_queued(now, out)
        return out

    # ---- time

    def overdue(self, now: float) -> Sequence[RequestId]:
        """Return the requests that are overdue at the time `now`: `on_timer` would end them, or retry them on other
        workers because theirs make no progress."""
        return [
            open_request.id
            for open_request in self._open.values()
            if self._timeout(open_request, now) is not None or self._is_stalled(open_request, now)
        ]

    def on_timer(self, now: float) -> list[Command]:
        """End or retry overdue requests, repeat searches for workers that take over offered KV, charge KV time, place
        waiting requests, and return the commands to carry out.

        Call it every `TICK_S` seconds.
        """
        out: list[Command] = []
        for open_request in self.requests():
            if now - open_request.kv_charged_at >= KV_PERIOD_S:
                self._charge_kv_time(open_request, now)
            self._apply(open_request, partial(self._timed_out, open_request, now), now, out)
            for search in open_request.state.seeks():
                self._find_consumer(open_request, search, now, out)
        self._place_queued(now, out)
        self.queue.sample(now)
        return out

    def rebalance(self, now: float) -> list[Command]:
        """Begin moves of running sequences to other decode workers, or only report them, as `gateway.rebalance` says,
        and report moves that have ended. Returns the commands to carry out.

        Sequences move from slow workers to faster ones. Preempted sequences, and those on workers that only compute
        prompts now, move to workers with room. Call it every `TICK_S` seconds.
        """
        out: list[Command] = []
        if self._config.rebalance == "off" or not self._rebalancer.is_due(now):
            return out
        states = {request: one.state for request, one in self._open.items()}
        of_clients = [one.state for one in self._of_clients()]
        out += self._rebalancer.ended(states, now)
        failing = self._queue.breaker.excluded(now)
        moves = self._rebalancer.plan(of_clients, failing, now)
        unfit = failing | self._queue.full(Lane.BATCH, now)  # those that refused a request of any lane
        moves += self._rebalancer.plan_resumes(states, unfit, now)
        moves += self._rebalancer.plan_leaves(of_clients, unfit, now)
        for move in moves:
            if self._config.rebalance == "on":
                relocate = partial(RequestState.relocate, choice=move.key.choice, target=move.target)
                out += self._decide(move.key.request, relocate, now)
            else:
                out.append(ReportMove(move, MoveOutcome.ADVISED))
        return out

    # ---- inside

    def _of_clients(self) -> list[OpenRequest]:
        """Return the open requests of clients, that is all but link probes."""
        return [open_request for open_request in self.requests() if open_request.fixed_placement is None]

    def _begin(self, request: Request, ledger: PhaseLedger | None, now: float, max_retries: int) -> OpenRequest:
        state = RequestState(request, self._new_handoff(request.id), max_retries)
        open_request = self._open[request.id] = OpenRequest(state, PhaseLedger(now) if ledger is None else ledger, now)
        open_request.move_ledger(now)
        return open_request

    def _place_queued(self, now: float, out: list[Command]) -> None:
        for turn in self._queue.turns(now):
            open_request = self._open[turn.request]
            self._workers.add_inflight(turn.placement.prefill, turn.request, self.queue.charged(turn.request))
            open_request.predicted = turn.predicted
            open_request.ledger.add_queue_waits(turn.waits)
            if self._config.wake_timeout_s:
                request = open_request.state.request
                served_since = self._queue.served_since(request.model, request.lane)
                open_request.state.was_held |= served_since > open_request.delivered_at
            self._apply(open_request, partial(open_request.state.placed, turn.placement), now, out)

    def _decide(
        self, request: RequestId, decide: Callable[[RequestState], Sequence[StateCommand]], now: float
    ) -> list[Command]:
        out: list[Command] = []
        open_request = self._open.get(request)
        if open_request is not None:
            self._apply(open_request, partial(decide, open_request.state), now, out)
        return out

    def _apply(
        self, open_request: OpenRequest, decide: Callable[[], Sequence[StateCommand]], now: float, out: list[Command]
    ) -> None:
        """Append the driver's commands that result from `decide` to `out`. An exception ends the request and is not
        raised."""
        try:
            for command in decide():
                self._resolve(open_request, command, now, out)
            open_request.move_ledger(now)
        except Exception as failure:
            self._abort(open_request, failure, now, out)

    def _resolve(self, open_request: OpenRequest, command: StateCommand, now: float, out: list[Command]) -> None:
        match command:
            case Token():
                open_request.delivered_at = open_request.progress_at
                open_request.has_begun = True
                self.queue.charge_output(open_request.id, 1)
                out.append(command)
            case PromptLogprobs() | Finished():
                open_request.delivered_at = now
                open_request.has_begun = open_request.has_begun or isinstance(command, Finished)
                out.append(command)
            case Requeue():
                self._requeue(open_request, command, now)
            case FindConsumer():
                self._find_consumer(open_request, command, now, out)
            case ReportWorkerFailure(workers):
                self._queue.breaker.failed(workers, now)
                out.append(command)
            case SubmitJob(worker, job):
                self._workers.add_inflight_job(worker, job)
                out.append(command)
            case EndRequest(outcome=outcome):
                self._end(open_request, outcome, now, out)
            case _:
                out.append(command)

    def _requeue(self, open_request: OpenRequest, place: Requeue, now: float) -> None:
        """Return a request to its place in the queue. A probe has no place there and is sent again at the next tick."""
        self._forget_placement(open_request)
        if open_request.fixed_placement is None:
            self._queue.refused(place.excluded, open_request.state.request.lane, now)
            if place.has_failed:
                open_request.failed_at = now
                self._queue.failed(open_request.id, place)
            self._queue.put_back(open_request.id, now)

    def _find_consumer(self, open_request: OpenRequest, search: FindConsumer, now: float, out: list[Command]) -> None:
        """Search for a worker that takes over KV, and pass the result to the state machine of the request. For a probe,
        no worker is searched for."""
        consumer = None
        if open_request.fixed_placement is None:
            request = open_request.state.request
            consumer = self._queue.pick_consumer(request.model, request.lane, search, now)
        self._apply(open_request, partial(open_request.state.consumer_found, search.choice, consumer), now, out)

    def _end(self, open_request: OpenRequest, outcome: Finished | TandemError, now: float, out: list[Command]) -> None:
        if self._open.pop(open_request.id, None) is None:
            return
        self._charge_kv_time(open_request, now)
        self._forget_placement(open_request)
        self._queue.leave(open_request.id, open_request.state.num_cached)
        open_request.has_begun = open_request.has_begun or isinstance(outcome, Finished)
        out.append(EndRequest(open_request.id, outcome))

    def _forget_placement(self, open_request: OpenRequest) -> None:
        """Remove the request's prompt tokens from the load of the worker that was to compute them."""
        if open_request.state.placement is not None:
            self._workers.add_inflight(open_request.state.placement.prefill, open_request.id, 0)

    def _abort(self, open_request: OpenRequest, failure: Exception, now: float, out: list[Command]) -> None:
        error = TandemError(ErrorKind.INTERNAL, f"the gateway failed while it processed this request: {failure!r}")
        error.__cause__ = failure
        try:
            for command in open_request.state.failed(error):
                self._resolve(open_request, command, now, out)
        except Exception as another:
            failure.add_note(f"and at ending it: {another!r}")
        self._end(open_request, error, now, out)

    def _charge_kv_time(self, open_request: OpenRequest, now: float) -> None:
        if self._config.kv_time_tokens:
            self.queue.charge_kv_time(open_request.id, open_request.take_kv_time(now))

    # ---- time and what workers teach

    def _timed_out(self, open_request: OpenRequest, now: float) -> Sequence[StateCommand]:
        error = self._timeout(open_request, now)
        if error is not None:
            return open_request.state.failed(error)
        if open_request.is_queued:
            return (
                () if open_request.fixed_placement is None else open_request.state.placed(open_request.fixed_placement)
            )
        if self._is_stalled(open_request, now):
            open_request.progress_at = now
            waited = f"{self._config.progress_timeout_s:g} s (gateway.progress_timeout_s)"
            return open_request.state.stalled(f"its workers made no progress for {waited}")
        return ()

    def _timeout(self, open_request: OpenRequest, now: float) -> TandemError | None:
        """Return the error with which an overdue request ends; None where it may go on."""
        if open_request.deadline is not None:
            prefill_s = open_request.prefill_s if open_request.is_queued else 0.0
            error = deadline_error(open_request.deadline - now, prefill_s)
            if error is not None:
                return error
        return self._queue_timeout(open_request, now) if open_request.is_queued else None

    def _queue_timeout(self, open_request: OpenRequest, now: float) -> TandemError | None:
        """Return the NO_WORKER error for a queued request that has waited too long for workers, or None when it may
        continue to wait.

        The wait begins when the client last got something or an attempt last failed, the number of which is limited. A
        request that returns to the queue because workers had no room does not begin it anew. With
        `gateway.wake_timeout_s` a request may wait that long while no worker could serve it, and `queue_timeout_s` from
        then on. Where workers are lost again and again, the wait after each failed attempt is at most the sum of both.
        """
        config, since = self._config, max(open_request.delivered_at, open_request.failed_at)
        model, lane = open_request.state.request.model, open_request.state.request.lane
        no_worker_since = self._queue.hopeless_since(model, lane)
        waited_s = now - since
        unserved_s = -math.inf if no_worker_since is None else now - max(since, no_worker_since)
        if config.wake_timeout_s:
            served_since = now if no_worker_since is not None else self._queue.served_since(model, lane)
            held_s = min(max(0.0, served_since - since), config.wake_timeout_s)
            limits = [
                (unserved_s, config.wake_timeout_s, "wake_timeout_s"),
                (waited_s, held_s + config.queue_timeout_s, "wake_timeout_s and queue_timeout_s"),
            ]
        else:
            limits = [
                (waited_s, config.queue_timeout_s, "queue_timeout_s"),
                (unserved_s, config.no_worker_wait_s, "no_worker_wait_s"),
            ]
        for spent_s, limit_s, setting in limits:
            if spent_s >= limit_s:
                why = self._queue.why(model, lane, now)
                message = f"no worker could take the request within {limit_s:g} s (gateway.{setting}): {why}"
                return TandemError(ErrorKind.NO_WORKER, message, retry_after_s=1.0)
        return None

    def _is_stalled(self, open_request: OpenRequest, now: float) -> bool:
        return not open_request.is_queued and now - open_request.progress_at >= self._config.progress_timeout_s

    def _learn(
        self, open_request: OpenRequest, worker: WorkerRef, event: JobEvent, now: float, out: list[Command]
    ) -> None:
        """Update the circuit breaker, the rebalancer and the measured bandwidths by an event that is not a token."""
        if isinstance(event, Finished):
            self._queue.breaker.clear(worker)
        elif isinstance(event, Preempted):
            if self._config.rebalance != "off" and open_request.fixed_placement is None:
                self._rebalancer.preempted(event.key, event.next_index, worker, now)
        elif isinstance(event, KVReceived):
            self._note_pause(open_request, event.key, now)
            placement = open_request.state.placement
            if event.source is not None:
                out.append(KVMoved(event.source, worker, event.num_bytes, is_prefix=True))
            # Of KV that came to another worker than the chosen one, the source is not known.
            elif placement is not None and placement.decode == worker:
                self._workers.measured(placement, event)
                if open_request.fixed_placement is None:
                    out.append(KVMoved(placement.prefill, worker, event.num_bytes, is_prefix=False))

    def _note_pause(self, open_request: OpenRequest, key: JobKey, now: float) -> None:
        """Record the pause of a preempted choice that the job `key` has taken over on another worker, which does not
        know of the pause."""
        taken = self._rebalancer.taken_over(key, now)
        if taken is not None:
            source_key, next_index, seconds = taken
            open_request.ledger.add_preemption(source_key, next_index, Preemption(Pauses(1, seconds)))

    def _learn_from_token(
        self, open_request: OpenRequest, worker: WorkerRef, token: Token, now: float, out: list[Command]
    ) -> None:
        """Record what a token of an open job reports of the job's time and of the cached part of the prompt, even where
        the client has the token already."""
        if not open_request.state.attempts.is_open(worker, token.key.attempt):
            return
        if token.stages is not None:
            open_request.ledger.add_job_stages(token.key.attempt, token.stages)
        if token.preemption is not None:
            open_request.ledger.add_preemption(token.key, token.index, token.preemption)
        if token.num_cached_tokens is None:
            return
        self._compare(open_request, token.num_cached_tokens, now)
        if not open_request.is_prompt_computed and open_request.fixed_placement is None:
            open_request.is_prompt_computed = True
            out.append(PromptComputed(open_request.state.request, token.num_cached_tokens))

    def _compare(self, open_request: OpenRequest, num_cached: int, now: float) -> None:
        """Compare the predicted prefix hits of a request with the `num_cached` prompt tokens that its worker did not
        compute."""
        placement = open_request.state.placement
        fetch = None if placement is None else placement.prefix
        predicted, open_request.predicted = open_request.predicted, ()
        for prediction in predicted:
            if self._prefixes is not None:
                self._prefixes.reported(prediction, num_cached)
            if placement is not None and fetch is not None and fetch.producer == prediction.worker:
                link = prediction.worker, placement.prefill
                self._queue.on_prefix_fetch(link, num_cached > prediction.num_before, now)


def deadline_error(left_s: float, prefill_s: float) -> TandemError | None:
    """Return the error for a request that cannot be answered before its client's deadline, or None when it can.

    `left_s`: seconds until the deadline. `prefill_s`: the least seconds that computing the prompt still takes; 0: only
    the deadline itself is checked. The error is DEADLINE when the deadline has passed, else SLO_MISS.
    """
    if left_s <= 0:
        return TandemError(ErrorKind.DEADLINE, "the client's deadline has passed", reason="deadline")
    if left_s < prefill_s:
        reason = f"rejected, because the prompt takes {prefill_s:.3g} s and the client's deadline leaves {left_s:.3g} s"
        return TandemError(ErrorKind.SLO_MISS, reason, retry_after_s=1.0, reason="deadline")
    return None
