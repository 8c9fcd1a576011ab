"""Run one workload on one simulated cluster and return its report."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tandem.core.slo import Slo
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.report.report import LatencyStats, SimulationReport, report
from tandem.sim.report.time_series import Series
from tandem.workload.scheduled_request import ScheduledRequest

Look = Callable[[SimCluster, LatencyStats], None]
"""Callback after the end of each request; it may raise an exception to abort the run."""


COLLECT_EVERY = 1_000_000
"""Objects allocated between two garbage collections of the youngest generation."""


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect garbage rarely inside the `with` block, for programs with long simulations.

    A simulation creates hardly any reference cycles, and the search for them among all its objects takes a fifth of its
    run time."""
    usual = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def simulate(
    spec: ClusterSpec,
    requests: Iterable[ScheduledRequest],
    slo: Slo,
    *,
    series: Series | None = None,
    look: Look | None = None,
    each: Callable[[ClientTrace], None] | None = None,
) -> tuple[SimulationReport, LatencyStats]:
    """Run a workload to its end on a new cluster; return its report and the latency statistics from which it was
    computed.

    `slo`: the latency targets with which requests are compared. At the end of every request, `each` is called with its
    trace, then `series` samples the cluster, then `look` is called. Raises ValueError when there is no request, and
    AssertionError when requests, reads or KV blocks are left over."""
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

    cluster.run(requests if series is None else _watched(requests, cluster, series), ended)
    cluster.check()
    return report(cluster, tally), tally


def _watched(requests: Iterable[ScheduledRequest], cluster: SimCluster, series: Series) -> Iterator[ScheduledRequest]:
    for scheduled in requests:
        series.look(cluster)
        yield scheduled
