"""Fits, residuals, profiles and replays: what went in comes out again, and bad input is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from loadtest.fidelity.replay import Replay
from tandem.cli.fit_cost import fit_all, profile_of, read_logs
from tandem.core.errors import TandemError
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.engine.step_log import LoggedStep, StepLog, encode_head, encode_step
from tandem.sched.state.schedule_result import StepRecord
from tandem.sim.cost.residuals import Residuals, always, kind_of, residuals_of
from tandem.sim.machines.profile import decode_profile, encode_profile, fit_worker
from tandem.workload import seeded_random
from tests.simulation.clusters import LAPTOP
from tests.unit.engine.test_step_log import HEAD


def sampled_steps(count: int, seed: int = 0) -> list[StepFeatures]:
    """One in eight has a chunk of a prompt."""
    steps = []
    for n in range(count):
        seqs = seeded_random.integer(0, 8, seed, "seqs", n)
        prompt = seeded_random.integer(16, 256, seed, "prompt", n) if n % 8 == 0 or not seqs else 0
        context = seqs * seeded_random.integer(50, 900, seed, "context", n)
        start = seeded_random.integer(0, 2000, seed, "start", n)
        steps.append(StepFeatures(prompt, seqs, context, prompt * start + prompt * (prompt + 1) // 2))
    return steps


def log_of(times: Sequence[tuple[StepFeatures, float]], pool: str = "mixed", failed: int = -1) -> StepLog:
    records = [
        StepRecord(
            number=n,
            features=step,
            predicted_s=seconds,
            measured_s=seconds,
            target_s=0.0,
            num_budget_tokens=256,
            num_preempted=0,
            has_failed=n == failed,
        )
        for n, (step, seconds) in enumerate(times)
    ]
    return StepLog(replace(HEAD, pool=pool), tuple(LoggedStep(float(r.number), r) for r in records))


def exact(steps: Sequence[StepFeatures], cost: StepCost = LAPTOP) -> list[tuple[StepFeatures, float]]:
    return [(step, cost.predict(step)) for step in steps]


def test_a_fit_finds_the_cost_that_made_its_steps() -> None:
    worker, quality = fit_worker([log_of(exact(sampled_steps(2000)))])
    assert worker.cost.vector == pytest.approx(LAPTOP.vector, rel=0.02)
    assert quality.total == pytest.approx(1.0, abs=1e-3)
    assert quality.p99 < 0.01


def test_a_rare_prompt_is_not_drowned_by_decodes() -> None:
    steps = [StepFeatures(0, 1, 300 + n, 0) for n in range(5000)] + [StepFeatures(256, 0, 0, 32896)] * 20
    worker, _ = fit_worker([log_of(exact(steps))])
    assert worker.cost.predict(StepFeatures(256, 0, 0, 32896)) == pytest.approx(
        LAPTOP.predict(StepFeatures(256, 0, 0, 32896)), rel=0.02
    )


def test_residuals_express_what_a_linear_cost_cannot() -> None:
    """Two sequences take half as long again as the line says; predictions with residuals do too."""
    times = [
        (s, t * (1.5 if s.num_decode_seqs == 2 and not s.num_prefill_tokens else 1.0))
        for s, t in exact(sampled_steps(4000))
    ]
    worker, _ = fit_worker([log_of(times)])
    for seqs in (1, 2, 3):
        like = [(s, t) for s, t in times if (s.num_prefill_tokens, s.num_decode_seqs) == (0, seqs)]
        predicted_s = fmean(worker.cost.predict(s) * fmean(worker.residuals.of(s)) for s, _ in like)
        assert predicted_s == pytest.approx(fmean(t for _, t in like), rel=0.03)


def test_a_kind_that_was_not_seen_has_the_nearest_ones_residuals() -> None:
    decode, prompt = StepFeatures(0, 1, 100, 0), StepFeatures(256, 0, 0, 32896)
    found = residuals_of([*[(decode, 0.5)] * 20, *[(prompt, 2.0)] * 20])
    assert set(found.of(StepFeatures(0, 40, 9000, 0))) == {0.5}, "however many sequences, it is a decode"
    assert set(found.of(StepFeatures(1, 1, 100, 1))) == {2.0}, "however few tokens, it is a prompt"
    assert kind_of(StepFeatures()) == (0, 0)


def test_residuals_are_refused_unless_they_are_factors() -> None:
    for bad in ((), (1.0, 0.0), (-1.0,)):
        with pytest.raises(ValueError, match="factors above 0"):
            always(*bad)
    with pytest.raises(ValueError, match="factors above 0"):
        Residuals({})


def test_failed_and_cold_steps_teach_nothing() -> None:
    times = exact(sampled_steps(400))
    slow = [(s, 50 * t) if n < 20 or n == 200 else (s, t) for n, (s, t) in enumerate(times)]
    worker, _ = fit_worker([log_of(slow, failed=200)])
    assert worker.cost.vector == pytest.approx(LAPTOP.vector, rel=0.05)
    assert worker.num_steps == 379


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(TandemError, match="too few to fit on"):
        fit_worker([log_of(exact(sampled_steps(100)))])
    one, other = log_of(exact(sampled_steps(200))), log_of(exact(sampled_steps(200)))
    other = replace(other, head=replace(other.head, settings={"engine": {"max_num_batched_tokens": 64}}))
    with pytest.raises(TandemError, match="different models or settings"):
        fit_worker([one, other])


def test_a_profile_round_trips_and_builds_workers(tmp_path: Path) -> None:
    logs = [log_of(exact(sampled_steps(500))), log_of(exact(sampled_steps(500, 1), LAPTOP.scaled(2)), pool="decode")]
    profile = profile_of(logs, fit_all(logs), 2e-3, 3e9, "a laptop")
    again = decode_profile(encode_profile(profile), "profile")
    assert encode_profile(again) == encode_profile(profile)
    assert "a laptop" in again.provenance and "unknown" in again.fidelity
    mixed, decode, prefill = again.worker("mixed"), again.worker("decode"), again.worker("prefill")
    assert (mixed.num_blocks, mixed.layout, mixed.bandwidth) == (HEAD.num_blocks, HEAD.layout, 3e9)
    assert decode.step_time(StepFeatures(0, 4, 900, 0)) > 1.5 * mixed.step_time(StepFeatures(0, 4, 900, 0))
    assert prefill.step_time(StepFeatures(0, 4, 900, 0)) == mixed.step_time(StepFeatures(0, 4, 900, 0))
    assert mixed.config.engine.max_num_batched_tokens == 256, "as in the log"


@pytest.mark.parametrize(
    "change", [{"format": "x"}, {"workers": {"other": {}}}, {"workers": {"mixed": {}}}, {"latency_s": "soon"}]
)
def test_what_is_no_profile_is_refused(change: dict[str, object]) -> None:
    logs = [log_of(exact(sampled_steps(200)))]
    document = json.loads(encode_profile(profile_of(logs, fit_all(logs), 2e-3, 3e9, "")))
    with pytest.raises(TandemError, match="x is no profile"):
        decode_profile(json.dumps({**document, **change}), "x")


def test_logs_are_read_from_files_and_directories(tmp_path: Path) -> None:
    log = log_of(exact(sampled_steps(150)))
    text = "".join([encode_head(log.head) + "\n", *(encode_step(step) + "\n" for step in log.steps)])
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.jsonl").write_text(text)
    assert len(read_logs([tmp_path])) == 2
    assert len(read_logs([tmp_path / "a.jsonl"])[0].steps) == 150
    with pytest.raises(TandemError, match="cannot read"):
        read_logs([tmp_path / "c.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(TandemError, match="has no step log"):
        read_logs([tmp_path / "empty"])


def test_a_replay_of_the_same_steps_takes_the_same_times() -> None:
    times = [(s, t * seeded_random.uniform("time", n)) for n, (s, t) in enumerate(exact(sampled_steps(300)))]
    replay = Replay(log_of(times), LAPTOP)
    assert [replay.seconds(step) for step, _ in times] == [seconds for _, seconds in times]
    assert (replay.num_matched, replay.num_unmatched) == (300, 0)


def test_a_replay_finds_its_place_again_after_steps_that_never_were() -> None:
    times = exact(sampled_steps(300))
    replay = Replay(log_of(times), LAPTOP)
    strange = StepFeatures(5000, 90, 10**5, 10**7)
    first = [replay.seconds(step) for step, _ in times[:100]]
    assert replay.seconds(strange) == pytest.approx(LAPTOP.predict(strange))
    # Two of the recorded steps never come.
    rest = [replay.seconds(step) for step, _ in times[102:]]
    assert first + rest == [seconds for _, seconds in (*times[:100], *times[102:])]
    assert (replay.num_matched, replay.num_unmatched) == (298, 1)


def test_a_replay_distinguishes_chunks_of_one_size_by_their_context() -> None:
    """As when two prompts are computed in another order than in the real run."""
    chunks = [(StepFeatures(256, 0, 0, pairs), seconds) for pairs, seconds in ((100, 0.3), (900, 0.5), (500, 0.4))]
    replay = Replay(log_of(chunks), LAPTOP)
    assert [replay.seconds(StepFeatures(256, 0, 0, pairs)) for pairs in (500, 101, 900)] == [0.4, 0.3, 0.5]
