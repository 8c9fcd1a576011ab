"""The API server of the planner's tests, and an empty cluster of each test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.gateway.pair import SETTINGS
from tests.e2e.gateway.processes import Cluster, cluster
from tests.unit.planner.api_servers import api_server

__all__ = ["api_server"]


@pytest.fixture
def running(tmp_path: Path, redis_url: str, model: Path) -> Iterator[Cluster]:
    with cluster(tmp_path, redis_url, model, *SETTINGS, "--namespace", tmp_path.name) as running:
        yield running
