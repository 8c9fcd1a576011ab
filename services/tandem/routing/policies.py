"""Order workers by simple policies (random, round robin, least loaded, longest prefix), as baselines for the cost
policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

from tandem.core.config import RoutingPolicy
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_view import Cost, WorkerView


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
            return sorted(workers, key=lambda worker: stable_hash(request.key, worker.ref.id))
        case "round_robin":
            by_id = sorted(workers, key=lambda worker: worker.ref)
            first = request.turn % len(by_id) if by_id else 0
            return by_id[first:] + by_id[:first]
        case "prefix":
            return sorted(workers, key=lambda worker: (-request.held(worker).num_tokens, *load_cost(worker)))
        case _:
            return sorted(workers, key=load_cost)


def stable_hash(*names: str) -> int:
    """Return a 64-bit hash of `names`, in their order, that is the same in every process."""
    return int.from_bytes(blake2b("\n".join(names).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
