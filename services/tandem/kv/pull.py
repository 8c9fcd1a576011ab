"""What a taker knows of one hand-off; only the PullBook writes it, and decides what follows from it."""

from __future__ import annotations

from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, HandoffKey, JobKey, WorkerRef
from tandem.kv.handoff import BlockDigest, PullState


class Pull:
    """One open hand-off as its taker sees it. `next_index` is the first offered block that no read was started for.
    `num_known` blocks are to be read or were found here; of a sequence that moves that many is said only in the end."""

    def __init__(self, key: HandoffKey, job: JobKey, source: WorkerRef, now: float) -> None:
        self.key = key
        self.job = job
        self.source = source
        self.state = PullState.WAITING
        self.was_announced = False
        self.is_moving = False
        self.has_asked = False
        self.offered: list[BlockDigest] = []
        self.first_tokens: tuple[SampledToken, ...] = ()
        self.num_computed = 0
        self.num_cached = 0
        self.blocks: tuple[BlockId, ...] = ()
        self.num_known = 0
        self.num_hits = 0
        self.next_index = 0
        self.open_reads: set[int] = set()
        self.lease_until: float | None = None
        self.read_at = now
        self.moved_at = now
        self.first_at = self.last_at = self.busy_since = now
        self.busy_s = 0.0
        self.num_exposed = 0

    @property
    def is_live(self) -> bool:
        return self.state in (PullState.WAITING, PullState.READING)

    @property
    def is_open_ended(self) -> bool:
        """Nobody knows yet how many blocks there will be."""
        return self.is_moving and not self.first_tokens

    def __repr__(self) -> str:
        return (
            f"<pull {self.key} from {self.source} {self.state.name} {self.next_index}/{self.num_known} blocks, "
            f"{len(self.offered)} offered, {len(self.open_reads)} reads>"
        )
