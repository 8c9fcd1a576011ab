"""Format the summaries of the workers' steps as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.common.tables import ms, table
from loadtest.load.steps import Counts, RecordedSteps, StepSummary, summarise


def steps_markdown(logs: Sequence[RecordedSteps]) -> str:
    heads = ["worker", "pool", "iterations", "prefill tokens p50 / p99 / max", "decodes p50 / p99 / max", "mixed"]
    heads += ["budget used", "step p50 / p99 / max ms", "over target", "preempted", "failed"]
    rows = [_row(found) if (found := summarise(log)) is not None else _empty(log, len(heads)) for log in logs]
    return table(heads, rows)


def _row(found: StepSummary) -> list[str]:
    seconds = found.seconds
    return [
        found.worker,
        found.pool,
        f"{found.num_steps:,}",
        _counts(found.prefill),
        _counts(found.decode),
        f"{found.mixed_share:.1%}",
        _share(found.budget_use),
        " / ".join(map(ms, (seconds.p50, seconds.p99, seconds.max))),
        _share(found.over_target),
        f"{found.num_preempted:,}",
        f"{found.num_failed:,}",
    ]


def _empty(log: RecordedSteps, width: int) -> list[str]:
    """Return the row of a worker that computed nothing during the test."""
    return [log.worker, log.pool, "0", *["-"] * (width - 3)]


def _counts(found: Counts | None) -> str:
    return "-" if found is None else f"{found.p50:,.0f} / {found.p99:,.0f} / {found.max:,.0f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
