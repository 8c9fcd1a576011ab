"""The requests that wait at a gateway: who may come in, whose turn it is and where it goes; never sends one, reads a
clock or hears of a worker but through the roster.

Only the first of each model is ever tried, so what finds no room costs one placement when something changes, however
many wait behind it. It stays first: nobody overtakes it but those whose turn comes before its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from tandem.admission.line import Line
from tandem.admission.predict import Forecast, queue_full, ttft_error
from tandem.admission.ticket import Ticket
from tandem.core.config import GatewayConfig
from tandem.core.errors import TandemError
from tandem.core.ids import BlockHash, RequestId, WorkerRef
from tandem.core.request import Request
from tandem.flow.expectation import expect
from tandem.routing.placement import NoPlacement, Placement
from tandem.routing.prefix_table import PrefixHit
from tandem.routing.roster import Roster
from tandem.routing.router import BUSY, BY_COST, Disaggregation, Routing, place, place_taker
from tandem.routing.view import WorkerView
from tandem.routing.want import EXPECTED_OUTPUT, Want
from tandem.sched.targets import NO_TARGETS, LatencyTargets

REFUSAL_BACKOFF_S = 0.1
"""A worker that refused is asked again after so long, or when it says that it may take more."""


class Prefixes(Protocol):
    """What is known of the blocks that workers hold."""

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerRef, PrefixHit]:
        """What each worker holds of a chain; those that hold nothing are left out."""
        ...


class Turn(NamedTuple):
    """`num_hit_blocks`: leading blocks of the prompt that the worker which computes it probably holds."""

    request: RequestId
    placement: Placement
    num_hit_blocks: int = 0


@dataclass(frozen=True, slots=True)
class _Claim:
    """What is asked for one that waits or was sent. `is_scored`: every token of its prompt is computed."""

    want: Want
    hashes: Sequence[BlockHash]
    mode: Disaggregation | None
    is_scored: bool


@dataclass(frozen=True, slots=True)
class Admitted:
    """`leaves` must end because more wait than may, with `error`; it may be the request itself. `prefill_s`: the least
    that its own prompt takes, 0 where nobody knows."""

    leaves: RequestId | None = None
    error: TandemError | None = None
    prefill_s: float = 0.0


class Waiting:
    """`line` has a standing for each request from `admit` until `line.leave`. `prefixes`: None where nobody keeps
    them."""

    def __init__(
        self, roster: Roster, config: GatewayConfig, targets: LatencyTargets = NO_TARGETS,
        prefixes: Prefixes | None = None, routing: Routing = BY_COST,
    ) -> None:  # fmt: skip
        self.line = Line(config.max_queued)
        self._roster = roster
        self._config = config
        self._targets = targets
        self._routing = routing
        self._prefixes = prefixes
        self._claims: dict[RequestId, _Claim] = {}
        self._full_until: dict[WorkerRef, float] = {}
        self._blocked: dict[str, tuple[Want, Disaggregation]] = {}
        self._why: dict[str, str] = {}
        self._num_turns = 0

    def admit(
        self, request: Request, *, weight: float = 1.0, timeout_s: float | None = None,
        policy: Disaggregation | None = None, hashes: Sequence[BlockHash] = (), session: str = "",
    ) -> Admitted:  # fmt: skip
        """Take a place in the line. `timeout_s`: what the client's deadline leaves; `hashes`: of the prompt's full
        blocks, none where nobody knows them; `session`: what belongs together. Raises TandemError(SLO_MISS), and keeps
        nothing, for what by prediction comes too late."""
        ticket = self.line.ticket(request, weight)
        claim = _Claim(_want(request, session), hashes, policy, is_scored=request.prompt_logprobs is not None)
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
            return Admitted(prefill_s=prefill_s)
        return Admitted(leaves, queue_full(self._config.max_queued, self._expect(ticket, claim)), prefill_s)

    def next(self, now: float) -> Turn | None:
        """The request that is sent now and where to; None when the first of every model must wait. It has left its
        place, so this is called until there is none."""
        self._full_until = {worker: until for worker, until in self._full_until.items() if until > now}
        for model in self.line.models():
            turn = self._next(model)
            if turn is not None:
                return turn
        return None

    def taker(self, request: RequestId, giver: WorkerView, excluded: frozenset[WorkerRef]) -> Placement | NoPlacement:
        """Who goes on with a request whose KV is at `giver`. It needs no turn: it has had one."""
        claim = self._claims[request]
        want = self._looked_up(claim, self.line.charged(request))
        return place_taker(self._roster, want, giver, excluded | self._full_until.keys(), self._routing)

    def leave(self, request: RequestId, num_cached: int | None = None) -> None:
        """It has ended; `num_cached` as `Line.leave`."""
        self.line.leave(request, num_cached)
        self._claims.pop(request, None)

    def why(self, model: str) -> str:
        """What the first in line waits for, for people."""
        return self._why.get(model, "its turn")

    # ---- what is heard of workers

    def refused(self, workers: Iterable[WorkerRef], now: float) -> None:
        self._full_until.update(dict.fromkeys(workers, now + REFUSAL_BACKOFF_S))

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
        return (view.prefills or mode in ("off", "auto")) and want.suits(view)

    # ---- inside

    def _next(self, model: str) -> Turn | None:
        request = self.line.first(model)
        if request is None:
            return None
        claim = self._claims[request]
        want = self._looked_up(claim, self.line.charged(request))
        mode = claim.mode or self._config.disaggregation
        outcome = place(self._roster, want, mode, self._full_until.keys(), self._routing)
        if isinstance(outcome, Placement):
            self._blocked.pop(model, None)
            self._num_turns += 1
            worker = self._roster.find(model, outcome.prefill)
            assert worker is not None, f"{outcome.prefill} was chosen"
            self.line.send(request, want.num_uncached(worker))
            hit = None if want.hits is None else want.hits.get(worker.ref)
            return Turn(request, outcome, 0 if hit is None else hit.num_blocks)
        self._why[model] = outcome.reason
        if outcome is BUSY:
            self._blocked[model] = want, mode
        else:
            self._blocked.pop(model, None)
        return None

    def _looked_up(self, claim: _Claim, num_charged: int) -> Want:
        """With what workers hold of the prompt now. Where nobody knows, `num_charged` tokens are to compute."""
        want = replace(claim.want, num_tokens=num_charged, turn=self._num_turns)
        if claim.is_scored:
            return replace(want, hits={})
        if self._prefixes is None or not claim.hashes:
            return want
        return replace(want, hits=self._prefixes.match(claim.hashes))

    def _expect(self, ticket: Ticket, claim: _Claim) -> Forecast | None:
        """With the longest prefix that any worker holds."""
        workers = self._roster.prefillers(claim.want.model)
        want = self._looked_up(claim, ticket.num_tokens)
        best = min(map(want.num_uncached, workers), default=ticket.num_tokens)
        return expect(self.line, claim.want.model, replace(ticket, num_tokens=max(1, best)), workers)


def _want(request: Request, session: str) -> Want:
    num_prompt, num_output = len(request.prompt_tokens), min(request.sampling.max_tokens, EXPECTED_OUTPUT)
    return Want(
        request.model,
        lane=request.lane,
        num_prompt=num_prompt,
        num_output=num_output * request.num_choices,
        key=request.id,
        session=session,
    )
