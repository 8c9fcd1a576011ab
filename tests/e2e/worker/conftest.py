"""Start worker processes on a tiny model, without Redis and without a gateway program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import WorkerProcess
from tests.e2e.gateway.tiny_model import make_model

MODEL_NAME = "tiny"
LEASE_S = 1.0
SETTINGS = {
    "--model-served-name": MODEL_NAME,
    "--dtype": "float64",
    "--num-threads": "1",
    "--kv-cache-memory": "32MiB",
    "--max-num-batched-tokens": "32",
    "--max-num-seqs": "16",
    "--lease-s": str(LEASE_S),
    "--pull-timeout-s": "2.0",
    "--drain-timeout-s": "2.0",
    "--worker-drain-s": "5.0",
    "--worker-queue-horizon-ms": "1000000.0",  # no gateway in which jobs could wait
}

Start = Callable[..., WorkerProcess]


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def start(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """`start(name, pool, transport, *flags)` begins a process; its `ref` waits until it serves."""
    logs = tmp_path_factory.mktemp("workers")
    processes: list[WorkerProcess] = []

    def begin(name: str, pool: str, transport: str, *more: str) -> WorkerProcess:
        flags = [*(word for pair in SETTINGS.items() for word in pair), *more]
        identity = ["--pool", pool, "--transfer-backend", transport, "--model", str(tiny_directory)]
        processes.append(WorkerProcess(logs, name, *identity, *flags))
        return processes[-1]

    yield begin
    for process in processes:
        process.stop()
