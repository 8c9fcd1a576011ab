"""What each placement under consideration costs; never chooses one and never looks for workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.core.ids import WorkerRef
from tandem.routing.candidates import Giver, Site
from tandem.routing.cost import DecodeCost, PairCost, PrefillCost, decode_cost, prefill_cost, transfer_s
from tandem.routing.links import Links
from tandem.routing.loan import loan
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
    """`is_told`: every worker in question has told what its steps cost."""

    want: Want
    links: Links
    is_told: bool

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
        worker, want = site.worker, self.want
        ways = [prefill_cost(worker, want, is_told=self.is_told)]
        for lender in site.lenders:
            lent = loan(lender, worker, want, self.links, is_told=self.is_told)
            ways.append(prefill_cost(worker, want, is_told=self.is_told, loan=lent))
        accepted = [way for way in ways if worker.takes(way.num_uncached, want.lane)]
        return min(accepted or ways, key=lambda way: way.total_s), bool(accepted)

    def _decode(self, worker: WorkerView) -> DecodeCost:
        return decode_cost(worker, self.want, is_told=self.is_told)

    def _pair(self, prefill: PrefillCost, decode: DecodeCost) -> PairCost:
        return PairCost(prefill, decode, transfer_s(prefill, decode.worker, self.want, self.links))
