"""Fixtures of golden tests: each model is made or loaded once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from tokenizers import Tokenizer

from tandem.core.bundle import TokenizerBundle
from tandem.runtime.model_config import read_model_config
from tandem.runtime.tokenizer_bundle import read_bundle
from tests.golden.models import Reference, make_tiny, real_model
from tests.golden.prompts import prompts

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


@pytest.fixture(scope="session")
def real_bundle(real: Reference) -> TokenizerBundle:
    return read_bundle(real.directory, read_model_config(real.directory))


@pytest.fixture(scope="session")
def tokenizer(real_bundle: TokenizerBundle) -> Tokenizer:
    """The real model's."""
    return Tokenizer.from_buffer(real_bundle.tokenizer_json)


@pytest.fixture(scope="session")
def texts(tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts of the real model, shortest first."""
    found = prompts(tokenizer)
    assert len(found) >= 24 and len(found[0]) == 3 and len(found[-1]) == 3000
    return found
