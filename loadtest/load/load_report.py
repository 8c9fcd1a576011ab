"""Define the report of one load test as a frozen value that serializes as JSON.

The top level of the JSON is `LoadReport`; seconds everywhere.
"""

from __future__ import annotations

import msgspec

from loadtest.common.distribution import Distribution
from tandem.core.slo import Slo

METRICS = ("ttft", "itl", "tpot", "e2e", "first_gap", "rest")
"""Latency metrics of one request.

In order: due to first token; gaps between arrivals (pooled over requests); time per token after the first; due to last
token; first to second arrival, which includes a hand-off; the gaps after that together.
"""


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of all requests, or of one class or tenant, as `kind` says.

    `times` are of requests that ended well, by `METRICS`; rates are per second of the whole run and count whole answers
    only. `num_good`: requests that met the SLO.
    """

    kind: str
    name: str
    num_requests: int
    num_whole: int
    num_good: int
    errors: dict[str, int]
    request_rate: float
    good_rate: float
    prompt_rate: float
    output_rate: float
    times: dict[str, Distribution]


class LoadWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of ten seconds of a run; the last window may be shorter.

    `output_rate` is tokens received per second, including those of failed answers.
    """

    start_s: float
    num_sent: int
    num_ended: int
    num_failed: int
    output_rate: float
    itl_p99_s: float | None
    most_open: int


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of one randomly chosen request that ended well."""

    group: str
    ttft_s: float
    e2e_s: float
    tenant: str = ""
    is_good: bool = True
    tpot_s: float | None = None
    gaps_s: tuple[float, ...] = ()


class ClientFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Delays that the client itself caused: how late it sent, and how many requests `max_open` delayed for how long in
    total."""

    late_p99_s: float
    late_max_s: float
    most_open: int
    num_held: int
    held_s: float


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one load test.

    `began` is seconds since the epoch; all other times count from it. The first of `scopes` is all requests.
    `examples`: one message for each kind of error. `is_whole`: the run was not stopped before its end. `is_simulated`:
    the report was made from a simulated run, and has no windows, client, examples and sample.
    """

    name: str
    facts: dict[str, str] = {}
    began: float = 0.0
    wall_s: float
    is_whole: bool = True
    is_simulated: bool = False
    slo: Slo = Slo()
    scopes: tuple[Scope, ...]
    windows: tuple[LoadWindow, ...] = ()
    client: ClientFacts | None = None
    examples: dict[str, str] = {}
    sample: tuple[Sampled, ...] = ()
