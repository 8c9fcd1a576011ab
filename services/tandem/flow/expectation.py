"""What a request must expect before any worker has heard of it, from what the line and the workers' reports say; never
admits one."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.admission.queue_item import QueueItem
from tandem.admission.request_queue import RequestQueue
from tandem.admission.ttft_predictor import PrefillWorkerLoad, TtftForecast, forecast
from tandem.routing.worker_view import WorkerView


def expect(line: RequestQueue, model: str, ticket: QueueItem, workers: Iterable[WorkerView]) -> TtftForecast | None:
    """Of one that comes now. `workers` compute prompts; None: none of them has told what its steps cost."""
    found = [each for view in workers if (each := _prefiller(view, ticket)) is not None]
    return forecast(found, line.num_ahead(model, ticket), ticket.num_tokens)


def _prefiller(view: WorkerView, ticket: QueueItem) -> PrefillWorkerLoad | None:
    if view.step_cost is None or view.load.draining:
        return None
    return PrefillWorkerLoad(view.step_cost, view.num_step_tokens, view.num_ahead(ticket.num_tokens, ticket.lane))
