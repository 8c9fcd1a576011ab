"""Define the JSON of `/console/state`.

Flows and percentiles are encoded as arrays in the order of their fields. Times are milliseconds, unless the name of a
field says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandem.gateway.telemetry.kv_flows import Flow


class GatewayRow(msgspec.Struct, kw_only=True):
    """The gateway itself. `life`: its name, unique to one run of the process; after a restart it is another one, and
    all numbers and sums begin again. `now`: in seconds since the epoch. `up_s`: seconds since its start. `missing`:
    what the gateway lacks to be ready; None: nothing. `num_running`, `num_waiting`: open requests that have a placement
    on workers, and that wait for one."""

    life: str
    version: str
    now: float
    up_s: float
    missing: str | None
    num_running: int
    num_waiting: int


class Viewer(msgspec.Struct):
    """Tenant that views the console. `tenant`: its name; empty where no key is required. `is_operator`: the tenant may
    see the requests of all tenants."""

    tenant: str
    is_operator: bool


class WorkerRow(msgspec.Struct, kw_only=True):
    """One worker. `life`: its incarnation, one run of its process. `state`: live; draining; trial or resting (its jobs
    failed, and the circuit breaker is half open or open); or away (its stream is down, and the other fields are empty).
    `model`: empty where the viewer may not use it. `lanes`: whose requests are placed there, empty for all lanes.

    `num_queued_tokens`: tokens of submitted jobs that are not computed yet. `num_leased_blocks`: KV blocks that other
    workers may still read. `num_reserved_blocks`: free KV blocks set aside for jobs that will read their KV from
    another worker. `lane_seqs`, `lane_blocks`: sequences of each lane and their KV blocks. `lane_paused`: waiting
    sequences of each lane that have begun, such as preempted ones. `num_host_blocks`: KV blocks that are only in host
    memory. `block_size`: in tokens.
    `num_prefill_tokens`, `num_decode_tokens`: computed since the worker's start. `num_remote_hit_tokens`: tokens since
    then whose KV was read from other workers' prefix caches."""

    id: str
    life: str
    state: str
    pool: str = ""
    model: str = ""
    zone: str = ""
    lanes: tuple[str, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_leased_blocks: int = 0
    num_reserved_blocks: int = 0
    lane_seqs: tuple[int, ...] = ()
    lane_blocks: tuple[int, ...] = ()
    lane_paused: tuple[int, ...] = ()
    num_host_blocks: int = 0
    block_size: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_remote_hit_tokens: int = 0


Percentiles = tuple[float, float]
"""p50 and p99."""


class RequestCounts(msgspec.Struct, kw_only=True):
    """Counts over the requests that ended within some time. `num_answers`: the requests. `num_failed`: those that an
    error ended, cancellations excluded. `num_prompt`, `num_output`: their tokens. `num_cached`: the prompt tokens taken
    from a cache."""

    num_answers: int = 0
    num_failed: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0


class ConsoleFigures(RequestCounts, kw_only=True):
    """Figures of the requests that ended within some time. `gap`: the longest time between two tokens of a choice.
    `ttft`: percentiles of the time to the first token. `itl`: percentiles of a request's mean time between two tokens.
    Both are None where no request had such a time."""

    gap: float
    ttft: Percentiles | None
    itl: Percentiles | None


class SliceRow(msgspec.Struct, kw_only=True):
    """Figures of the requests that ended in one slice of time, by lane. `index`: the slice begins at `index *
    StateReply.slice_s` seconds of the gateway's clock."""

    index: int
    lanes: dict[str, ConsoleFigures]


class TenantRow(RequestCounts, kw_only=True):
    """Figures of one tenant. `num_running`, `num_waiting`: its open requests at this moment. The other fields: over the
    requests that ended in the last `StateReply.tenants_s` seconds, `ttft` as the mean time to the first token; None:
    there was none."""

    name: str
    num_running: int
    num_waiting: int
    ttft: float | None


class StateReply(msgspec.Struct, kw_only=True):
    """The whole state of the console for one viewer.

    `number`: of the last ended request, to be sent as `since` with the next query. `slices`, `answers`: only those
    after the `since` of this query. `models`: names that the viewer may use. `stages`: names of the stages of a
    request. `num_workers`: of all workers, which may be more than `workers` lists. `flows`: KV moved between workers.
    `recent`: figures over the last minute and all lanes. `slice_s`: seconds of a slice. `slice_now`: index of the
    current one. `num_slices`: how many are kept.

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
