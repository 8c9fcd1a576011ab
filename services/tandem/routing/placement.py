"""Where a request goes and why, frozen; never how it gets there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.ids import WorkerRef
from tandem.routing.cost import PairCost
from tandem.routing.picker import PickResult


class RemotePrefixSource(NamedTuple):
    """Who lends the first `num_blocks` blocks of a prompt to the worker that computes it."""

    worker: WorkerRef
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Both may be the same worker. `prefix` is read rather than computed. `fallback` says why a request that should be
    split is not, `why` why one is not that might have been. `picked`: what it costs by prediction; `other`: the best of
    the other kind, split or local, where both were compared."""

    prefill: WorkerRef
    decode: WorkerRef
    prefix: RemotePrefixSource | None = None
    fallback: str = ""
    why: str = ""
    picked: PickResult | None = None
    other: PairCost | None = None

    @property
    def is_remote(self) -> bool:
        return self.prefill != self.decode

    @property
    def path(self) -> str:
        """What the client is told."""
        if self.is_remote:
            return "remote"
        if self.fallback:
            return f"fallback;reason={self.fallback}"
        return f"local;reason={self.why}" if self.why else "local"

    @property
    def reasons(self) -> dict[str, object]:
        """With the numbers, for JSON. Times in milliseconds; `decode`, `stall` and `no_room` are weighted."""
        told: dict[str, object] = {"prefill": self.prefill.id, "decode": self.decode.id}
        if self.prefix is not None:
            told["prefix"] = {"source": self.prefix.worker.id, "num_blocks": self.prefix.num_blocks}
        if self.picked is not None:
            told |= {"by": self.picked.by, "num_near": self.picked.num_near, "cost_ms": _told(self.picked.cost)}
        if self.other is not None:
            prefill, decode = self.other.prefill.worker.ref.id, self.other.decode.worker.ref.id
            told["other"] = {"prefill": prefill, "decode": decode, "cost_ms": _told(self.other)}
        return told


def _told(cost: PairCost) -> dict[str, object]:
    seconds = {
        "total": cost.total_s,
        "wait": cost.prefill.wait_s,
        "read": cost.prefill.read_s,
        "prefill": cost.prefill.compute_s,
        "transfer": cost.transfer_s,
        "stall": cost.prefill.stall_s + (0.0 if cost.is_local else cost.decode.prompts_s),
        "decode": cost.decode.decode_s,
        "no_room": cost.decode.room_s,
    }
    return {
        **{name: round(1e3 * value, 3) for name, value in seconds.items()},
        "num_uncached": cost.prefill.num_uncached,
    }


@dataclass(frozen=True, slots=True)
class NoPlacement:
    """Nowhere to go now. `reason` is for people; `may_pass`: workers exist, so waiting may help soon."""

    reason: str
    may_pass: bool
