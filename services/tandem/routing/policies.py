"""Simple ways to order workers, to compare the cost against; never filters and never pairs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Literal

from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_view import Cost, WorkerView

RoutingPolicy = Literal["cost", "random", "round_robin", "least_loaded", "prefix"]


def ordered(
    policy: RoutingPolicy, workers: Sequence[WorkerView], want: RoutingRequest, load_cost: Callable[[WorkerView], Cost]
) -> list[WorkerView]:
    """The best first, by anything but the cost."""
    match policy:
        case "random":
            return sorted(workers, key=lambda worker: draw(want.key, worker.ref.id))
        case "round_robin":
            by_id = sorted(workers, key=lambda worker: worker.ref)
            first = want.turn % len(by_id) if by_id else 0
            return by_id[first:] + by_id[:first]
        case "prefix":
            return sorted(workers, key=lambda worker: (-want.held(worker).num_tokens, *load_cost(worker)))
        case _:
            return sorted(workers, key=load_cost)


def draw(*names: str) -> int:
    """64 bits that depend on nothing but the names: every gateway draws the same."""
    return int.from_bytes(blake2b("\n".join(names).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
