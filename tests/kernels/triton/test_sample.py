"""Draws in Triton are those of the plain kernel, in any mixture of greedy, plain and filtered rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from tandem_kernels import reference
from tandem_kernels.contract import SamplingRows
from tandem_kernels.reference.philox import uniform
from tandem_kernels.reference.sample import Filters, kept_tokens
from tandem_kernels.triton import KERNELS
from tests.kernels.triton.tensors import DTYPES, on, randn

# The interpreter's numpy says so where a quotient or a weight's logarithm has no number.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:divide by zero")

_INF = float("inf")
_MASK64 = (1 << 64) - 1
_BOUNDARY = 1e-12

Row = tuple[float, int, float, float, int, int, int]
"""Temperature, top_k, top_p, log_min_p, seed, choice, index."""


def _rows(rows: Sequence[Row]) -> SamplingRows:
    names = ("temperature", "top_k", "top_p", "log_min_p", "seed", "choice", "index")
    floats = {"temperature", "top_p", "log_min_p"}
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    return SamplingRows(
        **{n: torch.tensor(c, dtype=torch.float64 if n in floats else torch.int64) for n, c in columns.items()}
    )


def _sample(logits: torch.Tensor, rows: Sequence[Row], device: torch.device) -> list[int]:
    sampling = on(device, _rows(rows))
    assert isinstance(sampling, SamplingRows)
    return KERNELS.sample(logits.to(device), sampling).tolist()


def _distance(logits: torch.Tensor, row: Row) -> float:
    """How far, as a share of the total, a row's random number lies from the nearest boundary between two tokens."""
    temperature, top_k, top_p, log_min_p, seed, choice, index = row
    wide = logits.double()
    kept = kept_tokens(wide, Filters(temperature, top_k, top_p, log_min_p))
    running = torch.exp((wide - wide.max()) / temperature)[kept].cumsum(0)
    number = uniform(seed & _MASK64, choice, index)
    return float((running / running[-1] - number).abs().min())


def _check(logits: torch.Tensor, rows: Sequence[Row], device: torch.device) -> None:
    expected = reference.sample(logits, _rows(rows)).tolist()
    got = _sample(logits, rows, device)
    for values, row, ours, theirs in zip(logits, rows, got, expected, strict=True):
        assert ours == theirs or _distance(values, row) < _BOUNDARY, (row, ours, theirs)


def _random_rows(count: int, seed: int) -> list[Row]:
    """A mixture in which each kind of row comes often, also filters upon filters."""
    rng = random.Random(seed)
    return [
        (
            rng.choice((0.0, 0.3, 0.7, 1.0, 1.0, 1.7)),
            rng.choice((0, 0, 1, 2, 7, 40, 1000, 10**6)),
            rng.choice((1.0, 1.0, 1e-9, 0.3137, 0.7731, 0.9313, 0.9991)),
            rng.choice((-_INF, -_INF, -8.1, -2.3, -0.4, 0.0)),
            rng.randrange(-(1 << 63), 1 << 63),
            rng.randrange(4),
            rng.choice((0, 1, 77, (1 << 32) + 5)),
        )
        for _ in range(count)
    ]


