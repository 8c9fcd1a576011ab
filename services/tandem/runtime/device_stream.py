"""Define the stream of an executor's device; the base class is the stream of a CPU.

On a GPU, work is launched asynchronously and runs in order on one stream. On a CPU it is finished when the call
returns, and all methods are trivial.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


class StreamMark:
    """Position in the order of a stream's work."""

    def wait(self) -> None:
        """Block until all work launched before the mark is finished and visible to every reader.

        Raises DeviceLost."""


class DeviceStream:
    """Ordered queue of work on one device. This class is that of the CPU, where every launch runs to its end."""

    device = torch.device("cpu")

    def running(self) -> AbstractContextManager[object]:
        """Return a context in which this thread's launches go to this stream."""
        return nullcontext()

    def host_words(self, num: int) -> torch.Tensor:
        """Allocate uninitialised int64 `[num]` in host memory that supports asynchronous copies to and from the device.

        On a GPU this is pinned memory."""
        return torch.empty(num, dtype=torch.int64)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy to host memory; the result is valid after waiting for the next `mark`.

        On a CPU it is the tensor itself, because nothing overwrites the outputs of a step."""
        return tensor

    def mark(self) -> StreamMark:
        """Record a mark behind all work launched so far."""
        return StreamMark()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work` as a graph and return a function that replays it on the same memory.

        `work` may be called several times to warm up before it is captured."""
        return work
