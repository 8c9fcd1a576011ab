"""Build the console's state for one viewer from a snapshot of the gateway and its history.

A tenant sees the workers, the total figures and its own requests, without names of other tenants or of models that it
may not use; an operator sees everything. Nobody sees a prompt, an output or the address of a worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from tandem.admission.tenant import Tenant
from tandem.core.ids import OPEN_TENANT, TenantId, WorkerId, WorkerRef
from tandem.core.lane import lane_labels
from tandem.core.request_stages import Stage
from tandem.core.worker_load import WorkerLoad
from tandem.gateway.console import schema as reply
from tandem.gateway.console.history import (
    NUM_SLICES,
    NUM_TENANT_SLICES,
    SLICE_S,
    TENANT_SLICE_S,
    ConsoleState,
    LaneFigures,
    Tally,
    percentiles,
)
from tandem.gateway.context.interfaces import ServedModel
from tandem.gateway.telemetry.kv_flows import Flow
from tandem.gateway.telemetry.request_record import RequestRecord
from tandem.routing.circuit_breaker import BreakerState
from tandem.routing.worker_view import WorkerView

MAX_WORKERS = 512
MAX_ERROR_CHARS = 300
_RECENT_SLICES = 12
"""Number of slices in `recent`: a minute."""
_STAGES = tuple(stage.value for stage in Stage)
_NO_FIGURES = Tally()
_RECORD_FIELDS = (
    "id", "label", "trace", "endpoint", "model", "lane", "outcome", "path", "reason", "num_attempts", "workers",
    "is_streamed",
)  # fmt: skip
"""Fields of a RequestRecord that an answer contains as they are."""
_record_values = attrgetter(*_RECORD_FIELDS)
_LOAD_FIELDS = tuple(name for name in reply.WorkerRow.__struct_fields__ if name in WorkerLoad.__dataclass_fields__)
"""Fields of a WorkerRow that a worker's load report has too."""
_BREAKERS = {BreakerState.TRIAL: "trial", BreakerState.OPEN: "resting"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySnapshot:
    """Hold the state of a gateway and its workers at one moment.

    `life`: the gateway's name, unique to one run of the process. `wall_s`: the moment in seconds since the epoch.
    `now`, `began_at`: the moment and the gateway's start, in seconds of the gateway's clock. `missing`: what the
    gateway lacks to be ready; None where it is ready. `models`: the models that clients may request. `known`: all
    workers that the gateway connects to. `live`: the workers whose Watch stream is open. `breakers`: states of the
    circuit breakers of workers whose last jobs failed. `flows`: KV moved between workers. `num_open`: number of
    requests that were admitted and have not ended. Its keys are pairs of a tenant id and whether the requests wait for
    a placement."""

    life: str
    version: str
    wall_s: float
    now: float
    began_at: float
    missing: str | None
    models: Sequence[ServedModel]
    known: Sequence[WorkerRef]
    live: Sequence[WorkerView]
    breakers: Mapping[WorkerId, BreakerState]
    flows: Sequence[Flow]
    num_open: Mapping[tuple[TenantId, bool], int]


def view(snapshot: GatewaySnapshot, state: ConsoleState, viewer: Tenant, since: int) -> reply.StateReply:
    """Return the part of `snapshot` and of the history `state` that `viewer` may see.

    `since`: number (see ConsoleState) of the last ended request that the client has received. The result has only the
    records of requests with a greater number, and only the time slices in which one of these requests ended."""
    own = None if viewer.operator else viewer.id
    return reply.StateReply(
        number=state.number,
        gateway=_gateway(snapshot),
        viewer=reply.Viewer("" if viewer.id == OPEN_TENANT else viewer.id, viewer.operator),
        models=tuple(name for model in snapshot.models if viewer.may_use(*model.names) for name in model.names),
        stages=_STAGES,
        num_workers=len(snapshot.known),
        workers=_workers(snapshot, viewer),
        flows=snapshot.flows,
        recent=_figures(state.recent(_RECENT_SLICES, snapshot.now)),
        slice_s=SLICE_S,
        slice_now=int(snapshot.now // SLICE_S),
        num_slices=NUM_SLICES,
        slices=[
            reply.SliceRow(index=each.index, lanes={lane: _figures(figures) for lane, figures in each.figures.items()})
            for each in state.slices(since, snapshot.now)
        ],
        tenants=_tenants(snapshot, state, own),
        tenants_s=TENANT_SLICE_S * NUM_TENANT_SLICES,
        answers=[_answer(number, record) for number, record in state.records(since, own)],
    )


def _gateway(snapshot: GatewaySnapshot) -> reply.GatewayRow:
    waiting = sum(number for (_, waits), number in snapshot.num_open.items() if waits)
    return reply.GatewayRow(
        life=snapshot.life,
        version=snapshot.version,
        now=round(snapshot.wall_s, 3),
        up_s=round(snapshot.now - snapshot.began_at, 1),
        missing=snapshot.missing,
        num_running=sum(snapshot.num_open.values()) - waiting,
        num_waiting=waiting,
    )


def _workers(snapshot: GatewaySnapshot, viewer: Tenant) -> list[reply.WorkerRow]:
    usable = {model.name for model in snapshot.models if viewer.may_use(*model.names)}
    live = {worker.ref: worker for worker in snapshot.live}
    rows: list[reply.WorkerRow] = []
    for ref in sorted(snapshot.known)[:MAX_WORKERS]:
        worker = live.get(ref)
        if worker is None:
            rows.append(reply.WorkerRow(id=ref.id, life=str(ref.incarnation), state="away"))
        else:
            rows.append(_worker(worker, snapshot.breakers.get(ref.id), worker.model if worker.model in usable else ""))
    return rows


def _worker(worker: WorkerView, breaker: BreakerState | None, model: str) -> reply.WorkerRow:
    load = {name: getattr(worker.load, name) for name in _LOAD_FIELDS}
    load["num_queued_tokens"] = worker.queued_tokens
    state = "draining" if worker.load.draining else _BREAKERS.get(breaker or BreakerState.CLOSED, "live")
    return reply.WorkerRow(
        id=worker.ref.id,
        life=str(worker.ref.incarnation),
        state=state,
        pool=worker.pool,
        model=model,
        zone=worker.topology.zone,
        lanes=lane_labels(worker.lanes),
        **load,
    )


def _counts(tally: Tally) -> dict[str, int]:
    return {name: getattr(tally, name) for name in reply.RequestCounts.__struct_fields__}


def _figures(lane: LaneFigures) -> reply.ConsoleFigures:
    first, token = percentiles(lane.first_s), percentiles(lane.token_s)
    return reply.ConsoleFigures(
        **_counts(lane),
        gap=_ms(lane.longest_gap_s),
        ttft=None if first is None else (_ms(first[0]), _ms(first[1])),
        itl=None if token is None else (_ms(token[0]), _ms(token[1])),
    )


def _tenants(snapshot: GatewaySnapshot, state: ConsoleState, own: str | None) -> list[reply.TenantRow]:
    """List the tenants that have figures or open requests, by name; without operator rights only the viewer's own."""
    figures = state.tenants(snapshot.now)
    names = {*figures, *(str(tenant) for tenant, _ in snapshot.num_open)} if own is None else {own}
    return [_tenant(name, figures.get(name, _NO_FIGURES), snapshot) for name in sorted(names)]


def _tenant(name: str, figures: Tally, snapshot: GatewaySnapshot) -> reply.TenantRow:
    return reply.TenantRow(
        name=name,
        num_running=snapshot.num_open.get((TenantId(name), False), 0),
        num_waiting=snapshot.num_open.get((TenantId(name), True), 0),
        **_counts(figures),
        ttft=_ms(figures.first_sum_s / figures.num_first) if figures.num_first else None,
    )


def _answer(number: int, record: RequestRecord) -> dict[str, object]:
    return dict(zip(_RECORD_FIELDS, _record_values(record), strict=True)) | {
        "number": number,
        "tenant": "" if record.tenant == OPEN_TENANT else record.tenant,
        "error": record.error[:MAX_ERROR_CHARS],
        "num_prompt": record.usage.num_prompt,
        "num_cached": record.usage.num_cached,
        "num_output": record.usage.num_output,
        "at": round(record.received_at, 3),
        "total": _ms(record.total_s),
        "ttft": None if record.first_token_s is None else _ms(record.first_token_s),
        "itl": None if record.token_s is None else _ms(record.token_s),
        "gap": _ms(record.longest_gap_s),
        "stages": tuple(map(_ms, record.stages)),
    }


def _ms(seconds: float) -> float:
    """Convert to milliseconds, rounded to microseconds."""
    return round(1e6 * seconds) / 1e3
