"""Where a request goes and why, frozen; never how it gets there."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.ids import WorkerRef


@dataclass(frozen=True, slots=True)
class Placement:
    """Both may be the same worker. `fallback` says why a request that should be split is not."""

    prefill: WorkerRef
    decode: WorkerRef
    fallback: str = ""
    reasons: tuple[str, ...] = ()

    @property
    def is_remote(self) -> bool:
        return self.prefill != self.decode

    @property
    def path(self) -> str:
        """What the client is told."""
        if self.is_remote:
            return "remote"
        return f"fallback;reason={self.fallback}" if self.fallback else "local"


@dataclass(frozen=True, slots=True)
class NoPlacement:
    """Nowhere to go now. `reason` is for people; `may_pass`: workers exist, so waiting may help soon."""

    reason: str
    may_pass: bool
