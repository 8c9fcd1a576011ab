"""Compute the predicted cost of each shortlisted placement of one request."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.ids import WorkerRef
from tandem.routing.candidates import PrefillCandidate
from tandem.routing.cost import DecodeCost, PairCost, PrefillCost, decode_cost, prefill_cost, transfer_s
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.remote_prefix import plan_remote_prefix
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_speed import WorkerSpeed
from tandem.routing.worker_view import WorkerView


def price(candidates: Sequence[PrefillCandidate], request: RoutingRequest, links: LinkBandwidth) -> list[PairCost]:
    """Return the cost of every prefill candidate together with each of its decode workers.

    Costs are in seconds if every compared worker has reported how long its steps take; otherwise all workers get the
    same nominal speed, so that in effect token counts are compared. `links`: the measured bandwidths between workers,
    for transfers.
    """
    views = [view for candidate in candidates for view in (candidate.worker, *candidate.decode_workers)]
    speeds = _Speeds(has_step_costs=all(view.step_cost is not None for view in views))
    decodes: dict[WorkerRef, DecodeCost] = {}
    priced: list[PairCost] = []
    for candidate in candidates:
        prefill = _cheapest_prefill(candidate, request, links, speeds)
        for consumer in candidate.decode_workers:
            decode = decodes.get(consumer.ref)
            if decode is None:
                decode = decodes[consumer.ref] = decode_cost(speeds.of(consumer), request)
            is_local = consumer.ref == candidate.worker.ref
            priced.append(PairCost(prefill, decode, 0.0 if is_local else transfer_s(prefill, decode, links)))
    return priced


class _Speeds:
    """Speeds of workers, each computed once."""

    def __init__(self, *, has_step_costs: bool) -> None:
        self._has_step_costs = has_step_costs
        self._known: dict[WorkerRef, WorkerSpeed] = {}

    def of(self, worker: WorkerView) -> WorkerSpeed:
        speed = self._known.get(worker.ref)
        if speed is None:
            speed = self._known[worker.ref] = WorkerSpeed(worker, has_step_costs=self._has_step_costs)
        return speed


def _cheapest_prefill(
    candidate: PrefillCandidate, request: RoutingRequest, links: LinkBandwidth, speeds: _Speeds
) -> PrefillCost:
    """Return the least cost of getting the prompt's KV, either by computing all of it or by fetching its beginning from
    one of the prefix sources.

    Variants that the worker would reject are compared only where it would reject all of them.
    """
    speed = speeds.of(candidate.worker)
    variants = [prefill_cost(speed, request)]
    for source in candidate.prefix_sources:
        variants.append(prefill_cost(speed, request, plan_remote_prefix(speeds.of(source), speed, request, links)))
    accepted = [variant for variant in variants if variant.is_accepted]
    return min(accepted or variants, key=lambda variant: variant.total_s)
