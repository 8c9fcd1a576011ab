"""Choose the workers of one request: filter, predict the cost of each placement, pick; keeps no state.

A worker that would refuse the prompt now is compared too: if waiting for it costs less than any other worker, the
request is not placed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain

from tandem.core.config import RoutingPolicy
from tandem.core.ids import WorkerRef
from tandem.routing.candidates import PrefillCandidate, Shortlist, why_no_pair
from tandem.routing.cost import PairCost, price
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.picker import margin_s, ordered, pick
from tandem.routing.placement import NoPlacement, Placement
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_ranking import WorkerRanking
from tandem.routing.worker_view import Cost, WorkerView, decode_cost, local_cost, prefill_cost

KV_LOST = NoPlacement("kv_lost", may_pass=False)
"""Why a request is not split over two workers: its KV transfer has failed more than once."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Settings by which the router compares workers.

    `policy`: how the best worker is chosen. `links`: the measured bandwidths between workers, which may change later.
    `remote_prefix`: whether workers may fetch prefixes from each other's caches where that costs less than computing
    them. `mixed_pairs`: whether a mixed worker may compute a prompt for another one; False where such pairs are never
    tested.
    """

    policy: RoutingPolicy = "cost"
    links: LinkBandwidth = field(default_factory=LinkBandwidth)
    remote_prefix: bool = True
    mixed_pairs: bool = True


BUSY = NoPlacement("every worker has as many queued prompt tokens as it accepts", may_pass=True)
"""Only a report of a worker that computes prompts can change this result."""
NO_SEAT = NoPlacement("every decode worker runs as many sequences as it may", may_pass=True)
"""Prefill workers would accept the request, and no decode worker that can be paired with them has a seat. A report of a
worker that decodes can change this result, and so can one of a worker that computes prompts."""
WORTH_WAITING = NoPlacement("waiting for a busy worker costs less than using a free one", may_pass=True)
BY_COST = Routing()


def place(
    candidates: WorkerRanking,
    request: RoutingRequest,
    excluded: Set[WorkerRef] = frozenset(),
    routing: Routing = BY_COST,
) -> Placement | NoPlacement:
    """Choose the workers of a request: one worker, or a prefill and a decode worker, as `request.mode` requires.
    `candidates`: the live workers, ranked by load. `routing`: settings by which they are compared.

    Workers in `excluded` are left out, because they have just rejected the request or keep failing. Returns NoPlacement
    when no worker can take the request now, or waiting for a busy one costs less.
    """
    able = candidates.pools(request.model, request.lane)
    if not able.total():
        return _no_worker(candidates, request)
    search = _PlacementSearch(candidates.without(excluded), request, routing)
    mode = request.mode
    if request.is_undivided and mode != "strict":
        return _fallback(search.local(), KV_LOST)
    if mode == "off" or (mode != "strict" and able["mixed"] == able.total()):
        return search.local()
    if mode == "auto" and routing.policy == "cost":
        return search.either()
    split = search.split(allow_mixed_pairs=mode == "strict" and routing.mixed_pairs)
    if isinstance(split, Placement) or split.may_pass:
        return split
    if _is_split_possible(candidates, request, excluded):
        return replace(split, may_pass=True)
    return split if mode == "strict" else _fallback(search.local(), split)


class _PlacementSearch:
    """Search for the placement of one request."""

    def __init__(self, candidates: WorkerRanking, request: RoutingRequest, routing: Routing) -> None:
        self._candidates = candidates
        self._request = request
        self._routing = routing
        self._shortlist = Shortlist(candidates, request, may_fetch_prefix=routing.remote_prefix)

    def split(self, *, allow_mixed_pairs: bool) -> Placement | NoPlacement:
        problem = self._split_problem(allow_mixed_pairs=allow_mixed_pairs)
        if problem is not None:
            return problem
        if self._routing.policy != "cost":
            return self._split_by_order()
        producers = self._shortlist.prefill_workers()
        if not producers:
            return self._why_no_pair()
        return _finalize_seated(self._priced(producers), self._request)

    def local(self) -> Placement | NoPlacement:
        """Return the best placement on a single worker, or why there is none now."""
        workers = self._shortlist.mixed_workers()
        if not workers:
            return NoPlacement("every worker is full", may_pass=True)
        if self._routing.policy != "cost":
            return self._local_by_order()
        return _finalize(self._priced(workers), self._request)

    def either(self) -> Placement | NoPlacement:
        """Return the cheaper of two placements, or why there is none now: the best one that splits the request between
        a prefill and a decode worker, and the best one on a single worker. Where a split is impossible, only the latter
        is considered."""
        problem = self._split_problem(allow_mixed_pairs=False)
        producers = [] if problem is not None else self._shortlist.prefill_workers()
        if not producers:
            return _fallback(self.local(), problem or self._why_no_pair())
        priced = self._priced([*producers, *self._shortlist.mixed_workers()])
        placed = _finalize_seated(priced, self._request)
        if isinstance(placed, NoPlacement) or placed.picked is None:
            return placed
        others = [offer for offer in priced if offer.is_local is placed.is_remote]
        other = min(others, key=lambda offer: offer.total_s, default=None)
        why = "" if placed.is_remote or other is None else _why_local(placed.picked.cost, other)
        return replace(placed, other=other, why=why)

    # ---- feasibility

    def _priced(self, candidates: Sequence[PrefillCandidate]) -> list[PairCost]:
        return price(candidates, self._request, self._routing.links)

    def _split_problem(self, *, allow_mixed_pairs: bool) -> NoPlacement | None:
        left = self._candidates.pools(self._request.model, self._request.lane)
        if not left["prefill"] and not (allow_mixed_pairs and left["mixed"]):
            return NoPlacement("no prefill worker", may_pass=False)
        if not left["decode"] and not left["mixed"]:
            return NoPlacement("no decode worker", may_pass=False)
        return None

    def _why_no_pair(self) -> NoPlacement:
        return NoPlacement(*why_no_pair(self._candidates, self._request, mixed_pairs=self._routing.mixed_pairs))

    # ---- policies other than cost

    def _split_by_order(self) -> Placement | NoPlacement:
        consumers = self._ordered(self._candidates.decode_workers(self._request.model, self._request.lane), decode_cost)
        is_busy = lacks_seat = False
        for producer in self._ordered(
            self._candidates.prefill_workers(self._request.model, self._request.lane), prefill_cost
        ):
            if not self._request.fits(producer):
                is_busy = True
                continue
            for consumer in consumers:
                is_linked = (producer.ref, consumer.ref) in self._candidates.linked
                if is_linked and producer.fingerprint == consumer.fingerprint:
                    if consumer.has_seat(self._request.lane):
                        return Placement(producer.ref, consumer.ref)
                    lacks_seat = True
        if lacks_seat:
            return NO_SEAT
        return BUSY if is_busy else self._why_no_pair()

    def _local_by_order(self) -> Placement | NoPlacement:
        workers = self._ordered(self._candidates.mixed_workers(self._request.model, self._request.lane), local_cost)
        able = [worker for worker in workers if worker.decodes] or workers
        found = next(filter(self._request.fits, able), None)
        return BUSY if found is None else Placement(found.ref, found.ref)

    def _ordered(self, workers: Iterable[WorkerView], load: Callable[[WorkerView], Cost]) -> list[WorkerView]:
        return ordered(self._routing.policy, list(workers), self._request, load)


def _finalize_seated(offers: Sequence[PairCost], request: RoutingRequest) -> Placement | NoPlacement:
    """Return what `_finalize` returns for the placements whose decode worker has a seat; NO_SEAT if only such a seat is
    lacking. A decode worker without one refuses KV from another worker, so the request had better wait at the
    gateway."""
    seated = [offer for offer in offers if offer.decode.worker.has_seat(request.lane)]
    if any(offer.prefill.is_accepted for offer in seated) or not any(offer.prefill.is_accepted for offer in offers):
        return _finalize(seated, request)
    return NO_SEAT


def _finalize(offers: Sequence[PairCost], request: RoutingRequest) -> Placement | NoPlacement:
    """Return the best placement that can be made now; BUSY if there is none, and WORTH_WAITING if it is better to wait
    for a worker that would reject the prompt now.

    A request does not wait for a worker for which more urgent requests wait too, because the costs leave these out.
    """
    now = [offer for offer in offers if offer.prefill.is_accepted]
    if not now:
        return BUSY
    picked = pick(now, request)
    busy = (offer for offer in offers if not offer.prefill.is_accepted)
    if any(_is_worth_waiting(offer, picked.cost) for offer in busy if request.is_served_next(offer.prefill.worker)):
        return WORTH_WAITING
    prefill = picked.cost.prefill
    return Placement(prefill.worker.ref, picked.cost.decode.worker.ref, prefill.prefix_fetch, picked=picked)


def _is_worth_waiting(later: PairCost, now: PairCost) -> bool:
    """Return whether the request should wait for the placement `later` instead of taking the placement `now`.

    A waiting request blocks those behind it. So between two placements of the same kind (both on one worker, or both on
    two) it waits only where the wait and the computation at `later` are together shorter than the computation at `now`,
    thanks to a cached prefix: that saves time for all requests.
    """
    if later.is_local != now.is_local:
        return later.total_s + margin_s(now) < now.total_s
    wait_s = later.prefill.wait_s + later.prefill.compute_s
    return later.total_s < now.total_s and wait_s + margin_s(now) < now.prefill.compute_s


def _fallback(local: Placement | NoPlacement, split: NoPlacement) -> Placement | NoPlacement:
    if isinstance(local, NoPlacement):
        return local
    return replace(local, fallback=split.reason.replace(" ", "_"))


def _why_local(local: PairCost, split: PairCost) -> str:
    """Return the main reason why the placement on one worker is cheaper than the split, as a word for the client."""
    saved_s = split.total_s - local.total_s
    if split.prefill.wait_s - local.prefill.wait_s > saved_s / 2:
        return "prefill_busy"
    if local.prefill.num_lacking < split.prefill.num_lacking:
        return "cached_prompt"
    if local.prefill.num_uncached <= local.prefill.worker.num_step_tokens:
        return "short_prompt"
    return "cheaper"


def _no_worker(candidates: WorkerRanking, request: RoutingRequest) -> NoPlacement:
    served = candidates.lanes(request.model)
    if served and all(request.lane not in lanes for lanes in served):
        return NoPlacement(f"no worker serves the lane {request.lane.label}", may_pass=False)
    return NoPlacement("no live worker serves the model", may_pass=False)


def _is_split_possible(candidates: WorkerRanking, request: RoutingRequest, excluded: Set[WorkerRef]) -> bool:
    """Return whether a live linked pair exists that only cannot be used now because one of its workers is in
    `excluded`: then the request waits instead of falling back to one worker.

    Without a worker of the prefill pool no pair is chosen, however many are linked, unless the mode is "strict".
    """
    model, lane = request.model, request.lane
    if not excluded or not (request.mode == "strict" or candidates.pools(model, lane)["prefill"]):
        return False
    producers = [view.ref for view in candidates.prefillers(model, lane)]
    with closing(candidates.decode_workers(model, lane)) as workers:
        consumers = [view.ref for view in workers]
    without_producer = ((p, d) for p in producers if p in excluded for d in consumers)
    without_consumer = ((p, d) for d in consumers if d in excluded for p in producers)
    return any(pair in candidates.linked for pair in chain(without_producer, without_consumer))
