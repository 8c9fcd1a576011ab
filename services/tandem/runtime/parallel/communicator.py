"""What the ranks of one model exchange in a step; owns no connection."""

from __future__ import annotations

from typing import Protocol

import torch


class CollectiveFailed(Exception):
    """An exchange did not come about: a rank is gone, or was silent for too long. No later one can be believed."""


class Communicator(Protocol):
    """All ranks call the same methods in the same order, with tensors of the same shapes and types. Each raises
    CollectiveFailed."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, which may be written over; the same bits everywhere."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """The first rank's `x`; other ranks' is written over."""
        ...

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """On the first rank all ranks' `x`, in their order; None on the others."""
        ...

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers. Waits for the device."""
        ...

    def abort(self) -> None:
        """End what is waited for, from another thread; nothing can be exchanged afterwards. Never raises."""
        ...


class SingleRank:
    """A `Communicator` of one rank: nothing to exchange, and nothing done."""

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
