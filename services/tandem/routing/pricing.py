"""What each placement under consideration costs; never chooses one and never looks for workers."""

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
    """Placements that can be made now, and those at workers that have as much of prompts as they take on."""

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
    """`is_told`: every worker in question has told what its steps cost. `paces` are those that were asked for."""

    want: RoutingRequest
    links: LinkBandwidth
    is_told: bool
    paces: dict[WorkerRef, WorkerSpeed] = field(default_factory=dict)

    def pairs(self, producers: Iterable[PrefillCandidate]) -> PricedPlacements:
        """A split, of every producer with every consumer of its own."""
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
        """All of it in one place."""
        now: list[PairCost] = []
        later: list[PairCost] = []
        for site in sites:
            prefill, is_ready = self._prefill(site)
            (now if is_ready else later).append(PairCost(prefill, self._decode(site.worker), 0.0))
        return PricedPlacements(tuple(now), tuple(later))

    def decode_workers(self, producer: WorkerView, consumers: Sequence[WorkerView]) -> PricedPlacements:
        """The prompt is computed already."""
        done = PrefillCost(producer, 0, wait_s=0.0, compute_s=0.0, stall_s=0.0)
        return PricedPlacements(tuple(self._pair(done, self._decode(consumer)) for consumer in consumers))

    def _prefill(self, site: PrefillSite) -> tuple[PrefillCost, bool]:
        """The best of computing all that it lacks and of reading a part of that, and whether it will probably accept
        that now; what it would not accept is compared only where it accepts neither."""
        worker, want, pace = site.worker, self.want, self._pace(site.worker)
        alone = prefill_cost(pace, want)
        if not site.producers:
            return alone, worker.takes(alone.num_uncached, want.lane)
        ways = [alone]
        for producer in site.producers:
            ways.append(prefill_cost(pace, want, plan_remote_prefix(self._pace(producer), pace, want, self.links)))
        accepted = [way for way in ways if worker.takes(way.num_uncached, want.lane)]
        return min(accepted or ways, key=lambda way: way.total_s), bool(accepted)

    def _decode(self, worker: WorkerView) -> DecodeCost:
        return decode_cost(self._pace(worker), self.want)

    def _pace(self, worker: WorkerView) -> WorkerSpeed:
        pace = self.paces.get(worker.ref)
        if pace is None:
            pace = self.paces[worker.ref] = WorkerSpeed(worker, is_told=self.is_told)
        return pace

    def _pair(self, prefill: PrefillCost, decode: DecodeCost) -> PairCost:
        return PairCost(prefill, decode, transfer_s(prefill, decode, self.links))
