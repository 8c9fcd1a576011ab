"""What all tests of kernels share: they compute in one thread of torch's."""

from __future__ import annotations

import pytest
import torch

from tandem_kernels.native.library import Team


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def team() -> Team:
    """Two threads of the compiled kernels."""
    return Team(2)
