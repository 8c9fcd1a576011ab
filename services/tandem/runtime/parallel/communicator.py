"""Define the collectives that the ranks of one model use in a step, and their trivial form for one rank."""

from __future__ import annotations

from typing import Protocol

import torch


class CollectiveFailed(Exception):
    """A collective failed because a rank is gone or timed out; results of later collectives cannot be trusted."""


class Communicator(Protocol):
    """Collectives between the ranks of one model.

    All ranks must call the same methods in the same order, with tensors of the same shapes and dtypes. Each method may
    raise CollectiveFailed."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `x`, with the same bits on each; `x` may be overwritten."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first rank's `x` on all ranks; the other ranks' `x` is overwritten."""
        ...

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Return all ranks' `x` in rank order on the first rank, and None on the others."""
        ...

    def least(self, number: int) -> int:
        """Return the smallest of all ranks' numbers; waits for the device."""
        ...

    def abort(self) -> None:
        """End a collective that another thread waits in; no collective is possible afterwards. Never raises."""
        ...


class SingleRank:
    """`Communicator` of a single rank; every collective is trivial."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        return [x]

    def least(self, number: int) -> int:
        return number

    def abort(self) -> None:
        pass


ALONE = SingleRank()
