"""Plot a load test: latencies of each class, the timeline, and the workers' steps."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.common.plot import GREY, cdf, colour, dress_cdf, log_time, panels, styled
from loadtest.load.load_report import LoadReport, Scope
from loadtest.load.stats_collector import WINDOW_S
from loadtest.load.steps import RecordedSteps, per_interval


@styled
def render(report: LoadReport, logs: Sequence[RecordedSteps] = ()) -> Figure:
    """Return a figure of a load test: a row of latencies, a row over time, and a row for every two workers with step
    logs."""
    facts_text = ", ".join(f"{name} {value}" for name, value in report.facts.items() if name != "url")
    figure, rows = panels(2 + (len(logs) + 1) // 2, 2, f"{report.name}: {facts_text}")
    (ttft, itl), (flow, stall), *more = rows
    groups = classes(report.scopes)
    plot_cdfs(ttft, groups, "ttft")
    dress_cdf(ttft, "Time to first token, from when it was due", "TTFT", report.slo.ttft_s)
    plot_cdfs(itl, groups, "itl")
    dress_cdf(itl, "Inter-token latency", "ITL", report.slo.itl_s)
    _plot_flow(flow, report)
    _plot_stalls(stall, report)
    places = [axes for row in more for axes in row]
    for axes, log in zip(places, logs, strict=False):
        _plot_steps(axes, log, report.wall_s)
    for axes in places[len(logs) :]:
        axes.set_visible(False)
    return figure


def classes(scopes: Sequence[Scope]) -> list[Scope]:
    """Return the scopes to plot, one curve each: all requests and each class, or only the class if there is just
    one."""
    found = [scope for scope in scopes if scope.kind == "class"]
    return found if len(found) < 2 else [scopes[0], *found]


def plot_cdfs(axes: Axes, scopes: Sequence[Scope], metric: str) -> None:
    for place, scope in enumerate(scopes):
        found = scope.times.get(metric)
        if found is not None:
            shade = GREY if scope.kind == "all" else colour(place - (scopes[0].kind == "all"))
            cdf(axes, found, scope.name, shade, "--" if scope.kind == "all" else "-")


def _plot_flow(axes: Axes, report: LoadReport) -> None:
    """Plot throughput, and on the right-hand scale the number of open requests."""
    edges, windows = [*(window.start_s for window in report.windows), report.wall_s], report.windows
    axes.stairs([w.output_rate for w in windows], edges, color=colour(0), fill=True, alpha=0.35)
    axes.set(title="Throughput and open requests, windows of 10 s", xlabel="seconds of the run")
    axes.set_ylabel("output tokens/s", color=colour(0))
    axes.set_ylim(bottom=0)
    other = axes.twinx()
    other.stairs([w.most_open for w in windows], edges, color=colour(1), linewidth=1.5, baseline=None)
    other.set_ylabel("most requests open at once", color=colour(1))
    axes.set_xlim(0, report.wall_s)
    other.set_ylim(bottom=0)
    other.grid(visible=False)
    other.spines["right"].set_visible(True)


def _plot_stalls(axes: Axes, report: LoadReport) -> None:
    windows = [w for w in report.windows if w.itl_p99_s is not None]
    middles = [(w.start_s + min(w.start_s + WINDOW_S, report.wall_s)) / 2 for w in windows]
    axes.plot(middles, [(w.itl_p99_s or 0) * 1e3 for w in windows], "o-", color=colour(0), markersize=3)
    failed = [w for w in report.windows if w.num_failed]
    for window in failed:
        axes.axvspan(
            window.start_s, min(window.start_s + WINDOW_S, report.wall_s), color=colour(1), alpha=0.25, linewidth=0
        )
    note = "; shaded: requests failed" if failed else ""
    axes.set(
        title=f"Inter-token latency at p99, windows of 10 s{note}", xlabel="seconds of the run", ylabel="ITL, log scale"
    )
    axes.set_xlim(0, report.wall_s)
    if windows:
        log_time(axes, "y")
    if report.slo.itl_s is not None:
        axes.axhline(report.slo.itl_s * 1e3, color=GREY, linestyle=":")


def _plot_steps(axes: Axes, log: RecordedSteps, wall_s: float) -> None:
    """Plot the mean tokens of an iteration in each interval, prompts above decodes."""
    edges, prefill, decode = per_interval(log)
    both = [p + d for p, d in zip(prefill, decode, strict=True)]
    axes.stairs(decode, edges, fill=True, color=colour(2), label="decode")
    axes.stairs(both, edges, baseline=decode, fill=True, color=colour(4), label="prefill")
    axes.set(title=f"Tokens of an iteration: {log.pool} worker {log.worker}", xlabel="seconds of the run")
    axes.set_xlim(0, wall_s)
    axes.set_ylabel("tokens, mean of a short interval")
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
