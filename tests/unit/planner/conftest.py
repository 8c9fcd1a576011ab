"""The API server of the planner's tests, and what ends with a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.unit.planner.api_servers import api_server

__all__ = ["api_server", "closing"]


@pytest.fixture
async def closing() -> AsyncIterator[AsyncExitStack]:
    """Yield a stack of what is closed when the test ends."""
    async with AsyncExitStack() as stack:
        yield stack
