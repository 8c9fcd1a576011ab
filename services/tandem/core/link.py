"""What is known of the way by which one worker reads another's memory, as all programs tell it; never measures one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tandem.core.ids import WorkerRef

LinkType = Literal["rdma", "cuda_ipc", "shared_memory", "tcp", "unknown"]
LINK_TYPES: tuple[LinkType, ...] = get_args(LinkType)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """Of one direction: `num_bytes` of `source` were read, which takes `seconds` at the best pace seen. `evidence` says
    for people what `link_type` was concluded from. `problem`: why it is not what was promised, empty where it is;
    `refused`: so the pair is not to be used."""

    source: WorkerRef
    link_type: LinkType
    evidence: str
    num_bytes: int = 0
    seconds: float = 0.0
    problem: str = ""
    refused: bool = False

    @property
    def gbps(self) -> float:
        """Gigabytes (10 to the 9th) per second; 0 where nothing was read."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0
