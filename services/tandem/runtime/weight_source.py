"""What a decoder needs of weights; owns no implementation."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

import torch


class WeightSource(Protocol):
    """The tensors of one model. `take` each, then `finish`; a context manager that closes what is open."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def take(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """The tensor `name`, whose whole shape is `shape`, in the dtype and on the device of the source's user; of
        parts only these are made. Raises TandemError unless it has this shape."""
        ...

    def drop(self, suffix: str) -> None:
        """Forget the tensors whose names end so: they repeat what is known otherwise."""
        ...

    def finish(self) -> None:
        """Raise TandemError when a tensor was not taken: the model has a part that we do not compute."""
        ...
