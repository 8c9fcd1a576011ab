"""Define the stream of an executor's device; the base class is the stream of a CPU.

On a GPU, work is launched asynchronously and runs in order on one stream. On a CPU it is finished when the call
returns, and all methods are trivial.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


class StreamMark:
    """Position in the order of a stream's work, which a thread can wait for."""

    def wait(self) -> None:
        """Block until all work launched before the mark is finished and visible to every reader.

        Raises DeviceLost when the device failed."""


class DeviceStream:
    """Ordered queue of work on one device: runs launches in order, copies results to the host and captures graphs.

    This class is the stream of a CPU, where every launch is finished when it returns and all methods are trivial."""

    device = torch.device("cpu")

    def running(self) -> AbstractContextManager[object]:
        """Return a context manager; what this thread launches inside it runs on this stream."""
        return nullcontext()

    def host_words(self, num: int) -> torch.Tensor:
        """Allocate an uninitialised int64 tensor `[num]` in host memory that supports asynchronous copies.

        On a GPU this is pinned memory."""
        return torch.empty(num, dtype=torch.int64)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy of `tensor` to host memory and return the host tensor.

        Its content is valid once a `mark` that is recorded after this call has been waited for. On a CPU the result is
        `tensor` itself, because nothing overwrites the outputs of a step."""
        return tensor

    def mark(self) -> StreamMark:
        """Return a mark that lies after all work launched so far and before any later work."""
        return StreamMark()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture the launches of `work` as a graph and return a function that replays them on the same memory.

        `work` may be called several times before the capture, so that its kernels are compiled by then. On a CPU `work`
        itself is returned, uncalled."""
        return work
