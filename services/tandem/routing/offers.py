"""What each placement under consideration costs; never chooses one and never looks for workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.core.ids import WorkerRef
from tandem.routing.candidates import Giver
from tandem.routing.cost import DecodeCost, PairCost, PrefillCost, decode_cost, prefill_cost, transfer_s
from tandem.routing.links import Links
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
            prefill = prefill_cost(giver.worker, self.want, is_told=self.is_told)
            for taker in giver.takers:
                decode = decodes.get(taker.ref)
                if decode is None:
                    decode = decodes[taker.ref] = self._decode(taker)
                (now if giver.is_ready else later).append(self._pair(prefill, decode))
        return Offers(tuple(now), tuple(later))

    def wholes(self, workers: Iterable[tuple[WorkerView, bool]]) -> Offers:
        """All of it in one place."""
        now: list[PairCost] = []
        later: list[PairCost] = []
        for worker, is_ready in workers:
            prefill = prefill_cost(worker, self.want, is_told=self.is_told)
            (now if is_ready else later).append(PairCost(prefill, self._decode(worker), 0.0))
        return Offers(tuple(now), tuple(later))

    def takers(self, giver: WorkerView, takers: Sequence[WorkerView]) -> Offers:
        """The prompt is computed already."""
        done = PrefillCost(giver, 0, wait_s=0.0, compute_s=0.0, stall_s=0.0)
        return Offers(tuple(self._pair(done, self._decode(taker)) for taker in takers))

    def _decode(self, worker: WorkerView) -> DecodeCost:
        return decode_cost(worker, self.want, is_told=self.is_told)

    def _pair(self, prefill: PrefillCost, decode: DecodeCost) -> PairCost:
        return PairCost(prefill, decode, transfer_s(prefill, decode.worker, self.want, self.links))
