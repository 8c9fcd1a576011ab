"""What all tests share: the environment of native libraries, hypothesis' settings, one Redis, and marks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from xdist.scheduler import LoadScopeScheduling

from tandem.stores.embedded_redis import EmbeddedServer
from tests.effort import IS_NIGHTLY, PHASES, scaled

_HERE = Path(__file__).parent
_FIRST_ROOMS = ("e2e", "chaos", "hosts", "golden", "contract", "simulation", "kernels")
"""What starts first where several processes run tests: what takes longest, and what waits while others compute."""
_TOGETHER = ("tests/e2e/calm/", "tests/e2e/serve/")
"""Folders whose tests share a cluster of processes."""
_CLUSTERS = ("tests/e2e/", "tests/chaos/", "tests/hosts/")
"""Folders whose tests start clusters of processes, and wait for them with a limit. In `make nightly` one process runs
all of them, and first, and the others, which only compute, give way to it by _NICENESS."""
_NICENESS = 10
_APART = ("tests/property/", "tests/simulation/")
"""Folders whose tests share nothing; in `make nightly` one of them takes minutes, and a file of them too long."""
_NIGHTLY_TIMEOUT_S = 3600

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
    max_examples=scaled(100),
    deadline=None,
    derandomize=True,
    phases=PHASES,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tandem")


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """One server for the session; tests take a namespace each."""
    with EmbeddedServer.start() as server:
        yield server.url


@pytest.fixture(scope="session")
def kube_cluster() -> Iterator[Any]:
    """Yield the Kubernetes cluster of TANDEM_KUBECONFIG, a tests.cluster.kube_cluster.KubeCluster."""
    made = import_module("tests.cluster.kube_cluster").KubeCluster()
    yield made
    made.close()


class _NoCluster(pytest.Directory):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip("TANDEM_KUBECONFIG names no kubeconfig of a Kubernetes cluster for tests")


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Skip the tests of a real Kubernetes cluster as one, where there is none."""
    if path == _HERE / "cluster" and not os.environ.get("TANDEM_KUBECONFIG"):
        return _NoCluster.from_parent(parent, path=path)
    return None


class _ByFile(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
    """Gives all tests of a file to one process, all files that share a cluster of processes too, and in `make nightly`
    all of the folders `_CLUSTERS` to one process, and each test of the folders `_APART` by itself."""

    def _split_scope(self, nodeid: str) -> str:
        if IS_NIGHTLY and nodeid.startswith(_CLUSTERS):
            return "clusters"
        if IS_NIGHTLY and nodeid.startswith(_APART):
            return nodeid.partition("[")[0]
        return next((folder for folder in _TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _ByFile(config, log)


def pytest_runtest_protocol(item: pytest.Item) -> None:
    if IS_NIGHTLY and not item.nodeid.startswith(_CLUSTERS):
        os.nice(max(0, _NICENESS - os.nice(0)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests; in `make nightly` mark also those that try random examples, for which more are due."""
    items.sort(key=_turn)
    for item in items:
        if IS_NIGHTLY and _is_random(item):
            item.add_marker(pytest.mark.nightly)
            item.add_marker(pytest.mark.timeout(_NIGHTLY_TIMEOUT_S))


def _turn(item: pytest.Item) -> int:
    room = item.path.relative_to(_HERE).parts[0]
    turn = _FIRST_ROOMS.index(room) if room in _FIRST_ROOMS else len(_FIRST_ROOMS)
    # In `make nightly` each of them takes minutes, so they start before the many short ones.
    return min(turn, _FIRST_ROOMS.index("golden")) if IS_NIGHTLY and _is_random(item) else turn


def _is_random(item: pytest.Item) -> bool:
    """Tell whether hypothesis chooses a test's examples: a function with `@given`, or a state machine."""
    is_machine = hasattr(getattr(item, "cls", None), "settings")
    return is_machine or is_hypothesis_test(getattr(item, "obj", None))
