"""Compute the cost of each shortlisted placement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tandem.core.ids import WorkerRef
from tandem.routing.candidates import PrefillCandidate, PrefillSite
from tandem.routing.cost import DecodeCost, PairCost, PrefillCost, decode_cost, prefill_cost, transfer_s
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.remote_prefix import plan_remote_prefix
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_speed import WorkerSpeed
from tandem.routing.worker_view import WorkerView


@dataclass(frozen=True, slots=True)
class PricedPlacements:
    """Placements that can be made `now`, and placements at workers that would reject the prompt now, for `later`."""

    now: tuple[PairCost, ...] = ()
    later: tuple[PairCost, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.now or self.later)

    def __add__(self, other: PricedPlacements) -> PricedPlacements:
        return PricedPlacements(self.now + other.now, self.later + other.later)

    @property
    def best(self) -> PairCost | None:
        return min((*self.now, *self.later), key=lambda offer: offer.total_s, default=None)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Price the placements of one request. `has_step_costs`: every compared worker has reported its step costs.
    `speeds` caches those computed so far."""

    request: RoutingRequest
    links: LinkBandwidth
    has_step_costs: bool
    speeds: dict[WorkerRef, WorkerSpeed] = field(default_factory=dict)

    def pairs(self, producers: Iterable[PrefillCandidate]) -> PricedPlacements:
        """Return the priced split placements: every producer with each of its consumers."""
        decodes: dict[WorkerRef, DecodeCost] = {}
        now: list[PairCost] = []
        later: list[PairCost] = []
        for producer in producers:
            prefill, is_ready = self._prefill(producer.site)
            for consumer in producer.decode_workers:
                decode = decodes.get(consumer.ref)
                if decode is None:
                    decode = decodes[consumer.ref] = self._decode(consumer)
                (now if is_ready else later).append(self._pair(prefill, decode))
        return PricedPlacements(tuple(now), tuple(later))

    def mixed_workers(self, sites: Iterable[PrefillSite]) -> PricedPlacements:
        """Return the priced placements that prefill and decode on one worker."""
        now: list[PairCost] = []
        later: list[PairCost] = []
        for site in sites:
            prefill, is_ready = self._prefill(site)
            (now if is_ready else later).append(PairCost(prefill, self._decode(site.worker), 0.0))
        return PricedPlacements(tuple(now), tuple(later))

    def decode_workers(self, producer: WorkerView, consumers: Sequence[WorkerView]) -> PricedPlacements:
        """Return the priced decode placements of a prompt that `producer` has already computed."""
        done = PrefillCost(producer, 0, wait_s=0.0, compute_s=0.0, stall_s=0.0)
        return PricedPlacements(tuple(self._pair(done, self._decode(consumer)) for consumer in consumers))

    def _prefill(self, site: PrefillSite) -> tuple[PrefillCost, bool]:
        """Return the cheapest way to get the prompt's KV, computing all or fetching a part, and whether the worker
        probably accepts it now.

        Variants that the worker would reject are compared only where it rejects all of them.
        """
        worker = site.worker
        request = self.request
        speed = self._speed(site.worker)
        alone = prefill_cost(speed, request)
        if not site.producers:
            return alone, worker.takes(alone.num_uncached, request.lane)
        variants = [alone]
        for producer in site.producers:
            variants.append(
                prefill_cost(speed, request, plan_remote_prefix(self._speed(producer), speed, request, self.links))
            )
        accepted = [variant for variant in variants if worker.takes(variant.num_uncached, request.lane)]
        return min(accepted or variants, key=lambda variant: variant.total_s), bool(accepted)

    def _decode(self, worker: WorkerView) -> DecodeCost:
        return decode_cost(self._speed(worker), self.request)

    def _speed(self, worker: WorkerView) -> WorkerSpeed:
        speed = self.speeds.get(worker.ref)
        if speed is None:
            speed = self.speeds[worker.ref] = WorkerSpeed(worker, has_step_costs=self.has_step_costs)
        return speed

    def _pair(self, prefill: PrefillCost, decode: DecodeCost) -> PairCost:
        return PairCost(prefill, decode, transfer_s(prefill, decode, self.links))
