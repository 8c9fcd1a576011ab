"""Pick one of several placements whose costs are known, or order workers by a simpler policy, as a baseline.

Gateways see the same reports, some milliseconds old. If each took the cheapest placement, all would choose the same
workers; so among placements of nearly the same cost the cheaper of two sampled ones is taken (Mitzenmacher, "The Power
of Two Choices in Randomized Load Balancing", 2001). The sample depends on the request's key only: equal views give
equal placements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from tandem.core.config import RoutingPolicy
from tandem.routing.cost import PairCost
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_view import Cost, WorkerView

NEAR_SHARE = 0.05
NEAR_S = 1e-3
"""Two costs are nearly the same if they differ by at most this margin in seconds, plus the fraction `NEAR_SHARE` of the
best placement's time to first token: predictions are no more accurate than that."""


@dataclass(frozen=True, slots=True)
class PickResult:
    """The picked placement with its `cost`, and how it was picked.

    `num_near`: number of placements with nearly the least cost. `by`: what decided among them. "cost": there was only
    one. "session": the placement belongs to the request's session by hash. "two_choices": it is the cheaper of two
    sampled placements.
    """

    cost: PairCost
    by: Literal["cost", "session", "two_choices"]
    num_near: int


def margin_s(best: PairCost) -> float:
    return NEAR_S + NEAR_SHARE * best.first_s


def pick(offers: Sequence[PairCost], request: RoutingRequest) -> PickResult:
    """Return the cheapest of the placements `offers`, or one that costs nearly as little, with how it was picked.

    Among nearly equal placements, requests of one session get the same one, chosen by hash; other requests get the
    cheaper of two that are sampled by the request's key. `offers` must not be empty.
    """
    totals = [offer.total_s for offer in offers]
    least_s, best = min(zip(totals, offers, strict=True), key=lambda entry: (entry[0], _name(entry[1])))
    limit_s = least_s + margin_s(best)
    few = [(total_s, _name(offer), offer) for total_s, offer in zip(totals, offers, strict=True) if total_s <= limit_s]
    near = [offer for _, _, offer in sorted(few, key=lambda entry: entry[:2])]
    if len(near) == 1:
        return PickResult(near[0], "cost", 1)
    if request.session:
        own = max(near, key=lambda offer: _stable_hash(request.session, *_name(offer)))
        return PickResult(own, "session", len(near))
    sample = _stable_hash(request.key)
    first = sample % len(near)
    step = 1 + (sample >> 32) % (len(near) - 1)
    two = near[first], near[(first + step) % len(near)]
    return PickResult(min(two, key=lambda offer: offer.total_s), "two_choices", len(near))


def _name(offer: PairCost) -> tuple[str, str]:
    return (offer.prefill.worker.ref.id, offer.decode.worker.ref.id)


def ordered(
    policy: RoutingPolicy,
    workers: Sequence[WorkerView],
    request: RoutingRequest,
    load_cost: Callable[[WorkerView], Cost],
) -> list[WorkerView]:
    """Return the workers sorted by `policy`, best first, for the policies other than "cost".

    `load_cost`: function that returns the sort key of a worker by load. It is the only key for "least_loaded"; for
    "prefix" it orders workers with equally long cached prefixes; the other policies do not use it.
    """
    match policy:
        case "random":
            return sorted(workers, key=lambda worker: _stable_hash(request.key, worker.ref.id))
        case "round_robin":
            by_id = sorted(workers, key=lambda worker: worker.ref)
            first = request.turn % len(by_id) if by_id else 0
            return by_id[first:] + by_id[:first]
        case "prefix":
            return sorted(workers, key=lambda worker: (-request.held(worker).num_tokens, *load_cost(worker)))
        case _:
            return sorted(workers, key=load_cost)


def _stable_hash(*names: str) -> int:
    """Return a 64-bit hash of `names`, in their order, that is the same in every process."""
    return int.from_bytes(blake2b("\n".join(names).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
