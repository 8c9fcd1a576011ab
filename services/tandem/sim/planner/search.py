"""Search the least numbers for which a monotone predicate holds: if it holds for a number, it holds for larger ones."""

from __future__ import annotations

from collections.abc import Callable


def least(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """Return the least number in [low, high] for which `holds` is true; None when it is false for `high`.

    The search begins at `low` with growing strides, because a good lower bound is close to the result."""
    failed, stride, number = low - 1, 1, low
    while number <= high:
        if holds(number):
            return _between(failed, number, holds)
        if number == high:
            return None
        failed, number, stride = number, min(high, number + stride), 2 * stride
    return None


def cheapest_pair(
    low: tuple[int, int], price: tuple[float, float], limit: float, holds: Callable[[int, int], bool]
) -> tuple[int, int] | None:
    """Return the cheapest (first, second) at or above `low` that costs at most `limit` and for which `holds` is true;
    None when there is none. At equal costs, the pair with the smaller first number is returned."""
    best: tuple[int, int] | None = None
    first = low[0]
    while True:
        most = _most(first, price, limit, best)
        if most < low[1]:
            return best
        if holds(first, most):
            second = _least_second(first, low[1], most, holds)
            best = (first, second)
        first += 1


def _least_second(first: int, low: int, most: int, holds: Callable[[int, int], bool]) -> int:
    """Return the least second number in [low, most]; `holds` is known to be true for `most`."""
    if most == low:
        return low
    return least(low, most - 1, lambda second: holds(first, second)) or most


def _most(first: int, price: tuple[float, float], limit: float, best: tuple[int, int] | None) -> int:
    """Return the greatest second number beside `first` that is within the limit and cheaper than the best pair."""
    if best is None:
        return int((limit - first * price[0]) / price[1] + 1e-9)
    room = best[0] * price[0] + best[1] * price[1] - first * price[0]
    return int(-(-(room / price[1] - 1e-9) // 1)) - 1


def _between(failed: int, held: int, holds: Callable[[int], bool]) -> int:
    while held - failed > 1:
        middle = (failed + held) // 2
        if holds(middle):
            held = middle
        else:
            failed = middle
    return held
