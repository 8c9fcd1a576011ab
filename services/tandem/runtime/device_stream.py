"""Define the stream interface of an executor's device, and implement it for the CPU.

On a GPU, work is launched asynchronously and runs in order on one stream. On a CPU it is finished when the call
returns, and all methods are trivial.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class StreamEvent(Protocol):
    """Marker of a position in the order of a stream's work."""

    def wait(self) -> None:
        """Block until all work launched before the event is finished and visible to every reader.

        Raises DeviceLost."""
        ...


class DeviceStream(Protocol):
    """Ordered queue of work on one device."""

    @property
    def device(self) -> torch.device: ...

    def running(self) -> AbstractContextManager[object]:
        """Return a context in which this thread's launches go to this stream."""
        ...

    def host_words(self, num: int) -> torch.Tensor:
        """Allocate uninitialised int64 `[num]` in host memory that supports asynchronous copies to and from the device.

        On a GPU this is pinned memory."""
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy to host memory; the result is valid after waiting for the next `mark`."""
        ...

    def mark(self) -> StreamEvent:
        """Record an event behind all work launched so far."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work` as a graph and return a function that replays it on the same memory.

        `work` may be called several times to warm up before it is captured."""
        ...


class _Done:
    """`StreamEvent` of a CPU, where work is finished when its call returns."""

    def wait(self) -> None:
        return


class HostStream:
    """`DeviceStream` of the CPU: everything runs synchronously."""

    device = torch.device("cpu")

    def running(self) -> AbstractContextManager[object]:
        return nullcontext()

    def host_words(self, num: int) -> torch.Tensor:
        return torch.empty(num, dtype=torch.int64)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself; nothing overwrites the outputs of a step."""
        return tensor

    def mark(self) -> StreamEvent:
        return _Done()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work
