"""Define the interface through which a decoder reads its weights."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

import torch


class WeightSource(Protocol):
    """Source of one model's tensors.

    Call `take` for each tensor, then `finish`. A context manager that closes open files."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def take(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """Return the tensor `name`, or the given `rows` and `columns` of it, in the source's dtype and device.

        `shape` is the shape of the whole tensor. Raises TandemError unless the tensor exists with this shape."""
        ...

    def drop(self, suffix: str) -> None:
        """Ignore the tensors whose names end with `suffix`, because they duplicate other data."""
        ...

    def finish(self) -> None:
        """Raise TandemError if a tensor was not taken, because then the decoder does not compute the whole model."""
        ...
