"""Sample how long a token takes from a gateway to its client from measured times."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.ids import RequestId
from tandem.workload import seeded_random


class Delivery:
    """Delivery times of tokens; all `seconds_s` are equally likely. Raises ValueError when one is negative or there is
    none.

    On a machine with busy cores, a client receives a token when its process is scheduled: up to several milliseconds
    later, which widens the gaps between tokens that it sees. Tokens may be out of order here; `ClientTrace` restores
    the order."""

    def __init__(self, seconds_s: Sequence[float], seed: int) -> None:
        if not seconds_s or min(seconds_s) < 0:
            raise ValueError(f"deliveries take seconds, not {seconds_s}")
        self._seconds = tuple(seconds_s)
        self._seed = seed

    def times(self, request: RequestId, first_index: int, sent: Sequence[float]) -> Sequence[float]:
        """Return the arrival times of consecutive tokens that were sent at these times."""
        if len(self._seconds) == 1:
            return sent if self._seconds[0] == 0 else [time + self._seconds[0] for time in sent]
        return [time + self.seconds(request, index) for index, time in enumerate(sent, first_index)]

    def seconds(self, request: RequestId, index: int) -> float:
        """Return the delivery seconds of one token, a function of its request and index."""
        if len(self._seconds) == 1:
            return self._seconds[0]
        return self._seconds[seeded_random.integer(0, len(self._seconds) - 1, self._seed, "delivery", request, index)]
