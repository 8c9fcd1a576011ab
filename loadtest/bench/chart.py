"""Plot the ITL and the per-class TTFT of a bench, with the systems side by side."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.client.records import Run
from loadtest.common.distribution import distribution
from loadtest.common.plot import cdf, colour, dress_cdf, log_time, panels, styled
from loadtest.common.stats import percentile
from tandem.core.quantile_sketch import QuantileSketch


@styled
def render(systems: Sequence[str], runs: Sequence[Run]) -> Figure:
    """Return a figure of the runs with one row for each workload; failed runs are left out."""
    workloads = list(dict.fromkeys(run.workload for run in runs))
    figure, rows = panels(max(len(workloads), 1), 2)
    for workload, (left, right) in zip(workloads, rows, strict=True):
        found = {s: [r for r in runs if (r.system, r.workload) == (s, workload) and not r.failures] for s in systems}
        for place, (system, counted) in enumerate(found.items()):
            gaps = distribution(QuantileSketch(gap for run in counted for r in run.records for gap in r.gaps_s))
            if gaps is not None:
                cdf(left, gaps, system, colour(place))
        dress_cdf(left, f"{workload}: inter-token latency", "ITL")
        _plot_ttft(right, workload, found)
    return figure


def _plot_ttft(axes: Axes, workload: str, found: dict[str, list[Run]]) -> None:
    """Plot for each class and system a line from the least TTFT to p99, with a mark at the median."""
    groups = list(dict.fromkeys(r.group for runs in found.values() for run in runs for r in run.records))
    for place, (system, runs) in enumerate(found.items()):
        label: str | None = system
        for g, group in enumerate(groups):
            values = [r.ttft_s * 1e3 for run in runs for r in run.records if r.group == group]
            if values:
                x = g + 0.8 * (place + 0.5) / len(found) - 0.4
                low, middle, high = (percentile(values, share) for share in (0.0, 0.5, 0.99))
                axes.plot([x, x], [low, high], color=colour(place), linewidth=5, alpha=0.4, solid_capstyle="butt")
                axes.plot([x], [middle], "_", color=colour(place), markersize=12, markeredgewidth=2, label=label)
                label = None
    axes.set_title(f"{workload}: time to first token, least to p99, mark at p50")
    axes.set_ylabel("TTFT, log scale")
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=False, axis="x")
    if groups:
        log_time(axes, "y")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
