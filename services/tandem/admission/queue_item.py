"""Define the properties of a request by which queues order it, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.ids import TenantId
from tandem.core.lane import Lane


class FlowKey(NamedTuple):
    """Key of a tenant's queue and of its fairness counter: one tenant in one lane."""

    lane: Lane
    tenant: TenantId


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueItem:
    """Hold the properties of a request by which queues order it.

    `num_tokens`: tokens that the tenant is charged when the request is sent. `weight`: the tenant's share of the lane,
    relative to the weights of other tenants. `priority`: the rank among the tenant's own requests; a request with a
    lower number is sent first.
    """

    lane: Lane
    tenant: TenantId
    num_tokens: int
    weight: float = 1.0
    priority: int = 0

    @property
    def flow_key(self) -> FlowKey:
        return FlowKey(self.lane, self.tenant)
