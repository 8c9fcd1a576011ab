"""Chooses the workers of one request: filter, predict what each placement costs, pick; never sends anything and keeps
no state.

A worker that would refuse the prompt now is compared too: where it is worth waiting for, nothing is placed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

from tandem.core.ids import WorkerRef
from tandem.routing.candidates import Candidates, PrefillCandidate, PrefillSite, Shortlist, why_no_pair
from tandem.routing.cost import PairCost
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.picker import PickResult, margin_s, pick
from tandem.routing.placement import NoPlacement, Placement, RemotePrefixSource
from tandem.routing.policies import RoutingPolicy, ordered
from tandem.routing.pricing import CostModel, PricedPlacements
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_view import Cost, WorkerView, decode_cost, prefill_cost, whole_cost

Disaggregation = Literal["off", "auto", "prefer", "strict"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How workers are compared. `links` are their owner's and may change. `remote_prefix`: one may read what another
    holds of a prompt; only the cost knows whether that pays."""

    policy: RoutingPolicy = "cost"
    links: LinkBandwidth = field(default_factory=LinkBandwidth)
    remote_prefix: bool = True


BUSY = NoPlacement("every worker has as much of prompts as it takes on", may_pass=True)
"""Nothing but a worker that computes prompts can change that."""
WORTH_WAITING = NoPlacement("a worker that has enough of prompts now is worth waiting for", may_pass=True)
BY_COST = Routing()


def place(
    among: Candidates,
    want: RoutingRequest,
    mode: Disaggregation,
    excluded: Set[WorkerRef] = frozenset(),
    routing: Routing = BY_COST,
) -> Placement | NoPlacement:
    """Pick a pair under `mode`; `excluded` workers refused a moment ago, or fail."""
    able = among.pools(want.model)
    if not able.total():
        return NoPlacement("no live worker serves the model", may_pass=False)
    choice = _PlacementSearch(among, want, excluded, routing)
    if mode == "off" or (mode != "strict" and able["mixed"] == able.total()):
        return choice.local()
    if mode == "auto" and routing.policy == "cost":
        return choice.either()
    split = choice.split(allow_mixed_pairs=mode == "strict")
    if isinstance(split, Placement) or mode == "strict" or split.may_pass or _is_split_possible(among, want.model):
        return split
    return _fallback(choice.local(), split)


def place_undivided(
    among: Candidates,
    want: RoutingRequest,
    reason: str,
    excluded: Set[WorkerRef] = frozenset(),
    routing: Routing = BY_COST,
) -> Placement | NoPlacement:
    """Pick one worker for all of a request that would be split but for `reason`."""
    if not among.pools(want.model).total():
        return NoPlacement("no live worker serves the model", may_pass=False)
    return _fallback(_PlacementSearch(among, want, excluded, routing).local(), NoPlacement(reason, may_pass=False))


