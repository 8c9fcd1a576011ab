"""Records of workers, for tests of the registry and of what reads it."""

from __future__ import annotations

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.stores.worker_registry import WorkerRecord

BORN = 1_795_000_000_000_000_001
"""In nanoseconds; as a double it equals its neighbours."""


def record(name: str = "w0", incarnation: int = BORN, port: int = 1, role: str = "") -> WorkerRecord:
    return WorkerRecord(
        worker=WorkerRef(WorkerId(name), Incarnation(incarnation), f"127.0.0.1:{port}"),
        pool="decode",
        model="smol",
        fingerprint="ab" * 16,
        layout="3h x 30l x 2 x 16t x 64d float32",
        max_model_len=2048,
        bundle_digest="cd" * 16,
        role=role,
    )
