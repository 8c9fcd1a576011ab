"""How long a token takes from a gateway to its client, drawn from what was measured; never reorders tokens itself."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.ids import RequestId
from tandem.workload import seeded_random


class Delivery:
    """`seconds_s` are as likely as each other. Raises ValueError when one is negative or there is none.

    On a machine whose cores compute, a client hears of a token when its process gets one: between none and several
    milliseconds later, which widens what it sees between two tokens.
    """

    def __init__(self, seconds_s: Sequence[float], seed: int) -> None:
        if not seconds_s or min(seconds_s) < 0:
            raise ValueError(f"deliveries take seconds, not {seconds_s}")
        self._seconds = tuple(seconds_s)
        self._seed = seed

    def times(self, request: RequestId, first_index: int, sent: Sequence[float]) -> Sequence[float]:
        """When consecutive tokens are there that were sent at these times."""
        if len(self._seconds) == 1:
            return sent if self._seconds[0] == 0 else [time + self._seconds[0] for time in sent]
        return [time + self.seconds(request, index) for index, time in enumerate(sent, first_index)]

    def seconds(self, request: RequestId, index: int) -> float:
        """Of one token, a function of its request and index."""
        if len(self._seconds) == 1:
            return self._seconds[0]
        return self._seconds[seeded_random.integer(0, len(self._seconds) - 1, self._seed, "delivery", request, index)]
