"""Simulate four bad nights and days of a cluster, before and after lanes, fair queues, chunks and separate workers.

    python -m loadtest drills [--drills batch-night,flood,long-paste,month-end] [--count 2000] [--chart drills.svg]
        [--write RESULTS.md]

Each drill is a built-in mix in which a group of people waits for answers. They are measured alone, beside the others
without what protects them, and with it; they send the same requests each time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.common.marks import put_between_marks
from loadtest.common.plot import chart_path, colour, duration, log_time, panels, save, styled
from loadtest.common.stats import percentile
from loadtest.common.tables import ms, table
from tandem.core.clock import SystemClock
from tandem.core.config import Config, EngineConfig, GatewayConfig
from tandem.core.ids import TenantId
from tandem.core.lane import Lane
from tandem.core.slo import Slo
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cost.hardware import HARDWARE
from tandem.sim.cost.model_shapes import SHAPES
from tandem.sim.cost.roofline import SERVING, Roofline
from tandem.sim.machines.deployment import Deployment, parse_pools
from tandem.sim.machines.machine import roofline_machine
from tandem.sim.simulate import rare_garbage_collection, simulate
from tandem.workload.scheduled_request import ScheduledRequest
from tandem.workload.source import open_workload

SPLIT = "prefill=4,decode=4"
STEP_TOKENS = 2048
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillSetup:
    """Describe one row of a drill's table.

    `name`: what is said of it. `is_alone`: the others send nothing. `has_lanes`, `has_tenants`: the others keep their
    lane and their tenant, or share those of the people who wait. `is_chunked`: engine.enable_chunked_prefill."""

    name: str
    pools: str = SPLIT
    is_alone: bool = False
    has_lanes: bool = True
    has_tenants: bool = True
    is_chunked: bool = True


@dataclass(frozen=True, slots=True)
class Drill:
    """Describe one drill. `mix`: its built-in mix. `people`: the group that waits. `setups`: alone first, then before,
    and after last."""

    mix: str
    people: str
    setups: tuple[DrillSetup, ...]


@dataclass(slots=True)
class DrillOutcome:
    """Times of the people who wait, in seconds: `ttft_s` of each request, `gaps_s` between all tokens."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


