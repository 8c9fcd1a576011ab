"""Define the collectives that the ranks of one model use in a step; the base class implements them for a single
rank."""

from __future__ import annotations

import torch


class CollectiveFailed(Exception):
    """Raised when a collective failed because a rank is gone or timed out; later collectives must not be used."""


class Communicator:
    """Collectives between the ranks of one model; this class is for a single rank, where all are trivial.

    All ranks must call the same methods in the same order, with tensors of the same shapes and dtypes. A method waits
    for the other ranks, at most for the group's timeout, and may raise CollectiveFailed."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `x`, with the same bits on each rank; `x` may be overwritten."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first rank's `x` on all ranks.

        On the other ranks `x` gives only shape and dtype, and is overwritten."""
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the list of all ranks' `x`, in rank order, on the first rank; return None on the others."""
        return [x]

    def least(self, number: int) -> int:
        """Return the smallest `number` that any rank passed, on every rank; blocks until all ranks have called this
        method."""
        return number

    def abort(self) -> None:
        """Make a collective that another thread waits for raise CollectiveFailed; no collective is possible afterwards.

        Never raises.
        """


ALONE = Communicator()
