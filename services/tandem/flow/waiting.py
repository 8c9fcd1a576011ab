"""The requests that wait at a gateway: who may come in, whose turn it is and where it goes; never sends one, reads a
clock or hears of a worker but through the roster.

Only the first of each model is ever tried, so what finds no room costs one placement when something changes, however
many wait behind it. It stays first: nobody overtakes it but those whose turn comes before its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import NamedTuple

from tandem.admission.line import Line
from tandem.admission.predict import Forecast, queue_full, ttft_error
from tandem.admission.ticket import Ticket
from tandem.core.config import GatewayConfig
from tandem.core.errors import TandemError
from tandem.core.ids import RequestId, WorkerRef
from tandem.core.request import Request
from tandem.flow.commands import Seek
from tandem.flow.expectation import expect
from tandem.routing.breaker import Breaker
from tandem.routing.placement import NoPlacement, Placement
from tandem.routing.roster import Roster
from tandem.routing.router import BUSY, Disaggregation, Want, place
from tandem.routing.takeover import find_taker
from tandem.routing.view import WorkerView
from tandem.sched.targets import NO_TARGETS, LatencyTargets

REFUSAL_BACKOFF_S = 0.1
"""A worker that refused is asked again after so long, or when it says that it may take more."""


class Turn(NamedTuple):
    request: RequestId
    placement: Placement


@dataclass(frozen=True, slots=True)
class Admitted:
    """`leaves` must end because more wait than may, with `error`; it may be the request itself. `prefill_s`: the least
    that its own prompt takes, 0 where nobody knows."""

    leaves: RequestId | None = None
    error: TandemError | None = None
    prefill_s: float = 0.0


class Waiting:
    """`line` has a standing for each request from `admit` until `line.leave`."""

    def __init__(self, roster: Roster, config: GatewayConfig, targets: LatencyTargets = NO_TARGETS) -> None:
        self.line = Line(config.max_queued)
        self.breaker = Breaker()
        self._roster = roster
        self._config = config
        self._targets = targets
        self._policies: dict[RequestId, Disaggregation] = {}
        self._full_until: dict[WorkerRef, float] = {}
        self._blocked: dict[str, Want] = {}
        self._why: dict[str, NoPlacement] = {}
        self._hopeless_since: dict[str, float] = {}
        self._avoided: dict[RequestId, frozenset[WorkerRef]] = {}

    def admit(
        self, request: Request, *, weight: float = 1.0, timeout_s: float | None = None,
        policy: Disaggregation | None = None,
    ) -> Admitted:  # fmt: skip
        """Take a place in the line. `timeout_s`: what the client's deadline leaves. Raises TandemError(SLO_MISS), and
        keeps nothing, for what by prediction comes too late."""
        ticket = self.line.ticket(request, weight)
        target_s = self._targets.lane(request.lane).ttft_s
        expected = None
        if timeout_s is not None or target_s > 0:
            expected = self._expect(request.model, ticket)
        if expected is not None and self._config.early_rejection == "on":
            error = ttft_error(expected, target_s, timeout_s)
            if error is not None:
                raise error
        leaves = self.line.enter(request, ticket)
        if policy is not None:
            self._policies[request.id] = policy
        prefill_s = 0.0 if expected is None else expected.prefill_s
        if leaves is None:
            return Admitted(prefill_s=prefill_s)
        return Admitted(leaves, queue_full(self._config.max_queued, self._expect(request.model, ticket)), prefill_s)

    def next(self, now: float) -> Turn | None:
        """The request that is sent now and where to; None when the first of every model must wait. It has left its
        place, so this is called until there is none."""
        for model in self.line.models():
            turn = self._next(model, now)
            if turn is not None:
                return turn
        return None

    def leave(self, request: RequestId, num_cached: int | None = None) -> None:
        """It has ended; `num_cached` as `Line.leave`."""
        self.line.leave(request, num_cached)
        self._policies.pop(request, None)
        self._avoided.pop(request, None)

    def why(self, model: str, now: float) -> str:
        """What the first in line waits for, for people."""
        outcome, excluded = self._why.get(model), self.breaker.why(now)
        return "; ".join(filter(None, ("its turn" if outcome is None else outcome.reason, excluded)))

    def hopeless_since(self, model: str) -> float | None:
        """Since when there has been no worker at all for the first in line; None: there is one, if perhaps a full
        one."""
        return self._hopeless_since.get(model)

    def taker(self, model: str, seek: Seek, now: float) -> WorkerRef | None:
        """Who goes on with what another worker offers, in no line; None: nobody can now."""
        self.refused(seek.excluded, now)
        return find_taker(self._roster, model, seek.source, seek.unfit | self._excluded(now))

    # ---- what is heard of workers

    def refused(self, workers: Iterable[WorkerRef], now: float) -> None:
        self._full_until.update(dict.fromkeys(workers, now + REFUSAL_BACKOFF_S))

    def failed(self, request: RequestId, workers: frozenset[WorkerRef]) -> None:
        """They had taken a request that goes to others from now on, where there are any; nothing when it has ended."""
        if request in self.line:
            self._avoided[request] = self._avoided.get(request, frozenset()) | workers

    def may_go_on(self, view: WorkerView) -> bool:
        """A worker says that it may take more: whether one that waits may now be sent."""
        if not len(self.line):
            return False
        if self._full_until.pop(view.ref, None) is not None:
            return True
        want = self._blocked.get(view.model)
        # What waits for a worker that computes prompts is helped by no other, nor by one that still has enough.
        return want is None or (self._computes(view) and view.takes(want.num_tokens, want.lane))

    # ---- inside

    def _next(self, model: str, now: float) -> Turn | None:
        request = self.line.first(model)
        if request is None:
            return None
        want = Want(model, self.line.charged(request), self.line.lane(request))
        outcome = self._place(request, want, now)
        if isinstance(outcome, Placement):
            self._blocked.pop(model, None)
            self._hopeless_since.pop(model, None)
            self.breaker.tried((outcome.prefill, outcome.decode), now)
            self.line.send(request)
            return Turn(request, outcome)
        self._why[model] = outcome
        if outcome.may_pass:
            self._hopeless_since.pop(model, None)
        else:
            self._hopeless_since.setdefault(model, now)
        if outcome is BUSY:
            self._blocked[model] = want
        else:
            self._blocked.pop(model, None)
        return None

    def _place(self, request: RequestId, want: Want, now: float) -> Placement | NoPlacement:
        policy = self._policies.get(request, self._config.disaggregation)
        excluded, avoided = self._excluded(now), self._avoided.get(request)
        if avoided:
            outcome = place(self._roster, want, policy, excluded | avoided)
            # BUSY: others are there, and soon have room.
            if isinstance(outcome, Placement) or outcome is BUSY:
                return outcome
        return place(self._roster, want, policy, excluded)

    def _excluded(self, now: float) -> Set[WorkerRef]:
        self._full_until = {worker: until for worker, until in self._full_until.items() if until > now}
        return self._full_until.keys() | self.breaker.excluded(now)

    def _computes(self, view: WorkerView) -> bool:
        return view.prefills or self._config.disaggregation == "off"

    def _expect(self, model: str, ticket: Ticket) -> Forecast | None:
        return expect(self.line, model, ticket, self._roster.prefillers(model))
