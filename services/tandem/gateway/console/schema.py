"""Define the JSON of `/console/state`.

Flows and percentiles are encoded as arrays in the order of their fields. Times are milliseconds, unless the name of a
field says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandem.gateway.telemetry.kv_flows import Flow


class GatewayRow(msgspec.Struct, kw_only=True):
    """State of the gateway itself. `life`: its name, unique to one run of the process; after a restart the name is
    another one, and all numbers and sums begin again. `now`: the time in seconds since the epoch. `up_s`: seconds since
    the gateway's start. `missing`: what the gateway lacks to be ready; None where it is ready. `num_running`: open
    requests that have a placement on workers. `num_waiting`: open requests that wait for a placement."""

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
    """State of one worker. `life`: its incarnation, one run of its process. `state`: live; draining; trial or resting
    (its jobs failed, and the circuit breaker is half open or open); or away (its stream is down, and the other fields
    are empty). `model`: name of the model; empty where the viewer may not use it. `lanes`: the lanes whose requests may
    be placed on the worker; empty: all lanes.

    `num_running`, `num_waiting`: sequences with and without KV blocks. `num_queued_tokens`: prompt tokens of submitted
    jobs that are not computed yet. `num_leased_blocks`: KV blocks that other workers may still read.
    `num_reserved_blocks`: free KV blocks set aside for jobs that will read their KV from another worker. `lane_seqs`,
    `lane_blocks`: for each lane, the most urgent first, the number of its sequences and of their KV blocks.
    `lane_paused`: for each lane, the number of waiting sequences that have begun, such as preempted ones.
    `num_host_blocks`: KV blocks that are only in host memory. `num_prefill_tokens`, `num_decode_tokens`: tokens
    computed since the worker's start."""

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
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0


Percentiles = tuple[float, float]
"""p50 and p99."""


class RequestCounts(msgspec.Struct, kw_only=True):
    """Counts over the requests that ended in one period. `num_answers`: number of these requests. `num_failed`: how
    many of them ended with an error; cancelled requests do not count. `num_prompt`, `num_output`: their prompt and
    output tokens. `num_cached`: prompt tokens whose KV was taken from a cache."""

    num_answers: int = 0
    num_failed: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0


class ConsoleFigures(RequestCounts, kw_only=True):
    """Figures of the requests that ended in one period; times are in milliseconds. `gap`: the longest time between two
    tokens of a choice. `ttft`: p50 and p99 of the time to first token. `itl`: p50 and p99 of a request's mean time
    between two tokens. `ttft` and `itl` are None where no request had such a time."""

    gap: float
    ttft: Percentiles | None
    itl: Percentiles | None


class SliceRow(msgspec.Struct, kw_only=True):
    """Figures of the requests that ended in one time slice, by lane. `index`: the slice begins at `index *
    StateReply.slice_s` seconds of the gateway's clock."""

    index: int
    lanes: dict[str, ConsoleFigures]


class TenantRow(RequestCounts, kw_only=True):
    """Figures of one tenant. `num_running`: its open requests that have a placement on workers at this moment.
    `num_waiting`: its open requests that wait for one. `ttft`: mean time to first token in milliseconds; None where no
    request had a first token. `ttft` and the counts cover the requests that ended in the last `StateReply.tenants_s`
    seconds."""

    name: str
    num_running: int
    num_waiting: int
    ttft: float | None


class StateReply(msgspec.Struct, kw_only=True):
    """The whole state of the console for one viewer.

    `number`: number of the last ended request, which the client sends as `since` with its next query. `models`: names
    that the viewer may use. `stages`: names of the stages of a request. `num_workers`: number of all workers, of which
    `workers` may list only a part. `flows`: KV moved between pairs of workers. `recent`: figures over the last minute
    and all lanes. `slice_s`: length of a time slice in seconds. `slice_now`: index of the current time slice.
    `num_slices`: how many time slices the gateway keeps. `slices`: the kept time slices in which a request with a
    number greater than the query's `since` ended. `tenants_s`: the period that `tenants` covers, in seconds.

    `answers`: one object for each kept record of an ended request with a number greater than `since`. It has fields of
    the request's RequestRecord by name, its `number`, its arrival `at` in seconds since the epoch, the times `total`,
    `ttft`, `itl` and `gap` in milliseconds, and `stages`, the milliseconds of each stage in the order of
    `StateReply.stages`."""

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
