"""The device of these tests: a GPU where there is one and TANDEM_TEST_DEVICE is not cpu, else the CPU, on which Triton
interprets its kernels."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

_ON_GPU = torch.cuda.is_available() and os.environ.get("TANDEM_TEST_DEVICE") != "cpu"
if not _ON_GPU:
    # Before Triton is imported.
    os.environ["TRITON_INTERPRET"] = "1"


# Triton is made for Linux alone.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if _ON_GPU else "cpu")
