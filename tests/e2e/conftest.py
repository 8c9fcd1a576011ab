"""The tiny model that most tests of real processes serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.gateway.tiny_model import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))
