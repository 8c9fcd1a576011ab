"""What a request must expect before any worker has heard of it, from what the line and the workers' reports say; never
admits one."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.admission.line import Line
from tandem.admission.predict import Forecast, Prefiller, forecast
from tandem.admission.ticket import Ticket
from tandem.core.load import prompt_size
from tandem.routing.view import WorkerView
from tandem.sched.backlog import HORIZON_STEPS

_STEP_TOKENS = 512
"""Of a worker that takes on any number."""


def expect(line: Line, model: str, ticket: Ticket, workers: Iterable[WorkerView]) -> Forecast | None:
    """Of one that comes now. `workers` compute prompts; None: none of them has told what its steps cost."""
    found = [each for view in workers if (each := _prefiller(view, ticket)) is not None]
    return forecast(found, line.num_ahead(model, ticket), ticket.num_tokens)


def _prefiller(view: WorkerView, ticket: Ticket) -> Prefiller | None:
    """Longer prompts there share their steps with a newcomer, so no more of them counts than the newcomer's own."""
    if view.step_cost is None or view.load.draining:
        return None
    load = view.load
    step_tokens = load.num_horizon_tokens // HORIZON_STEPS or _STEP_TOKENS
    if not load.lane_tokens:
        return Prefiller(view.step_cost, step_tokens, view.queued_tokens)
    is_idle = not load.lane_tokens[ticket.lane] and not view.unreported
    ahead = 0 if is_idle else load.beside(ticket.num_tokens, ticket.lane, view.unreported)
    if prompt_size(load.lane_longest[ticket.lane]) > prompt_size(ticket.num_tokens):
        ahead += ticket.num_tokens
    return Prefiller(view.step_cost, step_tokens, ahead)
