"""Define the report on a link: the path by which one worker reads another's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tandem.core.ids import WorkerRef

LinkType = Literal["rdma", "cuda_ipc", "shared_memory", "tcp", "unknown"]
LINK_TYPES: tuple[LinkType, ...] = get_args(LinkType)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """Report the measured speed and type of the link over which the reporting worker reads the memory of the worker
    `source`.

    - `num_bytes`, `seconds`: size and duration of the read with the best bandwidth so far.
    - `evidence`: how `link_type` was determined, as text for people.
    - `problem`: the requirement of `TransferConfig` that the link misses; empty where it misses none.
    - `refused`: whether no hand-off may use this pair of workers.
    """

    source: WorkerRef
    link_type: LinkType
    evidence: str
    num_bytes: int = 0
    seconds: float = 0.0
    problem: str = ""
    refused: bool = False

    @property
    def gbps(self) -> float:
        """Return gigabytes (10^9 bytes) per second; 0 where nothing was read."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0
