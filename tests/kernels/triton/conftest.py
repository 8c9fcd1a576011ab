"""Where Triton's kernels run in tests: on the GPU, else interpreted on the CPU, as `tests/conftest.py` has decided
before Triton was imported; never a kernel."""

from __future__ import annotations

import pytest
import torch

from tandem_kernels.triton.interpret import INTERPRETED


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """`cuda`, unless kernels are interpreted. TANDEM_TEST_DEVICE=cpu asks for that where a GPU is."""
    if INTERPRETED:
        return torch.device("cpu")
    assert torch.cuda.is_available(), "a GPU is there, but torch cannot use it: TANDEM_TEST_DEVICE=cpu interprets"
    return torch.device("cuda")
