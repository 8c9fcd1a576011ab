"""Solve least squares with non-negative coefficients from accumulated sums (normal equations), without stored
samples."""

from __future__ import annotations

from collections.abc import Sequence

Matrix = list[list[float]]


class NormalEquations:
    """Accumulate what a weighted least-squares fit needs of each sample (`row`, `value`), without storing the samples.

    These are the weighted sums of `row rowᵀ` and of `row * value`. Each new sample multiplies the weights of all
    earlier ones by `1 - 1/memory`. `size`: length of a row.
    """

    def __init__(self, size: int, memory: float) -> None:
        self._size = size
        self._keep = 1 - 1 / memory
        # Upper triangle of the outer product of (row, value) with itself.
        self._pairs = [(i, j) for i in range(size + 1) for j in range(i, size + 1)]
        self._sums = [0.0] * len(self._pairs)

    def add(self, row: Sequence[float], value: float) -> None:
        """Add a sample: `row` holds the features of the sample, from which the fit is to predict `value`."""
        whole, keep = (*row, value), self._keep
        self._sums = [keep * s + whole[i] * whole[j] for s, (i, j) in zip(self._sums, self._pairs, strict=True)]

    def read(self) -> tuple[Matrix, list[float]]:
        """Return the weighted sums of `row rowᵀ` (a square matrix) and of `row * value` (a vector), for
        `solve_non_negative`."""
        size = self._size
        gram = [[0.0] * size for _ in range(size)]
        moment = [0.0] * size
        for (i, j), total in zip(self._pairs, self._sums, strict=True):
            if j < size:
                gram[i][j] = gram[j][i] = total
            elif i < size:
                moment[i] = total
        return gram, moment


def solve_non_negative(gram: Matrix, moment: Sequence[float]) -> list[float]:
    """Return the x >= 0 that minimises `xᵀ gram x / 2 - xᵀ moment`; `gram` must be positive definite.

    Active-set method after Lawson and Hanson (Solving Least Squares Problems, 1974, ch. 23), started with all
    coefficients free because few of them end at zero.
    """
    size = len(moment)
    free = set(range(size))
    x = [0.0] * size
    # Each round frees or fixes one coefficient. The bound ends cycles between two that rounding errors could cause.
    for _ in range(4 * size):
        x = _solve(gram, moment, sorted(free))
        worst = min(free, key=lambda i: x[i], default=None)
        if worst is not None and x[worst] < 0:
            free.remove(worst)
            continue
        pull = {
            i: moment[i] - sum(g * y for g, y in zip(gram[i], x, strict=True)) for i in range(size) if i not in free
        }
        best = max(pull, key=lambda i: pull[i], default=None)
        if best is None or pull[best] <= 1e-9 * abs(moment[best]):
            break
        free.add(best)
    return [max(0.0, value) for value in x]


def _solve(gram: Matrix, moment: Sequence[float], free: Sequence[int]) -> list[float]:
    """Solve for the free coefficients by Gaussian elimination, the others being zero. A positive definite matrix needs
    no pivoting."""
    rows = [[gram[i][j] for j in free] + [moment[i]] for i in free]
    for k, pivot in enumerate(rows):
        for row in rows[k + 1 :]:
            factor = row[k] / pivot[k]
            for j in range(k, len(row)):
                row[j] -= factor * pivot[j]
    x = [0.0] * len(moment)
    for k in reversed(range(len(rows))):
        row = rows[k]
        known = sum(row[j] * x[free[j]] for j in range(k + 1, len(free)))
        x[free[k]] = (row[-1] - known) / row[k]
    return x
