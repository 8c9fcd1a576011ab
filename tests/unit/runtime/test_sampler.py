"""Test that samples follow their distribution, filters keep the right tokens, and only the stated inputs matter."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tandem.core.events import SampledToken
from tandem.core.request import SamplingParams
from tandem.runtime.sampler import LogitRows, filters_of
from tandem.sched.state.step_plan import Sampling
from tandem_kernels.reference.philox import philox4x32, uniform
from tandem_kernels.reference.sample import best, kept_tokens

_LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 2.0, -3.0, 0.0, 1.5])


def _params(**fields: float | int | None) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]


def sample(logits: torch.Tensor, sampling: Sampling) -> SampledToken:
    return LogitRows(logits[None]).sample(0, sampling)


def _samples(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    return [sample(logits, Sampling(params, 0, index)).id for index in range(count)]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    """Compare with the published test vectors of the Random123 library."""
    assert philox4x32(counter, key) == expected


def test_uniform_is_even_and_depends_on_every_coordinate() -> None:
    numbers = [uniform(seed, choice, index) for seed in (0, 2**63) for choice in (0, 1) for index in range(500)]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= 0 and max(numbers) < 1
    assert _chi_square([sum(int(n * 10) == b for n in numbers) for b in range(10)], [200.0] * 10) < 27.9


def _chi_square(seen: list[int], expected: list[float]) -> float:
    return sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_distribution(temperature: float) -> None:
    count = 3000
    samples = _samples(_LOGITS, _params(temperature=temperature, seed=42), count)
    shares = torch.softmax(_LOGITS.double() / temperature, 0)
    keep = [i for i in range(8) if shares[i] * count >= 5]
    seen = [samples.count(i) for i in keep]
    statistic = _chi_square(seen, [float(shares[i]) * count for i in keep])
    assert statistic < 24.4, "beyond the 99.9 % quantile of 7 degrees of freedom"


def test_a_sample_is_a_function_of_seed_choice_and_index() -> None:
    params = _params(seed=7)
    once, again = _samples(_LOGITS, params, 50), _samples(_LOGITS, params, 50)
    assert once == again
    assert once != _samples(_LOGITS, _params(seed=8), 50)
    assert once != [sample(_LOGITS, Sampling(params, 1, index)).id for index in range(50)]


def test_greedy_takes_the_lower_of_equals() -> None:
    assert sample(_LOGITS, Sampling(_params(temperature=0), 0, 0)).id == 1


def test_tiny_temperature_is_finite_and_greedy_but_for_ties() -> None:
    assert set(_samples(_LOGITS, _params(temperature=1e-310), 40)) == {1, 4}


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 4, 7]),
        ({"top_k": 100}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"top_p": 1e-9}, [1]),
        ({"top_p": 0.5}, [1, 4]),
        ({"top_p": 0.75}, [1, 4, 7]),
        ({"min_p": 1.0}, [1, 4]),
        ({"min_p": 0.36}, [1, 3, 4, 7]),
        ({"min_p": 0.36, "temperature": 0.5}, [1, 4, 7]),
        ({"top_k": 4, "min_p": 0.5}, [1, 4, 7]),
        ({"top_k": 2, "top_p": 0.5}, [1]),
    ],
)
def test_filters(fields: dict[str, float], kept: list[int]) -> None:
    params = _params(**fields)
    assert kept_tokens(_LOGITS.double(), filters_of(params)).tolist() == kept
    assert set(_samples(_LOGITS, params, 200)) <= set(kept)


def _sorted_nucleus(logits: torch.Tensor, top_p: float) -> list[int]:
    order = torch.sort(logits, descending=True, stable=True).indices
    total = 0.0
    for count, token in enumerate(order.tolist(), 1):
        total += float(torch.softmax(logits, 0)[token])
        if total >= top_p:
            return sorted(order[:count].tolist())
    return sorted(order.tolist())


@pytest.mark.parametrize("make", [lambda n: torch.randn(n), lambda n: torch.randn(n) * 6], ids=["flat", "peaked"])
def test_nucleus_of_a_large_vocabulary(make: Callable[[int], torch.Tensor]) -> None:
    """The nucleus of flat logits is larger than the first candidate set, that of peaked ones is within it."""
    torch.manual_seed(1)
    logits = make(3000).double()
    assert kept_tokens(logits, filters_of(_params(top_p=0.9))).tolist() == _sorted_nucleus(logits, 0.9)


def test_best_breaks_ties_by_id_and_clamps() -> None:
    values = torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0])
    assert best(values, 2).tolist() == [1, 2]
    assert best(values, 9).tolist() == [1, 2, 4, 3, 0]
    assert best(values, 0).tolist() == []


def test_logprobs_are_of_the_unfiltered_distribution() -> None:
    token = sample(_LOGITS, Sampling(_params(temperature=0.3, top_k=1, logprobs=3), 0, 0))
    expected = torch.log_softmax(_LOGITS.double(), 0)
    assert token.id == 1
    assert token.logprob == pytest.approx(float(expected[1]), abs=1e-12)
    assert [i for i, _ in token.top] == [1, 4, 7]
    assert [p for _, p in token.top] == pytest.approx([float(expected[i]) for i in (1, 4, 7)], abs=1e-12)
    assert math.isclose(math.fsum(math.exp(float(p)) for p in expected), 1.0)


def test_logprobs_without_alternatives_and_without_any() -> None:
    none = sample(_LOGITS, Sampling(_params(temperature=0, logprobs=0), 0, 0))
    assert none.logprob is not None and none.top == ()
    assert sample(_LOGITS, Sampling(_params(temperature=0), 0, 0)).logprob is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_logits_are_refused(bad: float) -> None:
    logits = _LOGITS.clone()
    logits[3] = bad
    with pytest.raises(ValueError, match="not finite"):
        sample(logits, Sampling(_params(temperature=0), 0, 0))


def test_a_broken_row_leaves_its_neighbours_alone() -> None:
    rows = LogitRows(torch.stack([_LOGITS, torch.full_like(_LOGITS, math.inf), _LOGITS.roll(1)]))
    greedy = Sampling(_params(temperature=0), 0, 0)
    assert [rows.sample(row, greedy).id for row in (0, 2)] == [1, 2]
    with pytest.raises(ValueError, match="not finite"):
        rows.sample(1, greedy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_of_any_float_type(dtype: torch.dtype) -> None:
    rows = LogitRows(torch.stack([_LOGITS.to(dtype), _LOGITS.roll(3).to(dtype)]))
    assert [rows.sample(row, Sampling(_params(temperature=0), 0, 0)).id for row in (0, 1)] == [1, 4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_right", range(4))
def test_verified_draft_tokens_equal_single_samples(temperature: float, num_right: int) -> None:
    rows = torch.stack([_LOGITS.roll(shift) for shift in range(4)])
    params = _params(temperature=temperature, seed=9, logprobs=2)
    single = tuple(sample(row, Sampling(params, 2, 5 + i)) for i, row in enumerate(rows))
    guesses = [token.id if i < num_right else token.id + 1 for i, token in enumerate(single[:3])]
    before = torch.full((2, len(_LOGITS)), math.nan)
    sampled, _ = LogitRows(torch.cat([before, rows])).sample_and_verify(2, Sampling(params, 2, 5), guesses)
    assert sampled == single[: num_right + 1]


def test_rows_after_a_wrong_guess_are_not_looked_at() -> None:
    rows = LogitRows(torch.stack([_LOGITS, torch.full_like(_LOGITS, math.nan)]))
    greedy = Sampling(_params(temperature=0.0), 0, 0)
    best_id = int(_LOGITS.argmax())
    assert [token.id for token in rows.sample_and_verify(0, greedy, [best_id + 1])[0]] == [best_id]
    with pytest.raises(ValueError, match="finite"):
        rows.sample_and_verify(0, greedy, [best_id])
