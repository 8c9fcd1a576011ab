"""The searches find what trying everything finds, with fewer tries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.sim.planner.capacity_planner import cheapest_pair, least
from tests.effort import effort


@effort(100)
@given(low=st.integers(1, 50), size=st.integers(0, 200), bound=st.integers(1, 300))
def test_the_least_number_is_found_in_few_tries(low: int, size: int, bound: int) -> None:
    tried: list[int] = []

    def holds(number: int) -> bool:
        tried.append(number)
        return number >= bound

    high = low + size
    assert least(low, high, holds) == (max(low, bound) if bound <= high else None)
    assert len(tried) == len(set(tried)) and all(low <= number <= high for number in tried)
    assert len(tried) <= 2 * (size + 1).bit_length() + 1


@effort(100)
@given(
    low=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    price=st.tuples(st.sampled_from([1.0, 2.0, 3.5, 8.0]), st.sampled_from([1.0, 2.0, 3.5, 8.0])),
    limit=st.floats(0.5, 60.0),
    stairs=st.lists(st.integers(0, 6), min_size=1, max_size=12),
)
def test_the_cheapest_pair_is_what_trying_all_finds(
    low: tuple[int, int], price: tuple[float, float], limit: float, stairs: list[int]
) -> None:
    def needed(first: int) -> int:
        """Fewer with every further first one; with less than the first stair none is enough."""
        index = first - 1
        return 1 + sum(stairs[min(index, len(stairs)) :]) if index >= 0 else 10**6

    tried: list[tuple[int, int]] = []

    def holds(first: int, second: int) -> bool:
        tried.append((first, second))
        return second >= needed(first)

    found = cheapest_pair(low, price, limit, holds)
    pairs = [
        (first * price[0] + second * price[1], first, second)
        for first in range(low[0], 70)
        for second in range(low[1], 70)
        if second >= needed(first) and first * price[0] + second * price[1] <= limit
    ]
    if not pairs:
        assert found is None
    else:
        assert found is not None and needed(found[0]) <= found[1]
        assert found[0] * price[0] + found[1] * price[1] == min(cost for cost, *_ in pairs)
    assert all(first * price[0] + second * price[1] <= limit + 1e-6 for first, second in tried)
