"""Define the collectives that the ranks of one model use in a step; the base class is that of one rank."""

from __future__ import annotations

import torch


class CollectiveFailed(Exception):
    """A collective failed because a rank is gone or timed out; results of later collectives cannot be trusted."""


class Communicator:
    """Collectives between the ranks of one model. This class is that of a single rank, where all are trivial.

    All ranks must call the same methods in the same order, with tensors of the same shapes and dtypes. Each method may
    raise CollectiveFailed."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `x`, with the same bits on each; `x` may be overwritten."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first rank's `x` on all ranks; the other ranks' `x` is overwritten."""
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Return all ranks' `x` in rank order on the first rank, and None on the others."""
        return [x]

    def least(self, number: int) -> int:
        """Return the smallest of all ranks' numbers; waits for the device."""
        return number

    def abort(self) -> None:
        """End a collective that another thread waits in; no collective is possible afterwards. Never raises."""


ALONE = Communicator()
