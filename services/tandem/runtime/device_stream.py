"""Define the stream of an executor's device; the base class is the stream of a CPU.

On a GPU, work is launched asynchronously and runs in order on one stream. On a CPU it is finished when the call
returns, and all methods are trivial.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


class StreamMark:
    """Mark in the order of a stream's work. A thread can wait until all work before the mark is finished."""

    def wait(self) -> None:
        """Block until all work launched before the mark is finished and visible to every reader.

        Raises DeviceLost when the device failed."""


class DeviceStream:
    """Ordered queue of work on one device: runs launches in order, copies results to the host and captures graphs.

    This class is the stream of a CPU, where every launch is finished when it returns and all methods are trivial."""

    device = torch.device("cpu")

    def running(self) -> AbstractContextManager[object]:
        """Return a context manager. The work that this thread launches inside its `with` block runs on this stream."""
        return nullcontext()

    def host_words(self, num: int) -> torch.Tensor:
        """Allocate an uninitialised int64 tensor `[num]` in host memory that supports asynchronous copies.

        On a GPU this is pinned memory."""
        return torch.empty(num, dtype=torch.int64)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy of `tensor` to host memory and return the host tensor, without waiting for the copy.

        To wait for the copy, call `mark` after this method, and `wait` on the mark; before that, the content of the
        host tensor is undefined. On a CPU, nothing is copied and `tensor` itself is returned, because nothing
        overwrites the outputs of a step there."""
        return tensor

    def mark(self) -> StreamMark:
        """Record a mark after all work launched so far, and return it. Work launched later comes after the mark."""
        return StreamMark()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture the launches of `work` as a graph, and return a function that replays them on the same memory.

        `work` may be called several times before the capture, so that its kernels are compiled by then. On a CPU
        nothing is captured: `work` is not called, and is itself the result."""
        return work
