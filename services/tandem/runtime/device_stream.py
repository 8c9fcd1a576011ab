"""Where an executor's work runs, as far as devices differ in it; owns no tensor that a model computes with.

On a GPU work is begun and goes on by itself, in order, on one stream; on a CPU it is done when the call returns, and
all of this comes to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class StreamEvent(Protocol):
    """A moment in the order of a stream's work."""

    def wait(self) -> None:
        """Until all that was begun before it has been done, and is there for whoever reads it from then on. Raises
        DeviceLost."""
        ...


class DeviceStream(Protocol):
    """One order of work on one device."""

    @property
    def device(self) -> torch.device: ...

    def running(self) -> AbstractContextManager[object]:
        """What this thread begins inside belongs to this stream."""
        ...

    def host_words(self, num: int) -> torch.Tensor:
        """Uninitialised int64 `[num]` in host memory, which copies to and from the device go on beside."""
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, there after the next mark."""
        ...

    def mark(self) -> StreamEvent: ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """A call that does what `work` does, with the memory that it uses now. It may be called several times first."""
        ...


class _Done:
    """A `StreamEvent` of work that was done when it was begun."""

    def wait(self) -> None:
        return


class HostStream:
    """A `DeviceStream` on the CPU."""

    device = torch.device("cpu")

    def running(self) -> AbstractContextManager[object]:
        return nullcontext()

    def host_words(self, num: int) -> torch.Tensor:
        return torch.empty(num, dtype=torch.int64)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Itself: nothing writes over what a step has yielded."""
        return tensor

    def mark(self) -> StreamEvent:
        return _Done()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work
