"""Test the non-negative least squares solver against all subsets of free coefficients."""

from __future__ import annotations

from itertools import combinations
from random import Random

import numpy as np
import pytest

from tandem.sched.budget.nnls import NormalEquations, solve_non_negative


def loss(gram: np.ndarray, moment: np.ndarray, x: np.ndarray) -> float:
    return float(x @ gram @ x / 2 - x @ moment)


def best_of_all_subsets(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    size, best = len(moment), np.zeros(len(moment))
    for count in range(1, size + 1):
        for free in map(list, combinations(range(size), count)):
            x = np.zeros(size)
            x[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
            if (x >= 0).all() and loss(gram, moment, x) < loss(gram, moment, best):
                best = x
    return best


@pytest.mark.parametrize("seed", range(60))
def test_it_finds_the_best_of_all_subsets(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = random.normal(size=(12, 5)) * random.uniform(0.1, 3, size=5)
    moment = rows.T @ random.normal(size=12)
    gram = rows.T @ rows + 1e-3 * np.eye(5)
    found = np.array(solve_non_negative(gram.tolist(), moment.tolist()))
    assert (found >= 0).all()
    expected = best_of_all_subsets(gram, moment)
    assert loss(gram, moment, found) == pytest.approx(loss(gram, moment, expected), rel=1e-6, abs=1e-12)


def test_all_may_end_at_zero() -> None:
    assert solve_non_negative([[2.0, 0.0], [0.0, 2.0]], [-1.0, -3.0]) == [0.0, 0.0]


def test_sums_forget() -> None:
    random = Random(1)
    rows = [[random.random() for _ in range(3)] for _ in range(9)]
    sums = NormalEquations(3, memory=4.0)
    for i, row in enumerate(rows):
        sums.add(row, float(i))
    weights = [0.75 ** (len(rows) - 1 - i) for i in range(len(rows))]
    gram, moment = sums.read()
    x, w = np.array(rows), np.array(weights)
    np.testing.assert_allclose(gram, x.T @ (x * w[:, None]))
    np.testing.assert_allclose(moment, x.T @ (w * np.arange(len(rows))))
