"""Wait for the end of a tiny request that shows whether KV moves between two workers."""

from __future__ import annotations

from tandem.core.errors import TandemError
from tandem.gateway.orchestration.active_request import ActiveRequest


async def has_moved(active: ActiveRequest) -> bool:
    """Wait for the end of a probe; True when its KV block has moved."""
    try:
        async for _ in active:
            pass
    except TandemError:
        return False
    finally:
        await active.aclose()
    return active.state.pulled is not None
