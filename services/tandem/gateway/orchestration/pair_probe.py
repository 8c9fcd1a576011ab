"""A tiny request that shows whether KV moves between two workers; never chooses them."""

from __future__ import annotations

import asyncio
import secrets

from tandem.core.errors import TandemError
from tandem.core.ids import RequestId
from tandem.core.request import Request, SamplingParams
from tandem.gateway.orchestration.active_request import ActiveRequest

PROBE_TIMEOUT_S = 30.0


def probe_request(model: str) -> Request:
    """The smallest request that moves one block: one token in, two out, greedy."""
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    return Request(id=RequestId(f"probe-{secrets.token_hex(8)}"), model=model, prompt_tokens=(0,), sampling=sampling)


async def has_moved(active: ActiveRequest) -> bool:
    """Wait for the end of a probe; True when its KV block has moved."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            async for _ in active:
                pass
    except (TandemError, TimeoutError):
        return False
    finally:
        await active.aclose()
    return active.state.pulled is not None