def _levels(count: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Few different numbers, so that every threshold falls among equals; zeros of both signs among them."""
    numbers = torch.tensor([-3.0, -0.0, 0.0, 0.5, 2.0])
    chosen = torch.randint(0, 5, (count, vocab), generator=torch.Generator().manual_seed(vocab))
    return numbers[chosen].to(dtype)


_KINDS: dict[str, Callable[[int, int, torch.dtype], torch.Tensor]] = {
    "spread": lambda count, vocab, dtype: randn(count, vocab, dtype=dtype) * 4,
    "flat": lambda count, vocab, dtype: (randn(count, vocab) * 1e-3 - 20).to(dtype),
    "levels": _levels,
    "equal": lambda count, vocab, dtype: torch.full((count, vocab), -1.5, dtype=dtype),
    "huge": lambda count, vocab, dtype: (randn(count, vocab) * 1e4).to(dtype),
    "tiny": lambda count, vocab, dtype: (randn(count, vocab) * 1e-6).to(dtype),
    "one far ahead": lambda count, vocab, dtype: randn(count, vocab, dtype=dtype).index_fill(
        1, torch.tensor([vocab // 2]), 60.0
    ),
}
# Around a chunk of 1024, and one token.
_SOME = [
    ("spread", 1, "f32"),
    ("spread", 1023, "bf16"),
    ("spread", 2049, "f32"),
    ("flat", 1024, "f32"),
    ("levels", 1025, "f16"),
    ("levels", 300, "f32"),
    ("equal", 1030, "bf16"),
    ("huge", 700, "f32"),
    ("tiny", 1500, "bf16"),
    ("one far ahead", 1100, "f16"),
    ("spread", 1100, "f64"),
]
_ALL = [(kind, vocab, name) for kind in _KINDS for vocab in (1, 2, 1023, 1024, 1025, 5000) for name in DTYPES]
_GRID = [*_SOME, *(pytest.param(*case, marks=pytest.mark.nightly) for case in _ALL if case not in _SOME)]


@pytest.mark.parametrize(("kind", "vocab", "name"), _GRID)
def test_any_mixture(kind: str, vocab: int, name: str, device: torch.device) -> None:
    rows = _random_rows(6, seed=vocab + len(kind) + len(name))
    _check(_KINDS[kind](len(rows), vocab, DTYPES[name]), rows, device)


@pytest.mark.parametrize("vocab", [20_000, pytest.param(160_000, marks=pytest.mark.nightly)])
def test_whole_vocabularies(vocab: int, device: torch.device) -> None:
    rows: list[Row] = [
        (0.8, 50, 0.95, -3.0, -5, 0, 3),
        (1.0, 0, 0.9, -_INF, 6, 0, 0),
        (1.1, 0, 1.0, -_INF, 7, 1, 9),
    ]
    _check(randn(len(rows), vocab) * 3, rows, device)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", _KINDS)
def test_many_mixtures(kind: str, seed: int, device: torch.device) -> None:
    vocab = random.Random(seed).choice((3, 50, 1000, 1024, 2000, 4097))
    rows = _random_rows(24, seed)
    _check(_KINDS[kind](len(rows), vocab, list(DTYPES.values())[seed % 4]), rows, device)


def _row(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, log_min_p: float = -_INF, seed: int = 1) -> Row:
    return temperature, top_k, top_p, log_min_p, seed, 0, 0


def test_greedy_takes_the_lowest_of_the_greatest(device: torch.device) -> None:
    logits = torch.zeros(4, 3000)
    logits[0, [17, 2999]] = 5
    logits[1, [1023, 1024]] = 1e-30
    logits[2] = -0.0
    logits[2, 2000:] = 0.0
    logits[3, :2999] = -7
    assert _sample(logits, [_row(0.0)] * 4, device) == [17, 1023, 0, 2999]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [_INF, -_INF, float("nan")])
def test_rows_that_are_not_finite_have_no_token(wrong: float, temperature: float, device: torch.device) -> None:
    """Wherever the number is, and only those rows."""
    logits = randn(5, 2100)
    for row, place in enumerate((0, 1024, 2099)):
        logits[row, place] = wrong
    logits[3] = wrong
    got = _sample(logits, [_row(temperature, top_k=3)] * 5, device)
    assert got[:4] == [-1] * 4 and got[4] >= 0


@pytest.mark.parametrize(
    "row",
    [
        _row(1e-300),
        _row(5e-324, top_k=3),
        _row(5e-324, top_p=0.5),
        _row(1e300, top_k=900),
        _row(1e300, top_p=0.4003),
        _row(1e-3, log_min_p=-4.0),
    ],
)
def test_temperatures_of_any_size(row: Row, device: torch.device) -> None:
    _check(randn(1, 1500) * 5, [row], device)


def test_filters_that_leave_one(device: torch.device) -> None:
    """Of equals the lowest id, whatever the number drawn."""
    logits = _levels(1, 1500, torch.float32)
    best = int(logits[0].argmax())
    only_one = [_row(top_k=1, seed=2), _row(top_p=1e-12, seed=3), _row(top_p=1e-300, seed=4), _row(top_p=0.0, seed=5)]
    assert _sample(logits.repeat(4, 1), only_one, device) == [best] * 4
    # min-p of 1 leaves all that are as good.
    tokens = _sample(logits.expand(8, -1), [_row(log_min_p=0.0, seed=seed) for seed in range(8)], device)
    assert all(logits[0, token] == 2.0 for token in tokens) and len(set(tokens)) > 1


def test_equals_at_a_threshold_are_kept_by_id(device: torch.device) -> None:
    """6 equal tokens over two chunks: half of them, by number and by share, are those of the lower ids."""
    logits = torch.full((1, 1200), -50.0)
    equal = torch.tensor([5, 6, 1100, 1101, 1150, 1199])
    logits[0, equal] = 3.0
    for limits in (_row(top_k=3), _row(top_p=0.49), _row(top_k=5, top_p=0.59), _row(top_k=3, log_min_p=-1.0)):
        rows = [(*limits[:4], seed, 0, 0) for seed in range(7)]
        tokens = set(_sample(logits.expand(7, -1), rows, device))
        assert tokens == set(equal[:3].tolist()), limits


def test_zeros_of_both_signs_are_equal(device: torch.device) -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -0.0, 0.0, -9.0]])
    for limits in (_row(top_k=2), _row(top_p=0.3)):
        rows = [(*limits[:4], seed, 0, 0) for seed in range(8)]
        assert set(_sample(logits.expand(8, -1), rows, device)) == {0, 1}, limits


def test_samples_follow_the_distribution(device: torch.device) -> None:
    """Pearson's chi-square of draws at consecutive places of one output, against its 99.9% quantile for 5 degrees."""
    count = 100 if device.type == "cpu" else 100_000
    logits = randn(6)
    rows = [(1.3, 0, 1.0, -_INF, 12_345, 0, index) for index in range(count)]
    counts = torch.bincount(torch.tensor(_sample(logits.expand(count, -1), rows, device)), minlength=6)
    expected = torch.softmax(logits.double() / 1.3, 0) * count
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.6


def test_random_numbers_are_the_plain_ones(device: torch.device) -> None:
    """2,048 equal tokens show a number's first 11 bits: of seeds with the top bit, choices and far indices."""
    coordinates = [(seed, choice, index) for seed in (-1, 1 << 62) for choice in (0, 3) for index in (0, 1 << 40)]
    rows = [(1.0, 0, 1.0, -_INF, *place) for place in coordinates]
    tokens = _sample(torch.zeros(len(rows), 2048), rows, device)
    assert tokens == [int(uniform(s & _MASK64, c, i) * 2048) for s, c, i in coordinates]


def test_no_rows(device: torch.device) -> None:
    nothing = torch.zeros(0, device=device)
    rows = SamplingRows(*(nothing.double(), nothing.long()), *(nothing.double(),) * 2, *(nothing.long(),) * 3)
    assert KERNELS.sample(torch.zeros(0, 50, device=device), rows).shape == (0,)


def test_a_row_does_not_see_its_company(device: torch.device) -> None:
    rows = _random_rows(6, seed=3)
    logits = randn(6, 200)
    alone = [_sample(logits[i : i + 1], rows[i : i + 1], device)[0] for i in range(6)]
    assert _sample(logits, rows, device) == alone
    assert _sample(logits.flip(0), rows[::-1], device) == alone[::-1]


def test_rows_of_a_wider_buffer(device: torch.device) -> None:
    rows, wide = _random_rows(4, seed=9), randn(4, 300)
    assert _sample(wide[:, 10:200], rows, device) == _sample(wide[:, 10:200].contiguous(), rows, device)
    assert _sample(wide.T[:4], rows, device) == _sample(wide.T[:4].contiguous(), rows, device)