ALONE = DrillSetup(name="alone", is_alone=True)
DRILLS = (
    Drill("batch-night", "chat", (ALONE, DrillSetup(name="one lane", has_lanes=False), DrillSetup(name="lanes"))),
    Drill(
        "flood", "chat",
        (ALONE, DrillSetup(name="flood of the chat's tenant", has_tenants=False), DrillSetup(name="of another tenant")),
    ),
    Drill(
        "long-paste", "chat",
        (
            ALONE,
            DrillSetup(name="`mixed=8`, `--no-enable-chunked-prefill`", pools="mixed=8", is_chunked=False),
            DrillSetup(name="`mixed=8`", pools="mixed=8"),
            DrillSetup(name=f"`{SPLIT}`"),
        ),
    ),
    Drill(
        "month-end", "questions",
        (
            ALONE,
            DrillSetup(
                name="`mixed=8`, one lane, `--no-enable-chunked-prefill`", pools="mixed=8", has_lanes=False,
                is_chunked=False,
            ),
            DrillSetup(name="`mixed=8`, documents in lane `standard`", pools="mixed=8"),
            DrillSetup(name=f"`{SPLIT}`, documents in lane `standard`"),
        ),
    ),
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    names = args.drills.split(",")
    found: dict[Drill, list[DrillOutcome]] = {}
    with rare_garbage_collection():
        for drill in (drill for drill in DRILLS if drill.mix in names):
            found[drill] = [_measured(drill, setup, args.count) for setup in drill.setups]
            sys.stdout.write(f"{drill_text(drill, found[drill])}\n")
    if args.chart is not None:
        save(render(found), args.chart)
    for drill, outcomes in found.items() if args.write is not None else ():
        put_between_marks(args.write, f"drill {drill.mix}", drill_text(drill, outcomes))
    return 0


def drill_requests(drill: Drill, setup: DrillSetup, count: int) -> Iterator[ScheduledRequest]:
    """Yield the requests of a drill's mix, the first `count`, as the setup wants them; those of the people who wait are
    the same in each setup."""
    people: ScheduledRequest | None = None
    for one in open_workload(drill.mix, seed=SEED, count=count, rate=None):
        if one.group == drill.people:
            people = one
            yield one
        elif not setup.is_alone:
            yield _shared(one, setup, drill)
    assert people is not None, f"{drill.mix} has no {drill.people}"


def _shared(one: ScheduledRequest, setup: DrillSetup, drill: Drill) -> ScheduledRequest:
    request = one.request if setup.has_lanes else replace(one.request, lane=Lane.INTERACTIVE)
    return replace(one, request=request if setup.has_tenants else replace(request, tenant=TenantId("acme")))


def measure(drill: Drill, setup: DrillSetup, count: int) -> DrillOutcome:
    """Simulate one row to its end. Raises AssertionError where a request fails."""
    config = Config(
        engine=EngineConfig(max_num_batched_tokens=STEP_TOKENS, enable_chunked_prefill=setup.is_chunked),
        gateway=GatewayConfig(max_queued=10**6, queue_timeout_s=1e6, progress_timeout_s=1e6),
    )
    machine = roofline_machine(Roofline(SHAPES["llama-3.1-8b"], HARDWARE["h200"], efficiency=SERVING))
    deployment = Deployment(machine=machine, pools=parse_pools(setup.pools), config=config)
    found = DrillOutcome()

    def each(trace: ClientTrace) -> None:
        assert trace.is_complete, trace.outcome
        if trace.group == drill.people:
            found.ttft_s.append(trace.ttft_s)
            found.gaps_s += trace.gaps_s

    simulate(deployment.cluster(SEED), drill_requests(drill, setup, count), Slo(), each=each)
    return found


def drill_text(drill: Drill, outcomes: Sequence[DrillOutcome]) -> str:
    """Return the table of a drill as Markdown, with a row for each setup."""
    heads = (f"`{drill.mix}`: {drill.people}", "TTFT p50 / p95 / p99, ms", "ITL p50 / p99 / p99.9 / longest, ms")
    rows = [
        (
            setup.name,
            " / ".join(ms(percentile(found.ttft_s, share)) for share in (0.5, 0.95, 0.99)),
            " / ".join(ms(percentile(found.gaps_s, share)) for share in (0.5, 0.99, 0.999, 1.0)),
        )
        for setup, found in zip(drill.setups, outcomes, strict=True)
    ]
    return table(heads, rows)


@styled
def render(found: dict[Drill, list[DrillOutcome]]) -> Figure:
    """Return a figure with a panel for each drill: TTFT and gaps of the people who wait, alone, before and after."""
    figure, rows = panels(2, 2)
    axes = [one for row in rows for one in row]
    for one, (drill, outcomes) in zip(axes, found.items(), strict=False):
        _plot(one, drill, [outcomes[0], outcomes[1], outcomes[-1]])
    for one in axes[len(found) :]:
        one.set_visible(False)
    return figure


def _plot(axes: Axes, drill: Drill, outcomes: Sequence[DrillOutcome]) -> None:
    for place, (name, found) in enumerate(zip(("alone", "before", "after"), outcomes, strict=True)):
        for row, (values, most) in enumerate(((found.ttft_s, 0.99), (found.gaps_s, 1.0))):
            low, high = (1e3 * percentile(values, share) for share in (0.5, most))
            at = 4 * row + place
            axes.plot([low, high], [at, at], color=colour(place), linewidth=7, alpha=0.5, solid_capstyle="butt")
            axes.plot([low], [at], "|", color=colour(place), markersize=12, markeredgewidth=2)
            text = f" {name}: {duration(low / 1e3)} / {duration(high / 1e3)}"
            axes.annotate(text, (high, at), va="center", fontsize=8)
    axes.set_yticks([1, 5], ["TTFT\np50 to p99", "gaps\np50 to longest"])
    axes.set_ylim(7, -1)
    axes.margins(x=0.45)
    axes.set_title(f"{drill.mix}: {drill.people}")
    log_time(axes)


def _measured(drill: Drill, setup: DrillSetup, count: int) -> DrillOutcome:
    clock = SystemClock()
    began = clock.now()
    found = measure(drill, setup, count)
    sys.stderr.write(f"{drill.mix}, {setup.name}: {len(found.ttft_s)} requests, {clock.now() - began:.0f} s\n")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest drills", description="Four mixes, before and after.")
    parser.add_argument("--drills", default=",".join(drill.mix for drill in DRILLS), help="default: all")
    parser.add_argument("--count", type=int, default=2000, help="requests of each mix (default: %(default)s)")
    parser.add_argument("--chart", type=chart_path, default=None, metavar="FILE", help="draw them as .svg or .png")
    parser.add_argument("--write", type=Path, default=None, metavar="FILE", help="put the tables between their marks")
    return parser
