"""One simulated run from cluster to report; never chooses what to run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tandem.core.slo import Slo
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import ClusterSpec, SimCluster
from tandem.sim.report.latency_stats import LatencyStats
from tandem.sim.report.report import SimulationReport, report
from tandem.sim.report.time_series import Series
from tandem.workload.ask import ScheduledRequest

Look = Callable[[SimCluster, LatencyStats], None]
"""Called after each end of a request; it may raise to give the run up."""


COLLECT_EVERY = 1_000_000
"""Objects between two collections."""


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """For programs that simulate for long: a simulation makes hardly any cycles, and looking for them among all that it
    holds takes a fifth of its time."""
    usual = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def simulate(
    spec: ClusterSpec,
    asks: Iterable[ScheduledRequest],
    slo: Slo,
    *,
    series: Series | None = None,
    look: Look | None = None,
    each: Callable[[ClientTrace], None] | None = None,
) -> tuple[SimulationReport, LatencyStats]:
    """Run a workload to its end and check that nothing is left open; `each` gets the trace of every request. Raises
    ValueError when there is no request."""
    cluster, tally = SimCluster(spec), LatencyStats(slo)

    def ended(trace: ClientTrace) -> None:
        tally.add(trace)
        if each is not None:
            each(trace)
        if series is not None:
            series.add(trace)
            series.look(cluster)
        if look is not None:
            look(cluster, tally)

    cluster.run(asks if series is None else _watched(asks, cluster, series), ended)
    cluster.check()
    return report(cluster, tally), tally


def _watched(asks: Iterable[ScheduledRequest], cluster: SimCluster, series: Series) -> Iterator[ScheduledRequest]:
    for ask in asks:
        series.look(cluster)
        yield ask
