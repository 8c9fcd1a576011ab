"""Test the online fit on steps of known cost: noise, outliers, a machine that changes, a wrong model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from statistics import median

import pytest

from tandem.core.ids import BlockId, SeqId
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.sched.budget.step_time_model import GENERIC, StepCostModel, features, fit
from tandem.sched.state.step_plan import ScheduledSlice

TRUTH = StepCost(20e-3, 1.3e-3, 0.8e-3, 0.9e-6, 0.6e-6)
NEAR = StepCost(*(a * b for a, b in zip(TRUTH.vector, (0.7, 1.3, 1.4, 0.6, 1.5), strict=True)))


def step(random: Random) -> StepFeatures:
    num_seqs = random.randint(1, 32)
    chunk, start = random.choice([0, 0, 64, 128, 256, 512]), random.randint(0, 4000)
    pairs = chunk * (2 * start + chunk + 1) // 2
    return StepFeatures(chunk, num_seqs, num_seqs * random.randint(50, 1500), pairs)


def errors(
    model: StepCostModel,
    num_steps: int,
    truth: Callable[[StepFeatures], float] = TRUTH.predict,
    *,
    seed: int = 1,
    noise: float = 0.05,
    outliers: float = 0.0,
) -> list[float]:
    """Return the relative errors of predictions, each made before its step was observed."""
    random = Random(seed)
    found: list[float] = []
    for _ in range(num_steps):
        now = step(random)
        seconds = truth(now)
        found.append(abs(model.predict(now) / seconds - 1))
        disturbed = random.uniform(2, 10) if random.random() < outliers else 1.0
        model.observe(now, seconds * disturbed * max(0.2, random.gauss(1, noise)))
    return found


def calibrated(prior: StepCost) -> StepCostModel:
    model = StepCostModel()
    model.restart(prior)
    return model


def test_features_are_what_the_slices_compute() -> None:
    def piece(start: int, stop: int) -> ScheduledSlice:
        return ScheduledSlice(SeqId(stop), start, stop - start, (1,) * (stop - start), (BlockId(0),), None)

    pairs = sum(range(5, 8)) + sum(range(1, 11))
    assert features([piece(9, 10), piece(4, 7), piece(99, 100), piece(0, 10)]) == StepFeatures(13, 2, 110, pairs)
    assert features([]) == StepFeatures()
    guessing = replace(piece(9, 12), num_drafted=2)
    assert features([guessing]) == StepFeatures(2, 1, 10, 11 + 12)


@pytest.mark.parametrize("prior", [NEAR, TRUTH.scaled(3), TRUTH.scaled(0.2)], ids=["near", "too slow", "too fast"])
@pytest.mark.parametrize("seed", range(4))
def test_it_converges_under_noise_and_outliers(prior: StepCost, seed: int) -> None:
    model = calibrated(prior)
    found = errors(model, 400, seed=seed, outliers=0.05)
    assert median(found[100:]) < 0.05
    assert sorted(found[200:])[-10] < 0.2
    for step_ in (StepFeatures(0, 8, 8000, 0), StepFeatures(512, 4, 4000, 512 * 2256), StepFeatures(64, 0, 0, 2080)):
        assert model.predict(step_) == pytest.approx(TRUTH.predict(step_), rel=0.15)


def test_without_a_calibration_it_learns_from_its_work() -> None:
    found = errors(StepCostModel(), 300, outliers=0.05)
    assert median(found[:8]) > 0.5, "nothing was to be learnt"
    assert median(found[100:]) < 0.1


def test_single_outliers_move_nothing() -> None:
    model = calibrated(TRUTH)
    errors(model, 200)
    before = model.predict(StepFeatures(256, 8, 4000, 256 * 500))
    random = Random(5)
    for i in range(40):
        now = step(random)
        model.observe(now, TRUTH.predict(now) * (8.0 if i % 10 == 0 else 1.0))
    assert model.predict(StepFeatures(256, 8, 4000, 256 * 500)) == pytest.approx(before, rel=0.08)


@pytest.mark.parametrize("factor", [2.5, 0.4])
def test_a_machine_that_changes_is_followed_within_some_ten_steps(factor: float) -> None:
    model = calibrated(NEAR)
    errors(model, 300)
    found = errors(model, 60, lambda now: factor * TRUTH.predict(now), seed=2)
    assert found[0] > 0.4
    assert median(found[12:]) < 0.1
    assert median(errors(model, 300, lambda now: factor * TRUTH.predict(now), seed=3)[200:]) < 0.05


def test_a_model_that_is_wrong_still_predicts_what_it_sees() -> None:
    """True costs have tiles of 128 tokens and a root of the number of decodes, which the model cannot express."""

    def truth(now: StepFeatures) -> float:
        tiles = -(-now.num_prefill_tokens // 128) * 128
        return 0.02 + 1.3e-3 * tiles + 4e-3 * now.num_decode_seqs**0.5 + 0.6e-6 * now.num_prefill_pairs

    found = errors(calibrated(NEAR), 400, truth)
    assert median(found[200:]) < 0.1
    assert sorted(found[200:])[-20] < 0.3


def test_decoding_for_hours_does_not_forget_what_a_prompt_costs() -> None:
    model = calibrated(NEAR)
    errors(model, 300)
    for i in range(3000):
        now = StepFeatures(0, 2, 600 + i, 0)
        model.observe(now, TRUTH.predict(now))
    chunk = StepFeatures(512, 2, 3000, 512 * 1256)
    assert model.predict(chunk) == pytest.approx(TRUTH.predict(chunk), rel=0.15)


def test_coefficients_never_become_negative() -> None:
    """Steps that get faster with every sequence."""
    model = calibrated(NEAR)
    for i in range(200):
        num_seqs = 1 + i % 30
        model.observe(StepFeatures(0, num_seqs, 100, 0), 0.1 - 0.003 * num_seqs)
    assert min(model.cost.vector) >= 0


def test_only_significant_changes_are_published() -> None:
    model = StepCostModel()
    assert model.published is None
    published = set()
    random = Random(3)
    for _ in range(1000):
        now = step(random)
        model.observe(now, TRUTH.predict(now) * max(0.2, random.gauss(1, 0.05)))
        published.add(model.published)
    settled = len(published)
    assert 2 <= settled < 60, "one in sixteen steps at most, and the first ones are most of them"
    assert model.published is not None
    assert model.published.predict(step(random)) > 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_step_takes_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="a step took"):
        StepCostModel().observe(StepFeatures(), seconds)


def test_a_fit_keeps_the_shape_where_samples_leave_it_open() -> None:
    """Only decodes of one context length: what a prompt costs is taken from the machine's speed alone."""
    slow = GENERIC.scaled(7)
    samples = [(now, slow.predict(now)) for now in (StepFeatures(0, 1, 16, 0), StepFeatures(0, 8, 128, 0))]
    found = fit(samples, GENERIC, 0.02)
    assert found.vector == pytest.approx(slow.vector, rel=1e-6)
    more = [*samples, *((now, TRUTH.predict(now)) for now in (StepFeatures(64, 0, 0, 2080),))]
    assert fit(more, GENERIC, 0.02).predict(StepFeatures(64, 0, 0, 2080)) == pytest.approx(0.104, rel=0.1)
