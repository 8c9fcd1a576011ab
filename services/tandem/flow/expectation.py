"""Predict the time to first token of a new request from the request queue and the workers' reports."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.admission.queue_item import QueueItem
from tandem.admission.request_queue import RequestQueue
from tandem.admission.ttft_predictor import PrefillWorkerLoad, TtftForecast, forecast
from tandem.routing.worker_view import WorkerView


def expect(line: RequestQueue, model: str, item: QueueItem, workers: Iterable[WorkerView]) -> TtftForecast | None:
    """Return the forecast for a request that arrives now; None while no worker has reported its step costs. `workers`
    are the prefill workers."""
    loads = [load for view in workers if (load := _prefiller(view, item)) is not None]
    return forecast(loads, line.num_ahead(model, item), item.num_tokens)


def _prefiller(view: WorkerView, item: QueueItem) -> PrefillWorkerLoad | None:
    if view.step_cost is None or view.load.draining:
        return None
    return PrefillWorkerLoad(view.step_cost, view.num_step_tokens, view.num_ahead(item.num_tokens, item.lane))
