"""The requests that wait at a gateway: who may come in, whose turn it is and where it goes; never sends one, reads a
clock or hears of a worker but through the roster.

Only the first of each model is ever tried, so what finds no room costs one placement when something changes, however
many wait behind it. It stays first: nobody overtakes it but those whose turn comes before its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from tandem.admission.queue_item import QueueItem
from tandem.admission.request_queue import RequestQueue
from tandem.admission.ttft_predictor import TtftForecast, queue_full, ttft_error
from tandem.core.config import GatewayConfig
from tandem.core.errors import TandemError
from tandem.core.ids import BlockHash, RequestId, WorkerRef
from tandem.core.request import Request
from tandem.flow.commands import FindConsumer, Requeue
from tandem.flow.expectation import expect
from tandem.routing.candidates import Candidates, ExcludingCandidates
from tandem.routing.circuit_breaker import CircuitBreakers
from tandem.routing.placement import NoPlacement, Placement
from tandem.routing.prefix_fetch_backoff import PrefixFetchBackoff
from tandem.routing.prefix_index import PrefixHit
from tandem.routing.router import BUSY, BY_COST, WORTH_WAITING, Disaggregation, Routing, place, place_undivided
from tandem.routing.routing_request import EXPECTED_OUTPUT, RoutingRequest
from tandem.routing.takeover import pick_migration_target
from tandem.routing.worker_ranking import WorkerRanking
from tandem.routing.worker_view import Pair, WorkerView
from tandem.sched.slo_targets import NO_TARGETS, LatencyTargets

KV_LOST = "kv_lost"
"""Why a request that might be split is not: its KV did not arrive, more than once."""
REFUSAL_BACKOFF_S = 0.1
"""A worker that refused is asked again after so long, or when it says that it may take more."""


class Prefixes(Protocol):
    """What is known of the blocks that workers hold."""

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerRef, PrefixHit]:
        """What each worker holds of a chain; those that hold nothing are left out."""
        ...


class Dispatchable(NamedTuple):
    """`num_hit_blocks`: leading blocks of the prompt that the worker which computes it probably holds."""

    request: RequestId
    placement: Placement
    num_hit_blocks: int = 0


@dataclass(frozen=True, slots=True)
class _QueuedRequest:
    """What is asked for one that waits or was sent. `is_scored`: every token of its prompt is computed."""

    want: RoutingRequest
    hashes: Sequence[BlockHash]
    mode: Disaggregation | None
    is_scored: bool


@dataclass(frozen=True, slots=True)
class AdmissionResult:
    """`leaves` must end because more wait than may, with `error`; it may be the request itself. `prefill_s`: the least
    that its own prompt takes, 0 where nobody knows."""

    leaves: RequestId | None = None
    error: TandemError | None = None
    prefill_s: float = 0.0


class PlacementQueue:
    """`line` has a standing for each request from `admit` until `line.leave`. `prefixes`: None where nobody keeps
    them."""

    def __init__(
        self, roster: WorkerRanking, config: GatewayConfig, targets: LatencyTargets = NO_TARGETS,
        prefixes: Prefixes | None = None, routing: Routing = BY_COST,
    ) -> None:  # fmt: skip
        self.line = RequestQueue(config.max_queued)
        self.breaker = CircuitBreakers()
        self._prefix_fetches = PrefixFetchBackoff()
        self._roster = roster
        self._config = config
        self._targets = targets
        self._routing = routing
        self._prefixes = prefixes
        self._claims: dict[RequestId, _QueuedRequest] = {}
        self._full_until: dict[WorkerRef, float] = {}
        self._blocked: dict[str, tuple[RoutingRequest, Disaggregation]] = {}
        self._why: dict[str, NoPlacement] = {}
        self._hopeless_since: dict[str, float] = {}
        self._avoided: dict[RequestId, frozenset[WorkerRef]] = {}
        self._undivided: set[RequestId] = set()
        self._num_turns = 0

    def admit(
        self, request: Request, *, weight: float = 1.0, timeout_s: float | None = None,
        policy: Disaggregation | None = None, hashes: Sequence[BlockHash] = (), session: str = "",
    ) -> AdmissionResult:  # fmt: skip
        """Take a place in the line. `timeout_s`: what the client's deadline leaves; `hashes`: of the prompt's full
        blocks, none where nobody knows them; `session`: what belongs together. Raises TandemError(SLO_MISS), and keeps
        nothing, for what by prediction comes too late."""
        ticket = self.line.item_for(request, weight)
        claim = _QueuedRequest(_want(request, session), hashes, policy, is_scored=request.prompt_logprobs is not None)
        target_s = self._targets.lane(request.lane).ttft_s
        expected = None
        if timeout_s is not None or target_s > 0:
            expected = self._expect(ticket, claim)
        if expected is not None and self._config.early_rejection == "on":
            error = ttft_error(expected, target_s, timeout_s)
            if error is not None:
                raise error
        leaves = self.line.enter(request, ticket)
        self._claims[request.id] = claim
        prefill_s = 0.0 if expected is None else expected.prefill_s
        if leaves is None:
            return AdmissionResult(prefill_s=prefill_s)
        return AdmissionResult(leaves, queue_full(self._config.max_queued, self._expect(ticket, claim)), prefill_s)

    def next(self, now: float) -> Dispatchable | None:
        """The request that is sent now and where to; None when the first of every model must wait. It has left its
        place, so this is called until there is none."""
        for model in self.line.models():
            turn = self._next(model, now)
            if turn is not None:
                return turn
        return None

    def leave(self, request: RequestId, num_cached: int | None = None) -> None:
        """It has ended; `num_cached` as `RequestQueue.leave`."""
        self.line.leave(request, num_cached)
        self._claims.pop(request, None)
        self._avoided.pop(request, None)
        self._undivided.discard(request)

    def why(self, model: str, now: float) -> str:
        """What the first in line waits for, for people."""
        outcome, excluded = self._why.get(model), self.breaker.why(now)
        return "; ".join(filter(None, ("its turn" if outcome is None else outcome.reason, excluded)))

    def hopeless_since(self, model: str) -> float | None:
        """Since when there has been no worker at all for the first in line; None: there is one, if perhaps a full
        one."""
        return self._hopeless_since.get(model)

    def pick_consumer(self, model: str, seek: FindConsumer, now: float) -> WorkerRef | None:
        """Who goes on with what another worker offers, in no line; None: nobody can now."""
        self.refused(seek.excluded, now)
        unfit, ill = seek.unfit | self._full(now), self.breaker.excluded(now)
        consumer = pick_migration_target(self._roster, model, seek.source, unfit | ill)
        if consumer is None and ill:
            consumer = pick_migration_target(self._roster, model, seek.source, unfit | self.breaker.resting(now))
        if consumer is not None:
            self.breaker.on_attempt((consumer,), now)
        return consumer

    # ---- what is heard of workers

    def on_prefix_fetch(self, link: Pair, has_come: bool, now: float) -> None:
        """Whether anything came of a prefix fetch that was to be read from one worker by another."""
        if has_come:
            self._prefix_fetches.on_success(link)
        else:
            self._prefix_fetches.failed(link, now)

    def forget(self, worker: WorkerRef) -> None:
        """It is gone."""
        self.breaker.forget(worker)
        self._prefix_fetches.forget(worker)

    def refused(self, workers: Iterable[WorkerRef], now: float) -> None:
        self._full_until.update(dict.fromkeys(workers, now + REFUSAL_BACKOFF_S))

    def failed(self, request: RequestId, place: Requeue) -> None:
        """Workers had taken a request that goes to others from now on, where there are any; nothing when it has
        ended."""
        if request in self.line:
            self._avoided[request] = self._avoided.get(request, frozenset()) | place.excluded
        if request in self.line and place.is_undivided:
            self._undivided.add(request)

    def may_go_on(self, view: WorkerView) -> bool:
        """A worker says that it may take more: whether one that waits may now be sent."""
        if not len(self.line):
            return False
        if self._full_until.pop(view.ref, None) is not None:
            return True
        blocked = self._blocked.get(view.model)
        if blocked is None:
            return True
        # What waits for a worker that computes prompts is helped by no other, nor by one that still has enough.
        want, mode = blocked
        num_lent = want.max_remote_tokens(view.block_size) if self._routing.remote_prefix else 0
        return (view.prefills or mode in ("off", "auto")) and want.fits(view, num_lent)

    # ---- inside

    def _next(self, model: str, now: float) -> Dispatchable | None:
        request = self.line.first(model)
        if request is None:
            return None
        claim = self._claims[request]
        want = self._looked_up(claim, self.line.charged(request))
        if shut := self._prefix_fetches.links(now):
            want = replace(want, blocked_links=shut)
        mode = claim.mode or self._config.disaggregation
        outcome = self._place(request, want, mode, now)
        if isinstance(outcome, Placement):
            return self._sent(request, want, outcome, now)
        self._why[model] = outcome
        if outcome.may_pass:
            self._hopeless_since.pop(model, None)
        else:
            self._hopeless_since.setdefault(model, now)
        if outcome is BUSY:
            self._blocked[model] = want, mode
        else:
            self._blocked.pop(model, None)
        return None

    def _looked_up(self, claim: _QueuedRequest, num_charged: int) -> RoutingRequest:
        """With what workers hold of the prompt now. Where nobody knows, `num_charged` tokens are to compute."""
        want = replace(claim.want, num_tokens=num_charged, turn=self._num_turns)
        if claim.is_scored:
            return replace(want, hits={})
        if self._prefixes is None or not claim.hashes:
            return want
        return replace(want, hits=self._prefixes.match(claim.hashes))

    def _sent(self, request: RequestId, want: RoutingRequest, placement: Placement, now: float) -> Dispatchable:
        self._blocked.pop(want.model, None)
        self._hopeless_since.pop(want.model, None)
        self.breaker.on_attempt((placement.prefill, placement.decode), now)
        self._num_turns += 1
        worker = self._roster.find(want.model, placement.prefill)
        assert worker is not None, f"{placement.prefill} was chosen"
        picked = placement.picked
        self.line.send(request, want.num_uncached(worker) if picked is None else picked.cost.prefill.num_uncached)
        hit = None if want.hits is None else want.hits.get(worker.ref)
        return Dispatchable(request, placement, 0 if hit is None else hit.num_blocks)

    def _place(
        self, request: RequestId, want: RoutingRequest, mode: Disaggregation, now: float
    ) -> Placement | NoPlacement:
        """Who is ill counts as absent, unless nobody else is there: then it is tried, once in a while."""
        full, ill, avoided = self._full(now), self.breaker.excluded(now), self._avoided.get(request)
        among = ExcludingCandidates(self._roster, ill) if ill else self._roster
        choose = partial(self._choose, request, want, mode)
        if avoided:
            outcome = choose(among, full | avoided)
            # Otherwise others are there, and soon have room.
            if isinstance(outcome, Placement) or outcome is BUSY or outcome is WORTH_WAITING:
                return outcome
        outcome = choose(among, full)
        if not ill or not _is_hopeless(outcome) or (full and not _is_hopeless(choose(among, frozenset()))):
            return outcome
        return choose(self._roster, full | self.breaker.resting(now))

    def _choose(
        self,
        request: RequestId,
        want: RoutingRequest,
        mode: Disaggregation,
        among: Candidates,
        excluded: Set[WorkerRef],
    ) -> Placement | NoPlacement:
        if request in self._undivided and mode != "strict":
            return place_undivided(among, want, KV_LOST, excluded, self._routing)
        return place(among, want, mode, excluded, self._routing)

    def _full(self, now: float) -> Set[WorkerRef]:
        self._full_until = {worker: until for worker, until in self._full_until.items() if until > now}
        return self._full_until.keys()

    def _expect(self, ticket: QueueItem, claim: _QueuedRequest) -> TtftForecast | None:
        """With the longest prefix that any worker holds."""
        workers = self._roster.prefillers(claim.want.model)
        want = self._looked_up(claim, ticket.num_tokens)
        best = min(map(want.num_uncached, workers), default=ticket.num_tokens)
        return expect(self.line, claim.want.model, replace(ticket, num_tokens=max(1, best)), workers)


def _is_hopeless(outcome: Placement | NoPlacement) -> bool:
    return isinstance(outcome, NoPlacement) and not outcome.may_pass


def _want(request: Request, session: str) -> RoutingRequest:
    num_prompt, num_output = len(request.prompt_tokens), min(request.sampling.max_tokens, EXPECTED_OUTPUT)
    return RoutingRequest(
        request.model,
        lane=request.lane,
        num_prompt=num_prompt,
        num_output=num_output * request.num_choices,
        key=request.id,
        session=session,
    )
