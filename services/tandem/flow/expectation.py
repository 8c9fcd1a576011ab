"""What a request must expect before any worker has heard of it, from what the line and the workers' reports say; never
admits one."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.admission.line import Line
from tandem.admission.predict import Forecast, Prefiller, forecast
from tandem.admission.ticket import Ticket
from tandem.routing.view import WorkerView


def expect(line: Line, model: str, ticket: Ticket, workers: Iterable[WorkerView]) -> Forecast | None:
    """Of one that comes now. `workers` compute prompts; None: none of them has told what its steps cost."""
    found = [each for view in workers if (each := _prefiller(view, ticket)) is not None]
    return forecast(found, line.num_ahead(model, ticket), ticket.num_tokens)


def _prefiller(view: WorkerView, ticket: Ticket) -> Prefiller | None:
    if view.step_cost is None or view.load.draining:
        return None
    return Prefiller(view.step_cost, view.num_step_tokens, view.num_ahead(ticket.num_tokens, ticket.lane))
