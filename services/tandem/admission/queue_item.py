"""What a queue needs to know of one request, as values; never the request itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.ids import TenantId
from tandem.core.lane import Lane


class FlowKey(NamedTuple):
    """What counters are kept by."""

    lane: Lane
    tenant: TenantId


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueItem:
    """Of one request: `num_tokens` that it is charged when it is sent; the least `priority` is the most urgent."""

    lane: Lane
    tenant: TenantId
    num_tokens: int
    weight: float = 1.0
    priority: int = 0

    @property
    def account(self) -> FlowKey:
        return FlowKey(self.lane, self.tenant)
