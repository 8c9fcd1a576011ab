"""Requests for tests of queues."""

from __future__ import annotations

from tandem.core.ids import RequestId, TenantId
from tandem.core.request import Request, SamplingParams


def request(name: str, tenant: str = "a", num_tokens: int = 100, model: str = "m") -> Request:
    return Request(
        id=RequestId(name),
        model=model,
        prompt_tokens=(1,) * num_tokens,
        sampling=SamplingParams(max_tokens=4),
        tenant=TenantId(tenant),
    )
