"""What one load test amounts to, as one frozen value that travels as JSON; never adds anything up.

The top level of the JSON is `LoadReport`; seconds everywhere.
"""

from __future__ import annotations

import msgspec

from loadtest.common.distribution import Distribution
from tandem.core.slo import Slo

METRICS = ("ttft", "itl", "tpot", "e2e", "first_gap", "rest")
"""Of one request: due to first token; gaps between arrivals (all requests' pooled); time per token after the first;
due to last token; first to second arrival, which a hand-off is in; the gaps after that together."""


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one class or tenant, or all: which is `kind`. `times` are of requests that ended well, by `METRICS`;
    rates are per second of the whole run and count whole answers only. `num_good` met the SLO."""

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
    """Ten seconds of a run; the last one may be shorter. `output_rate`: tokens per second that arrived, those of failed
    answers included."""

    start_s: float
    num_sent: int
    num_ended: int
    num_failed: int
    output_rate: float
    itl_p99_s: float | None
    most_open: int


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """One request that ended well."""

    group: str
    ttft_s: float
    e2e_s: float
    tenant: str = ""
    is_good: bool = True
    tpot_s: float | None = None
    gaps_s: tuple[float, ...] = ()


class ClientFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The client's own faults: how late it sent, and how many requests `max_open` held back for how long together."""

    late_p99_s: float
    late_max_s: float
    most_open: int
    num_held: int
    held_s: float


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """`began` is seconds since the epoch; all other times count from it. The first of `scopes` is all requests.
    `examples`: one message for each kind of error. `is_whole`: nobody stopped it before its end. `is_simulated`: it is
    what a simulated run would have told; that has no windows, client, examples and sample."""

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
