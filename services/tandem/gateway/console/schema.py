"""What `/console/state` answers, as structs for JSON; never fills one in.

Rows of which there are many are written as arrays, in the order of their fields. Times are milliseconds, but where a
name says otherwise.
"""

from __future__ import annotations

import msgspec


class GatewayRow(msgspec.Struct, kw_only=True):
    """`life` is another for each life of a gateway: numbers and sums begin again with it. `missing`: what it lacks to
    serve; None: nothing. `now` in seconds since the epoch."""

    life: str
    version: str
    now: float
    up_s: float
    missing: str | None
    num_running: int
    num_waiting: int


class Viewer(msgspec.Struct):
    """Who looks. `tenant`: empty where nobody is asked for a key; `is_operator`: it sees what others do."""

    tenant: str
    is_operator: bool


class WorkerRow(msgspec.Struct, kw_only=True):
    """`state`: live, draining, trial or resting (its jobs failed), or away (its stream is down; then nothing else is
    known). `model` is empty where the viewer may not use it. Tokens that steps were made of are counted since the
    worker's start, `life`."""

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


class FlowRow(msgspec.Struct, array_like=True):
    """Since the gateway began. `kind`: handoff or prefix."""

    source: str
    target: str
    kind: str
    num_moves: int
    num_bytes: int


class Percentiles(msgspec.Struct, array_like=True):
    p50: float
    p99: float


class ConsoleFigures(msgspec.Struct, kw_only=True):
    """Of the answers that ended within some time. `gap` is the longest between two tokens."""

    num_answers: int
    num_failed: int
    num_prompt: int
    num_cached: int
    num_output: int
    gap: float
    ttft: Percentiles | None
    itl: Percentiles | None


class SliceRow(msgspec.Struct, kw_only=True):
    """`index`: how many slices of `slice_s` fit before it on the gateway's clock."""

    index: int
    lanes: dict[str, ConsoleFigures]


class TenantRow(msgspec.Struct, kw_only=True):
    """`num_running` and `num_waiting` at this moment, the rest of the last minutes; `ttft` is the mean."""

    name: str
    num_running: int = 0
    num_waiting: int = 0
    num_answers: int = 0
    num_failed: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    ttft: float | None = None


class AnswerRow(msgspec.Struct):
    """`stages` in the order of `StateReply.stages`. `at`: when it arrived, in seconds since the epoch."""

    number: int
    id: str
    label: str
    trace: str
    endpoint: str
    model: str
    tenant: str
    lane: str
    outcome: str
    error: str
    path: str
    reason: str
    num_attempts: int
    workers: tuple[str, ...]
    is_streamed: bool
    num_prompt: int
    num_cached: int | None
    num_output: int
    at: float
    total: float
    ttft: float | None
    itl: float | None
    gap: float
    stages: tuple[float, ...]


class StateReply(msgspec.Struct, kw_only=True):
    """`number`: to ask with next time, of the last answer that this one knows. `slices` and `answers` are those that
    came after the number that was asked with; `recent` is of the last minute, all lanes together. `num_workers` may be
    more than are listed."""

    number: int
    gateway: GatewayRow
    viewer: Viewer
    models: tuple[str, ...]
    stages: tuple[str, ...]
    num_workers: int
    workers: list[WorkerRow]
    flows: list[FlowRow]
    recent: ConsoleFigures
    slice_s: float
    slice_now: int
    num_slices: int
    slices: list[SliceRow]
    tenants: list[TenantRow]
    tenants_s: float
    answers: list[AnswerRow]
