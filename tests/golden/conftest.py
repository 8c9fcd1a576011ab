"""Fixtures of golden tests: each model is made or loaded once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from tests.golden.models import Reference, make_tiny, real_model

TinyModels = Callable[[str, str], Reference]


@pytest.fixture(autouse=True, scope="module")
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny matrices gain nothing from a second thread; `NUM_THREADS` of a module says otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request.module, "NUM_THREADS", 1))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """`tiny(name, dtype)`: a tiny model with its transformers reference."""

    @cache
    def make(name: str, dtype: str) -> Reference:
        return make_tiny(name, tmp_path_factory.mktemp(f"{name}-{dtype}"), dtype)

    return make


@pytest.fixture(scope="session")
def real() -> Reference:
    """The real model with its transformers reference."""
    return real_model()
