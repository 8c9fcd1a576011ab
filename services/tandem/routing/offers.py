"""What each placement under consideration costs; never chooses one and never looks for workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tandem.core.ids import WorkerRef
from tandem.routing.candidates import Giver, Site
from tandem.routing.cost import DecodeCost, PairCost, PrefillCost, decode_cost, prefill_cost, transfer_s
from tandem.routing.links import Links
from tandem.routing.loan import loan
from tandem.routing.pace import Pace
from tandem.routing.view import WorkerView
from tandem.routing.want import Want


@dataclass(frozen=True, slots=True)
class Offers:
    """Placements that can be made now, and those at workers that have as much of prompts as they take on."""

    now: tuple[PairCost, ...] = ()
    later: tuple[PairCost, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.now or self.later)

    def __add__(self, other: Offers) -> Offers:
        return Offers(self.now + other.now, self.later + other.later)

    @property
    def best(self) -> PairCost | None:
        return min((*self.now, *self.later), key=lambda offer: offer.total_s, default=None)


@dataclass(frozen=True, slots=True)
class Pricer:
    """`is_told`: every worker in question has told what its steps cost. `paces` are those that were asked for."""

    want: Want
    links: Links
    is_told: bool
    paces: dict[WorkerRef, Pace] = field(default_factory=dict)

    def pairs(self, givers: Iterable[Giver]) -> Offers:
        """A split, of every giver with every taker of its own."""
        decodes: dict[WorkerRef, DecodeCost] = {}
        now: list[PairCost] = []
        later: list[PairCost] = []
        for giver in givers:
            prefill, is_ready = self._prefill(giver.site)
            for taker in giver.takers:
                decode = decodes.get(taker.ref)
                if decode is None:
                    decode = decodes[taker.ref] = self._decode(taker)
                (now if is_ready else later).append(self._pair(prefill, decode))
        return Offers(tuple(now), tuple(later))

    def wholes(self, sites: Iterable[Site]) -> Offers:
        """All of it in one place."""
        now: list[PairCost] = []
        later: list[PairCost] = []
        for site in sites:
            prefill, is_ready = self._prefill(site)
            (now if is_ready else later).append(PairCost(prefill, self._decode(site.worker), 0.0))
        return Offers(tuple(now), tuple(later))

    def takers(self, giver: WorkerView, takers: Sequence[WorkerView]) -> Offers:
        """The prompt is computed already."""
        done = PrefillCost(giver, 0, wait_s=0.0, compute_s=0.0, stall_s=0.0)
        return Offers(tuple(self._pair(done, self._decode(taker)) for taker in takers))

    def _prefill(self, site: Site) -> tuple[PrefillCost, bool]:
        """The best of computing all that it lacks and of reading a part of that, and whether it will probably accept
        that now; what it would not accept is compared only where it accepts neither."""
        worker, want, pace = site.worker, self.want, self._pace(site.worker)
        alone = prefill_cost(pace, want)
        if not site.lenders:
            return alone, worker.takes(alone.num_uncached, want.lane)
        ways = [alone]
        for lender in site.lenders:
            ways.append(prefill_cost(pace, want, loan(self._pace(lender), pace, want, self.links)))
        accepted = [way for way in ways if worker.takes(way.num_uncached, want.lane)]
        return min(accepted or ways, key=lambda way: way.total_s), bool(accepted)

    def _decode(self, worker: WorkerView) -> DecodeCost:
        return decode_cost(self._pace(worker), self.want)

    def _pace(self, worker: WorkerView) -> Pace:
        pace = self.paces.get(worker.ref)
        if pace is None:
            pace = self.paces[worker.ref] = Pace(worker, is_told=self.is_told)
        return pace

    def _pair(self, prefill: PrefillCost, decode: DecodeCost) -> PairCost:
        return PairCost(prefill, decode, transfer_s(prefill, decode, self.links))
