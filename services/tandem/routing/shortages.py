"""Find the live workers or links that a model lacks for placing its requests as `gateway.disaggregation` demands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from tandem.core.config import Disaggregation
from tandem.routing.pd_pairs import PairRegistry
from tandem.routing.worker_view import WorkerView

Lack = Literal["worker", "prefill", "decode", "link"]


class Shortage(NamedTuple):
    """Describe what one model lacks for its requests.

    `lacks`: "worker" (it has no live worker at all), "prefill" or "decode" (no live worker of that role), or "link" (no
    link between a prefill and a decode worker is usable, because none has passed a test or all are refused). `reason`:
    a sentence for people. `is_served`: the model's requests run nevertheless, each on one worker.
    """

    model: str
    lacks: Lack
    reason: str
    is_served: bool


def find_shortages(
    models: Iterable[str], views: Sequence[WorkerView], pairs: PairRegistry, mode: Disaggregation
) -> list[Shortage]:
    """Return a `Shortage` for each of `models` that lacks a worker, a prefill or a decode worker, or a usable link
    between two. `views`: the live workers; those that drain do not count, because they accept no request. `pairs`:
    records between which workers KV may move. `mode`: the value of `gateway.disaggregation`."""
    found = (_find_shortage(model, views, pairs, mode) for model in models)
    return [shortage for shortage in found if shortage is not None]


def _find_shortage(
    model: str, views: Sequence[WorkerView], pairs: PairRegistry, mode: Disaggregation
) -> Shortage | None:
    workers = [view for view in views if view.model == model and not view.load.draining]
    if not workers:
        return Shortage(model, "worker", f"model {model} has no live worker", is_served=False)
    is_served = mode != "strict"
    if mode == "off" or (is_served and all(view.pool == "mixed" for view in workers)):
        return None
    # Only a strict gateway has a mixed worker compute a prompt for another worker.
    producers = [view.ref for view in workers if view.pool == "prefill" or (mode == "strict" and view.prefills)]
    consumers = [view.ref for view in workers if view.decodes]
    # Not `linked`, which is for the thread that changes it.
    if any(pairs.is_linked((producer, consumer)) for producer in producers for consumer in consumers):
        return None
    if not producers:
        return Shortage(model, "prefill", f"model {model} has no live prefill worker", is_served)
    if not consumers:
        return Shortage(model, "decode", f"model {model} has no live decode worker", is_served)
    is_refused = any((producer, consumer) in pairs.refused for producer in producers for consumer in consumers)
    untested = f"no block has moved between a prefill and a decode worker of model {model} yet"
    return Shortage(model, "link", (pairs.problem() if is_refused else None) or untested, is_served)
