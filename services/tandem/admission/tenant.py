"""A tenant's terms as a value; never counts what it has used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.admission.quota import QuotaLimits
from tandem.core.ids import OPEN_TENANT, TenantId
from tandem.core.lane import Lane

DisaggregationPolicy = Literal["off", "auto", "prefer", "strict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """0 is no limit. `models`: None allows all. `lane` is the best one that it may ask for, and the one of requests
    that ask for none; `weight` is its share against other tenants in a lane. Tokens are those of prompts that were
    not in the prefix cache, and all output. `cache_sharing` "public" puts its prefixes where every public tenant finds
    them. `disaggregation`: None follows the gateway. An `operator` sees in the console what others do."""

    id: TenantId
    models: frozenset[str] | None = None
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrency: int = 0
    max_prompt_tokens: int = 0
    lane: Lane = Lane.INTERACTIVE
    weight: float = 1.0
    cache_sharing: Literal["private", "public"] = "private"
    disaggregation: DisaggregationPolicy | None = None
    operator: bool = False

    @property
    def limits(self) -> QuotaLimits:
        return QuotaLimits(self.requests_per_minute, self.tokens_per_minute, self.max_concurrency)

    def may_use(self, *names: str) -> bool:
        """A model that clients may call by any of these names. One that it may not use is, for this tenant, not there:
        a refusal of another kind would tell it what there is."""
        return self.models is None or not self.models.isdisjoint(names)


OPEN = Tenant(id=OPEN_TENANT, cache_sharing="public", operator=True)
"""Everybody, where no key is asked for."""
