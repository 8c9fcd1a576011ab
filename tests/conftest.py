"""What all tests share; never a fake of a product part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tandem.stores.embedded import EmbeddedServer
from tests.property.effort import IS_QUICK, QUICK_PART

_HERE = Path(__file__).parent

# Before torch is imported: tests share few cores, so a thread that waits must not spin, and their results do not depend
# on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Before anything imports Triton: where no GPU is, or `TANDEM_TEST_DEVICE` is cpu, its kernels are interpreted.
if os.environ.get("TANDEM_TEST_DEVICE") == "cpu" or not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Some tests fork a program while others' gRPC threads run. The child executes another program at once; what gRPC would
# do in it before that can kill it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# No deadline, because a shared machine stalls; the same examples in every run, because a red test must stay red.
settings.register_profile(
    "tandem",
    max_examples=100 // QUICK_PART if IS_QUICK else 100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tandem")


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """One server for the session; tests take a namespace each."""
    with EmbeddedServer.start() as server:
        yield server.url


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole models and whole processes take longer than `make check` has."""
    rooms = tuple(f"{_HERE / room}{os.sep}" for room in ("golden", "e2e", "chaos"))
    for item in items:
        if str(item.path).startswith(rooms):
            item.add_marker(pytest.mark.slow)
