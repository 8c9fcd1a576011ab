"""Define the JSON of `/console/state`.

Flows and percentiles are encoded as arrays in the order of their fields. Times are milliseconds, unless the name of a
field says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandem.gateway.telemetry.kv_flows import Flow


class GatewayRow(msgspec.Struct, kw_only=True):
    """The gateway itself. `life`: unique to one run of the process, with which numbers and sums begin again.
    `missing`: what the gateway lacks to be ready; None: nothing. `now`: in seconds since the epoch."""

    life: str
    version: str
    now: float
    up_s: float
    missing: str | None
    num_running: int
    num_waiting: int


class Viewer(msgspec.Struct):
    """Tenant that views the console. `tenant`: empty where no key is required. `is_operator`: the tenant sees the
    requests of all tenants."""

    tenant: str
    is_operator: bool


class WorkerRow(msgspec.Struct, kw_only=True):
    """One worker. `state`: live; draining; trial or resting (its jobs failed, the circuit breaker is half open or
    open); or away (its stream is down, and the other fields are empty). `model`: empty where the viewer may not use it.
    `num_prefill_tokens`, `num_decode_tokens`: computed since the worker's start, which `life` identifies."""

    id: str
    life: str
    state: str
    pool: str = ""
    model: str = ""
    zone: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_leased_blocks: int = 0
    num_reserved_blocks: int = 0
    block_size: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_remote_hit_tokens: int = 0


Percentiles = tuple[float, float]
"""p50 and p99."""


class RequestCounts(msgspec.Struct, kw_only=True):
    """Numbers of requests that ended within some time, and of their tokens."""

    num_answers: int = 0
    num_failed: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0


class ConsoleFigures(RequestCounts, kw_only=True):
    """Figures of the requests that ended within some time. `gap`: the longest time between two tokens."""

    gap: float
    ttft: Percentiles | None
    itl: Percentiles | None


class SliceRow(msgspec.Struct, kw_only=True):
    """Figures of one slice of time by lane. `index`: the slice begins at `index * slice_s` of the gateway's clock."""

    index: int
    lanes: dict[str, ConsoleFigures]


class TenantRow(RequestCounts, kw_only=True):
    """Figures of one tenant. `num_running`, `num_waiting`: at this moment. The other fields: over the last minutes,
    `ttft` as the mean."""

    name: str
    num_running: int
    num_waiting: int
    ttft: float | None


class StateReply(msgspec.Struct, kw_only=True):
    """The whole state.

    `number`: of the last ended request, to be sent as `since` with the next query. `slices`, `answers`: those after the
    `since` of this query. `recent`: over the last minute and all lanes. `num_workers`: may be more than are listed.

    An answer is one ended request: the fields of a RequestRecord by name, its `number`, and `at`, its arrival in
    seconds since the epoch; `total`, `ttft`, `itl`, `gap`, and `stages` in the order of `StateReply.stages`."""

    number: int
    gateway: GatewayRow
    viewer: Viewer
    models: tuple[str, ...]
    stages: tuple[str, ...]
    num_workers: int
    workers: list[WorkerRow]
    flows: Sequence[Flow]
    recent: ConsoleFigures
    slice_s: float
    slice_now: int
    num_slices: int
    slices: list[SliceRow]
    tenants: list[TenantRow]
    tenants_s: float
    answers: list[dict[str, object]]
