"""Picks one of several placements whose costs are known; never works a cost out.

Gateways see the same reports, some milliseconds old. If each took the cheapest they would all take the same; so among
those that cost nearly the same one of two drawn ones is taken (Mitzenmacher, "The Power of Two Choices in Randomized
Load Balancing", 2001), drawn by the request's name: equal views give equal placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.routing.cost import PairCost
from tandem.routing.policies import draw
from tandem.routing.routing_request import RoutingRequest

NEAR_SHARE = 0.05
NEAR_S = 1e-3
"""Costs this much apart, on top of a share of the best one's way to the first token, are nearly the same: predictions
are no better than that."""


@dataclass(frozen=True, slots=True)
class PickResult:
    """`by` says what decided among the `num_near` that cost nearly the same as the best."""

    cost: PairCost
    by: Literal["cost", "session", "two_choices"]
    num_near: int


def margin_s(best: PairCost) -> float:
    return NEAR_S + NEAR_SHARE * best.first_s


def pick(offers: Sequence[PairCost], want: RoutingRequest) -> PickResult:
    """There must be one."""
    totals = [offer.total_s for offer in offers]
    least_s, best = min(zip(totals, offers, strict=True), key=lambda one: (one[0], _name(one[1])))
    limit_s = least_s + margin_s(best)
    few = [(total_s, _name(offer), offer) for total_s, offer in zip(totals, offers, strict=True) if total_s <= limit_s]
    near = [offer for _, _, offer in sorted(few, key=lambda one: one[:2])]
    if len(near) == 1:
        return PickResult(near[0], "cost", 1)
    if want.session:
        return PickResult(max(near, key=lambda offer: draw(want.session, *_name(offer))), "session", len(near))
    drawn = draw(want.key)
    first, step = drawn % len(near), 1 + (drawn >> 32) % (len(near) - 1)
    two = near[first], near[(first + step) % len(near)]
    return PickResult(min(two, key=lambda offer: offer.total_s), "two_choices", len(near))


def _name(offer: PairCost) -> tuple[str, str]:
    return (offer.prefill.worker.ref.id, offer.decode.worker.ref.id)
