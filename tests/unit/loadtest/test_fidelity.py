"""The way from a run to a prediction of another, where the truth is known: runs of the simulator itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench.systems_under_test import Failure
from loadtest.client.records import Record, encode
from loadtest.fidelity.fidelity import ALLOWED, FidelityRow, compare, fidelity_text, markdown
from loadtest.fidelity.predictions import _deliveries, profile_from, replayed, times_of
from loadtest.fidelity.recorded_runs import MeasuredRun, RecordedLoad, RunConfig, StoredRun, kept
from tandem.core.clock import SystemClock
from tandem.core.config import Config, EngineConfig
from tandem.core.step_cost import StepFeatures
from tandem.engine.step_log import LoggedStep, StepLog, step_settings
from tandem.sched.state.schedule_result import StepRecord
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.worker import SimWorker
from tandem.sim.cost.residuals import always
from tandem.workload.scheduled_request import ScheduledRequest
from tests.simulation.clusters import LAPTOP, cluster, mix, slow_spec, traces_of
from tests.unit.loadtest.made import HEAD, stamped

BEGAN_UNIX_S = 1.8e9
CONFIG = Config(engine=EngineConfig(max_num_batched_tokens=128))
NOISY = always(0.8, 0.95, 1.0, 1.05, 1.5)


def logged(one: SimCluster, worker: SimWorker) -> list[LoggedStep]:
    """Steps of a worker as it counts them, written down as a real one writes them."""
    steps: list[LoggedStep] = []
    count = worker._count

    def counted(step: StepFeatures, seconds: float) -> None:
        count(step, seconds)
        record = StepRecord(
            number=len(steps),
            features=step,
            predicted_s=seconds,
            measured_s=seconds,
            target_s=0.0,
            num_budget_tokens=CONFIG.engine.max_num_batched_tokens,
            num_preempted=0,
            has_failed=False,
        )
        steps.append(LoggedStep(BEGAN_UNIX_S + one.now, record))

    worker._count = counted  # type: ignore[method-assign]
    return steps


def run_of(seed: int, speed: float = 1.0, latency_s: float = 2e-3) -> StoredRun:
    spec = slow_spec(config=CONFIG, step_time=LAPTOP.scaled(speed).predict, residuals=NOISY, max_run=1)
    one = cluster((spec, 1), seed=100 + seed, latency_s=latency_s)
    (worker,) = one.workers
    steps = logged(one, worker)
    schedule = mix(seed, 60, 0.6)
    traces = traces_of(one, schedule)
    head = replace(HEAD, num_blocks=spec.num_blocks, layout=spec.layout, settings=step_settings(CONFIG))
    records = tuple(_record(scheduled, trace) for scheduled, trace in zip(schedule, traces, strict=True))
    run = measured(seed=seed, count=len(schedule), rate=0.6, wall_s=one.now, records=records)
    return StoredRun(run, (StepLog(head, tuple(steps)),))


def measured(**facts: Any) -> MeasuredRun:
    return MeasuredRun(**{"topology": "mixed", "flags": (), "turn": 0, "began_unix_s": BEGAN_UNIX_S, **facts})


def _record(scheduled: ScheduledRequest, trace: ClientTrace) -> Record:
    requested = {"num_prompt_tokens": len(scheduled.request.prompt_tokens), "num_requested_tokens": trace.max_tokens}
    return stamped(trace.group, trace.due_s, trace.token_times, name=trace.id, **requested)


@pytest.fixture(scope="module")
def runs() -> Sequence[StoredRun]:
    """Run A, on which step times are fitted, and run B, which is predicted and replayed."""
    return [run_of(1), run_of(2)]


@pytest.mark.nightly
def test_a_run_of_the_simulator_is_predicted_and_replayed(runs: Sequence[StoredRun]) -> None:
    rows = compare(runs[0], [runs[1]])
    assert [row.name for row in rows] == list(ALLOWED)
    assert all(row.holds for row in rows), markdown(rows, 1)
    assert all(abs(row.replay_error) < 0.02 for row in rows), markdown(rows, 1)
    assert "holds" in markdown(rows, 1) and "does not" not in markdown(rows, 1)
    assert "predicted 1 real runs of another seed with errors of TTFT p50" in fidelity_text(rows, 1)


@pytest.mark.nightly
def test_an_engine_that_became_slower_is_not_predicted_but_replayed(runs: Sequence[StoredRun]) -> None:
    rows = compare(runs[0], [run_of(2, speed=1.5)])
    assert all(row.error < -0.2 for row in rows if row.name.startswith("ITL"))
    assert not any(row.holds for row in rows if row.name.startswith("ITL"))
    assert all(abs(row.replay_error) < 0.02 for row in rows), markdown(rows, 1)
    assert "does not hold" in markdown(rows, 1)


def row(name: str, error: float, replay_error: float = 0.0) -> FidelityRow:
    """A figure of three real runs, of 1, 2 and 3 seconds, with these errors."""
    real = [1.0, 2.0, 3.0]
    return FidelityRow(name, real, [2.0 * (1 + error)] * 9, [value * (1 + replay_error) for value in real], 0.0)


def test_the_spread_of_real_runs_is_allowed_at_p99_only() -> None:
    wide, middle = row("TTFT p99", 0.9), row("TTFT p50", 0.9)
    assert wide.spread == 1.0 == wide.allowed and wide.holds
    assert middle.allowed == ALLOWED["TTFT p50"] and not middle.holds


@pytest.mark.parametrize(
    ("error", "replay_error", "holds"),
    [(0.14, 0.04, True), (-0.14, -0.04, True), (0.16, 0.0, False), (-0.16, 0.0, False), (0.0, -0.06, False)],
)
def test_a_figure_holds_within_the_errors_that_are_allowed(error: float, replay_error: float, holds: bool) -> None:
    one = row("ITL p50", error, replay_error)
    assert (one.error, one.replay_error) == pytest.approx((error, replay_error)) and one.holds == holds
    assert ("does not hold" in markdown([one], 3)) != holds


@pytest.mark.slow
def test_what_a_fit_finds_is_what_the_run_was_made_of(runs: Sequence[StoredRun]) -> None:
    profile = profile_from(runs[0], "here")
    worker = profile.workers["mixed"]
    mean = (0.8 + 0.95 + 1.0 + 1.05 + 1.5) / 5
    assert worker.cost.prefill_token_s == pytest.approx(mean * LAPTOP.prefill_token_s, rel=0.15)
    assert profile.latency_s == pytest.approx(2e-3, rel=0.05)
    assert "here" in profile.provenance
    assert worker.config().engine == CONFIG.engine


@pytest.mark.slow
def test_a_token_may_arrive_before_the_end_of_its_step_is_noted(runs: Sequence[StoredRun]) -> None:
    """Its delivery is not counted from the step before."""
    assert _deliveries(runs[0]) == pytest.approx([2e-3] * len(_deliveries(runs[0])), rel=0.01)
    (log,) = runs[0].logs
    late = replace(log, steps=tuple(replace(step, at=step.at + 4e-3) for step in log.steps))
    assert max(profile_from(StoredRun(runs[0].run, (late,)), "").delivery_s) < 1e-3


@pytest.mark.slow
def test_a_replay_has_the_same_tokens_at_the_same_times(runs: Sequence[StoredRun]) -> None:
    real, again = times_of(runs[1].run.records), replayed(runs[1])
    assert again.num_tokens == real.num_tokens
    for name, seen in real.seen.items():
        assert again.seen[name].ttft_s == pytest.approx(seen.ttft_s, rel=0.02)
        assert again.seen[name].group == seen.group


async def test_a_run_with_other_flags_is_not_taken_for_this_one(tmp_path: Path) -> None:
    flags = ("--max-num-batched-tokens", "128")
    run = measured(flags=flags, seed=1, count=1, rate=1.0, wall_s=1.0, records=())
    (tmp_path / "mixed-seed1-1-rate1-turn0.json").write_bytes(encode(run))
    with pytest.raises(Failure, match="was measured with --max-num-batched-tokens 128, not --max-num"):
        await kept(
            RunConfig("mixed", ("--max-num-batched-tokens", "256")), RecordedLoad(1, 1, 1.0), tmp_path, SystemClock()
        )