class _PlacementSearch:
    """One request's, while it is placed."""

    def __init__(self, among: Candidates, want: RoutingRequest, excluded: Set[WorkerRef], routing: Routing) -> None:
        self._among = among
        self._want = want
        self._excluded = excluded
        self._routing = routing
        self._shortlist = Shortlist(among, want, excluded, may_prefix_request=routing.remote_prefix)

    def split(self, *, allow_mixed_pairs: bool) -> Placement | NoPlacement:
        problem = self._split_problem(allow_mixed_pairs=allow_mixed_pairs)
        if problem is not None:
            return problem
        if self._routing.policy != "cost":
            return self._split_by_order()
        producers = self._shortlist.prefill_workers()
        if not producers:
            return self._why_no_pair()
        return _finalize(self._pricer(producers, ()).pairs(producers), self._want)

    def local(self) -> Placement | NoPlacement:
        """One worker for all of it."""
        workers = self._shortlist.mixed_workers()
        if not workers:
            return NoPlacement("every worker is full", may_pass=True)
        if self._routing.policy != "cost":
            return self._local_by_order()
        return _finalize(self._pricer((), workers).mixed_workers(workers), self._want)

    def either(self) -> Placement | NoPlacement:
        """Whichever costs less."""
        problem = self._split_problem(allow_mixed_pairs=False)
        producers = [] if problem is not None else self._shortlist.prefill_workers()
        if not producers:
            return _fallback(self.local(), problem or self._why_no_pair())
        workers = self._shortlist.mixed_workers()
        pricer = self._pricer(producers, workers)
        pairs, wholes = pricer.pairs(producers), pricer.mixed_workers(workers)
        placed = _finalize(pairs + wholes, self._want)
        if isinstance(placed, NoPlacement) or placed.picked is None:
            return placed
        other = (wholes if placed.is_remote else pairs).best
        why = "" if placed.is_remote or other is None else _why_local(placed.picked.cost, other)
        return replace(placed, other=other, why=why)

    # ---- inside

    def _pricer(self, producers: Sequence[PrefillCandidate], wholes: Sequence[PrefillSite]) -> CostModel:
        """Of workers of which one has not told what its steps cost only counts of tokens can be compared."""
        views = [view for producer in producers for view in (producer.site.worker, *producer.decode_workers)]
        views += [site.worker for site in wholes]
        return CostModel(self._want, self._routing.links, all(view.step_cost is not None for view in views))

    def _split_problem(self, *, allow_mixed_pairs: bool) -> NoPlacement | None:
        found = (self._among.find(self._want.model, ref) for ref in self._excluded)
        left = self._among.pools(self._want.model) - Counter(view.pool for view in found if view is not None)
        if not left["prefill"] and not (allow_mixed_pairs and left["mixed"]):
            return NoPlacement("no prefill worker", may_pass=False)
        if not left["decode"] and not left["mixed"]:
            return NoPlacement("no decode worker", may_pass=False)
        return None

    def _why_no_pair(self) -> NoPlacement:
        return NoPlacement(*why_no_pair(self._among, self._want.model, self._excluded))

    # ---- by anything but the cost

    def _split_by_order(self) -> Placement | NoPlacement:
        consumers = self._ordered(self._among.decode_workers(self._want.model), decode_cost)
        is_busy = False
        for producer in self._ordered(self._among.prefill_workers(self._want.model), prefill_cost):
            if not self._want.fits(producer):
                is_busy = True
                continue
            for consumer in consumers:
                if (producer.ref, consumer.ref) in self._among.linked and producer.fingerprint == consumer.fingerprint:
                    return Placement(producer.ref, consumer.ref)
        return BUSY if is_busy else self._why_no_pair()

    def _local_by_order(self) -> Placement | NoPlacement:
        workers = self._ordered(self._among.mixed_workers(self._want.model), whole_cost)
        able = [worker for worker in workers if worker.decodes] or workers
        found = next(filter(self._want.fits, able), None)
        return BUSY if found is None else Placement(found.ref, found.ref)

    def _ordered(self, workers: Iterable[WorkerView], load: Callable[[WorkerView], Cost]) -> list[WorkerView]:
        left = [worker for worker in workers if worker.ref not in self._excluded]
        return ordered(self._routing.policy, left, self._want, load)


def _finalize(offers: PricedPlacements, want: RoutingRequest) -> Placement | NoPlacement:
    """Pick of those that can be made now, unless one that cannot is worth waiting for."""
    if not offers.now:
        return BUSY
    picked = pick(offers.now, want)
    if any(_is_worth_waiting(later, picked.cost) for later in offers.later):
        return WORTH_WAITING
    return _placed(picked)


def _is_worth_waiting(later: PairCost, now: PairCost) -> bool:
    """Who waits holds up those behind it. So between workers of one kind it waits only where the whole wait is shorter
    than the computation that a prefix saves, which serves all."""
    if later.is_local != now.is_local:
        return later.total_s + margin_s(now) < now.total_s
    wait_s = later.prefill.wait_s + later.prefill.compute_s
    return later.total_s < now.total_s and wait_s + margin_s(now) < now.prefill.compute_s


def _placed(picked: PickResult) -> Placement:
    prefill = picked.cost.prefill
    prefix = (
        None
        if prefill.prefix_fetch is None
        else RemotePrefixSource(prefill.prefix_fetch.producer, prefill.prefix_fetch.num_blocks)
    )
    return Placement(prefill.worker.ref, picked.cost.decode.worker.ref, prefix=prefix, picked=picked)


def _fallback(local: Placement | NoPlacement, split: NoPlacement) -> Placement | NoPlacement:
    if isinstance(local, NoPlacement):
        return local
    return replace(local, fallback=split.reason.replace(" ", "_"))


def _why_local(mine: PairCost, split: PairCost) -> str:
    """What of the split costs most, for the client."""
    saved_s = split.total_s - mine.total_s
    if split.prefill.wait_s - mine.prefill.wait_s > saved_s / 2:
        return "prefill_busy"
    if mine.prefill.num_lacking < split.prefill.num_lacking:
        return "cached_prompt"
    if mine.prefill.num_uncached <= mine.prefill.worker.num_step_tokens:
        return "short_prompt"
    return "cheaper"


def _is_split_possible(among: Candidates, model: str) -> bool:
    """A linked pair lives but is excluded for the moment: then the request waits instead of falling back. Without a
    prefill worker no pair is ever chosen under "prefer", however many are linked."""
    if not among.pools(model)["prefill"]:
        return False
    return any(among.find(model, p) is not None and among.find(model, d) is not None for p, d in among.linked)
