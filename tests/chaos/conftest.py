"""The model and the Redis of all that is struck here; never a fake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.gateway.processes import Redis, redis_server
from tests.e2e.gateway.tiny_model import make_model


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def redis() -> Iterator[Redis]:
    with redis_server() as redis:
        yield redis
